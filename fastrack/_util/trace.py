"""Record the time, thread and device stream of each step of every transfer."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fastrack._util.atomic import new_file
from fastrack._util.fork import per_process
from fastrack._util.locations import require_local
from fastrack._util.public import public
from fastrack._version import __version__
from fastrack.errors import DeviceError

Detail = Mapping[str, int | str]

Steps = list[str | int]  # five items per step: name, start, stop, first chunk of the slab, and its sealed size
_Span = tuple[str, int, int, int, Detail]

_HOST = "host"


@dataclass(frozen=True, slots=True)
class Span:
    """A step with its start and its end, one bar in Perfetto."""

    name: str  # the step
    start: int  # nanoseconds since the timeline began, like `stop`
    stop: int
    process: str  # "host", or a device such as "cuda:0"
    thread: str  # the name of a thread of the host, or of a stream of the device
    track: int  # a number for each thread and each stream
    detail: Detail  # the arguments to show with it


class Timeline:
    """A collection of spans, added by any thread. Times are from `time.perf_counter_ns`."""

    def __init__(self) -> None:
        self.zero = time.perf_counter_ns()
        self.began = datetime.now(UTC)
        self.lost = 0
        self.local = threading.local()  # `transfer`: the transfer that a thread executes; `track`: its number
        self._spans: list[_Span] = []  # `append` needs no lock
        self._deferred: list[tuple[str, Callable[[], tuple[int, int]], int, Detail]] = []
        self._transfers: list[tuple[int, str, int, int, int, str | None, Steps]] = []
        self._tracks: dict[int, tuple[str, str]] = {}
        self._streams: dict[tuple[str, str, int], int] = {}
        self._lock = per_process(self, "_lock", threading.Lock)
        self._workers: dict[int, int] = {}

    def add(self, name: str, start: int, stop: int, detail: Detail) -> None:
        """Add a span on the calling thread."""
        self._spans.append((name, start, stop, self._track(), detail))

    def add_worker(self, number: int, start: int, stop: int) -> None:
        """Add a span of a worker thread that took part in the current step of the calling thread."""
        transfer = getattr(self.local, "transfer", None)
        if transfer is None:
            return
        with self._lock:
            track = self._workers.get(number)
            if track is None:
                track = self._workers[number] = len(self._tracks) + 1
                self._tracks[track] = _HOST, f"fastrack_{number}"
        self._spans.append((transfer.current_span, start, stop, track, {}))

    def add_transfer(self, name: str, start: int, stop: int, size: int, tensor: str | None, steps: Steps) -> None:
        """Add a transfer on the calling thread, and its steps in order."""
        self._transfers.append((self._track(), name, start, stop, size, tensor, steps))

    def add_deferred(
        self, name: str, stream: tuple[str, str, int], times: Callable[[], tuple[int, int]], detail: Detail
    ) -> None:
        """Add a span on a stream of a device. Its start and stop become known after its end.

        `stream` has the names of the device and of the stream, and a number, since each channel has its own streams.
        `times` returns start and stop. If it raises `DeviceError`, the span is counted as lost.
        """
        with self._lock:
            track = self._streams.get(stream)
            if track is None:
                track = self._streams[stream] = len(self._tracks) + 1
                self._tracks[track] = stream[:2]
        self._deferred.append((name, times, track, detail))

    def spans(self) -> list[Span]:
        """Return all spans so far, sorted by track and start, with an enclosing span before its inner spans.

        Waits for the end of spans on devices.
        """
        deferred, self._deferred = self._deferred, []
        ends: dict[int, int] = {}
        for name, times, track, detail in deferred:
            try:
                start, stop = times()
            except DeviceError:
                self.lost += 1
                continue
            # Spans of one stream never overlap, but the clocks of two messages may differ by some microseconds.
            start = max(start, ends.get(track, start))
            stop = ends[track] = max(stop, start)
            self._spans.append((name, start, stop, track, detail))
        spans = self._spans + [span for transfer in self._transfers for span in _spans_of(*transfer)]
        spans.sort(key=lambda span: (span[3], span[1], -span[2]))
        return [
            Span(name, start - self.zero, stop - self.zero, *self._tracks[track], track, detail)
            for name, start, stop, track, detail in spans
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
    """Record when each step of every transfer happens while the block runs, and write it as a trace for Perfetto.

    Parameters
    ----------
    path : path
        The file to write at the end of the block, even after an error: JSON in the Chrome trace event format, which
        https://ui.perfetto.dev, ``chrome://tracing`` and other viewers read. An existing file is replaced.

    Raises
    ------
    RuntimeError
        If a trace is being recorded already. One trace covers all threads and channels of the process.
    OSError
        If the file cannot be written. This is checked before the block runs, as far as possible.

    Notes
    -----
    Each thread has a track, and each stream of a GPU. A transfer is a span, ``to_device`` or ``to_host``, that encloses

    - ``prepare``: keys are derived and commitments checked, up to the first slab;
    - ``wait``: every staging buffer is still in use by the device;
    - ``source``: a slab is read into its staging buffer; a plain tensor is sealed on the way;
    - ``open``, ``seal``: a slab is authenticated and decrypted, or encrypted. On "cpu" these spans are on the threads
      that do it. On a GPU they are on its track ``kernels``, and the host has ``submit`` instead, when it queues the
      commands of a slab, and ``issue``, when the driver executes them;
    - ``copy``: a slab is copied to a GPU or back;
    - ``store``: a sealed slab is copied out of its staging buffer;
    - ``release``: the results of all chunks are awaited, after the last slab.

    A collective of `fastrack.distributed` is a span of its name, such as ``all_reduce``, that encloses

    - ``seal``, ``open``: a slab of a message is encrypted, or authenticated and decrypted;
    - ``wait``: a slab of another rank's message is awaited;
    - ``add``: the slabs of all ranks are added;
    - ``drain``: all sends are awaited, at the end;
    - ``confirm``: the ranks tell each other that all their messages were authentic.

    CUDA events take the times of a GPU, which are fitted to the host's clock once per message. The file holds names and
    sizes of tensors, but no contents.

    The trace is kept in memory until the block ends: about 200 bytes per step, and four CUDA events per slab. Record
    some batches rather than a day.

    Examples
    --------
    >>> import json, tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> sealed = fastrack.seal(np.arange(1000), key)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "trace.json"
    ...     with fastrack.trace(path):
    ...         array = fastrack.to_device(sealed, "cpu", keys=key, framework="numpy")
    ...     events = json.loads(path.read_bytes())["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"][0]
    'to_device'
    """
    require_local(path)
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory to write a trace to; make it first", str(path.parent))
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file; name another one for the trace", str(path))
    with ExitStack() as writing, recording() as timeline:
        writing.push(partial(_write, timeline, path, os.getpid()))
        yield


@contextmanager
def recording() -> Iterator[Timeline]:
    """Collect the spans of all transfers while the block runs. Raise RuntimeError if a trace is already recorded."""
    global active  # noqa: PLW0603
    timeline = Timeline()
    with _lock:
        if active is not None:
            raise RuntimeError("a trace is being recorded already; end it first")
        active = timeline
    try:
        yield timeline
    finally:
        with _lock:
            if active is timeline:  # in a forked child another timeline may have begun
                active = None


def current() -> Timeline | None:
    """Return the timeline that is being recorded, or None."""
    return active


@contextmanager
def span(name: str) -> Iterator[None]:
    """Add the block as a step of the calling thread, if a trace is being recorded."""
    timeline = active
    if timeline is None:
        yield
        return
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        timeline.add(name, start, time.perf_counter_ns(), {})


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the Chrome trace event format, with times in microseconds."""
    spans = timeline.spans()
    events: list[dict[str, Any]] = []
    processes = {_HOST: 1}
    firsts = {span.track: span for span in sorted(spans, key=lambda span: -span.start)}.values()
    # In display order: the host first, then devices, by start.
    for index, first in enumerate(sorted(firsts, key=lambda span: (span.process != _HOST, span.start))):
        number = processes.setdefault(first.process, len(processes) + 1)
        events += [
            _metadata("process_name", number, first.track, name=first.process),
            _metadata("thread_name", number, first.track, name=first.thread),
            _metadata("thread_sort_index", number, first.track, sort_index=index),
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
    """Yield the spans of a transfer: the transfer, its steps, and the time before the first and after the last step."""
    steps: Any = list(zip(*(flat[field::5] for field in range(5)), strict=True))
    yield name, start, stop, track, {"bytes": size, **({} if tensor is None else {"tensor": tensor})}
    yield "prepare", start, steps[0][1] if steps else stop, track, {}
    for step, begin, end, chunk, sealed in steps:
        yield step, begin, end, track, {"chunk": chunk, "sealed": sealed}
    if steps:
        yield "release", steps[-1][2], stop, track, {}


def _metadata(kind: str, process: int, track: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def _write(timeline: Timeline, path: Path, process: int, _: object, error: BaseException | None, *__: object) -> None:
    """Write the trace of a block that ended, possibly with `error`, unless this is a forked child."""
    if os.getpid() != process:
        return
    try:
        with new_file(path) as file:
            file.write(json.dumps(to_chrome(timeline), separators=(",", ":")).encode())
    except Exception as other:
        if error is None:
            raise
        error.add_note(f"the trace could not be written either: {other}")


active: Timeline | None = per_process(sys.modules[__name__], "active", lambda: None)  # the trace is its parent's
_lock = per_process(sys.modules[__name__], "_lock", threading.Lock)
