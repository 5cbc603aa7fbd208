"""The native extension: the module `_native`, which is made of this package's sources when fastrack is built.

With ``FASTRACK_ENGINE=jit`` a process compiles the same code for itself, for work on what makes it. Nothing else
imports the other modules of this package, nor numba or llvmlite, which they use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from fastrack._util.registry import COMPILERS, find
from fastrack.errors import DeviceError

ENGINE_VARIABLE = "FASTRACK_ENGINE"
JIT = "jit"  # its value

_MODULE = "fastrack._crypto._native"
_PACKAGE = Path(__file__).parents[2]


def functions(isa: str = "") -> Any:
    """Return the functions of an instruction set as attributes, or with "" all functions, by their full names.

    Raise DeviceError if there is no native extension.
    """
    module = load()
    if module is None:
        raise DeviceError(f"expected fastrack's native extension, got none: {problem()}")
    return functions_of(module, isa) if isa else module


def functions_of(module: ModuleType, isa: str) -> SimpleNamespace:
    """Return the functions of an instruction set, without it in their names."""
    end = suffix_of(isa)
    named = vars(module).items()
    return SimpleNamespace(**{name.removesuffix(end): code for name, code in named if name.endswith(end)})


def suffix_of(isa: str) -> str:
    """Return the end of the names of an instruction set's functions."""
    return "_" + isa.replace("-", "_")


def load() -> ModuleType | None:
    """Return the native extension, or None if there is none that is right."""
    return _find()[0]


def problem() -> str | None:
    """Return the reason that there is no native extension, and what to do, or None if there is."""
    return _find()[1]


@cache
def _find() -> tuple[ModuleType | None, str | None]:
    if os.environ.get(ENGINE_VARIABLE) == JIT:
        return _compile()
    try:
        module = import_module(_MODULE)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == _MODULE
        reason = "this installation has none" if is_absent else f"it cannot be loaded: {error}"
        return None, f"{reason}. {_ADVICE}"
    if not is_of_these_sources(module):
        return None, "it was made of other sources than those here. Run `make native` in the checkout"
    return module, None


def _compile() -> tuple[ModuleType | None, str | None]:
    try:
        return find(COMPILERS["module"])(), None
    except (ImportError, RuntimeError) as error:  # of numba, of llvmlite, and of what they cannot do
        advice = "" if isinstance(error, RuntimeError) else ". Run `pip install 'fastrack-io[jit]'`"
        return None, f"{ENGINE_VARIABLE}={JIT} failed: {error}{advice}"


_ADVICE = (
    "Install a wheel, which there are for Linux on x86-64 and AArch64, or run `make native` in a checkout. "
    f"{ENGINE_VARIABLE}=openssl chooses what is there, and {ENGINE_VARIABLE}={JIT} compiles, with numba"
)


def is_of_these_sources(module: ModuleType) -> bool:
    """Return whether a module was made of the sources that are here. A program may be shipped without them."""
    made = module_facts(module)
    there = [name for name in made["sources"] if (_PACKAGE / name).is_file()]
    return not there or made["digest"] == digest_of(made["sources"])


def module_facts(module: ModuleType) -> dict[str, Any]:
    """Return what a native extension tells of itself: its sources, their digest, and what made it."""
    return dict(json.loads(module.__doc__ or "{}"))


def digest_of(sources: Iterable[str]) -> str:
    """Return a digest of files of this package. One that is absent counts as empty."""
    contents = ((_PACKAGE / name).read_bytes() if (_PACKAGE / name).is_file() else b"" for name in sources)
    return sha256(b"".join(sha256(content).digest() for content in contents)).hexdigest()
