"""Select the fastest engine that this CPU supports."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from fastrack._crypto import native
from fastrack._crypto.base import Engine
from fastrack._crypto.isa import INSTRUCTION_SETS, supported_instruction_sets
from fastrack._crypto.native import ENGINE_VARIABLE
from fastrack._crypto.workers import default_threads
from fastrack._util.shown import shown
from fastrack.errors import DeviceError

ENGINES = (*INSTRUCTION_SETS, "openssl")


@dataclass(frozen=True, slots=True)
class SelectedEngine:
    """The engine of this process, and the reason for its selection."""

    name: str
    forced: bool = False  # True if the environment variable `FASTRACK_ENGINE` chose it
    fault: str | None = None  # the failed test of a faster engine that it replaces


def available_engines() -> tuple[str, ...]:
    """Return the names of the engines that this machine can run, fastest first."""
    return *supported_instruction_sets(), "openssl"


def get_engine(name: str | None = None, *, threads: int | None = None) -> Engine:
    """Return the engine `name`, by default the selected engine. Each number of threads has one instance.

    Raise ValueError if this machine cannot run the engine. Raise DeviceError if it fails its known-answer test, or if
    `FASTRACK_ENGINE` names an engine that this machine cannot run.
    """
    return make_engine(name or selected_engine().name, threads or default_threads())


@cache
def selected_engine() -> SelectedEngine:
    """Select the engine named by `FASTRACK_ENGINE`, or else the fastest engine of this machine.

    OpenSSL replaces the fastest engine if it fails its known answers or has no native extension. One `RuntimeWarning`
    reports it. Raise DeviceError if `FASTRACK_ENGINE` names an engine that this machine cannot run or that fails, or if
    OpenSSL fails.
    """
    names = available_engines()
    forced = os.environ.get(ENGINE_VARIABLE)
    problem = native.problem()
    if forced:
        if forced not in names:
            raise DeviceError(
                f"{ENGINE_VARIABLE} cannot be used: expected an engine that this machine can run "
                f"({', '.join(names)}), got {forced!r:.40}. Name one of these, or unset {ENGINE_VARIABLE}"
            )
        _require_correct(forced)
        return SelectedEngine(forced, forced=True)
    fault = _fault(names[0]) if problem is None else None
    if problem is not None:
        problem = f"{_place()}{problem}"
        warning = f"fastrack runs without its native extension, on OpenSSL, which is slower: {problem}"
        reason = f"no native extension: {problem}"
    elif fault is not None:
        reason = f"{names[0]} failed its test {fault}"
        warning = (
            f"the engine {names[0]!r} failed its test {fault}. 'openssl' takes its place and is slower: see `fastrack "
            "doctor`, and report this"
        )
    else:
        return SelectedEngine(names[0])
    _require_correct("openssl")
    warnings.warn(warning, RuntimeWarning, stacklevel=3)
    return SelectedEngine("openssl", fault=reason)


def _place() -> str:
    """Return where a package without its extension is, if in a checkout, and what it is imported in place of."""
    from importlib.metadata import distributions  # deferred: with the extension it is not needed

    here = Path(__file__).parents[1]
    there = [Path(str(each.locate_file("fastrack"))) for each in distributions(name="fastrack-io")]
    others = [str(each) for each in there if (each / "__init__.py").is_file() and not each.samefile(here)]
    instead = f" in place of {others[0]}: leave its folder" if others else ""
    return f"it is the checkout {here.parent}{instead}; " if (here.parent / "pyproject.toml").is_file() else ""


@lru_cache(maxsize=32)
def make_engine(name: str, threads: int) -> Engine:
    """Return the engine `name` for a number of threads, after its known-answer test."""
    names = available_engines()
    if name not in names:
        raise ValueError(f"expected an engine that this machine can run ({', '.join(names)}), got {shown(name, 40)}")
    _require_correct(name)
    return _build(name, threads)


def _build(name: str, threads: int) -> Engine:
    if name == "openssl":
        from fastrack._crypto.openssl import OpenSSLEngine

        return OpenSSLEngine()
    from fastrack._crypto.vector import VectorEngine

    return VectorEngine(name, native.functions(name), threads)


def _require_correct(name: str) -> None:
    fault = _fault(name)
    if fault is not None:
        raise DeviceError(
            f"the engine {name!r} failed its test {fault}. Do not use it, and report this; {ENGINE_VARIABLE} names "
            f"another engine: {', '.join(available_engines())}"
        )


@cache
def _fault(name: str) -> str | None:
    """Run the known-answer test of an engine once in a process, and return its failure, or None."""
    from fastrack._crypto.known_answers import find_derivation_fault, find_fault, find_job_fault

    engine = _build(name, 1)
    return find_fault(engine) or find_derivation_fault(engine) or find_job_fault(engine)
