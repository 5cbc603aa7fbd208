"""The figures fastrack promises, measured on this machine, next to what they are to reach."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fastrack._bench.measure import Row, interleave
from fastrack._crypto.keys import Key
from fastrack._sealed.reader import verify_file
from fastrack._sealed.tensor import seal
from fastrack._sealed.writer import save_file
from fastrack._transfer.channel import Channel

_READ = 128 << 10  # what `cat` reads at a time


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    name : what was measured, and against what
    value : the figure
    unit : "x" for a ratio, else "us" or "ms"
    reach : what it is to reach
    at_most : whether it is to stay below that, rather than above
    """

    name: str
    value: float
    unit: str
    reach: float
    at_most: bool = False

    @property
    def is_met(self) -> bool:
        return self.value <= self.reach if self.at_most else self.value >= self.reach

    def as_dict(self) -> dict[str, Any]:
        """The figure for a program to read."""
        return {**asdict(self), "is_met": self.is_met}


def figures(
    rows: Sequence[Row], *, repeat: int = 9, file_mib: int = 1024, progress: Callable[[str], None] | None = None
) -> list[Figure]:
    """Measure what `path_table` does not, and put all of it together.

    Parameters
    ----------
    rows : sequence of Row
        From `path_table`; those of the largest size count.
    repeat : int
        Runs of each thing; medians are taken.
    file_mib : int
        Size of the file that is verified, in MiB.
    progress : callable, optional
        Called with what is about to be measured.
    """
    say = progress or (lambda _: None)
    size = max(row.size for row in rows)
    found = _of_paths({row.path: row for row in rows if row.size == size}, size >> 20)
    say("small tensors")
    found.append(Figure("sealed 4 KiB tensor, a call, warm", _small_call(), "us", 150, at_most=True))
    say("a busy interpreter")
    share = _busy_share(size, repeat)
    found.append(Figure("direct beside a pure-Python thread, of its quiet speed", share, "x", 0.5))
    say(f"verifying {file_mib} MiB")
    found.append(
        Figure(f"verify of a {file_mib} MiB file, of the speed of cat", _verify_share(file_mib, repeat), "x", 0.8)
    )
    say("imports")
    found.append(Figure("import fastrack, beyond import numpy", _import_cost(repeat), "ms", 50, at_most=True))
    return found


def _of_paths(rows: dict[str, Row], mib: int) -> list[Figure]:
    seconds = {path: row.seconds for path, row in rows.items()}

    def faster(path: str, other: str, reach: float) -> Figure:
        return Figure(f"{path}, {mib} MiB, over {other}", seconds[other] / seconds[path], "x", reach)

    return [
        faster("direct", "bounce", 5),
        faster("direct", "parallel bounce", 1.8),
        faster("direct", "plain copy", 0.8),
        faster("direct, fresh", "plain copy, fresh", 0.9),
        faster("direct", "pyca Cobblestone", 2.5),
        faster("direct, one thread", "pyca Cobblestone", 1.5),
        faster("direct, plain tensor", "bounce, plain tensor", 3),
    ]


def _small_call() -> float:
    key = Key.generate()
    sealed = seal(np.zeros(4096, np.uint8), key)
    with Channel("cpu", keys=key) as channel:
        times = interleave({"call": lambda: channel.to_device(sealed, framework="numpy")}, 2000)
    return median(times["call"]) * 1e6


def _busy_share(size: int, repeat: int) -> float:
    key = Key.generate()
    plain = np.ones(size, np.uint8)
    sealed, out = seal(plain, key), np.ones_like(plain)
    quiet, busy = [], []
    with Channel("cpu", keys=key) as channel:
        channel.to_device(sealed, out=out)
        for _ in range(repeat):
            quiet.append(_seconds(lambda: channel.to_device(sealed, out=out)))
            with _busy_thread():
                busy.append(_seconds(lambda: channel.to_device(sealed, out=out)))
    return median(quiet) / median(busy)


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    stop = False

    def spin() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def _verify_share(mib: int, repeat: int) -> float:
    key = Key.generate()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "verify.safetensors"
        save_file({"data": np.ones(mib << 20, np.uint8)}, path, key)
        times = interleave(
            {"verify": lambda: verify_file(path, key), "cat": lambda: _read_all(path)},
            repeat,
        )
    return median(times["cat"]) / median(times["verify"])


def _read_all(path: Path) -> None:
    """What `cat file > /dev/null` does, without the start of a process."""
    buffer = bytearray(_READ)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)


def _import_cost(repeat: int) -> float:
    runs = {module: _fresh_import(module) for module in ("numpy", "numpy, fastrack")}
    times = interleave(runs, repeat)
    return (median(times["numpy, fastrack"]) - median(times["numpy"])) * 1e3


def _fresh_import(modules: str) -> Callable[[], Any]:
    return lambda: subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)  # noqa: S603


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
