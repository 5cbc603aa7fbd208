"""A forked child that saves again and again, and is interrupted at random moments of it."""

import gc
import os
import random
import select
import signal
import sys
import traceback

PATIENCE = 60  # seconds


def interrupt(save, check, times, *, number=signal.SIGINT, error=KeyboardInterrupt, seed=1, longest=0.012):
    """Send a signal to a child that calls `save()` in a loop, so many times, each of which has to end the loop.

    The handler of the signal raises `error`. After each the child calls `check()`, for what was saved earlier.
    """
    commands, answers = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _save_until_interrupted(save, check, number, error, commands[0], answers[1])
    rng = random.Random(seed)
    done = 0
    try:
        while done < times:
            os.write(commands[1], b"x")
            if _answer(answers[0]) != b"s":
                break
            select.select([], [], [], rng.random() * longest)
            os.kill(child, number)
            if _answer(answers[0]) != b"k":
                break
            done += 1
        os.write(commands[1], b"e")
    finally:
        if done < times and select.select([answers[0]], [], [], 5)[0] == []:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for each in (*commands, *answers):
            os.close(each)
    assert (done, status) == (times, 0), f"{done} of {times} interrupts were answered; the child ended with {status}"


def _answer(descriptor):
    """Return the next byte of the child: nothing if it has ended, or waits for ever."""
    return os.read(descriptor, 1) if select.select([descriptor], [], [], PATIENCE)[0] else b""


def _save_until_interrupted(save, check, number, error, commands, answers):
    def handle(_, frame):
        if frame.f_globals["__name__"] != "copyreg":
            raise error
        signal.setitimer(signal.ITIMER_REAL, 0.0005)  # soon again: it drops all errors in a line, also unprotected

    status = 1
    gc.callbacks.clear()  # Hypothesis has one in Python, and what is raised in such a one is lost
    gc.freeze()  # as is what is raised in a `__del__` of an object that an earlier test left
    sys.unraisablehook = sys.__unraisablehook__  # which tells of what is lost; that of pytest keeps it
    try:
        for each in {number, signal.SIGALRM}:
            signal.signal(each, handle)
        while os.read(commands, 1) == b"x":
            try:
                os.write(answers, b"s")
                while True:
                    save()
            except error:
                pass
            check()
            os.write(answers, b"k")
        status = 0
    except BaseException:  # noqa: BLE001 - the child ends here
        traceback.print_exc()
    finally:
        os._exit(status)
