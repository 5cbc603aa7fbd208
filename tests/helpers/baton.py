"""Threads that run one at a time, in an order that a seed chooses, so that a schedule that fails can be run again.

Threads hand each other a baton wherever they take a lock, wait, or call `Scheduler.step`. Code is scheduled while its
module's `threading` is a `Scheduler`. Where no thread can go on, `Scheduler.run` raises `DeadlockError`.
"""

import os
import random
import sys
import threading
import traceback
import types
from collections import Counter
from pathlib import Path


class DeadlockError(AssertionError):
    """No thread can go on."""


class Scheduler:
    """A stand-in for `threading` in modules, and a runner of threads. Two runs of one seed take the same `steps`.

    Outside of `run`, and in forked children, nothing is scheduled, and what would wait raises `DeadlockError`.
    """

    local = staticmethod(threading.local)
    get_ident = staticmethod(threading.get_ident)
    current_thread = staticmethod(threading.current_thread)

    def __init__(self, seed):
        self.steps = []  # the threads that went on, in order
        self._random = random.Random(seed)
        self._stay = self._random.choice([0, 0.5, 0.9])  # how often a thread keeps the baton
        self._threads, self._named = [], Counter()
        self._current = None
        self._ended = threading.Event()
        self._error = None
        self._process = os.getpid()

    def run(self, main, seconds=60):
        """Call `main` in the first thread, and return its result. The first error of any thread ends the run."""
        first = self.Thread(target=main, name="main")
        self._current = first
        first.start()
        first.go_on()
        try:
            assert self._ended.wait(seconds), f"{self._current} is at work without end"
        finally:
            self._current = None  # threads that are left wait for ever
        if self._error is not None:
            raise self._error
        return first.result

    def step(self):
        """Let another thread go on, or the same."""
        if self.is_scheduled:
            self._choose(None, "")

    def wait_until(self, reached, what):
        """Wait for a condition, which other threads look at too."""
        if self.is_scheduled:
            self._choose(reached, what)
        elif not (reached() or self._ended.is_set()):
            raise DeadlockError(f"a thread that is not scheduled waits for {what}")

    @property
    def is_scheduled(self):
        """True if the calling thread has the baton."""
        current = self._current
        return current is not None and current.ident == threading.get_ident() and os.getpid() == self._process

    # What stands in for `threading`.

    def Lock(self):  # noqa: N802 - as in threading
        return _Lock(self)

    def RLock(self):  # noqa: N802
        return _Lock(self, is_reentrant=True)

    def Condition(self, lock=None):  # noqa: N802
        return _Condition(self, _Lock(self, is_reentrant=True) if lock is None else lock)

    def Event(self):  # noqa: N802
        return _Event(self)

    def Thread(self, target, args=(), kwargs=types.MappingProxyType({}), name=None, daemon=False):  # noqa: N802
        if name is None:
            self._named[target.__name__] += 1
            name = f"{target.__name__} {self._named[target.__name__]}"
        thread = _Thread(self, lambda: target(*args, **kwargs), name, is_daemon=daemon)
        thread.weight = self._random.choice([1, 4, 16])
        return thread

    # How the baton goes round.

    def _choose(self, reached, what):
        """Hand the baton to a thread that can go on, and wait until it comes back."""
        me = self._current
        me.reached, me.what = reached, what
        if reached is None and self._random.random() < self._stay:
            return
        if (other := self._next()) is not me:
            if other is not None:
                other.go_on()
            me.wait()

    def _next(self):
        ready = [thread for thread in self._threads if thread.is_ready]
        if not ready:
            frames = sys._current_frames()
            waiting = [f"{thread} for {thread.what}{_way_to(frames[thread.ident])}" for thread in self._threads]
            self._end(DeadlockError("no thread can go on:\n" + "\n".join(waiting)))
            return None
        (chosen,) = self._random.choices(ready, [thread.weight for thread in ready])
        self._current = chosen
        self.steps.append(chosen.name)
        return chosen

    def _end(self, error=None):
        self._error = self._error or error
        self._ended.set()

    def _leave(self, thread):
        """Hand the baton on for the last time."""
        self._threads.remove(thread)
        if all(each.is_daemon for each in self._threads):
            self._end()
        elif (other := self._next()) is not None:
            other.go_on(after=thread)


class _Thread:
    def __init__(self, scheduler, action, name, *, is_daemon):
        self.name = name
        self.is_daemon = is_daemon
        self.reached, self.what = None, "its start"
        self.result = self.ident = None
        self._scheduler = scheduler
        self._action = action
        self._baton = threading.Lock()
        self._baton.acquire()
        self._after = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __str__(self):
        return self.name

    def start(self):
        self._scheduler._threads.append(self)
        self._thread.start()
        self.ident = self._thread.ident

    def join(self, timeout=None):
        self._scheduler.wait_until(lambda: self._is_over, f"the end of {self}")

    def is_alive(self):
        return not self._is_over

    def go_on(self, after=None):
        self._after = after
        self._baton.release()

    def wait(self):
        self._baton.acquire()
        if self._after is not None:  # what a thread leaves is gone before another goes on
            self._after._thread.join()
            self._after = None

    @property
    def is_ready(self):
        return self.reached is None or self.reached()

    def _run(self):
        self.wait()
        try:
            self.result = self._action()
        except BaseException as error:  # noqa: BLE001 - raised by `Scheduler.run`
            self._scheduler._end(error)
            return
        self._action = None
        self._is_over = True
        self._scheduler._leave(self)


def _way_to(frame):
    """Name the calls that led to a frame, but for those of this module and of threading."""
    calls = traceback.extract_stack(frame)
    names = [f"{Path(call.filename).name}:{call.lineno}" for call in calls if call.filename not in _PASSED_OVER]
    return f" ({', '.join(names)})"


_PASSED_OVER = __file__, threading.__file__


class _Lock:
    def __init__(self, scheduler, *, is_reentrant=False):
        self._scheduler = scheduler
        self._is_reentrant = is_reentrant
        self.owner, self.count = None, 0
        frame = sys._getframe(2)
        self.name = f"a lock of {frame.f_globals['__name__']}:{frame.f_lineno}"

    def acquire(self, blocking=True, timeout=-1):
        if not (self._is_reentrant and self.owner == threading.get_ident()):
            self._scheduler.step()
            if self.owner is not None:
                if not blocking:
                    return False
                self._scheduler.wait_until(lambda: self.owner is None, self.name)
            self.owner = threading.get_ident()
        self.count += 1
        return True

    def release(self):
        assert self.count, "released a lock that no thread has"
        self.count -= 1
        if not self.count:
            self.owner = None

    def locked(self):
        return self.owner is not None

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class _Condition:
    def __init__(self, scheduler, lock):
        self._scheduler = scheduler
        self._lock = lock
        self.acquire, self.release = lock.acquire, lock.release
        self._waiting = []

    def wait(self, timeout=None):
        return self._wait(lambda: True)

    def wait_for(self, reached, timeout=None):
        return reached() or self._wait(reached)

    def _wait(self, reached):
        """Give the lock back until a notification finds the condition true: one that comes too early is used up."""
        lock, mine = self._lock, []
        owner, count = lock.owner, lock.count
        self._waiting.append(mine)

        def is_over():
            if not mine or lock.locked():
                return False
            if not reached():
                mine.clear()
                self._waiting.append(mine)
            return bool(mine)

        lock.owner, lock.count = None, 0
        self._scheduler.wait_until(is_over, f"a change under {lock.name}")
        lock.owner, lock.count = owner, count
        return True

    def notify(self, n=1):
        assert self._lock.locked(), "notified without the lock"
        for mine in self._waiting[:n]:
            mine.append(True)
        del self._waiting[:n]

    def notify_all(self):
        self.notify(len(self._waiting))

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class _Event:
    def __init__(self, scheduler):
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self):
        return self._is_set

    def set(self):
        self._is_set = True

    def clear(self):
        self._is_set = False

    def wait(self, timeout=None):
        self._scheduler.step()
        self._scheduler.wait_until(self.is_set, "an event")
        return True
