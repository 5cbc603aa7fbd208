"""The engines to test: those of this machine, and wider forms that it can only emulate.

Where FASTRACK_ENGINE forces an engine, it is the only one. Where FASTRACK_AARCH64 is set, as by `make aarch64`, that is
the form for AArch64 on an emulated CPU.
"""

import os
from functools import cache, partial

from fastrack._crypto import engine, isa, vector
from helpers.native_code import build_form

ARM = bool(os.environ.get("FASTRACK_AARCH64"))

# Wide vectors on narrow instructions: in one form where the CPU has wide instructions, else in each.
if ARM:
    EMULATED = {}
elif "vaes-256" in isa.supported_instruction_sets():
    EMULATED = {"vaes-512-on-256": isa.InstructionSet("x86", 64, 32)}
elif "aesni" in isa.supported_instruction_sets():
    EMULATED = {
        "vaes-512-on-128": isa.InstructionSet("x86", 64, 16),
        "vaes-256-on-128": isa.InstructionSet("x86", 32, 16),
    }
else:
    EMULATED = {}
if ARM:
    NAMES = ["armv8-emulated"]
else:
    _selected = engine.selected_engine()
    NAMES = [_selected.name] if _selected.forced else [*engine.available_engines(), *EMULATED]
VECTOR_NAMES = [name for name in NAMES if name not in {"openssl", "armv8-emulated"}]
THREADS = 4


@cache
def make(name=None, threads=THREADS):
    """Make the engine of this name, or the one that is selected here."""
    if name == "armv8-emulated":
        from helpers import arm

        return arm.EmulatedEngine(arm.start(arm.CPUS[0]), threads)
    if name in EMULATED:
        return vector.VectorEngine(name, emulated(name), threads)
    return engine.get_engine(name, threads=threads)


@cache
def emulated(name):
    return build_form(name, EMULATED[name])


class Wrong:
    """An engine that goes wrong in one way: its methods of these names take the sound engine first."""

    def __init__(self, **wrong):
        self._engine = engine.get_engine(threads=1)
        self.__dict__.update({name: partial(method, self._engine) for name, method in wrong.items()})

    def __getattr__(self, name):
        return getattr(self._engine, name)
