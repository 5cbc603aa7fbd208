"""Model of what confidential GPUs charge for each message and byte, on a virtual clock. Nothing of it is measured here.

``tolls.toml`` has the published figures, each with its source and date, and the models that are made of them. Every
time is ``a + b * n`` for a message of n bytes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastrack.errors import FormatError

MIB = 1 << 20
DEFAULT_CAP = 25  # MiB, of DistributedDataParallel
FIRST_CAP = 1  # MiB of the first bucket, unless a cap is given
CAPS = (25, 100, 250, 1000)
RANKS = (2, 3, 4, 8)
PLAIN, FITTED = "plain", "fitted"
_UNITS = {"GB/s": 1e9, "us": 1e-6, "TFLOP/s": 1e12, "1": 1.0}
_ITEM = 4  # bytes of a gradient in float32
_WITHIN = 1.1  # the factor between model and figure that counts as reproduced, where the data names no other
_BACKWARD = 2 / 3  # of the time of the passes: a backward pass has twice the multiplications of a forward pass
_ADAM = 28  # bytes of memory that a step of Adam reads and writes for each parameter in float32


@cache
def load_data() -> dict[str, Any]:
    """Return the published figures and the models."""
    return tomllib.loads(Path(__file__).with_name("tolls.toml").read_text(encoding="utf-8"))


class Line(NamedTuple):
    """Seconds of a message: a + b * n."""

    message: float  # seconds for each message
    byte: float  # seconds for each byte

    def __call__(self, nbytes: float) -> float:
        return self.message + self.byte * nbytes


def parameter(name: str) -> float:
    """Return a parameter in seconds, bytes per second, operations per second, or as it is."""
    each = load_data()["parameters"][name]
    return float(each["value"]) * _UNITS[each["unit"]]


def line(group: str, name: str) -> Line:
    """Return the cost of a transfer, or of a hop, by its name."""
    known = load_data()[group]
    if name not in known:
        raise FormatError(f"toll: expected one of {', '.join(known)}, got {name!r:.80}. Name one of them")
    each = known[name]
    return Line(sum(map(parameter, each["message"])), sum(1 / parameter(part) for part in each["bytes"]))


def kinds_of(group: str, name: str) -> set[str]:
    """Return the kinds of the parameters of a transfer or a hop, as ``tolls.toml`` names them."""
    data = load_data()
    each = data[group][name]
    return {data["parameters"][part]["kind"] for part in (*each["message"], *each["bytes"])}


# Transfers.


@dataclass(frozen=True, slots=True)
class TransferToll:
    """Modelled transfer of some bytes to a GPU."""

    path: str
    nbytes: int
    seconds: float
    plain: float  # seconds of the plain copy
    cost: float  # time over that of the plain copy

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "transfer", **asdict(self)}


def transfers(sizes: Sequence[int]) -> list[TransferToll]:
    """Return what each path takes for each size."""
    rows = []
    for name, each in load_data()["transfers"].items():
        if "over" in each:
            path, plain = line("transfers", name), line("transfers", each["over"])
            rows += [TransferToll(name, size, path(size), plain(size), path(size) / plain(size)) for size in sizes]
    return rows


# Training with DistributedDataParallel.


def gpt2_gradients(layers: int, width: int, vocabulary: int = 50_257, context: int = 1024) -> list[int]:
    """Return the elements of GPT-2's gradients, in the order of its parameters. The output layer is tied."""
    layer = [width, width, 3 * width * width, 3 * width, width * width, width]
    layer += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    return [vocabulary * width, context * width, *(layer * layers), width, width]


def buckets(gradients: Sequence[int], cap_mib: float = DEFAULT_CAP, itemsize: int = _ITEM) -> list[int]:
    """Return the bytes of the buckets of DistributedDataParallel: filled in reverse order, closed at the cap.

    The first has a cap of 1 MiB, unless another one than the default is asked for, as torch 2.13 does it.
    """
    result: list[int] = []
    filled, cap = 0, (FIRST_CAP if cap_mib == DEFAULT_CAP else cap_mib) * MIB
    for size in reversed(gradients):
        filled += size * itemsize
        if filled >= cap:
            result, filled, cap = [*result, filled], 0, cap_mib * MIB
    return [*result, filled] if filled else result


@dataclass(frozen=True, slots=True)
class Training:
    """Training of a model by its list of gradients, with the seconds of compute of one iteration on one GPU."""

    name: str
    gradients: Sequence[int]
    passes: float  # seconds of forward and backward pass
    optimizer: float  # seconds of the optimizer's step

    @classmethod
    def of(cls, name: str) -> Training:
        """Return a model of ``tolls.toml``: 6 operations a parameter and token, and the memory traffic of Adam."""
        each = load_data()["models"][name]
        gradients = gpt2_gradients(each["layers"], each["width"])
        operations = 6 * sum(gradients) * each["tokens"]
        passes = operations / (parameter("utilisation") * parameter("peak"))
        return cls(name, gradients, passes, _ADAM * sum(gradients) / parameter("hbm"))


@dataclass(frozen=True, slots=True)
class TrainingToll:
    """Modelled iteration of DistributedDataParallel whose ring pays a toll for each message and byte."""

    model: str
    hop: str
    ranks: int
    cap_mib: float
    buckets: int
    messages: int  # that one rank sends in an iteration
    scatter_reduce: float  # seconds of the first half of the hops
    all_gather: float  # seconds of the second half
    compute: float  # seconds of passes and optimizer
    seconds: float  # of the iteration
    plain: float  # seconds of the iteration with plain hops and buckets of 25 MiB
    slowdown: float  # time over that
    kinds: tuple[str, ...]  # of the parameters of the hop

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "training", **asdict(self)}


class Clock(NamedTuple):
    """Virtual times of an iteration: seconds of both halves of the rings, and when all was done."""

    scatter_reduce: float
    all_gather: float
    end: float


def run(training: Training, ranks: int, hop: Line, cap_mib: float) -> Clock:
    """Run one iteration on a virtual clock.

    A backward pass produces gradients in reverse order, in the time that their sizes share. A bucket is sent once its
    last gradient is there and the bucket before it has arrived: 2 (n - 1) hops of an n-th of it each. The optimizer
    waits for all.
    """
    start, total, done = training.passes * (1 - _BACKWARD), _ITEM * sum(training.gradients), 0
    free = phase = 0.0
    for size in buckets(training.gradients, cap_mib):
        done += size
        ready = start + training.passes * _BACKWARD * done / total
        half = (ranks - 1) * hop(size / ranks)
        free = max(free, ready) + 2 * half
        phase += half
    return Clock(phase, phase, max(free, training.passes) + training.optimizer)


def trainings(
    names: Sequence[str], hops: Sequence[str], ranks: Sequence[int], caps: Sequence[float]
) -> list[TrainingToll]:
    """Return an iteration of each model for each hop, number of ranks and cap in MiB."""
    rows = []
    for name in names:
        training = Training.of(name)
        for hop in hops:
            for count in ranks:
                plain = run(training, count, line("hops", PLAIN), DEFAULT_CAP).end
                for cap in caps:
                    found, number = run(training, count, line("hops", hop), cap), len(buckets(training.gradients, cap))
                    rows.append(
                        TrainingToll(
                            name,
                            hop,
                            count,
                            cap,
                            number,
                            2 * (count - 1) * number,
                            *found[:2],
                            training.passes + training.optimizer,
                            found.end,
                            plain,
                            found.end / plain,
                            tuple(sorted(kinds_of("hops", hop))),
                        )
                    )
    return rows


def cap_for(training: Training, hop: Line, ranks: int, slowdown: float) -> int | None:
    """Return about the smallest cap, in MiB, with which an iteration is at most so much slower; None if none is.

    Larger ones may be slower again, as buckets end where gradients do.
    """
    plain = run(training, ranks, line("hops", PLAIN), DEFAULT_CAP).end
    whole = -(-_ITEM * sum(training.gradients) // MIB)
    caps = [cap for cap in range(1, whole + 1) if cap % max(1, cap // 64) == 0]  # steps of about a 64th
    return next((cap for cap in [*caps, whole] if run(training, ranks, hop, cap).end / plain <= slowdown), None)


# What papers say.


@dataclass(frozen=True, slots=True)
class Figure:
    """Published figure beside what a model gives for it."""

    name: str
    published: float
    by: str  # the path or the hop
    modelled: float
    off: float  # the factor between both, 1 or more
    within: float  # the factor that counts as reproduced
    verdict: str  # "reproduced", "missed", "fitted", or "range" for a model that the figure does not name
    source: str
    date: str

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"row": "figure", **asdict(self)}


def figures() -> list[Figure]:
    """Return each published figure by each model."""
    data = load_data()
    rows = []
    for each in data["figures"]:
        if "bytes" in each:
            given = {row.path: row.cost for row in transfers([each["bytes"]])}
        else:
            hops = [name for name in data["hops"] if name != PLAIN]
            given = {row.hop: row.slowdown for row in trainings([each["model"]], hops, [4], [each["cap_mib"]])}
        rows += [_figure(each, name, value) for name, value in given.items()]
    return rows


def _figure(each: Mapping[str, Any], by: str, modelled: float) -> Figure:
    published = float(each["value"])
    off = max(modelled / published, published / modelled)
    group, within = ("transfers", each["within"]) if "bytes" in each else ("hops", _WITHIN)
    if FITTED in kinds_of(group, by):
        verdict = FITTED
    elif group == "hops":
        verdict = "missed" if off > within else "reproduced"
    else:
        verdict = "range" if by != each["by"] else "reproduced" if off <= within else "missed"
    return Figure(each["name"], published, by, modelled, off, within, verdict, each["source"], each["date"].isoformat())
