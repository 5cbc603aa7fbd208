"""Measurement of the stages that `fastrack plan` predicts from: one thing at a time, at sizes a factor of two apart."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._bench.paths import BouncePath, copy, touched
from fastrack._crypto.base import Bytes
from fastrack._crypto.workers import default_threads
from fastrack._files.writer import save_file
from fastrack._keys.keys import Key
from fastrack._sealed.seal import seal
from fastrack._sets.load_file import load_file
from fastrack._training.checkpoints.checkpoint import save_checkpoint
from fastrack._transfer.channel import Channel
from fastrack._util.shown import format_size
from fastrack_bench.prediction.profiles import (
    ALL_REDUCE,
    BOUNCE,
    CONTIGUOUS,
    COPY,
    LOAD,
    LOAD_COLD,
    LOADER,
    PLAIN_TENSOR,
    RANDOM,
    SAVE,
    TO_DEVICE,
    TO_HOST,
    Row,
    Stage,
)

SMALLEST = 16 << 10  # bytes
LARGEST = 1 << 30
ROUNDS = 7
RANKS = (2,)
_LARGEST_BOUNCE = 64 << 20  # bytes: a chain takes three buffers more
_LARGEST_BUCKET = 64 << 20
_SMALLEST_BUCKET = 64 << 10
_ROWS = tuple(512 << shift for shift in range(10))  # bytes, to 256 KiB
_BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)  # rows
_LARGEST_BATCH = 64 << 20  # bytes
_ORDER = 65_536  # rows of a shuffled order, which take more than a cache
_TABLE = 128 << 20  # bytes of the rows to choose from
_RUNS = ((1 << 20, 5), (16 << 20, 3))  # bytes up to which a round has so many runs; above it has one
_SMALL = 16 << 20  # bytes up to which a size is measured twice in a round: it costs little, and varies
_CACHED = 64 << 20  # bytes up to which caches hold something of the run before
_MOUNTS = Path("/proc/self/mountinfo")
_IN_MEMORY = {"tmpfs", "ramfs"}
_SEED = 20261128


@dataclass(frozen=True, slots=True)
class _Task:
    """A run of one stage at one size, and what comes before it, untimed."""

    stage: Stage
    size: int
    run: Callable[[], Any]
    prepare: Callable[[], None] = field(default=lambda: None)
    settle: int = 1  # untimed runs before, so that caches hold what another stage has displaced


def measure_stages(
    folder: Path,
    *,
    largest: int = LARGEST,
    rounds: int = ROUNDS,
    ranks: Sequence[int] = RANKS,
    progress: Callable[[str], None] | None = None,
) -> list[Row]:
    """Measure all stages, with files in a folder, up to `largest` bytes. The rounds cover all sizes each.

    Runs of a point are thus minutes apart, like those of a user. `progress` is called before each size of a round.
    """
    report = progress or (lambda _: None)
    taken: dict[tuple[Stage, int], list[float]] = {}
    with ExitStack() as stack:
        tasks = [*_tasks(stack, sizes_to(largest), folder), *_row_tasks(stack, folder, min(_TABLE, largest))]
        small = [task for task in tasks if task.size <= _SMALL]
        for number in range(1, rounds + 1):
            size = None
            for task in (*tasks, *small):
                if task.size != size:
                    size = task.size
                    report(f"round {number}/{rounds}: {format_size(size)}")
                taken.setdefault((task.stage, task.size), []).extend(_time(task))
    rows = [Row(stage, size, seconds) for (stage, size), seconds in taken.items()]
    return [*rows, *_collectives(ranks, min(largest, _LARGEST_BUCKET), rounds, report)]


def sizes_to(largest: int, smallest: int = SMALLEST) -> list[int]:
    """Return sizes a factor of two apart."""
    sizes = [min(smallest, largest)]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    return sizes


def _time(task: _Task) -> Iterator[float]:
    """Yield the seconds of the runs of a round."""
    count = next((runs for limit, runs in _RUNS if task.size <= limit), 1)
    for _ in range(task.settle if task.size <= _CACHED else 0):
        task.run()
    for _ in range(count):
        task.prepare()
        start = time.perf_counter()
        result = task.run()
        yield time.perf_counter() - start
        del result


def _tasks(stack: ExitStack, sizes: Sequence[int], folder: Path) -> Iterator[_Task]:
    """Yield the tasks of transfers and of whole files, by size."""
    key = Key.generate()
    source = np.random.default_rng(_SEED).integers(0, 256, sizes[-1], dtype=np.uint8)
    target = touched(sizes[-1])
    channels = {
        threads: stack.enter_context(Channel("cpu", keys=key, threads=threads)) for threads in sorted({1, _cpus()})
    }
    has_disk = forgets(folder)
    for size in sizes:
        plain, out = source[:size], target[:size]
        yield from _transfers(channels, plain, out, key)
        path = folder / f"{size}.safetensors"
        yield _Task(Stage(SAVE, _cpus()), size, partial(save_checkpoint, path, {"x": plain}, key), settle=0)
        yield _Task(Stage(LOAD, _cpus()), size, partial(_load, channels[_cpus()], path))
        if has_disk:
            load = partial(_load, channels[_cpus()], path)
            yield _Task(Stage(LOAD_COLD, _cpus()), size, load, partial(_drop, path), 0)


def _transfers(channels: dict[int, Channel], plain: Bytes, out: Bytes, key: Key) -> Iterator[_Task]:
    size, sealed = plain.size, seal(plain, key)
    for threads, channel in channels.items():
        yield _Task(Stage(TO_DEVICE, threads), size, partial(channel.to_device, sealed, out=out))
        yield _Task(Stage(PLAIN_TENSOR, threads), size, partial(channel.to_device, plain, out=out))
        yield _Task(Stage(TO_HOST, threads), size, partial(channel.to_host, out, key=key))
    yield _Task(Stage(f"{TO_DEVICE}, {COPY}", _cpus()), size, partial(copy, out, plain))
    if size <= _LARGEST_BOUNCE:
        chain = BouncePath(size)
        message = chain.seal(plain)
        yield _Task(Stage(f"{TO_DEVICE}, {BOUNCE}", _cpus()), size, partial(chain.sealed_to_device, message, out))


def _load(channel: Channel, path: Path) -> Any:
    with load_file(path) as file:
        return [channel.to_device(file[name], framework="numpy") for name in file]


def forgets(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether the kernel forgets files of a folder when it is asked to: it can be, and they are not memory."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = mounts.read_text(errors="replace").splitlines() if mounts.exists() else []
    kinds = {line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2:3] == [number]}
    return hasattr(os, "posix_fadvise") and not kinds & _IN_MEMORY


def _drop(path: Path) -> None:
    """Have the kernel forget the pages of a file, which was synchronized to the disk, as far as it can."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def _row_tasks(stack: ExitStack, folder: Path, total: int) -> Iterator[_Task]:
    """Yield the tasks of batches of rows, whose files are in the page cache: by themselves, and by a `DataLoader`."""
    key = Key.generate()
    channel = stack.enter_context(Channel("cpu", keys=key))
    content = np.random.default_rng(_SEED).integers(0, 256, total, dtype=np.uint8)
    for row in (row for row in _ROWS if row <= total):
        path = folder / f"rows of {row}.safetensors"
        save_file({"x": content.reshape(-1, row)}, path, key=key)
        rows = stack.enter_context(load_file(path))["x"]
        for batch in (batch for batch in _BATCHES if row * batch <= min(_LARGEST_BATCH, total // 2)):
            for name in (RANDOM, CONTIGUOUS):
                batches = _Batches(channel, rows, batch, name == RANDOM)
                yield _Task(Stage(name, _cpus(), row), row * batch, batches.take, batches.choose, settle=2)
                if find_spec("torch") is not None:
                    stage = Stage(f"{name}{LOADER}", _cpus(), row)
                    yield _Task(stage, row * batch, _by_loader(channel, path, batch, name == RANDOM), settle=2)


def _by_loader(channel: Channel, path: Path, batch: int, is_random: bool) -> Callable[[], Any]:
    """Return a function that brings the next batch of a loader without end to the device."""
    from torch.utils.data import DataLoader

    from fastrack._training.collate import collate
    from fastrack._training.dataset import SealedDataset

    data = SealedDataset(path)
    count = len(data)
    order = random.Random(_SEED).sample(range(count), min(count, _ORDER)) if is_random else range(count)  # noqa: S311
    loader: Any = DataLoader(data, batch, sampler=_Endless(order), collate_fn=collate)
    batches = iter(loader)
    return lambda: channel.to_device(next(batches))


class _Endless:
    """A sampler that begins again at its end. A list is what torch's own sampler goes through."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return cycle(self._order)


class _Batches:
    """Batches of rows, each of other rows than the one before."""

    def __init__(self, channel: Channel, rows: Any, batch: int, is_random: bool) -> None:
        self._channel = channel
        self._rows = rows
        self._batch = batch
        self._is_random = is_random
        self._random = random.Random(_SEED)  # noqa: S311 - no secret
        self._chosen: Any = slice(0, batch)

    def choose(self) -> None:
        """Choose the rows of the next batch, as a sampler does before."""
        count = self._rows.shape[0]
        if self._is_random:
            self._chosen = np.array(self._random.sample(range(count), self._batch))
        else:
            start = self._random.randrange(count - self._batch + 1)
            self._chosen = slice(start, start + self._batch)

    def take(self) -> Any:
        """Bring the batch to the device."""
        return self._channel.to_device(self._rows[self._chosen], framework="numpy")


def _collectives(ranks: Sequence[int], largest: int, rounds: int, report: Callable[[str], None]) -> Iterator[Row]:
    """Yield rows of all-reduce, as it is sealed, plain and by gloo, if torch is installed."""
    if not ranks or find_spec("torch") is None:
        return
    from fastrack_bench.collectives import measure_collectives

    sizes = [size / (1 << 20) for size in sizes_to(largest, _SMALLEST_BUCKET)]
    taken: dict[tuple[Stage, int], list[float]] = {}
    for _ in range(2):  # groups of processes, which differ in where the kernel puts them
        for row in measure_collectives(ranks, sizes, bits=256, repeat=rounds + 3, specs=(), progress=report):
            stage = Stage(f"{ALL_REDUCE}, {row.way}", ranks=row.ranks)
            taken.setdefault((stage, row.size), []).extend(row.times)
    yield from (Row(stage, size, seconds) for (stage, size), seconds in taken.items())


def _cpus() -> int:
    return default_threads()
