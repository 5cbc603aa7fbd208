"""The native extension: the module `_native`, which `kernels/fastrack_native` makes when fastrack is built."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from fastrack.errors import DeviceError

ENGINE_VARIABLE = "FASTRACK_ENGINE"

_MODULE = "fastrack._crypto._native"
_ROOT = Path(__file__).parents[2]


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
    try:
        module = import_module(_MODULE)
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == _MODULE
        reason = "this installation has none" if is_absent else f"it cannot be loaded: {error}"
        return None, f"{reason}. {_ADVICE}"
    if not is_of_these_sources(module):
        return None, "it was made of other sources than those here. Run `make native` in the checkout"
    return module, None


_ADVICE = (
    "Install a wheel, which there are for Linux on x86-64 and AArch64, or run `make native` in a checkout. "
    f"{ENGINE_VARIABLE}=openssl chooses what is there"
)


def is_of_these_sources(module: ModuleType) -> bool:
    """Return whether a module was made of the sources that are here.

    A package has those of the folder `fastrack`, a checkout those of `kernels` too, and a program may be shipped
    without any: a folder of which nothing is here does not count.
    """
    made = module_facts(module).get("digests", {})
    here = {name: digest_of(_ROOT / name) for name in made}
    folders = {_folder_of(name) for name, digest in here.items() if digest is not None}
    return bool(made) and all(here[name] == made[name] for name in made if _folder_of(name) in folders)


def _folder_of(name: str) -> str:
    return name.partition("/")[0]


def module_facts(module: ModuleType) -> dict[str, Any]:
    """Return what a native extension tells of itself: the digests of its sources, and what made it."""
    return dict(json.loads(module.__doc__ or "{}"))


def digest_of(path: Path) -> str | None:
    """Return a digest of a source, or None if it is absent."""
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else None
