"""List what the native module has, and make its object code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding

from fastrack._crypto.isa import INSTRUCTION_SETS, InstructionSet
from fastrack._crypto.native import digest_of, suffix_of
from fastrack._crypto.native.compiler import compile_functions
from fastrack._crypto.native.cpu_ir import build_cpu
from fastrack._crypto.native.kernels_chunks import build_runs
from fastrack._crypto.native.kernels_plan import build_copy, build_plans
from fastrack._crypto.native.kernels_table import build_jobs
from fastrack._crypto.native.kernels_threads import serve, share
from fastrack._crypto.native.target import Target
from fastrack._util.registry import COMPILERS, find

_SOURCES = ("fastrack._crypto.", "fastrack._devices.cuda.")


def functions_of_isa(name: str, isa: InstructionSet) -> dict[str, Any]:
    """Return the functions of an instruction set, by their names in the module."""
    functions = {**build_runs(*isa), **build_jobs(*isa)}
    return {function + suffix_of(name): code for function, code in functions.items()}


def common_functions(architecture: str) -> dict[str, Any]:
    """Return the functions for every CPU of an architecture, by their names in the module."""
    return {
        **build_cpu(architecture),
        **build_plans(),
        **build_copy(),
        **find(COMPILERS["commands"])(),
    }


def make_object(target: Target, *, name: str) -> bytes:
    """Return the object code of the native module for a platform, or without a `name` that for this process."""
    functions = common_functions(target.architecture)
    isas = {isa: INSTRUCTION_SETS[isa] for isa in target.isas}
    for name_of_isa, isa in isas.items():
        functions |= functions_of_isa(name_of_isa, isa)
    return make_object_of(functions, list(isas.values()), target, name=name, doc=describe_sources())


def make_object_of(
    functions: dict[str, Any], isas: Sequence[InstructionSet], target: Target, *, name: str = "", doc: str = ""
) -> bytes:
    """Return the object code of some functions, which call those of some instruction sets."""
    helpers = {"share": share, "serve": serve}
    return compile_functions(functions, isas, target, helpers=helpers, name=name, doc=doc)


def describe_sources() -> str:
    """Return what the module tells of itself. Its sources are what was imported to make it."""
    package = Path(__file__).parents[2]
    modules = [module for name, module in sys.modules.items() if name.startswith(_SOURCES)]
    files = [Path(file).relative_to(package).as_posix() for module in modules if (file := module.__file__)]
    sources = sorted(set(files) - {"_crypto/native/__main__.py"})
    llvm = ".".join(map(str, binding.llvm_version_info))
    made = {"numba": numba.__version__, "llvmlite": llvmlite.__version__, "llvm": llvm}
    return json.dumps({"sources": sources, "digest": digest_of(sources), **made})
