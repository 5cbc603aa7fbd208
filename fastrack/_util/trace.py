"""`trace`: when each step of every transfer happened, on which thread, and on which stream of a device."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastrack._util.atomic import new_file
from fastrack._util.fork import after_fork
from fastrack._util.public import public
from fastrack._version import __version__
from fastrack.errors import DeviceError

Detail = Mapping[str, int | str]

Steps = list[str | int]  # of each its name, start, stop; the slab's first chunk, and its size when sealed
_Span = tuple[str, int, int, int, Detail]

_HOST = "host"
_PATIENCE = 1.0  # seconds in which a thread that has helped gets its turn


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took its time.

    name : what was done
    start, stop : nanoseconds since the timeline began
    process : "host", or a device such as "cuda:0"
    thread : the name of a thread of the host, or of a stream of the device
    track : a number of its own for each of these
    detail : what else is known of it
    """

    name: str
    start: int
    stop: int
    process: str
    thread: str
    track: int
    detail: Detail = field(default_factory=dict)


class Timeline:
    """Spans, from any thread, until they are asked for.

    Times that are given are those of `time.perf_counter_ns`.
    """

    def __init__(self) -> None:
        self.zero = time.perf_counter_ns()
        self.began = datetime.now(UTC)
        self.lost = 0
        self.local = threading.local()  # `transfer`: what a thread is at
        self._spans: list[_Span] = []  # whose `append` needs no lock
        self._later: list[tuple[str, Callable[[], tuple[int, int]], int, Detail]] = []
        self._transfers: list[tuple[int, str, int, int, int, str | None, Steps]] = []
        self._tracks: dict[int, tuple[str, str]] = {}
        self._streams: dict[tuple[str, str, int], int] = {}
        self._lock = threading.Lock()
        self._change = threading.Condition()
        self._helpers = 0

    @property
    def current_span(self) -> str:
        """What the calling thread is at, for others that help it; nothing outside of a transfer."""
        transfer = getattr(self.local, "transfer", None)
        return "" if transfer is None else transfer.current_span

    def add(self, name: str, start: int, stop: int, detail: Detail) -> None:
        """A span on the calling thread."""
        self._spans.append((name, start, stop, self._track(), detail))

    @contextmanager
    def helping(self, name: str) -> Iterator[None]:
        """Show the block as a span on the calling thread, even if whom it helps goes on before it has ended."""
        with self._change:
            self._helpers += 1
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter_ns(), {})
            with self._change:
                self._helpers -= 1
                self._change.notify_all()

    def add_transfer(self, name: str, start: int, stop: int, size: int, tensor: str | None, steps: Steps) -> None:
        """A transfer on the calling thread, and what was done in it, one step after the other."""
        self._transfers.append((self._track(), name, start, stop, size, tensor, steps))

    def add_deferred(
        self, name: str, stream: tuple[str, str, int], times: Callable[[], tuple[int, int]], detail: Detail
    ) -> None:
        """A span on a stream of a device, whose start and stop can be told when it is over.

        `stream` is the name of the device, that of the stream, and a number, as each channel has streams of its own. `times` raises
        `DeviceError` if it can never tell: such a span is lost, and counted.
        """
        with self._lock:
            track = self._streams.get(stream)
            if track is None:
                track = self._streams[stream] = len(self._tracks) + 1
                self._tracks[track] = stream[:2]
        self._later.append((name, times, track, detail))

    def spans(self) -> list[Span]:
        """All of them so far, each track's in the order of their starts, and what encloses another before it.

        Waits for devices whose spans are not over, and for threads that are about to tell of theirs.
        """
        with self._change:
            self._change.wait_for(lambda: not self._helpers, _PATIENCE)
        later, self._later = self._later, []
        ends: dict[int, int] = {}
        for name, times, track, detail in later:
            try:
                start, stop = times()
            except DeviceError:
                self.lost += 1
                continue
            # What is on one stream never overlaps, but the clocks of two messages may differ by some microseconds.
            start = max(start, ends.get(track, start))
            stop = ends[track] = max(stop, start)
            self._spans.append((name, start, stop, track, detail))
        found = self._spans + [span for transfer in self._transfers for span in _spans_of(*transfer)]
        found.sort(key=lambda span: (span[3], span[1], -span[2]))
        return [
            Span(name, start - self.zero, stop - self.zero, *self._tracks[track], track, detail)
            for name, start, stop, track, detail in found
        ]

    def _track(self) -> int:
        try:
            track: int = self.local.track
        except AttributeError:
            with self._lock:
                track = self.local.track = len(self._tracks) + 1
                self._tracks[track] = _HOST, threading.current_thread().name
        return track


@public
@contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write down when each step of every transfer happens while the block runs, for https://ui.perfetto.dev to show.

    Parameters
    ----------
    path : path
        The file to write when the block ends, however it ends: JSON in the Chrome trace event format, which Perfetto,
        ``chrome://tracing`` and other viewers read. It replaces one that is there.

    Raises
    ------
    RuntimeError
        If a trace is being taken already. There is one for the whole process, with all its threads and channels.
    OSError
        If no such file can be written; found out before the block runs, as far as possible.

    Notes
    -----
    Each thread has a row, and each stream of a GPU. A transfer is a span, ``to_device`` or ``to_host``, and in it are

    - ``prepare``: up to the first slab: keys are derived, commitments checked;
    - ``wait``: for a slot of the ring that the device still uses;
    - ``source``: a slab is filled, which for a plain tensor means sealed;
    - ``open``, ``seal``: a slab is authenticated and decrypted, or encrypted. On "cpu" these are on the threads that do
      it. On a GPU they are on its row ``kernels``, and the host has ``submit`` instead, when it writes down what is to
      be done with a slab, and ``issue``, when the driver is told;
    - ``copy``: a slab is on its way to a GPU or back, by its own clock;
    - ``store``: a sealed slab is copied out of its slot;
    - ``release``: from the last slab on until every verdict is in.

    A GPU's times are its own, taken by events and fitted to the host's clock once a message. Names and sizes of tensors
    are in the file, and nothing of their contents.

    All of it is kept in memory until the block ends: some 200 bytes a step, and four events of CUDA for each slab. So
    trace some batches, rather than a day.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory to write a trace to; make it first", str(path.parent))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "this is no ordinary file; name another one for the trace", str(path))
    process = os.getpid()
    try:
        with recording() as timeline:
            yield
    except BaseException as error:
        if os.getpid() == process:
            try:
                _write(timeline, path)
            except Exception as other:  # noqa: BLE001 - what the block raised is the one to tell
                error.add_note(f"and its trace could not be written: {other}")
        raise
    if os.getpid() == process:
        _write(timeline, path)


@contextmanager
def recording() -> Iterator[Timeline]:
    """Collect the spans of all transfers while the block runs.

    Raises
    ------
    RuntimeError
        If somebody does so already.
    """
    global _current  # noqa: PLW0603
    timeline = Timeline()
    with _lock:
        if _current is not None:
            raise RuntimeError("a trace is being taken already; end it first")
        _current = timeline
    try:
        yield timeline
    finally:
        with _lock:
            if _current is timeline:  # and not, in a forked child, what began there
                _current = None


def current() -> Timeline | None:
    """Where spans are to go, if anywhere."""
    return _current


def first_spans(spans: Iterable[Span]) -> list[Span]:
    """The first span of each track, in the order to show them: the host's, then the devices', by when they begin."""
    first = {span.track: span for span in sorted(spans, key=lambda span: -span.start)}
    return sorted(first.values(), key=lambda span: (span.process != _HOST, span.start))


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """A timeline in the Chrome trace event format, whose times are microseconds."""
    spans = timeline.spans()
    events: list[dict[str, Any]] = []
    processes = {_HOST: 1}
    for place, first in enumerate(first_spans(spans)):
        number = processes.setdefault(first.process, len(processes) + 1)
        events += [
            _metadata("process_name", number, first.track, name=first.process),
            _metadata("thread_name", number, first.track, name=first.thread),
            _metadata("thread_sort_index", number, first.track, sort_index=place),
        ]
    events += [
        {
            "ph": "X",
            "cat": "fastrack",
            "name": span.name,
            "pid": processes[span.process],
            "tid": span.track,
            "ts": span.start / 1000,
            "dur": (span.stop - span.start) / 1000,
            "args": dict(span.detail),
        }
        for span in spans
    ]
    other = {"fastrack": __version__, "began": timeline.began.isoformat(), "lost": timeline.lost}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _spans_of(
    track: int, name: str, start: int, stop: int, size: int, tensor: str | None, flat: Steps
) -> Iterator[_Span]:
    """A transfer, its steps, and what is before the first and after the last of them."""
    steps: Any = list(zip(*(flat[place::5] for place in range(5)), strict=True))
    yield name, start, stop, track, {"bytes": size, **({} if tensor is None else {"tensor": tensor})}
    yield "prepare", start, steps[0][1] if steps else stop, track, {}
    for step, begin, end, chunk, sealed in steps:
        yield step, begin, end, track, {"chunk": chunk, "sealed": sealed}
    if steps:
        yield "release", steps[-1][2], stop, track, {}


def _metadata(kind: str, process: int, track: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def _write(timeline: Timeline, path: Path) -> None:
    with new_file(path) as file:
        file.write(json.dumps(to_chrome(timeline), separators=(",", ":")).encode())


def _forget() -> None:
    """A forked child records nothing: what its parent began is the parent's."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


_current: Timeline | None = None
_lock = threading.Lock()
after_fork(_forget)
