"""Write what is recorded of transfers as a trace, which Perfetto and other viewers draw."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastrack._transfer.timeline import HOST, Recorded, Timeline, recording
from fastrack._util.atomic import new_file
from fastrack._util.locations import require_local
from fastrack._util.public import public
from fastrack._util.trace import Detail, Steps
from fastrack._version import __version__
from fastrack.errors import DeviceError


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


def to_chrome(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline in the Chrome trace event format, with times in microseconds."""
    spans = spans_of(timeline)
    events: list[dict[str, Any]] = []
    processes = {HOST: 1}
    firsts = {span.track: span for span in sorted(spans, key=lambda span: -span.start)}.values()
    # In display order: the host first, then devices, by start.
    for index, first in enumerate(sorted(firsts, key=lambda span: (span.process != HOST, span.start))):
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


def _metadata(kind: str, process: int, track: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": args}


def spans_of(timeline: Timeline) -> list[Span]:
    """Return all spans of a timeline so far, sorted by track and start, with an enclosing span before its inner spans.

    Waits for the end of spans on devices.
    """
    deferred, timeline.deferred = timeline.deferred, []
    ends: dict[int, int] = {}
    for name, times, track, detail in deferred:
        try:
            start, stop = times()
        except DeviceError:
            timeline.lost += 1
            continue
        # Spans of one stream never overlap, but the clocks of two messages may differ by some microseconds.
        start = max(start, ends.get(track, start))
        stop = ends[track] = max(stop, start)
        timeline.recorded.append((name, start, stop, track, detail))
    spans = timeline.recorded + [span for transfer in timeline.transfers for span in _steps_of(*transfer)]
    spans.sort(key=lambda span: (span[3], span[1], -span[2]))
    return [
        Span(name, start - timeline.zero, stop - timeline.zero, *timeline.tracks[track], track, detail)
        for name, start, stop, track, detail in spans
    ]


def _steps_of(
    track: int, name: str, start: int, stop: int, size: int, tensor: str | None, flat: Steps
) -> Iterator[Recorded]:
    """Yield the spans of a transfer: the transfer, its steps, and the time before the first and after the last step."""
    steps: Any = list(zip(*(flat[field::5] for field in range(5)), strict=True))
    yield name, start, stop, track, {"bytes": size, **({} if tensor is None else {"tensor": tensor})}
    yield "prepare", start, steps[0][1] if steps else stop, track, {}
    for step, begin, end, chunk, sealed in steps:
        yield step, begin, end, track, {"chunk": chunk, "sealed": sealed}
    if steps:
        yield "release", steps[-1][2], stop, track, {}
