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

from fastrack._crypto import workers as layout
from fastrack_native import intrinsics
from fastrack_native.compiler import compiled
from fastrack_native.intrinsics import at, call, emitted, exchange, load, now, put
from fastrack_native.llvm import I64

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
        box += layout.BOX_SIZE
        if load(box + 8 * layout.OWNER) != block:
            continue
        posted -= 1
        if exchange(box + 8 * layout.STATE, layout.POSTED, layout.CLAIMED) != layout.POSTED:
            while load(box + 8 * layout.STATE) != layout.DONE:
                intrinsics.sched_yield()
            if spans:
                row = 1 + 3 * at(spans, 0)
                put(spans, row, (box - boxes) // layout.BOX_SIZE)
                put(spans, row + 1, at(box, layout.START))
                put(spans, row + 2, at(box, layout.STOP))
                put(spans, 0, at(spans, 0) + 1)
        put(box, layout.OWNER, 0)
        put(box, layout.STATE, layout.FREE)
    if workers > 0:
        put(boxes, layout.SHARED, now())


@compiled
def _count_streak(boxes: int) -> int:
    """Return the number of calls before this one that came one soon after the other, all of this thread."""
    thread, streak = intrinsics.this_thread(), 0
    if load(boxes + 8 * layout.CALLING) == thread and now() - load(boxes + 8 * layout.SHARED) < _FOLLOWS:
        streak = load(boxes + 8 * layout.STREAK) + 1
    put(boxes, layout.CALLING, thread)
    put(boxes, layout.STREAK, streak)
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
    stop = boxes + layout.BOX_SIZE * at(boxes, 0)
    posted = 0
    for sleeping in range(2):  # those that are awake first
        box = boxes
        while posted < workers and box < stop and wakes >= sleeping:
            box += layout.BOX_SIZE
            state, is_awake = load(box + 8 * layout.STATE), load(box + 8 * layout.AWAKE) != 0
            if (sleeping == 0 and not is_awake) or (state != layout.FREE and state != layout.NONE):
                continue
            if exchange(box + 8 * layout.STATE, state, layout.CLAIMED) != state:
                continue
            if state == layout.NONE:
                intrinsics.make_wakeup(box + 8 * layout.MUTEX, box + 8 * layout.CONDITION)
                if intrinsics.create_thread(box + 8 * layout.THREAD, serve, box) != 0:
                    put(box, layout.STATE, layout.NONE)
                    return posted
            if others > 0:
                _move(box, mask)
            _fill(box, entry, block, stays)
            posted += 1
            if not is_awake:
                intrinsics.wake(box + 8 * layout.CONDITION)
                wakes -= 1
    return posted


@compiled
def _fill(box: int, entry: int, block: int, stays: bool) -> None:
    """Write work into a box, and post it."""
    put(box, layout.STAYS, stays)
    put(box, layout.OWNER, block)
    put(box, layout.ENTRY, entry)
    put(box, layout.ARGUMENTS, layout.WORKER)
    for word in range(1, layout.WORDS):
        put(box, layout.ARGUMENTS + word, at(block, word))
    put(box, layout.STATE, layout.POSTED)


@compiled
def _read_other_cpus(mask: int) -> int:
    """Write the CPUs that this thread may use except its current one, and return 1 if there are, 0 if not.

    A scheduler prefers to wake a thread on the CPU of the thread that woke it. With the other CPUs busy it may leave it
    there, and the two would share one CPU. Return -1 where the system cannot tell.
    """
    for word in range(_MASK_WORDS):
        put(mask, word, 0)
    cpu = intrinsics.current_cpu()
    if cpu < 0 or cpu >= 64 * _MASK_WORDS or intrinsics.read_affinity(0, 8 * _MASK_WORDS, mask) != 0:
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
        if at(box, layout.MASK + word) != at(mask, word):
            for other in range(_MASK_WORDS):
                put(box, layout.MASK + other, at(mask, other))
            intrinsics.set_affinity(at(box, layout.THREAD), 8 * _MASK_WORDS, mask)
            break


@compiled
def serve(box: int) -> None:
    """Do the work that is posted in a box, until the process ends."""
    last, state = 0, box + 8 * layout.STATE
    while True:
        if load(state) == layout.POSTED and exchange(state, layout.POSTED, layout.RUNNING) == layout.POSTED:
            put(box, layout.START, now())
            call(at(box, layout.ENTRY), (box + 8 * layout.ARGUMENTS,))
            last = now()
            put(box, layout.STOP, last)
            put(box, layout.AWAKE, at(box, layout.STAYS))
            put(box, layout.STATE, layout.DONE)
        elif load(box + 8 * layout.AWAKE) != 0 and now() - last < _FOLLOWS:
            intrinsics.sched_yield()
        else:
            put(box, layout.AWAKE, 0)
            intrinsics.lock(box + 8 * layout.MUTEX)
            if load(state) != layout.POSTED:
                intrinsics.wait(box + 8 * layout.CONDITION, box + 8 * layout.MUTEX)
            intrinsics.unlock(box + 8 * layout.MUTEX)


@emitted
def _mask(builder: ir.IRBuilder) -> ir.Value:
    """Return the address of a mask of CPUs on the stack, valid until the caller returns."""
    with builder.goto_entry_block():
        mask = builder.alloca(I64, _MASK_WORDS)
    return builder.ptrtoint(mask, I64)
