"""Compile functions with numba to object code that needs numba no more.

A process that finds the object code on disk then loads it by llvmlite alone: to import numba and to prepare its types
takes a second, and to link the code a few milliseconds. Importing this imports numba.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from llvmlite import binding, ir
from numba import cfunc, njit, types

from fastrack._crypto.instructions import declare
from fastrack._crypto.library import METHODS, Target, target_machine
from fastrack._crypto.llvm import I8, I32, I64

# The functions outside of the object code that it may call: those of the C library, and those of Python that the
# wrappers call. Without a reference to others, a compiled function neither raises an exception nor allocates memory.
_LIBC = {
    "clock_gettime",
    "memcpy",
    "memmove",
    "memset",
    "pthread_cond_init",
    "pthread_cond_signal",
    "pthread_cond_wait",
    "pthread_create",
    "pthread_mutex_init",
    "pthread_mutex_lock",
    "pthread_mutex_unlock",
    "pthread_self",
    "pthread_setaffinity_np",
    "pthread_setname_np",
    "pthread_sigmask",
    "sched_getaffinity",
    "sched_getcpu",
    "sched_yield",
    "sigdelset",
    "sigfillset",
    "usleep",
}
_PYTHON = {
    "PyBuffer_Release",
    "PyErr_BadArgument",
    "PyErr_Occurred",
    "PyEval_RestoreThread",
    "PyEval_SaveThread",
    "PyLong_AsLongLong",
    "PyLong_FromLongLong",
    "PyObject_GetBuffer",
}
_KINDS = ("int", "bool", "Array", "Role", "Counters")  # the annotations of arguments
_POINTER = I8.as_pointer()

# Of Python's stable interface.
_METH_FASTCALL = 0x80
_PYBUF_SIMPLE = 0  # contiguous memory
_BUFFER = ir.ArrayType(I64, 10)  # `Py_buffer`, which starts with the address


def compiled(function: Any) -> Any:
    """Compile a function for other compiled functions, and for `compile_functions`."""
    return njit(nogil=True)(function)


def compiled_with_lock(function: Any) -> Any:
    """Compile a function that keeps the interpreter's lock while it runs.

    It is for functions so short that releasing the lock would cost more under contention.
    """
    return njit(nogil=False)(function)


def compile_functions(functions: Mapping[str, Any], target: Target) -> bytes:
    """Return the object code of functions that `compiled` or `compiled_with_lock` made, by the names to export.

    Their arguments are integers of 64 bits, annotated as `int` or `bool`, and addresses of arrays, annotated as
    `Array`. They return an integer, a boolean or None. For each the object code has a function that Python can call.

    A function whose last argument is annotated as `Counters` is a kernel: `workers.run` calls it on several threads. In
    place of the counters Python gives four integers, for `jit_workers.share`, and it gets the first bad chunk. If its
    first argument is annotated as `Role`, it gets `CALLER` or `WORKER` there.
    """
    machine = target_machine(target)
    wrappers = ir.Module("fastrack")
    wrappers.triple = target.triple
    table = []
    linked = None
    for name, function in (*functions.items(), *_sharing(functions)):
        kinds = _argument_kinds(function.py_func)
        is_void = inspect.signature(function.py_func).return_annotation == "None"
        module = _lower(function.py_func, f"fastrack_c_{name}", len(kinds), types.void if is_void else types.int64)
        linked = module if linked is None else _link(linked, module)
        if name not in functions:
            continue
        wrapper = _emit_wrapper(wrappers, name, kinds, is_void=is_void, releases_lock=function.targetoptions["nogil"])
        table.append((name, wrapper))
    _emit_table(wrappers, table)
    linked = _link(linked, binding.parse_assembly(str(wrappers)))
    _optimize(linked, machine)
    _require_known(linked)
    return bytes(machine.emit_object(linked))


def _sharing(functions: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the functions that wrappers of kernels call, if there are kernels."""
    if not any("Counters" in _argument_kinds(function.py_func) for function in functions.values()):
        return ()
    from fastrack._crypto import jit_workers

    return ("share", jit_workers.share), ("serve", jit_workers.serve)


def _lower(function: Any, symbol: str, count: int, result: types.Type) -> Any:
    """Return a module that has a function with C's calling convention as `symbol`, and all that it calls."""
    callback = cfunc(result(*[types.int64] * count))(function)
    module = binding.parse_assembly(callback.inspect_llvm())
    module.get_function(callback.native_name).name = symbol
    return module


def _require_known(module: Any) -> None:
    foreign = {function.name for function in module.functions if function.is_declaration}
    foreign = {name for name in foreign - _LIBC - _PYTHON if not name.startswith("llvm.")}
    if foreign:
        raise RuntimeError(
            f"expected compiled functions that neither raise nor allocate, got calls of {', '.join(sorted(foreign))}. "
            "Unset variables of numba that change what it compiles, such as NUMBA_BOUNDSCHECK and NUMBA_OPT"
        )


def _argument_kinds(function: Any) -> list[str]:
    kinds = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.annotation not in _KINDS:
            raise TypeError(f"expected arguments of {', '.join(_KINDS)}, got {parameter} in {function}")
        kinds.append(parameter.annotation)
    return kinds


def _link(module: Any, other: Any) -> Any:
    module.link_in(other)
    return module


def _optimize(module: Any, machine: Any) -> None:
    """Remove from the functions all that is not needed, which is every way to report an exception.

    numba has optimized them, but each for itself and for callers that it does not know.
    """
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name != METHODS:
            value.linkage = "internal"
    passes = binding.create_new_module_pass_manager()
    passes.add_ipsccp_pass()
    passes.add_simplify_cfg_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))


def _emit_wrapper(module: ir.Module, name: str, kinds: list[str], *, is_void: bool, releases_lock: bool) -> ir.Function:
    """Emit the function that Python calls: ``METH_FASTCALL`` of its stable interface.

    A call by `ctypes` would take a microsecond more.
    """
    kind = ir.FunctionType(ir.VoidType() if is_void else I64, [I64] * len(kinds))
    target = ir.Function(module, kind, f"fastrack_c_{name}")
    arguments = [_POINTER, _POINTER.as_pointer(), I64]
    wrapper = ir.Function(module, ir.FunctionType(_POINTER, arguments), f"fastrack_python_{name}")
    builder = ir.IRBuilder(wrapper.append_basic_block())
    none = ir.Constant(_POINTER, None)
    views: list[ir.Value] = []
    memory = builder.alloca(_BUFFER, max(1, kinds.count("Array")), "views")
    is_kernel = kinds[-1:] == ["Counters"]
    given = [*(kind for kind in kinds if kind not in {"Role", "Counters"}), *["int"] * 4 * is_kernel]

    def python(name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [value.type for value in values]), name)
        return builder.call(function, values)

    def release() -> None:
        for view in views:
            python("PyBuffer_Release", ir.VoidType(), view)

    def fail_if(condition: ir.Value) -> None:
        with builder.if_then(condition, likely=False):
            release()
            builder.ret(none)

    with builder.if_then(builder.icmp_signed("!=", wrapper.args[2], I64(len(given))), likely=False):
        python("PyErr_BadArgument", I32)
        builder.ret(none)
    words = []
    for index, kind in enumerate(given):
        value = builder.load(builder.gep(wrapper.args[1], [I64(index)]))
        if kind == "Array":
            view = builder.gep(memory, [I64(len(views))])
            failed = python("PyObject_GetBuffer", I32, value, view, I32(_PYBUF_SIMPLE))
            fail_if(builder.icmp_signed("!=", failed, I32(0)))
            words.append(builder.load(builder.bitcast(view, I64.as_pointer())))
            views.append(view)
            continue
        word = python("PyLong_AsLongLong", I64, value)
        with builder.if_then(builder.icmp_signed("==", word, I64(-1)), likely=False):
            fail_if(builder.icmp_unsigned("!=", python("PyErr_Occurred", _POINTER), none))
        words.append(word)
    state = python("PyEval_SaveThread", _POINTER) if releases_lock else None
    result = _emit_shared(builder, target, kinds, words) if is_kernel else builder.call(target, words)
    if state is not None:
        python("PyEval_RestoreThread", ir.VoidType(), state)
    release()
    builder.ret(python("PyLong_FromLongLong", _POINTER, result if is_kernel or not is_void else I64(0)))
    return wrapper


def _emit_shared(builder: ir.IRBuilder, kernel: ir.Function, kinds: list[str], words: list[ir.Value]) -> ir.Value:
    """Emit the call of a kernel on several threads, and return the first bad chunk.

    The role, its arguments and its counters are on the stack of the caller.
    """
    from fastrack._crypto import workers

    *arguments, helpers, wakes, boxes, spans = words
    assert len(arguments) + 2 <= workers.WORDS
    with builder.goto_entry_block():
        block = builder.alloca(I64, workers.WORDS + workers.COUNTER_WORDS)
        block.align = 64

    def word(index: int) -> ir.Value:
        return builder.gep(block, [I64(index)])

    counters = word(workers.WORDS)
    for index, value in enumerate((I64(workers.CALLER), *arguments, builder.ptrtoint(counters, I64))):
        builder.store(value, word(index))
    builder.store(I64(0), word(workers.WORDS + workers.NEXT))
    builder.store(I64(workers.NONE_BAD), word(workers.WORDS + workers.BAD))
    module = builder.module
    entry = _emit_entry(module, kernel, first=0 if kinds[0] == "Role" else 1)
    share = declare(module, "fastrack_c_share", ir.FunctionType(ir.VoidType(), [I64] * 7))
    serve = declare(module, "fastrack_c_serve", ir.FunctionType(ir.VoidType(), [I64]))
    functions = (builder.ptrtoint(function, I64) for function in (entry, serve))
    builder.call(share, [*functions, builder.ptrtoint(block, I64), helpers, wakes, boxes, spans])
    return builder.load(word(workers.WORDS + workers.BAD))


def _emit_entry(module: ir.Module, kernel: ir.Function, first: int) -> ir.Function:
    """Emit the function that calls a kernel with the words at an address, from word `first` on."""
    entry = ir.Function(module, ir.FunctionType(I32, [I64]), f"{kernel.name}_entry")
    builder = ir.IRBuilder(entry.append_basic_block())
    block = builder.inttoptr(entry.args[0], I64.as_pointer())
    words = range(first, first + len(kernel.args))
    builder.call(kernel, [builder.load(builder.gep(block, [I64(index)])) for index in words])
    builder.ret(I32(0))
    return entry


def _emit_table(module: ir.Module, functions: list[tuple[str, ir.Function]]) -> None:
    """Emit the array of `PyMethodDef` that `library` gives to Python."""
    entry = ir.LiteralStructType([_POINTER, _POINTER, I32, _POINTER])
    none = ir.Constant(_POINTER, None)
    entries = []
    for name, function in functions:
        data = bytearray(name.encode() + b"\0")
        text = ir.GlobalVariable(module, ir.ArrayType(I8, len(data)), f"fastrack_name_{name}")
        text.initializer = ir.Constant(text.type.pointee, data)
        text.global_constant = True
        entries.append(entry([text.bitcast(_POINTER), function.bitcast(_POINTER), I32(_METH_FASTCALL), none]))
    entries.append(entry([none, none, I32(0), none]))
    table = ir.GlobalVariable(module, ir.ArrayType(entry, len(entries)), METHODS)
    table.initializer = ir.Constant(table.type.pointee, entries)
