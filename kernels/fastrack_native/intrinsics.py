"""Intrinsics for compiled code: words shared by threads, the clock, calls of C functions by address, and threads.

Words are integers of 64 bits. Addresses are words too.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from fastrack_native import llvm
from fastrack_native.llvm import I32, I64, pointer

_CLOCK = 8 if sys.platform == "darwin" else 1  # CLOCK_UPTIME_RAW, CLOCK_MONOTONIC: that of `time.perf_counter_ns`
_SIGNAL_WORDS = 16  # of `sigset_t`
_NAME = b"fastrack"  # of threads, one word


def emitted(emit: Callable[..., ir.Value | None]) -> Any:
    """Make a function for compiled code of `emit(builder, *words)`, which emits code on 64-bit integers.

    The function returns the integer that `emit` returns, or 0.
    """

    @wraps(emit)
    def intrinsic_function(typingctx: Any, *words: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
            result = emit(builder, *values)
            return I64(0) if result is None else result

        return types.int64(*[types.int64] * len(words)), codegen

    return intrinsic(intrinsic_function)


# Words.


@emitted
def at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    """Read word `index`."""
    return builder.load(word_pointer(builder, address, index))


@emitted
def put(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
    """Write word `index`. Other threads see it before later writes."""
    builder.store_atomic(value, word_pointer(builder, address, index), "seq_cst", 8)


@emitted
def load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read a word that other threads may write."""
    return builder.load_atomic(pointer(builder, address), "seq_cst", 8)


@emitted
def exchange(builder: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """Compare and swap a word, and return its previous value."""
    return builder.extract_value(builder.cmpxchg(pointer(builder, address), expected, value, "seq_cst"), 0)


@emitted
def fetch_add(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", pointer(builder, address), value, "seq_cst")


@emitted
def fetch_min(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("min", pointer(builder, address), value, "seq_cst")


# C functions.


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any) -> Any:
    """Call a C function by its address, with integers or pointers, and return its int."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return emit_call(builder, values[0], cgutils.unpack_tuple(builder, values[1]))

    return types.int64(types.int64, types.UniTuple(types.int64, len(arguments))), codegen


@emitted
def now(builder: ir.IRBuilder) -> ir.Value:
    """Return the nanoseconds of the monotonic clock, as `time.perf_counter_ns`."""
    with builder.goto_entry_block():
        timespec = builder.alloca(I64, 2)
    llvm.call(builder, "clock_gettime", I32, I32(_CLOCK), timespec)
    seconds, nanoseconds = (builder.load(builder.gep(timespec, [I32(index)])) for index in range(2))
    return builder.add(builder.mul(seconds, I64(10**9)), nanoseconds)


def _libc(name: str, *operands: str, is_there: bool = True) -> Any:
    """Make a function for compiled code of a function of the C library, which takes words and returns an int.

    It returns -1 if the function is not there.
    """

    def emit(builder: ir.IRBuilder, *words: ir.Value) -> ir.Value:
        return _call_libc(builder, name, *words) if is_there else I64(-1)

    parameters = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ("builder", *operands)]
    vars(emit)["__signature__"] = Signature(parameters)  # numba reads how many there are
    return emitted(emit)


sleep = _libc("usleep", "microseconds")
sched_yield = _libc("sched_yield")
lock, unlock = _libc("pthread_mutex_lock", "mutex"), _libc("pthread_mutex_unlock", "mutex")
wait, wake = _libc("pthread_cond_wait", "condition", "mutex"), _libc("pthread_cond_signal", "condition")

# CPUs, which Linux tells and takes: the one of this thread, and masks of so many bytes of those that a thread may use.
_IS_LINUX = sys.platform == "linux"
current_cpu = _libc("sched_getcpu", is_there=_IS_LINUX)
read_affinity = _libc("sched_getaffinity", "thread", "size", "mask", is_there=_IS_LINUX)
set_affinity = _libc("pthread_setaffinity_np", "thread", "size", "mask", is_there=_IS_LINUX)


@emitted
def create_thread(builder: ir.IRBuilder, handle: ir.Value, function: ir.Value, argument: ir.Value) -> ir.Value:
    """Start a thread that calls the function at an address, write its `pthread_t` to `handle`, and return a status.

    It takes no signals but those of its own faults, which a thread that waits for signals would miss.
    """
    with builder.goto_entry_block():
        room = builder.alloca(I64, 2 * _SIGNAL_WORDS + 2)
    signals, before, name = (builder.gep(room, [I32(index * _SIGNAL_WORDS)]) for index in range(3))
    signals, before, name = (builder.ptrtoint(pointer, I64) for pointer in (signals, before, name))
    _call_libc(builder, "sigfillset", signals)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        _call_libc(builder, "sigdelset", signals, I64(number))
    _call_libc(builder, "pthread_sigmask", I64(signal.SIG_SETMASK), signals, before)
    status = _call_libc(builder, "pthread_create", handle, I64(0), function, argument)
    _call_libc(builder, "pthread_sigmask", I64(signal.SIG_SETMASK), before, I64(0))
    if _IS_LINUX:
        with builder.if_then(builder.icmp_signed("==", status, I64(0))):
            for index, text in enumerate((_NAME, b"")):
                builder.store(I64(int.from_bytes(text, "little")), word_pointer(builder, name, I64(index)))
            _call_libc(builder, "pthread_setname_np", builder.load(pointer(builder, handle)), name)
    return status


@emitted
def this_thread(builder: ir.IRBuilder) -> ir.Value:
    """Return the `pthread_t` of this thread."""
    return llvm.call(builder, "pthread_self", I64)


@emitted
def make_wakeup(builder: ir.IRBuilder, mutex: ir.Value, condition: ir.Value) -> None:
    """Initialise a mutex and a condition variable, which take up to 64 bytes each."""
    _call_libc(builder, "pthread_mutex_init", mutex, I64(0))
    _call_libc(builder, "pthread_cond_init", condition, I64(0))


def word_pointer(builder: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return pointer(builder, builder.add(address, builder.mul(index, I64(8))))


def emit_call(builder: ir.IRBuilder, function: ir.Value, arguments: Sequence[ir.Value]) -> ir.Value:
    """Call a C function with words, and return its int as one."""
    # The C calling conventions of x86-64 and AArch64 accept a 64-bit word for a narrower integer.
    kind = ir.FunctionType(I32, [I64] * len(arguments))
    return builder.sext(builder.call(builder.inttoptr(function, kind.as_pointer()), arguments), I64)


def _call_libc(builder: ir.IRBuilder, name: str, *arguments: ir.Value) -> ir.Value:
    return builder.sext(llvm.call(builder, name, I32, *arguments), I64)
