"""The compiled code that processes on this machine need, and the files that it is kept in."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastrack._crypto.library import Unit


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """The state of compiled code for this CPU and these versions: how much of it is on disk, and where.

    `folder` is where code is kept, or would be.
    """

    folder: str
    writable: bool
    units: int  # that processes here need, 0 if nothing is compiled
    found: int  # of these on disk
    bytes: int  # of object code that was found


def needed_units() -> list["Unit"]:
    """Return all units that processes on this machine need: for the engine, for rows, and with CuPy for GPUs."""
    from fastrack._crypto import engine, gather, memcpy
    from fastrack._crypto.forms import is_compiling
    from fastrack._devices.cuda import key_state, native

    if not is_compiling():
        return []
    names = engine.available_engines()
    forced = os.environ.get(engine.ENGINE_VARIABLE)
    units = [*engine.units_of(forced if forced in names else names[0]), gather.PLANS]
    if find_spec("cupy") is not None:
        units += [memcpy.COPY, native.COMMANDS, key_state.unit()]
    return units


def read_compiled_code() -> CompiledCode:
    """Return the state of compiled code. Nothing is compiled or loaded."""
    from fastrack._crypto import code_cache, library

    units = needed_units()
    found = [file for file in map(library.find, units) if file is not None]
    folder = found[0][0].parent if found else code_cache.writable_folder() or code_cache.folders()[0]
    writable = code_cache.writable_folder() is not None
    return CompiledCode(str(folder), writable, len(units), len(found), sum(size for _, size in found))
