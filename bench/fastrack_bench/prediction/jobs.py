"""Prediction of what jobs take: transfers, epochs, checkpoints, collectives and loading, from the stages they pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastrack._util.shown import format_size
from fastrack_bench import toll
from fastrack_bench.prediction.curves import Estimate, OutOfReachError
from fastrack_bench.prediction.profiles import (
    ALL_REDUCE,
    CONTIGUOUS,
    LOAD,
    LOAD_COLD,
    LOADER,
    PLAIN_TENSOR,
    RANDOM,
    SAVE,
    TO_DEVICE,
    Stage,
)
from fastrack_bench.prediction.sources import Source
from fastrack_bench.prediction.traces import Observed
from fastrack_bench.revocations import Costs, Revocations

MIB = 1 << 20
CAPS = (50, 100, 250)  # MiB of buckets to compare with
COMPUTE = "compute"
_SMALL = 16 << 10  # bytes of a message that takes as long as one without
_MOST = 1_000_000  # buckets
_WORTH = 0.98  # of the time: what saves less is not named
_HOPELESS = 1000.0  # times as long as without revocations
_NO_REACH = "published lines are taken at any size and number of ranks; how far they hold is not known"
_NOTICES = {True: "fits", False: "does not fit", None: "may not fit"}


@dataclass(frozen=True, slots=True)
class Part:
    """A stage of a job, and what all of it takes by itself."""

    name: str
    seconds: Estimate
    stage: Stage | None = None  # None for what is no stage
    size: float = 0.0  # bytes of each message of the stage, the largest if they differ
    each: Estimate | None = None  # seconds of that message


@dataclass(frozen=True, slots=True)
class Move:
    """A change that makes a job quicker, and what the job takes then."""

    name: str
    seconds: Estimate
    of: float  # the time over that without the change


@dataclass(frozen=True, slots=True)
class Plan:
    """The prediction of a job on one machine."""

    job: str
    machine: str
    label: str
    seconds: Estimate
    parts: tuple[Part, ...]
    bottleneck: str
    moves: tuple[Move, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[tuple[str, float], ...] = ()  # names and seconds of sources that differ

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "sources": [{"name": name, "seconds": seconds} for name, seconds in self.sources]}


def plan_by_each(source: Source, predict: Callable[[Source], Plan]) -> Plan:
    """Return the plan of a source, with what each of its parts gives if there are several that reach."""
    plan, found = predict(source), list[tuple[str, float]]()
    for name, part in source.each():
        try:
            found.append((name, predict(part).seconds.middle))
        except OutOfReachError:
            continue
    return replace(plan, sources=tuple(sorted(found, key=lambda item: item[1]))) if len(found) > 1 else plan


def _plan(
    source: Source,
    job: str,
    seconds: Estimate,
    parts: Sequence[Part],
    *,
    moves: Iterable[Move] = (),
    notes: Sequence[str] = (),
    bottleneck: str | None = None,
) -> Plan:
    worst = bottleneck or max(parts, key=lambda part: part.seconds.middle).name
    useful = sorted((move for move in moves if move.of < _WORTH), key=lambda move: move.of)
    noted = (*notes, _NO_REACH) if source.label else tuple(notes)
    return Plan(job, source.name, source.label, seconds, tuple(parts), worst, tuple(useful), noted)


class _Moves:
    """The changes that the measurements reach."""

    def __init__(self, now: Estimate) -> None:
        self.found: list[Move] = []
        self._now = now

    def try_(self, name: str, predict: Callable[..., Estimate], *arguments: Any) -> None:
        """Add a change if its time can be predicted: by a function, with these arguments."""
        try:
            seconds = predict(*arguments)
        except OutOfReachError:
            return
        self.found.append(Move(name, seconds, seconds.middle / self._now.middle))


# Transfers.


def plan_transfer(
    source: Source, name: str, size: float, threads: int, *, count: int = 1, observed: Observed | None = None
) -> Plan:
    """Predict `count` messages of `size` bytes, one after the other, by the stage of this name."""

    def took(by: Stage, each: float, messages: float) -> Estimate:
        return source.at(by, each).times(messages)

    stage = Stage(name, threads)
    seconds = took(stage, size, count)
    moves = _Moves(seconds)
    for other in source.threads(name):
        if other != threads:
            moves.try_(f"{other} threads", took, Stage(name, other), size, count)
    if count > 1:
        moves.try_(f"one message of {format_size(count * size)}", took, stage, count * size, 1)
        moves.try_("messages twice as large", took, stage, 2 * size, count / 2)
    if name == PLAIN_TENSOR:
        moves.try_("sealed before, by its owner", took, Stage(TO_DEVICE, threads), size, count)
    part = Part(str(stage), seconds, stage, size, source.at(stage, size))
    job = f"{name} of {format_size(size)}" + (f", {count} times" if count > 1 else "")
    notes = () if observed is None else (_describe(observed),)
    step = None if observed is None else f"{name}: {observed.bottleneck}"
    return _plan(source, job, seconds, [part], moves=moves.found, notes=notes, bottleneck=step)


def _describe(observed: Observed) -> str:
    total = math.fsum(observed.steps.values())
    shares = sorted(observed.steps.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {share / total:.0%}" for name, share in shares if share >= total / 100)
    how = f"overlapped by {observed.overlap:.0%}" if observed.is_overlapped else "one after the other"
    return f"by the trace, the steps of {observed.operation} go {how}: {listed}"


# Epochs.


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of batches of rows. The last batch counts as a whole one."""

    samples: int
    row: int  # bytes of a sample
    batch: int  # samples
    compute: float  # seconds of a step
    pattern: str = RANDOM
    threads: int = 1
    overlap: float | None = None  # 0: batches are fetched between steps; 1: while a step goes on; None: unknown

    @property
    def steps(self) -> int:
        """The number of batches."""
        return -(-self.samples // self.batch)

    def seconds(self, data: Estimate) -> Estimate:
        """Return the seconds of the epoch, when a batch takes `data`."""
        if self.overlap is None:
            serial, overlapped = (self._blend(data, overlap) for overlap in (0.0, 1.0))
            return overlapped.between(serial)
        return self._blend(data, self.overlap)

    def _blend(self, data: Estimate, overlap: float) -> Estimate:
        """Return the time in which `overlap` of the shorter of both is hidden, in all steps but the first."""
        hidden = overlap * (self.steps - 1)
        return data.mapped(lambda each: self.steps * (each + self.compute) - hidden * min(each, self.compute))


def plan_epoch(source: Source, epoch: Epoch) -> Plan:
    """Predict an epoch."""

    def took(changed: Epoch) -> Estimate:
        return changed.seconds(source.rows(changed.pattern, changed.threads, changed.row, changed.batch))

    data = source.rows(epoch.pattern, epoch.threads, epoch.row, epoch.batch)
    total = epoch.seconds(data)
    moves = _Moves(total)
    if epoch.pattern.startswith(RANDOM):
        moves.try_(CONTIGUOUS, took, replace(epoch, pattern=epoch.pattern.replace(RANDOM, CONTIGUOUS)))
    if epoch.pattern.endswith(LOADER):
        moves.try_("rows taken without a DataLoader", took, replace(epoch, pattern=epoch.pattern.removesuffix(LOADER)))
    larger = replace(epoch, batch=2 * epoch.batch, compute=2 * epoch.compute)
    moves.try_(f"batches of {larger.batch}, with as much compute a sample", took, larger)
    if epoch.overlap != 1 and epoch.compute:
        moves.try_("batches fetched while a step goes on", took, replace(epoch, overlap=1.0))
    if epoch.compute and data.middle < epoch.compute:
        moves.try_("half the compute", took, replace(epoch, compute=epoch.compute / 2))
    stage = Stage(epoch.pattern, epoch.threads, epoch.row)
    name = f"{stage}: the copy to the GPU, without gathering" if source.label else str(stage)
    parts = [Part(name, data.times(epoch.steps), stage, epoch.row * epoch.batch, data)]
    if epoch.compute:
        parts.append(Part(COMPUTE, Estimate.exact(epoch.compute * epoch.steps)))
    job = f"epoch of {epoch.samples} samples of {epoch.row} bytes in {epoch.steps} batches of {epoch.batch}"
    return _plan(
        source,
        job,
        total,
        parts,
        moves=moves.found,
        notes=_unknown(epoch.overlap, epoch.compute, "--overlap or --trace"),
    )


# Checkpoints.


@dataclass(frozen=True, slots=True)
class Schedule:
    """The intervals between checkpoints, for one duration of a checkpoint."""

    save: float  # seconds
    restart: float  # seconds
    young: float  # seconds of work between two checkpoints
    daly: float
    best: float
    costs: Mapping[str, Costs]  # with each of these intervals, by name


def plan_checkpoint(source: Source, size: float, threads: int, *, notice: float | None = None) -> Plan:
    """Predict a checkpoint of `size` bytes, and whether it is whole before a machine goes after a notice."""
    stage = Stage(SAVE, threads)
    seconds = source.at(stage, size)
    moves = _Moves(seconds)
    moves.try_("half the bytes", source.at, stage, size / 2)
    notes = []
    if notice is not None:
        fits = True if seconds.high <= notice else False if seconds.low > notice else None
        notes.append(f"a checkpoint {_NOTICES[fits]} in a notice of {notice:g} s")
    job = f"checkpoint of {format_size(size)}"
    return _plan(
        source, job, seconds, [Part(str(stage), seconds, stage, size, seconds)], moves=moves.found, notes=notes
    )


def schedules(source: Source, size: float, threads: int, mean: float, restart: float) -> list[Schedule]:
    """Return how often to save for a mean time between revocations: for a quick, a likely and a slow checkpoint.

    A restart takes `restart` seconds, and the state is loaded from the disk.
    """
    save = source.at(Stage(SAVE, threads), size)
    load = source.at(Stage(LOAD_COLD, threads), size)
    pairs = (save.low, load.low), (save.middle, load.middle), (save.high, load.high)
    return [_schedule(Revocations(mean, saving, restart + loading)) for saving, loading in pairs]


def _schedule(model: Revocations) -> Schedule:
    try:
        intervals = {"young": model.young(), "daly": model.daly(), "best": model.best()}
        costs = {name: model.at(interval) for name, interval in intervals.items()}
        is_sane = all(0 <= each.slowdown <= _HOPELESS for each in costs.values())
    except (OverflowError, ZeroDivisionError):
        is_sane = False
    if not is_sane:
        raise OutOfReachError(
            f"planning how often to save failed: expected revocations that leave time to work, got one in "
            f"{model.mean:.3g} s, with {model.save:.3g} s for a checkpoint and {model.restart:.3g} s for a restart. "
            "Save fewer bytes, or take machines that stay"
        )
    return Schedule(model.save, model.restart, **intervals, costs=costs)


# Collectives.


def plan_collective(
    source: Source,
    sizes: Sequence[int],
    way: str,
    ranks: int,
    cap: float,
    *,
    compute: float = 0.0,
    overlap: float | None = None,
) -> Plan:
    """Predict all-reduce of gradients, given by their bytes in the order of the parameters, in buckets of `cap` MiB.

    `compute` is the seconds of a backward pass, which produces gradients in reverse order and meanwhile has buckets
    sent, as `DistributedDataParallel` does. An `overlap` of 1 hides what that can hide, and 0 nothing: ranks that share
    their processors with the collectives wait for each. None gives the range.
    """

    def took(count: int, limit: float) -> Estimate:
        changed = buckets(sizes, limit)
        each = _all(source, replace(stage, ranks=count), changed)
        serial, hidden = _sum(each) + Estimate.exact(compute), _beside(each, changed, compute)
        if overlap is None:
            return hidden.between(serial)
        return serial.times(1 - overlap) + hidden.times(overlap)

    stage = Stage(f"{ALL_REDUCE}, {way}", ranks=ranks)
    seconds, filled = took(ranks, cap), buckets(sizes, cap)
    moves = _Moves(seconds)
    for other in CAPS:
        if other != cap:
            moves.try_(f"buckets of {other} MiB", took, ranks, other)
    for fewer in source.ranks(stage.name):
        if fewer < ranks:
            moves.try_(f"{fewer} ranks", took, fewer, cap)
    parts = [Part(str(stage), _sum(_all(source, stage, filled)), stage, max(filled), source.at(stage, max(filled)))]
    if compute:
        parts.append(Part(COMPUTE, Estimate.exact(compute)))
    job = f"all-reduce of {format_size(sum(sizes))} by {ranks} ranks in {len(filled)} buckets of {cap:g} MiB"
    return _plan(source, job, seconds, parts, moves=moves.found, notes=_unknown(overlap, compute, "--overlap"))


def _unknown(overlap: float | None, compute: float, options: str) -> list[str]:
    text = f"how much goes on beside compute is not known: the range is from all to nothing. {options} tells"
    return [text] if overlap is None and compute else []


def buckets(sizes: Sequence[int], cap: float) -> list[int]:
    """Return the bytes of buckets. One size alone is divided evenly, as no sizes of gradients are known then."""
    if len(sizes) > 1:
        return toll.buckets(sizes, cap, itemsize=1)
    count = max(1, math.ceil(sizes[0] / (cap * MIB)))
    if count > _MOST:
        raise OutOfReachError(f"planning buckets failed: expected at most {_MOST:,}, got {count:,}. Give a larger cap")
    return [-(-sizes[0] // count)] * count


def _all(source: Source, stage: Stage, filled: Sequence[int]) -> list[Estimate]:
    known = {size: source.at(stage, size) for size in dict.fromkeys(filled)}
    return [known[size] for size in filled]


def _beside(each: Sequence[Estimate], filled: Sequence[int], compute: float) -> Estimate:
    """Return when all buckets have arrived: each is sent when it is full and the one before has arrived."""
    total, done, free = sum(filled), 0, Estimate.exact(0.0)
    for seconds, size in zip(each, filled, strict=True):
        done += size
        free = free.over(Estimate.exact(compute * done / total)) + seconds
    return free


# Loading.


def plan_load(source: Source, sizes: Sequence[int], threads: int, *, is_cold: bool = True, tensors: int = 1) -> Plan:
    """Predict loading files of so many bytes to the device, one after the other, from the disk or the page cache.

    Files of one tensor were measured; those under 16 KiB count as of 16. Each of `tensors` beyond these is a message
    more, like a small transfer.
    """
    small, more = Stage(TO_DEVICE, threads), tensors - len(sizes)
    messages = source.at(small, _SMALL).times(more) if more > 0 else Estimate.exact(0.0)

    def took(by: Stage, share: float) -> Estimate:
        return _sum(source.at(by, max(_SMALL, share * size)) for size in sizes) + messages

    cold, cached = Stage(LOAD_COLD, threads), Stage(LOAD, threads)
    stage = cold if is_cold else cached
    seconds = took(stage, 1)
    moves = _Moves(seconds)
    whole, most = _sum(source.at(stage, max(_SMALL, size)) for size in sizes), max(_SMALL, *sizes)
    parts, worst = [Part(str(stage), whole, stage, most, source.at(stage, most))], None
    if more > 0:
        parts.append(Part(f"{more} messages more", messages, small, _SMALL, source.at(small, _SMALL)))
    if is_cold and messages.middle < whole.middle:
        moves.try_("files in the page cache", took, cached, 1)
        for move in moves.found:
            worst = "the disk" if move.of < 0.5 else "opening and copying"
    moves.try_("half the bytes", took, stage, 0.5)
    job = f"load {format_size(sum(sizes))} in {len(sizes)} file{'s' if len(sizes) > 1 else ''}"
    return _plan(source, job, seconds, parts, moves=moves.found, bottleneck=worst)


def _sum(estimates: Iterable[Estimate]) -> Estimate:
    total = Estimate.exact(0.0)
    for estimate in estimates:
        total += estimate
    return total
