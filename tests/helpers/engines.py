"""The engines to test: those of this machine, and wider forms that it can only emulate.

Where FASTRACK_ENGINE forces an engine, it is the only one.
"""

from __future__ import annotations

from functools import cache

from fastrack._crypto.engine import available_engines, get_engine, selected_engine
from fastrack._crypto.vaes import VaesEngine, supported_width

# Each with as many bytes of vector, and of instruction.
EMULATED = {"vaes-512-on-256": (64, 32), "vaes-256-on-128": (32, 16)} if supported_width() >= 32 else {}
NAMES = [selected_engine().name] if selected_engine().forced else [*available_engines(), *EMULATED]
VECTOR_NAMES = [name for name in NAMES if name.startswith("vaes")]
THREADS = 4


@cache
def make(name, threads=THREADS):
    if name in EMULATED:
        width, native = EMULATED[name]
        return VaesEngine(width, threads, native=native)
    return get_engine(name, threads=threads)
