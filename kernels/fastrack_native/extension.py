"""Emit the functions that Python calls, and the extension module that has them, as LLVM IR.

The module is of Python's stable interface (PEP 384, as of 3.11, and multi-phase initialisation, PEP 489).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llvmlite import ir

from fastrack._crypto import workers
from fastrack_native.llvm import I8, I32, I64, VOID, call, declare, pointer

METHODS = "fastrack_methods"  # the symbol of the table of the functions that Python calls
INIT = "PyInit__native"

Row = tuple[str, list[str], bool, bool]  # a name, kinds of arguments, whether it returns None, and releases the lock

_POINTER = I8.as_pointer()

# Of Python's stable interface.
_METH_FASTCALL = 0x80
_PYBUF_SIMPLE = 0  # contiguous memory
_BUFFER = ir.ArrayType(I64, 10)  # `Py_buffer`, which starts with the address
_METHOD = ir.LiteralStructType([_POINTER, _POINTER, I32, _POINTER])  # `PyMethodDef`
_BASE = ir.LiteralStructType([I64, _POINTER, _POINTER, I64, _POINTER])  # `PyModuleDef_Base`
_DEFINITION = ir.LiteralStructType([_BASE, _POINTER, _POINTER, I64, *[_POINTER] * 5])  # `PyModuleDef`


def emit_module(rows: Sequence[Row], triple: str, name: str, doc: str) -> ir.Module:
    """Emit a module with the functions of `rows`, which call those of the same names with ``fastrack_c_`` before them.

    With a `name` it has the function that Python calls to import an extension module of that name.
    """
    module = ir.Module("fastrack")
    module.triple = triple
    table = [
        (symbol, _emit_wrapper(module, symbol, kinds, is_void=is_void, releases_lock=releases))
        for symbol, kinds, is_void, releases in rows
    ]
    none, flags = ir.Constant(_POINTER, None), I32(_METH_FASTCALL)
    entries = [_METHOD([_text(module, symbol), code.bitcast(_POINTER), flags, none]) for symbol, code in table]
    entries.append(_METHOD([none, none, I32(0), none]))
    methods = _constant(module, METHODS, ir.Constant(ir.ArrayType(_METHOD, len(entries)), entries))
    if name:
        _emit_init(module, methods, name, doc)
    return module


def _emit_wrapper(module: ir.Module, name: str, kinds: list[str], *, is_void: bool, releases_lock: bool) -> ir.Function:
    """Emit the function that Python calls: ``METH_FASTCALL`` of its stable interface.

    A call by `ctypes` would take a microsecond more.
    """
    kind = ir.FunctionType(VOID if is_void else I64, [I64] * len(kinds))
    target = ir.Function(module, kind, f"fastrack_c_{name}")
    arguments = [_POINTER, _POINTER.as_pointer(), I64]
    wrapper = ir.Function(module, ir.FunctionType(_POINTER, arguments), f"fastrack_python_{name}")
    builder = ir.IRBuilder(wrapper.append_basic_block())
    none = ir.Constant(_POINTER, None)
    views: list[ir.Value] = []
    memory = builder.alloca(_BUFFER, max(1, kinds.count("Array")), "views")
    is_kernel = kinds[-1:] == ["Counters"]
    given = [*(kind for kind in kinds if kind not in {"Role", "Counters"}), *["int"] * 4 * is_kernel]

    python = partial(call, builder)

    def release() -> None:
        for view in views:
            python("PyBuffer_Release", VOID, view)

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
        python("PyEval_RestoreThread", VOID, state)
    release()
    builder.ret(python("PyLong_FromLongLong", _POINTER, result if is_kernel or not is_void else I64(0)))
    return wrapper


def _emit_shared(builder: ir.IRBuilder, kernel: ir.Function, kinds: list[str], words: list[ir.Value]) -> ir.Value:
    """Emit the call of a kernel on several threads, and return the first bad chunk.

    The role, its arguments and its counters are on the stack of the caller.
    """
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
    serve = declare(module, "fastrack_c_serve", ir.FunctionType(VOID, [I64]))
    addresses = (builder.ptrtoint(value, I64) for value in (entry, serve, block))
    call(builder, "fastrack_c_share", VOID, *addresses, helpers, wakes, boxes, spans)
    return builder.load(word(workers.WORDS + workers.BAD))


def _emit_entry(module: ir.Module, kernel: ir.Function, first: int) -> ir.Function:
    """Emit the function that calls a kernel with the words at an address, from word `first` on."""
    entry = ir.Function(module, ir.FunctionType(I32, [I64]), f"{kernel.name}_entry")
    builder = ir.IRBuilder(entry.append_basic_block())
    block = pointer(builder, entry.args[0])
    words = range(first, first + len(kernel.args))
    builder.call(kernel, [builder.load(builder.gep(block, [I64(index)])) for index in words])
    builder.ret(I32(0))
    return entry


def _emit_init(module: ir.Module, methods: ir.GlobalVariable, name: str, doc: str) -> None:
    """Emit the function that Python looks for in an extension module, and what it returns: a `PyModuleDef`."""
    none = ir.Constant(_POINTER, None)
    base = _BASE([I64(1), none, none, I64(0), none])  # as PyModuleDef_HEAD_INIT
    slots = _constant(module, "fastrack_slots", ir.Constant(ir.ArrayType(I64, 2), [0, 0]))  # none: there is no state
    tables = (table.bitcast(_POINTER) for table in (methods, slots))
    members = [base, _text(module, name), _text(module, doc), I64(0), *tables, none, none, none]
    # Python writes to this one, where it counts references.
    definition = _global(module, "fastrack_definition", _DEFINITION(members))
    function = ir.Function(module, ir.FunctionType(_POINTER, []), INIT)
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(call(builder, "PyModuleDef_Init", _POINTER, definition.bitcast(_POINTER)))


def _text(module: ir.Module, text: str) -> ir.Constant:
    data = bytearray(text.encode() + b"\0")
    value = ir.Constant(ir.ArrayType(I8, len(data)), data)
    return _constant(module, module.get_unique_name("fastrack_text"), value).bitcast(_POINTER)


def _constant(module: ir.Module, name: str, value: ir.Constant) -> ir.GlobalVariable:
    """Return a variable that is read-only once it is relocated, so that no overflow can put another function there."""
    variable = _global(module, name, value)
    variable.global_constant = True
    return variable


def _global(module: ir.Module, name: str, value: ir.Constant) -> ir.GlobalVariable:
    variable = ir.GlobalVariable(module, value.type, name)
    variable.initializer = value
    return variable
