"""Load compiled functions from object code on disk, or compile them if it is not there.

Loading takes LLVM's linker, by llvmlite, and no numba.
"""

from __future__ import annotations

import ctypes
import logging  # noqa: F401 - a fork takes its lock after the one of this module, as numba does
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fastrack._crypto import code_cache
from fastrack._util.fork import after_fork
from fastrack._version import __version__

METHODS = "fastrack_methods"  # the symbol of the table of the functions that Python calls


class Unit(NamedTuple):
    """Functions that are compiled together, when the first of them is needed, and share a file.

    The function `build` of the module, called with the arguments, returns them by their names, as `compiler.compiled`
    made them. The module imports numba, and is itself imported when there is something to compile.
    """

    module: str
    build: str
    arguments: tuple[object, ...] = ()

    @property
    def name(self) -> str:
        """Name the unit as files and messages do."""
        words = (*self.module.split(".")[1:], self.build.removeprefix("build_"), *map(str, self.arguments))
        return "-".join(word.strip("_") for word in words)


@dataclass(frozen=True, slots=True)
class Target:
    """The platform that LLVM compiles for, the name of its CPU, and the features of that."""

    triple: str
    cpu: str
    features: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A unit that this process has loaded: the file of its code, or the reason that it is in none, and what it took."""

    unit: Unit
    path: Path | None
    problem: OSError | None
    size: int  # bytes of object code
    compiled: bool  # False if it was found on disk
    seconds: float


def load(unit: Unit) -> Any:
    """Return the functions of a unit as attributes, loaded or compiled once in a process."""
    found = _loaded.get(unit)
    if found is None:
        with _lock:
            found = _loaded.get(unit)
            if found is None:
                found = _loaded[unit] = _load(unit)
    return found[0]


def loaded() -> list[Loaded]:
    """Return what this process has loaded so far."""
    return [record for _, record in _loaded.values()]


def find(unit: Unit) -> tuple[Path, int] | None:
    """Return the file that has the code of a unit for this machine, and the size of the code, or None."""
    found = code_cache.read(_file_name(unit), _key())
    return None if found is None else (found[1], len(found[0]))


def _load(unit: Unit) -> tuple[ModuleType, Loaded]:
    start = time.perf_counter()
    name, key = _file_name(unit), _key()
    found = code_cache.read(name, key)
    code, path = found or (_compile(unit), None)
    functions = _link(code, unit.name)
    problem = None
    if path is None:
        try:
            path = code_cache.write(name, key, code)
        except OSError as error:  # the next process compiles again
            problem = error
    return functions, Loaded(unit, path, problem, len(code), found is None, time.perf_counter() - start)


def _compile(unit: Unit) -> bytes:
    from fastrack._crypto.compiler import compile_functions  # imports numba

    return compile_functions(getattr(import_module(unit.module), unit.build)(*unit.arguments), target())


# What code depends on. Names of files tell platforms apart, so that several can share a folder. For each platform the
# newest code is kept.


def _file_name(unit: Unit) -> str:
    platform = f"{sys.implementation.cache_tag} {target()}"
    return f"{unit.name}-{sha256(platform.encode()).hexdigest()[:16]}.code"


@cache
def _key() -> dict[str, object]:
    package = Path(__file__).parents[1]
    sources = [path for folder in ("_crypto", "_devices/cuda") for path in sorted((package / folder).glob("*.py"))]
    packages = [_version_file(name) for name in ("numba", "llvmlite")]
    return {
        "fastrack": __version__,
        "python": sys.version,
        "target": str(target()),
        "sources": _digest(sources),
        "packages": _digest(packages),
    }


def _version_file(package: str) -> Path:
    """Return the file that has the version of a package, without importing it."""
    spec = find_spec(package)
    return Path(spec.origin if spec is not None and spec.origin else package).with_name("_version.py")


def _digest(paths: list[Path]) -> str:
    """Return a digest of files. One that is absent counts as empty: a program may be shipped without its sources."""
    contents = (path.read_bytes() if path.is_file() else b"" for path in paths)
    return sha256(b"".join(sha256(content).digest() for content in contents)).hexdigest()


@cache
def target() -> Target:
    """Return this machine, or the CPU that numba's variables name in its place."""
    from llvmlite import binding

    cpu = os.environ.get("NUMBA_CPU_NAME")
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = "" if cpu == "generic" else binding.get_host_cpu_features().flatten()
    return Target(binding.get_process_triple(), cpu or binding.get_host_cpu_name(), features)


def target_machine(target: Target) -> Any:
    """Return LLVM's compiler for code that is linked into this process, wherever in memory it comes to lie."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    llvm_target = binding.Target.from_triple(target.triple)
    relocation = "static" if llvm_target.name.startswith("x86") else "default"
    return llvm_target.create_target_machine(
        target.cpu, target.features, 3, reloc=relocation, codemodel="jitdefault", jit=True
    )


def _link(code: bytes, name: str) -> ModuleType:
    """Link object code, and return a module with its functions. The code stays in memory until the process ends."""
    from llvmlite import binding

    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine(target()))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    module = ModuleType(name)
    table = ctypes.c_void_p(engine.get_global_value_address(METHODS))
    engine.detach()  # it owns the code, which worker threads run until the process ends
    add_functions = ctypes.pythonapi.PyModule_AddFunctions
    add_functions.argtypes = (ctypes.py_object, ctypes.c_void_p)
    add_functions(module, table)
    return module


_MAX_FORK_DELAY = 60  # seconds

_loaded: dict[Unit, tuple[ModuleType, Loaded]] = {}
_lock = threading.RLock()  # a signal handler that forks may interrupt a load


def _delay_fork() -> None:
    """Wait until no other thread loads or compiles.

    In the child numba and LLVM would have locks that are held forever by a thread that is not there.
    """
    _lock.acquire(timeout=_MAX_FORK_DELAY)


def _release_lock() -> None:
    with suppress(RuntimeError):  # it was not acquired in time
        _lock.release()


def _reset_lock() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_delay_fork, after_in_parent=_release_lock)
after_fork(_reset_lock)
