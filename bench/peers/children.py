"""The children of the measuring process: alive all along, and called in turn."""

import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from bench.peers.child import serve, sum_of


class DeadError(Exception):
    """A child has ended, or does not answer. The text says how."""


class Child:
    """One peer in a process of its own, so that its memory and its threads are its own."""

    def __init__(self, name, size, folder, seed, *, limit=300):
        context = get_context("spawn")
        self._limit = limit
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, size, folder, seed))
        self._process.start()
        theirs.close()

    def ask(self, command):
        try:
            self._pipe.send(command)
            if not self._pipe.poll(self._limit):
                self._process.kill()
                raise DeadError(f"no answer to {command!r} in {self._limit} s")
            reply = self._pipe.recv()
        except (OSError, EOFError):
            self._process.join()
            raise DeadError(f"the process ended with {self._process.exitcode}") from None
        if "error" in reply:
            raise DeadError(f"{command}: {reply['error']}")
        return reply

    def ask_watched(self, command):
        """Send a command like `ask`, and add the peak of additional memory of the process, in bytes.

        Pages of a mapped file belong to the page cache and do not count; memory of its children does. It is read about
        every millisecond, so that a shorter peak may be missed.
        """
        pid, most, done = self._process.pid, 0, threading.Event()
        before = owned(pid)

        def watch():
            nonlocal most
            while not done.is_set():
                most = max(most, owned(pid))
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            reply = self.ask(command)
        finally:
            done.set()
            watcher.join()
        return {**reply, "owned": max(most, owned(pid)) - before}

    def end(self):
        self._pipe.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()


def owned(pid):
    """Bytes of private memory of a process and its children."""
    try:
        total = sum_of(f"/proc/{pid}/status", "RssAnon:", "RssShmem:")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    for child in children:
        with suppress(OSError):
            total += sum_of(f"/proc/{child}/smaps_rollup", "Private_Dirty:")
    return total
