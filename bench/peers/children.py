"""The children, as the process that measures sees them: alive all along, and told when it is their turn."""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from bench.machine import ROOT
from bench.peers.child import sum_of


class DeadError(Exception):
    """A child has ended, or does not answer. The text says how."""


class Child:
    """One peer in a process of its own, so that its memory and its threads are its own."""

    def __init__(self, name, size, folder, seed, *, limit=300):
        self._limit, self._errors = limit, tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.child", name, str(size), str(folder), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def ask(self, command):
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise DeadError(self._ending()) from None
        if not select.select([self._process.stdout], [], [], self._limit)[0]:
            self._process.kill()
            raise DeadError(f"no answer to {command!r} in {self._limit} s")
        line = self._process.stdout.readline()
        if not line:
            raise DeadError(self._ending())
        reply = json.loads(line)
        if "error" in reply:
            raise DeadError(f"{command}: {reply['error']}")
        return reply

    def ask_watched(self, command):
        """The same, with the most memory of its own that it held beyond what it had, in bytes.

        Pages of a mapped file belong to the page cache and do not count, those of its own children do. Looked up about
        every millisecond, so that something shorter may be missed.
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
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ending(self):
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"the process ended with {code}{f': {last[:200]}' if last else ''}"


def owned(pid):
    """Bytes of memory that a process has for itself, and its children beside it."""
    try:
        total = sum_of(f"/proc/{pid}/status", "RssAnon:", "RssShmem:")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    for child in children:
        with suppress(OSError):
            total += sum_of(f"/proc/{child}/smaps_rollup", "Private_Dirty:")
    return total
