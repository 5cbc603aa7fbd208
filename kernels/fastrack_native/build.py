"""Make the native extension for a platform.

zig's linker, or the linker of the system for this machine, makes a shared object of the object code.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import llvmlite
import numba
from llvmlite import binding

from fastrack._crypto.isa import INSTRUCTION_SETS, InstructionSet
from fastrack._crypto.native import digest_of, suffix_of
from fastrack_native.compiler import Target, compile_functions, host_target, target_machine
from fastrack_native.cpu_ir import build_cpu
from fastrack_native.extension import METHODS
from fastrack_native.kernels_chunks import build_runs
from fastrack_native.kernels_commands import build_commands
from fastrack_native.kernels_plan import build_plans
from fastrack_native.kernels_table import build_jobs
from fastrack_native.kernels_threads import serve, share

GLIBC = "2.28"  # the oldest that a wheel is for, that of manylinux_2_28

# Without code of a compiler; all is bound when it is loaded and then read-only; no stack is executable; a relocation of
# the text is an error, which zig's linker takes for granted.
_OPTIONS = ["-shared", "-nostdlib", "-Wl,-z,relro,-z,now,-z,noexecstack,-s,--build-id=none"]
_LIBRARIES = ["-lc", "-lpthread"]
_SOURCES = ("fastrack._crypto.", "fastrack._devices.cuda.", "fastrack.format", "fastrack_native.")


def functions_of_isa(name: str, isa: InstructionSet) -> dict[str, Any]:
    """Return the functions of an instruction set, by their names in the module."""
    functions = {**build_runs(*isa), **build_jobs(*isa)}
    return {function + suffix_of(name): code for function, code in functions.items()}


def make_object(target: Target, *, name: str) -> bytes:
    """Return the object code of the native module for a platform."""
    functions = {**build_cpu(target.architecture), **build_plans(), **build_commands()}  # for every CPU
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
    root = Path(__file__).parents[2]
    modules = [module for name, module in sys.modules.items() if name.startswith(_SOURCES)]
    files = {Path(file).relative_to(root).as_posix() for module in modules if (file := module.__file__)}
    digests = {name: digest_of(root / name) for name in sorted(files - {"kernels/fastrack_native/__main__.py"})}
    llvm = ".".join(map(str, binding.llvm_version_info))
    made = {"numba": numba.__version__, "llvmlite": llvmlite.__version__, "llvm": llvm}
    return json.dumps({"digests": digests, **made})


def load_here(code: bytes) -> ModuleType:
    """Link object code in this process, for tests, and return a module with its functions, which stay until it ends."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine(host_target(), here=True))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    made = ModuleType("_native")
    table = ctypes.c_void_p(engine.get_global_value_address(METHODS))
    engine.detach()  # it owns the code, which worker threads run until the process ends
    add_functions = ctypes.pythonapi.PyModule_AddFunctions
    add_functions.argtypes = (ctypes.py_object, ctypes.c_void_p)
    add_functions(made, table)
    return made


def link(code: bytes, target: Target, path: Path) -> str:
    """Write a shared object of object code, and return the name of the linker. A file at `path` is replaced."""
    zig = find_spec("ziglang") is not None
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{target.architecture}-linux-gnu.{GLIBC}"]
    if not zig:
        compiler = os.environ.get("CC") or "cc"
        if platform.machine() != target.architecture or shutil.which(compiler) is None:
            raise RuntimeError(
                f"linking for {target.architecture} failed: expected ziglang, or a C compiler of a machine of that "
                "architecture, got neither. Run `pip install ziglang`"
            )
        command = [compiler, "-Wl,-z,text"]
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".native-") as folder:
        # Without a place of its own zig would write to the home of the user.
        environment = os.environ | {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
        source, made = Path(folder, "native.o"), Path(folder, "native.so")
        source.write_bytes(code)
        subprocess.run([*command, *_OPTIONS, "-o", made, source, *_LIBRARIES], check=True, env=environment)  # noqa: S603 - of this machine
        made.chmod(0o755)
        made.replace(path)
    return "ziglang" if zig else compiler
