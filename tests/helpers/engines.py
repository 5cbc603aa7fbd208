"""The engines to test: those of this machine, and wider forms that it can only emulate.

Where FASTRACK_ENGINE forces an engine, it is the only one.
"""

from functools import cache, partial

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


class Wrong:
    """An engine that goes wrong in one way: its methods of these names take the sound engine first."""

    def __init__(self, **wrong):
        self._engine = get_engine(threads=1)
        self.__dict__.update({name: partial(method, self._engine) for name, method in wrong.items()})

    def __getattr__(self, name):
        return getattr(self._engine, name)
