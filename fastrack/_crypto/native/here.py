"""Compile machine code in this process."""

from __future__ import annotations

import ctypes
from types import ModuleType

from llvmlite import binding

from fastrack._crypto.native.extension import METHODS
from fastrack._crypto.native.target import host_target, target_machine
from fastrack._crypto.native.units import describe_sources, make_object


def load_here(code: bytes) -> ModuleType:
    """Link object code, and return a module with its functions. The code stays in memory until the process ends."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine(host_target(), here=True))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    made = ModuleType("fastrack-jit")
    table = ctypes.c_void_p(engine.get_global_value_address(METHODS))
    engine.detach()  # it owns the code, which worker threads run until the process ends
    add_functions = ctypes.pythonapi.PyModule_AddFunctions
    add_functions.argtypes = (ctypes.py_object, ctypes.c_void_p)
    add_functions(made, table)
    return made


def compile_here() -> ModuleType:
    """Return all machine code, compiled anew."""
    module = load_here(make_object(host_target(), name=""))
    module.__doc__ = describe_sources()
    return module
