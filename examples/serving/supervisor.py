"""The process that starts the workers, and the one that opens a model for all of them.

The supervisor has one thread, no plaintext and no key of the owner, so that it can fork at any time. A loader, which is
forked for each model, opens it into a memory file and ends. The supervisor then makes that file unchangeable and sends
its descriptor to the workers, who map it. So there is one copy of the weights, which goes with the last worker that
maps it; a worker never sees a model of which anything was refused; and the owner's key is only in the loader.
"""

import fcntl
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import fastrack
from examples.serving.refusals import ModelError, told
from examples.serving.shared import Counters, Replays
from examples.serving.weights import open_model
from examples.serving.worker import Worker
from fastrack import attest
from fastrack.grants import Identity

_SIGNALS = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM}
_TICK = 0.05  # seconds
_PATIENCE = 30.0  # seconds in which a worker has to take over a model
_PAUSE = 1.0  # seconds between two starts of a worker
_STOP_SECONDS = 15.0

log = logging.getLogger("serving")


@dataclass(slots=True)
class _Process:
    """A worker, or the place of one that has ended."""

    pid: int = 0
    channel: socket.socket | None = None
    started: float = float("-inf")


@dataclass(slots=True)
class _Model:
    """A model that workers are to use: words about it, its memory file, and when they were told."""

    message: bytes = b""
    memory: int = -1
    generation: int = 0
    told: float = 0.0


class Supervisor:
    """Workers on one socket, and the model of a sealed folder for all of them."""

    def __init__(
        self,
        path: Path,
        keys: str,
        *,
        workers: int,
        listener: socket.socket,
        collect: Callable[[attest.OfferBinding], attest.MachineEvidence],
        anchor: Path | None = None,
        watch: float = 0.0,
    ) -> None:
        self._path, self._keys, self._anchor, self._watch = path, keys, anchor, watch
        self._listener, self._collect = listener, collect
        self._identity = Identity.generate()  # its secret half is inherited by the workers, and is nowhere else
        self._replays, self._counters = Replays(), Counters(workers)
        self._counters.cause = "unready"
        self._workers = [_Process() for _ in range(workers)]
        self._model = _Model()
        self._loader: tuple[int, int, int] | None = None  # process, pipe, memory file
        self._is_wanted = True  # another look at the path
        self._seen: object = None
        self._look_at = 0.0

    def run(self) -> int:
        """Serve until a signal asks to end. SIGHUP reloads the model."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        gc.collect()
        gc.freeze()  # or the collections of each worker would copy the pages of all objects
        while True:
            got = signal.sigtimedwait(_SIGNALS, _TICK)
            if got is not None and got.si_signo in {signal.SIGINT, signal.SIGTERM}:
                return self._stop()
            self._is_wanted |= got is not None and got.si_signo == signal.SIGHUP
            self._tend_workers()
            self._tend_model()

    # Workers.

    def _tend_workers(self) -> None:
        now = time.monotonic()
        for number, worker in enumerate(self._workers):
            if worker.pid and (status := _ended(worker.pid)) is not None:
                log.warning("worker %d (%d) ended %s; another one is started", number, worker.pid, _how(status))
                worker.channel.close()
                worker.pid = 0
                self._counters.add("restarts")
                self._counters.set_generation(0, number)
            if not worker.pid and now >= worker.started + _PAUSE:
                worker.started = now
                with _tried(f"starting worker {number}"):
                    self._start_worker(number)
            is_behind = worker.pid and self._counters.generation(number) != self._model.generation
            if is_behind and now > max(worker.started, self._model.told) + _PATIENCE:
                # It would keep an old model alive, and the next one waits for it.
                log.error("worker %d (%d) does not take over the model; it is ended", number, worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

    def _start_worker(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        first = (self._model.message, self._model.memory) if self._model.generation else None

        def work() -> None:
            ours.close()
            for other in self._workers:  # a copy here would keep another worker from hearing that the supervisor ended
                if other.pid:
                    other.channel.close()
            for descriptor in self._loader[1:] if self._loader else ():  # a copy here would keep that model alive
                os.close(descriptor)
            worker = Worker(number, self._identity, self._collect, self._replays, self._counters)
            worker.run(self._listener, theirs, first)

        pid = _fork(work)
        theirs.close()
        ours.setblocking(False)
        self._workers[number] = _Process(pid, ours, time.monotonic())
        log.info("worker %d is process %d", number, pid)

    # The model.

    def _tend_model(self) -> None:
        if self._loader is not None:
            if (status := _ended(self._loader[0])) is not None:
                self._finish(status)
        elif all(
            worker.pid and self._counters.generation(number) == self._model.generation
            for number, worker in enumerate(self._workers)
        ):  # so that there are two models at a time, and not more
            if self._model.told:
                self._model.told = 0.0
                if self._model.generation > 1:
                    self._counters.add("reload ok")
                log.info("generation %d of the model is in use", self._model.generation)
            if self._is_wanted or self._has_changed():
                self._is_wanted = False
                with _tried("loading the model", lambda: self._counters.add("reload failed")):
                    self._load()

    def _has_changed(self) -> bool:
        now = time.monotonic()
        if not self._watch or now < self._look_at:
            return False
        self._look_at = now + self._watch
        return self._look() != self._seen

    def _look(self) -> object:
        with suppress(OSError):
            found = (self._path / "fastrack.folder").stat()
            return found.st_dev, found.st_ino, found.st_mtime_ns
        return None

    def _load(self) -> None:
        """Begin to open the folder that the path leads to now."""
        self._seen = self._look()
        memory = os.memfd_create("model", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        result, pipe = os.pipe()

        def load() -> None:
            torch.set_num_threads(1)  # as in a worker, so that what is tried here is what it does
            try:
                # A link may lead elsewhere meanwhile: all files are those of one folder.
                words = {"edition": open_model(self._path.resolve(), self._keys, memory, anchor=self._anchor)}
            except Exception as error:  # noqa: BLE001
                result = "refused" if isinstance(error, (fastrack.FastrackError, ModelError)) else "failed"
                words = {"result": result, "cause": cause_of(error), "told": told(error)}
            os.write(pipe, json.dumps(words).encode())

        try:
            self._loader = _fork(load), result, memory
        except OSError:
            os.close(result)
            os.close(memory)
            raise
        finally:
            os.close(pipe)

    def _finish(self, status: int) -> None:
        """Let all workers use the model that was opened, or go on with the old one."""
        _, result, memory = self._loader
        self._loader = None
        with open(result, "rb") as pipe:  # noqa: PTH123
            text = pipe.read()
        ended = {"result": "failed", "cause": "unready", "told": f"the loader ended {_how(status)}"}
        words = json.loads(text) if text and status == 0 else ended
        if "result" in words:
            os.close(memory)
            self._counters.cause = words["cause"]
            self._counters.add(f"reload {words['result']}")
            log.error("the model was not loaded, and what was in use stays: %s", words["told"])
            return
        # No process can change the weights of all, or cut them, which would kill the others.
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, seals)
        old, generation = self._model, self._model.generation + 1
        message = json.dumps({**words, "generation": generation}).encode()
        self._model = _Model(message, memory, generation, time.monotonic())
        for worker in self._workers:
            with suppress(OSError):  # of one that has ended, or does not listen: another takes its place
                if worker.pid:
                    socket.send_fds(worker.channel, [message], [memory])
        if old.generation:
            os.close(old.memory)
        log.info("edition %s is opened", words["edition"])

    def _stop(self) -> int:
        if self._loader is not None:
            os.kill(self._loader[0], signal.SIGKILL)
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, signal.SIGTERM)
        end = time.monotonic() + _STOP_SECONDS
        left = {worker.pid for worker in self._workers if worker.pid}
        while left and time.monotonic() < end:
            left -= {pid for pid in left if _ended(pid) is not None}
            time.sleep(0.01)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        log.info("stopped")
        return 0


@contextmanager
def _tried(action: str, note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Go on after an error of the system, such as a lack of memory or descriptors."""
    try:
        yield
    except OSError as error:
        note()
        log.error("%s failed: %s", action, os.strerror(error.errno or 0))


def _fork(run: Callable[[], None]) -> int:
    """Call a function in a forked process, which ends with it."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number in _SIGNALS:
            ignored = number in {signal.SIGHUP, signal.SIGINT}  # which a terminal sends to all; the supervisor decides
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        run()
        status = 0
    except BaseException as error:  # noqa: BLE001 - nothing of the supervisor's may run here
        log.error("process %d failed: %s", os.getpid(), told(error))
    finally:
        os._exit(status)


def cause_of(error: Exception) -> str:
    """Return the reason that clients get while there is no model."""
    if isinstance(error, fastrack.UnknownKeyError):
        return "key"
    if isinstance(error, (fastrack.FastrackError, OSError)):
        return "damaged"
    return error.reason if isinstance(error, ModelError) else "unready"


def _ended(pid: int) -> int | None:
    """Return the status of a child that has ended."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return status if found else None


def _how(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with status {os.WEXITSTATUS(status)}"
