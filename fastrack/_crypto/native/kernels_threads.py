"""The native side of `workers`: threads that wait outside the interpreter, and the boxes in which they find work.

A box belongs to one worker thread, and is never given back. Callers and the worker agree by one word, its state:

- NONE: it has no thread yet. The caller that changes this to CLAIMED starts the thread.
- FREE: any caller may change this to CLAIMED.
- CLAIMED: one caller owns the box, and writes the work into it: the address of a function, and a copy of its arguments.
- POSTED: the worker may begin. Only the worker changes this to RUNNING, and only the owner back to CLAIMED. Both
  compare and swap, so that one of them wins.
- RUNNING: the worker calls the function.
- DONE: the worker has returned from it, and reads and writes nothing of the caller any more.

The owner makes the box FREE again before its own native call ends: at once if the work was still POSTED, so that no
worker has seen it, and otherwise when it is DONE. So no worker uses memory of a caller whose call has ended. All of
this is within one native call, which no signal handler and no exception can interrupt. No caller waits for a worker
that has not begun, be it that the worker sleeps, or that a fork left it behind; and one that finds no box works alone.

A worker that has nothing to do sleeps on a condition variable. To wake it costs the caller 2 to 12 µs, and it begins 5
to 20 µs later, as its CPU sleeps too. So in a streak, calls of one thread within `_FOLLOWS` of each other, it stays
awake and reads its state for as long; and short work, which wakes no worker, is shared with those that are awake, and
wakes one after `_STREAK` calls. Where several threads call there is no streak: their CPUs have work. The caller takes
no lock to wake a worker: one that was about to sleep misses that, and the caller does the work alone.
"""

from __future__ import annotations

from llvmlite import ir

from fastrack._crypto.native.compiler import compiled
from fastrack._crypto.native.intrinsics import (
    at,
    call,
    create_thread,
    current_cpu,
    emitted,
    exchange,
    load,
    lock,
    make_wakeup,
    now,
    put,
    read_affinity,
    sched_yield,
    set_affinity,
    this_thread,
    unlock,
    wait,
    wake,
)
from fastrack._crypto.native.llvm import I64
from fastrack._crypto.workers import (
    ARGUMENTS,
    AWAKE,
    BOX_SIZE,
    CALLING,
    CLAIMED,
    CONDITION,
    DONE,
    ENTRY,
    FREE,
    MASK,
    MUTEX,
    NONE,
    OWNER,
    POSTED,
    RUNNING,
    SHARED,
    START,
    STATE,
    STAYS,
    STOP,
    STREAK,
    THREAD,
    WORDS,
    WORKER,
)

_MASK_WORDS = 16  # of 64 CPUs each, as in `cpu_set_t`
_FOLLOWS = 200_000  # nanoseconds
_STREAK = 4


@compiled
def share(entry: int, serve: int, block: int, workers: int, wakes: int, boxes: int, spans: int) -> None:
    """Call the function at `entry` with the words of `block`, on this thread and on so many workers if there are.

    So many of them are woken, or one in a streak of such work; the others have to be awake.

    `serve` is the address of the function below. `block` has the role and the arguments. With an address of `spans`,
    append a row for each worker that took part: the number of its box, and when it began and ended. The first word
    counts the rows.
    """
    posted = 0
    if workers > 0:
        streak = _count_streak(boxes)
        if streak >= _STREAK:
            wakes = max(wakes, 1)
        if streak > 0 or wakes > 0:
            posted = _post(entry, serve, block, workers, wakes, streak > 0, boxes)
    call(entry, (block,))
    box = boxes
    while posted > 0:
        box += BOX_SIZE
        if load(box + 8 * OWNER) != block:
            continue
        posted -= 1
        if exchange(box + 8 * STATE, POSTED, CLAIMED) != POSTED:
            while load(box + 8 * STATE) != DONE:
                sched_yield()
            if spans:
                row = 1 + 3 * at(spans, 0)
                put(spans, row, (box - boxes) // BOX_SIZE)
                put(spans, row + 1, at(box, START))
                put(spans, row + 2, at(box, STOP))
                put(spans, 0, at(spans, 0) + 1)
        put(box, OWNER, 0)
        put(box, STATE, FREE)
    if workers > 0:
        put(boxes, SHARED, now())


@compiled
def _count_streak(boxes: int) -> int:
    """Return the number of calls before this one that came one soon after the other, all of this thread."""
    thread, streak = this_thread(), 0
    if load(boxes + 8 * CALLING) == thread and now() - load(boxes + 8 * SHARED) < _FOLLOWS:
        streak = load(boxes + 8 * STREAK) + 1
    put(boxes, CALLING, thread)
    put(boxes, STREAK, streak)
    return streak


@compiled
def _post(entry: int, serve: int, block: int, workers: int, wakes: int, stays: bool, boxes: int) -> int:
    """Post work to so many workers, wake or start so many of them if needed, and return their number.

    With `stays` they stay awake for a while after it.
    """
    mask = _mask()
    others = _read_other_cpus(mask)
    if others == 0:
        return 0
    stop = boxes + BOX_SIZE * at(boxes, 0)
    posted = 0
    for sleeping in range(2):  # those that are awake first
        box = boxes
        while posted < workers and box < stop and wakes >= sleeping:
            box += BOX_SIZE
            state, is_awake = load(box + 8 * STATE), load(box + 8 * AWAKE) != 0
            if (sleeping == 0 and not is_awake) or (state != FREE and state != NONE):
                continue
            if exchange(box + 8 * STATE, state, CLAIMED) != state:
                continue
            if state == NONE:
                make_wakeup(box + 8 * MUTEX, box + 8 * CONDITION)
                if create_thread(box + 8 * THREAD, serve, box) != 0:
                    put(box, STATE, NONE)
                    return posted
            if others > 0:
                _move(box, mask)
            _fill(box, entry, block, stays)
            posted += 1
            if not is_awake:
                wake(box + 8 * CONDITION)
                wakes -= 1
    return posted


@compiled
def _fill(box: int, entry: int, block: int, stays: bool) -> None:
    """Write work into a box, and post it."""
    put(box, STAYS, stays)
    put(box, OWNER, block)
    put(box, ENTRY, entry)
    put(box, ARGUMENTS, WORKER)
    for word in range(1, WORDS):
        put(box, ARGUMENTS + word, at(block, word))
    put(box, STATE, POSTED)


@compiled
def _read_other_cpus(mask: int) -> int:
    """Write the CPUs that this thread may use except its current one, and return 1 if there are, 0 if not.

    A scheduler prefers to wake a thread on the CPU of the thread that woke it. With the other CPUs busy it may leave it
    there, and the two would share one CPU. Return -1 where the system cannot tell.
    """
    for word in range(_MASK_WORDS):
        put(mask, word, 0)
    cpu = current_cpu()
    if cpu < 0 or cpu >= 64 * _MASK_WORDS or read_affinity(8 * _MASK_WORDS, mask) != 0:
        return -1
    put(mask, cpu // 64, at(mask, cpu // 64) & ~(1 << cpu % 64))
    for word in range(_MASK_WORDS):
        if at(mask, word) != 0:
            return 1
    return 0


@compiled
def _move(box: int, mask: int) -> None:
    """Restrict a worker to the CPUs of a mask. A sandbox may forbid it."""
    for word in range(_MASK_WORDS):
        if at(box, MASK + word) != at(mask, word):
            for other in range(_MASK_WORDS):
                put(box, MASK + other, at(mask, other))
            set_affinity(at(box, THREAD), 8 * _MASK_WORDS, mask)
            break


@compiled
def serve(box: int) -> None:
    """Do the work that is posted in a box, until the process ends."""
    last = 0
    while True:
        if load(box + 8 * STATE) == POSTED and exchange(box + 8 * STATE, POSTED, RUNNING) == POSTED:
            put(box, START, now())
            call(at(box, ENTRY), (box + 8 * ARGUMENTS,))
            last = now()
            put(box, STOP, last)
            put(box, AWAKE, at(box, STAYS))
            put(box, STATE, DONE)
        elif load(box + 8 * AWAKE) != 0 and now() - last < _FOLLOWS:
            sched_yield()
        else:
            put(box, AWAKE, 0)
            lock(box + 8 * MUTEX)
            if load(box + 8 * STATE) != POSTED:
                wait(box + 8 * CONDITION, box + 8 * MUTEX)
            unlock(box + 8 * MUTEX)


@emitted
def _mask(builder: ir.IRBuilder) -> ir.Value:
    """Return the address of a mask of CPUs on the stack, valid until the caller returns."""
    with builder.goto_entry_block():
        mask = builder.alloca(I64, _MASK_WORDS)
    return builder.ptrtoint(mask, I64)
