"""`PreemptionNotice`: a machine is about to be taken away, and all ranks save at the same step."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from fastrack._training.checkpoints import trainer_callbacks
from fastrack._util.fork import after_fork, before_fork
from fastrack._util.locations import require_path
from fastrack._util.public import public
from fastrack._util.rights import require_own
from fastrack.errors import ClosedError, KeyPermissionError

_STATUS = Path("/proc/self/status")
_POLL = 0.25  # seconds between two looks at the file: a look on NFS is a message to its server


@public
class PreemptionNotice:
    """Tell a training loop that its machine is about to be taken away, by a signal or by a file.

    A signal or the file only sets a flag; the loop asks for it between two steps, and saves then. So no step is cut,
    and a second signal, or one during a save, changes nothing.

    Parameters
    ----------
    file : path, optional
        A file that appears when the machine will be taken away, such as one that an agent of the platform writes. It
        has to be a regular file of this user or of root. Its content is not read.
    deadline : float
        Seconds from the notice to the end of the machine. Spot machines of AWS have 120, of Google Cloud and Azure 30;
        pods of Kubernetes have 30.
    signals : sequence of signal.Signals
        Signals that are a notice; SIGTERM by default. With ``()`` only the file is one, in any thread.

    Raises
    ------
    RuntimeError
        On entering it with signals in another thread than the main one, or where a handler is not one of Python.
    FileNotFoundError, KeyPermissionError
        On entering it, if the folder of `file` is not there, or another user may replace what is in it.
    ClosedError
        If it is used outside of its ``with`` statement, or in a forked child.

    Notes
    -----
    The handlers that were there come back at the end of the ``with`` statement; a function of Python that handled a
    signal before is called then, if the signal has come. Forked children, such as workers of a DataLoader, have the
    earlier handlers from the start. The time of a signal is known to within one call of native code, such as a backward
    pass, as Python handles signals between such calls.

    Programs under ``torchrun`` should end with another status than 0 after a notice: 0 ends the run.

    Examples
    --------
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> with fastrack.PreemptionNotice(deadline=30) as notice:
    ...     for step in range(3):
    ...         if notice.is_due():
    ...             with notice.saving():
    ...                 fastrack.save_checkpoint("run.safetensors", {"step": step}, key=key)
    ...             break
    >>> step
    2
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None = None,
        *,
        deadline: float = 30.0,
        signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        if not 0 < deadline < math.inf:
            raise ValueError(f"PreemptionNotice(deadline=): expected seconds above zero, got {deadline}")
        if file is None and not signals:
            raise ValueError("PreemptionNotice: expected a file or signals, got neither. Name what tells of the end")
        self._file = None if file is None else Path(require_path(file)).absolute()
        self._deadline = deadline
        self._previous: dict[int, Any] = dict.fromkeys(signals)
        self._process = 0  # that entered it
        # Monotonic times. Only handlers write the first: one that came between a look and a store would be lost else.
        self._signalled = self._told = math.inf
        self._came: list[int] = []  # signals, for the handlers that were there
        self._looked = self._decided = -math.inf  # monotonic times: of the file, and of an answer
        self._step = 0.0  # seconds between the last two answers
        self._calls = 0
        self._group: Any = None  # that was asked
        self._is_agreed = self._has_warned = self._has_refused = False

    def __enter__(self) -> Self:
        if self._process:
            raise RuntimeError("PreemptionNotice: expected one that was never entered, got one that was. Make another")
        if self._file is not None:
            require_own(self._file.parent)
        handlers = self._require_handlers()
        self._process = os.getpid()
        try:
            _entered.append(self)
            self._take_signals(handlers)
            self._decided = time.monotonic()
            self._warn_of(self._look())
            if self._told < math.inf:
                warnings.warn(
                    f"{self._file}: expected no notice at the start, got one. Remove it if it is of another machine: a "
                    "run that starts again saves and ends at once",
                    RuntimeWarning,
                    stacklevel=2,
                )
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process != os.getpid():
            return
        self._require_main_thread()
        self._restore()
        with ExitStack() as earlier:  # all of them, whatever one of them raises
            for number in reversed(self._came):
                handler = self._previous[number]
                outer = getattr(handler, "__self__", None)
                if isinstance(outer, PreemptionNotice):
                    earlier.callback(outer._hear, number, self._signalled)  # noqa: SLF001 - its own
                elif callable(handler):
                    earlier.callback(handler, number, None)

    def is_due(self, group: Any = None, *, every: int = 1) -> bool:
        """Return True once a notice has come: to this process, or to any rank of a group.

        With a group this is a collective, which all ranks call at the same step, and all get the same answer: a notice
        may reach only one rank, and others would wait for it. After the first True no further message is sent.

        Parameters
        ----------
        group : torch.distributed.ProcessGroup or SecureGroup, optional
            The ranks that stop together, the same at all calls. A `SecureGroup` seals its answers, so that no other
            machine can forge one. With NCCL each question waits for the GPU.
        every : int
            Ask the group at every so many calls; those between return False. Without a group each call has an answer.

        Raises
        ------
        ValueError
            If ``torch.distributed`` has several ranks and no group is named: a rank that stops alone makes others hang.
            If another group was asked before: its answer is none of this group's.
        """
        self._require_open()
        if every < 1:
            raise ValueError(f"is_due(every=): expected a number of calls above zero, got {every}")
        if group is not None and group is not self._group:
            if self._group is not None:
                raise ValueError("is_due(): expected the group of earlier calls, got another. Make a notice for each")
            self._group = group
        if self._is_agreed:
            return True
        self._calls += 1
        if group is None:
            _require_alone()
        elif self._calls % every:
            return False
        refused = self._look()
        now = time.monotonic()
        self._step, self._decided = now - self._decided, now
        left = self.remaining()
        if group is not None:
            left = _least(left, group)
            self._told = min(self._told, time.monotonic() + left - self._deadline)
        self._is_agreed = left < math.inf
        self._warn_of(refused)  # which may raise, and other ranks wait until all have answered
        return self._is_agreed

    def remaining(self) -> float:
        """Return the seconds until the deadline: negative after it, and infinite before a notice.

        After an answer of a group it is the least of its ranks.
        """
        return min(self._signalled, self._told) + self._deadline - time.monotonic()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save, the ordinary ones too, and tell of one that is too slow for the deadline.

        Raises
        ------
        TimeoutError
            If a notice had come and its deadline passed before the checkpoint was whole. The checkpoint is there.

        Warns
        -----
        RuntimeWarning
            Once, before any notice, if the last step and twice this save take longer than the deadline: a notice may
            come as a save begins.
        """
        began = time.monotonic()
        self._require_open()
        yield
        self._judge(time.monotonic() - began)

    def _judge(self, seconds: float) -> None:
        """Compare the seconds of a save that has succeeded with the deadline."""
        if self.remaining() < 0:
            raise TimeoutError(
                f"a checkpoint after a preemption notice: expected it within {self._deadline:g} s, got it "
                f"{-self.remaining():.1f} s later, after {seconds:.1f} s of saving. It is whole; make saves faster, or "
                "ask is_due() more often"
            )
        # A notice that comes as a save begins is heard after this, and after a step.
        if self.remaining() == math.inf and self._step + 2 * seconds > self._deadline and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"PreemptionNotice(deadline={self._deadline:g}): expected a step and two saves within the deadline, "
                f"got {self._step:.1f} s and {seconds:.1f} s each. A machine that is taken away may not save in time; "
                "save faster, ask is_due() more often, or set the deadline that the platform gives",
                RuntimeWarning,
                stacklevel=4,
            )

    def lightning_callback(self, path: str | os.PathLike[str], *, every: int = 1) -> Any:
        """Return a callback for a Trainer of Lightning, which saves to `path` and ends the run with status 143.

        All ranks of the Trainer decide together, after whole steps of the optimizer, and not after the last batch of an
        epoch, from which Lightning resumes without the next one: then after the first batch of that. `on_exception` of
        other callbacks runs as after Lightning's own ``SIGTERMException``. Lightning saves no random states, and
        resumes within an epoch only with a loader that has a ``state_dict``, as `wrap` and torchdata's
        ``StatefulDataLoader`` have. Its ordinary saves are not measured.
        """
        return trainer_callbacks.make_lightning(self, path, every)

    def transformers_callback(self, *, every: int = 1) -> Any:
        """Return a callback for the Trainer of transformers, which saves a checkpoint as others and ends `train`.

        All ranks of the Trainer decide together, after whole steps.
        """
        return trainer_callbacks.make_transformers(self, every)

    def _retake_signals(self) -> None:
        """Handle the signals again, which a Trainer handles now."""
        self._require_open()
        if threading.current_thread() is threading.main_thread():  # a Trainer takes no signals in another one either
            self._take_signals(self._previous)

    def _require_handlers(self) -> dict[int, Any]:
        """Return the handlers of the signals. Raise RuntimeError if they cannot be replaced and put back."""
        self._require_main_thread()
        handlers = {number: signal.getsignal(number) for number in self._previous}
        if any(_is_foreign(number, handler) for number, handler in handlers.items()):
            raise RuntimeError(
                "PreemptionNotice: expected a handler of Python, got one of a library, which could not be put back. "
                "Use a file with signals=(), or another signal"
            )
        return handlers

    def _require_main_thread(self) -> None:
        if self._previous and threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "PreemptionNotice: expected the main thread, as only it may handle signals, got "
                f"{threading.current_thread().name}. Enter and leave it there, or use a file with signals=()"
            )

    def _take_signals(self, handlers: dict[int, Any]) -> None:
        self._previous = handlers  # before the first signal can come
        for number in handlers:
            signal.signal(number, self._receive)

    def _restore(self) -> None:
        self._process = -1
        if self in _entered:
            _entered.remove(self)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._receive:  # else it is another's, who may put this one back
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._process != os.getpid() and self._process:  # a Trainer put it back after the end
            _forward(self._previous[number], number, frame)
            return
        self._hear(number, time.monotonic())

    def _hear(self, number: int, when: float) -> None:
        self._signalled = min(self._signalled, when)
        if number not in self._came:
            self._came.append(number)

    def _look(self) -> OSError | None:
        """Look whether the file is there, if the last look is some time ago. Return why it was not believed."""
        now = time.monotonic()
        if self._file is None or self._told < math.inf or now - self._looked < _POLL:
            return None
        since, self._looked = now - self._looked, now  # infinite at the first look
        try:
            status = self._file.stat()
            if not self._file.is_file():
                raise KeyPermissionError(f"{self._file}: expected a regular file, got something else. Remove it")
            require_own(self._file, status)
        except FileNotFoundError:
            return None
        except OSError as error:
            return error
        # It appeared since the last look; its time says when, if the clock of its writer is right. One that was there
        # before, and whose deadline has passed, is of another time, or of another machine.
        age = max(time.time() - status.st_mtime, 0.0)
        self._told = now - (min(age, since) if since < math.inf or age < self._deadline else 0.0)
        return None

    def _warn_of(self, error: OSError | None) -> None:
        if error is not None and not self._has_refused:
            self._has_refused = True
            warnings.warn(f"a preemption notice was not believed: {error}", RuntimeWarning, stacklevel=4)

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise ClosedError(
                "PreemptionNotice: expected to be inside its with statement, in the process that entered it, got a use "
                "elsewhere. Enter it first"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a preemption notice stays in its process and cannot be pickled; make one in each process")


_entered: list[PreemptionNotice] = []  # the last one that was entered is left first
_mask = threading.local()


def _hold_signals() -> None:
    """Let signals wait while this thread forks.

    A child that gets one before it has the earlier handlers would lose it, and its parent would wait for its end.
    """
    numbers = {number for notice in _entered.copy() for number in notice._previous}  # noqa: SLF001 - of this module
    _mask.held = set()
    if numbers:
        # Known before it is changed: a handler of Python may raise in either call, and what is held has to be released.
        _mask.held = numbers - signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.pthread_sigmask(signal.SIG_BLOCK, _mask.held)


def _release_signals() -> None:
    held: set[int] = getattr(_mask, "held", set())
    _mask.held = set()
    if held:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, held)


def _reset_in_child() -> None:
    """Bring the earlier handlers back: children end by SIGTERM as ever."""
    try:
        for notice in reversed(_entered.copy()):
            notice._restore()  # noqa: SLF001 - of this module
    finally:
        _release_signals()


before_fork(_hold_signals, _release_signals)
after_fork(_reset_in_child)


def _forward(handler: Any, number: int, frame: FrameType | None) -> None:
    """Handle a signal as an earlier handler does."""
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, handler)
        os.kill(os.getpid(), number)


def _is_foreign(number: int, handler: Any) -> bool:
    """Return whether native code handles a signal. Python knows of such handlers only those from before it started."""
    if handler is None:
        return True
    if callable(handler) or not _STATUS.exists():
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _STATUS.read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _require_alone() -> None:
    """Raise ValueError if torch.distributed has several ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"is_due(): expected the group whose ranks stop together, got none and {dist.get_world_size()} ranks. Pass "
            "torch.distributed.group.WORLD or a SecureGroup"
        )


def _least(seconds: float, group: Any) -> float:
    """Return the least of the seconds of all ranks of a group."""
    import torch
    import torch.distributed as dist

    reduced = getattr(group, "_reduced", None)  # of a sealed group
    # Not in host memory where the backend sends only from GPUs.
    device = "cuda" if reduced is None and "nccl" in str(dist.get_backend(group)) else "cpu"
    tensor = torch.tensor([seconds], dtype=torch.float64, device=device)
    if reduced is not None:  # of a kind of its own: no rank takes an all-reduce of the program for an answer
        return float(reduced("is_due", tensor, "min", async_op=False))
    dist.all_reduce(tensor, dist.ReduceOp.MIN, group)
    return float(tensor)
