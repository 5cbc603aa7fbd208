"""Measurement of sealed collectives next to unencrypted ones, and of data parallel training with both."""

# No `from __future__ import annotations`: torch compares the annotations of a hook with types.

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._C._distributed_c10d import GradBucket
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fastrack._bench.measure import Times
from fastrack._keys.keys import Key
from fastrack._transfer.timeline import Timeline, recording
from fastrack._transfer.trace_file import spans_of
from fastrack.distributed import SecureGroup
from fastrack.distributed._transport import PointToPoint
from fastrack.errors import FastrackError
from fastrack_bench.models import Spec
from fastrack_bench.ring import CopyEngine, NaiveRing

ALL_REDUCE = "all-reduce"
ALONE, GLOO, PLAIN, NAIVE, SEALED = "alone", "gloo", "plain", "naive", "sealed"
STEPS = ("seal", "wait", "open", "add", "drain", "confirm", "other")  # of a collective

_TIMEOUT = 300.0  # seconds for a message
_OPERATION = "all_reduce"  # the span that encloses the steps
_POLL = 0.2  # seconds

_processes: Any = torch.multiprocessing  # untyped
AllReduce = Callable[[torch.Tensor], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Collective:
    """The measurement of one way to add a bucket, or the gradients of a model, over all ranks."""

    subject: str  # "all-reduce" of a bucket, or the name of a model
    ranks: int
    size: int  # bytes of the bucket, or of all gradients
    way: str
    runs: int
    seconds: float  # median of the runs, each as long as on the slowest rank
    quartiles: tuple[float, float]  # the first and the third quartile of the seconds
    over_gloo: float  # time relative to gloo
    steps: dict[str, float]  # seconds by step on rank 0, medians of the runs; empty for other libraries
    times: tuple[float, ...] = ()  # seconds of each run

    def as_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON, without its runs."""
        return {name: value for name, value in asdict(self).items() if name != "times"}


@dataclass(frozen=True, slots=True)
class Task:
    """The measurements of one number of ranks."""

    ranks: int
    sizes: Sequence[int]  # bytes of buckets
    specs: Sequence[Spec]
    repeat: int
    secret: bytes
    store: str  # a file that does not exist


def measure_collectives(
    ranks: Sequence[int],
    sizes_mib: Sequence[float],
    *,
    bits: int,
    repeat: int,
    specs: Sequence[Spec],
    progress: Callable[[str], None] | None = None,
) -> list[Collective]:
    """Measure every way for each number of ranks: all-reduce at each size (MiB), and training of each model.

    The ranks are processes of this machine. `progress` is called with a description of each measurement before it.
    """
    sizes = [int(size * (1 << 20)) // 4 * 4 for size in sizes_mib]
    rows = []
    for count in ranks:
        with tempfile.TemporaryDirectory() as folder:
            task = Task(count, sizes, specs, repeat, os.urandom(bits // 8), f"{folder}/store")
            rows += _spawn(task, progress or (lambda _: None))
    return rows


def _spawn(task: Task, progress: Callable[[str], None]) -> list[Collective]:
    """Run the ranks, and return the rows that the first of them sends."""
    rows: list[Collective] = []
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    context = _processes.spawn(_run, (task, sender), task.ranks, join=False)
    try:
        ended = False
        while not ended:
            ended = context.join(_POLL)
            while receiver.poll():
                message = receiver.recv()
                if isinstance(message, str):
                    progress(message)
                else:
                    rows.append(message)
    except _processes.ProcessExitedException as error:
        raise FastrackError(
            f"measuring collectives failed: expected {task.ranks} ranks to finish, got {error}. Where memory is short, "
            "ask for fewer --ranks"
        ) from error
    finally:
        for process in context.processes:
            process.kill()
            process.join()
        receiver.close()
        sender.close()
    return rows


def _run(rank: int, task: Task, pipe: Connection) -> None:
    """Be one rank."""
    warnings.simplefilter("ignore", FutureWarning)  # later versions of torch rename `broadcast_buffers`
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task.store}", rank=rank, world_size=task.ranks)
    send = pipe.send if rank == 0 else lambda _: None
    with open_ways(task.secret) as ways:
        for size in task.sizes:
            send(f"{task.ranks} ranks, {size / (1 << 20):g} MiB")
            for row in _measure_bucket(ways, size, task):
                send(row)
        for spec in task.specs:
            send(f"{task.ranks} ranks, {spec.name}")
            for row in _measure_training(ways, spec, task):
                send(row)
    dist.destroy_process_group()


@contextlib.contextmanager
def open_ways(secret: bytes) -> Iterator[dict[str, AllReduce]]:
    """Yield functions by name that begin to replace a tensor by the sum over all ranks."""
    key = Key.from_bytes(secret)
    ring = NaiveRing(PointToPoint.among(None, _TIMEOUT), secret)
    with SecureGroup(key) as sealed, SecureGroup(key) as plain, contextlib.closing(ring):
        link: Any = plain._link  # noqa: SLF001 - the same algorithm and transport, without the cipher
        link.engine = CopyEngine()
        yield {
            GLOO: _gloo,
            PLAIN: lambda tensor: plain.all_reduce(tensor, async_op=True),
            NAIVE: lambda tensor: ring.all_reduce(tensor, async_op=True),
            SEALED: lambda tensor: sealed.all_reduce(tensor, async_op=True),
        }


def _gloo(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(tensor, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def _measure_bucket(ways: Mapping[str, AllReduce], size: int, task: Task) -> Iterator[Collective]:
    initial = torch.randn(size // 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected, bucket = initial.clone(), initial.clone()
    dist.all_reduce(expected)

    def check(_: str) -> None:
        torch.testing.assert_close(bucket, expected)
        bucket.copy_(initial)

    runs = {name: lambda way=way: way(bucket).wait() for name, way in ways.items()}
    return _rows(ALL_REDUCE, size, runs, check, task)


def _measure_training(ways: Mapping[str, AllReduce], spec: Spec, task: Task) -> Iterator[Collective]:
    """Measure iterations: forward and backward pass and a step of SGD, whose rate of 0 leaves the weights alone."""
    torch.manual_seed(0)
    inner = spec.build()
    model = DistributedDataParallel(inner, broadcast_buffers=False, gradient_as_bucket_view=True)
    chosen = {"way": ways[GLOO]}
    model.register_comm_hook(chosen, _hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    inputs, targets = spec.sample(torch.Generator().manual_seed(dist.get_rank()))
    norms: dict[str, torch.Tensor] = {}

    def iterate(way: str) -> None:
        chosen["way"] = ways.get(way, _gloo)
        with model.no_sync() if way == ALONE else contextlib.nullcontext():
            cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def check(way: str) -> None:
        """Compare the gradients with the first gradients of gloo."""
        if way != ALONE:
            current = torch.stack([weight.grad.norm() for weight in inner.parameters() if weight.grad is not None])
            torch.testing.assert_close(current, norms.setdefault(GLOO, current), rtol=1e-3, atol=1e-5)
        optimizer.zero_grad()

    runs = {way: lambda way=way: iterate(way) for way in (ALONE, *ways)}
    size = sum(weight.nbytes for weight in inner.parameters())
    return _rows(spec.name, size, runs, check, task)


def _hook(chosen: dict[str, AllReduce], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket like torch without a hook, by the chosen way."""
    future = chosen["way"](bucket.buffer().div_(dist.get_world_size()))
    return future.then(lambda done: done.value())


def _rows(
    subject: str, size: int, runs: Mapping[str, Callable[[], Any]], check: Callable[[str], None], task: Task
) -> Iterator[Collective]:
    """Yield a row for each way, after interleaved rounds. `check(way)` is called after each run, untimed."""
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in runs}
    for number in range(task.repeat + 1):
        for way, run in runs.items():
            dist.barrier()
            with recording() as timeline:
                start = time.perf_counter()
                run()
                took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            check(way)
            if number:  # the first round warms up
                seconds[way].append(took.item())
                steps[way].append(steps_of(timeline))
    times = {way: Times(timing) for way, timing in seconds.items()}
    for way, timing in times.items():
        medians = {step: Times([spent.get(step, 0.0) for spent in steps[way]]).median for step in STEPS}
        yield Collective(
            subject=subject,
            ranks=task.ranks,
            size=size,
            way=way,
            runs=task.repeat,
            seconds=timing.median,
            quartiles=timing.quartiles,
            over_gloo=timing.median / times[GLOO].median,
            steps=medians if any(steps[way]) else {},
            times=tuple(timing.seconds),
        )


def steps_of(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each step of the collectives of a timeline, and of "other"."""
    seconds: dict[str, float] = {}
    for span in spans_of(timeline):
        seconds[span.name] = seconds.get(span.name, 0.0) + (span.stop - span.start) / 1e9
    if _OPERATION in seconds:
        total = seconds.pop(_OPERATION)
        seconds["other"] = max(total - sum(seconds.values()), 0.0)
    return seconds
