"""Workloads: requests and training steps of known models, fed by a plain copy, by the bounce path, and directly.

A request brings its inputs to the device and its result back, both sealed for their owner. A training step brings a
batch. Transfers are measured; compute is timed once for a case, or modelled by ``tolls.toml``. They follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from random import Random
from typing import Any, Literal

import numpy as np

from fastrack._bench.endpoints import CpuEndpoint, CudaEndpoint, Endpoint, open_driver
from fastrack._bench.measure import Times, timed_rounds
from fastrack._crypto.base import Bytes
from fastrack._keys.keys import Key
from fastrack._sealed.seal import seal, unseal
from fastrack._sealed.tensor import SealedTensor
from fastrack._transfer.channel import Channel
from fastrack.errors import FormatError
from fastrack_bench import toll

PLAIN, BOUNCE, DIRECT = WAYS = ("plain", "bounce", "direct")
MEASURED, MODELLED = "measured", "modelled"
TOKENS = 128  # of a sequence
AGAIN = ", again"  # the same way once more in each round, for the ratio A/A

_PIXELS, _CLASSES, _VOCABULARY = 3 * 224 * 224, 1000, 50_257
_TOTAL = 1 << 30  # bytes that all rounds of a small case move
_MOST = 300  # rounds
_SETTLE = 3  # rounds that are not counted

_RESULT = "result"

Mode = Literal["inference", "training"]


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its use and its batch."""

    model: str
    mode: Mode
    batch: int

    @property
    def inputs(self) -> dict[str, int]:
        """The bytes of each tensor that goes to the device. Labels of a language model are its tokens."""
        if self.model.startswith("GPT"):
            return dict.fromkeys(("input_ids", "attention_mask"), 8 * TOKENS * self.batch)
        labels = {"labels": 8 * self.batch} if self.mode == "training" else {}
        return {"pixel_values": 4 * _PIXELS * self.batch, **labels}

    @property
    def result(self) -> int:
        """The bytes that come back: scores of all classes, or of the next token; none of a training step."""
        classes = _VOCABULARY if self.model.startswith("GPT") else _CLASSES
        return 0 if self.mode == "training" else 4 * classes * self.batch


MODELS = ("ResNet-50", "ViT-B", "GPT-2")
_USES: tuple[tuple[Mode, int], ...] = (("inference", 1), ("inference", 8), ("inference", 64), ("training", 8))
CASES = tuple(Case(model, *use) for model in MODELS for use in _USES)


@dataclass(frozen=True, slots=True)
class Workload:
    """A case with its data fed in one way."""

    model: str
    mode: Mode
    batch: int
    way: str
    bytes_in: int
    bytes_out: int
    runs: int
    transfer: float  # seconds, median
    quartiles: tuple[float, float]  # of these seconds
    compute: float  # seconds
    of_compute: str  # "measured" or "modelled"
    step: float  # seconds: both
    again: float  # A/A: the step's time over the time of the same way measured again
    over_plain: float  # the step's time over that with a plain copy
    share: float  # of the step that is transfers
    removed: float | None  # the part of the bounce path's overhead that the direct way saves; None for other ways

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


Compute = Callable[[Case], Times]
"""Returns the seconds of a case's compute, in several runs."""


def measure_workloads(
    cases: Sequence[Case],
    device: str,
    bits: int,
    repeat: int,
    compute: Compute,
    of_compute: str,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Workload]:
    """Measure each case in every way, in turn. `repeat` is the least number of rounds."""
    rows = []
    for number, case in enumerate(cases, 1):
        title = f"{case.model}, {case.mode}, batch {case.batch}; {number} of {len(cases)}"
        progress(f"{title}: compute")
        seconds = compute(case)
        progress(f"{title}: transfers")
        with open_ways(case, device=device, bits=bits) as ways:
            runs = {name: way for each, way in ways.items() for name in (each, each + AGAIN)}
            moved = sum(case.inputs.values()) + case.result
            rounds = max(repeat, min(_MOST, _TOTAL // (len(runs) * moved)))
            for run in [run for run in ways.values() for _ in range(_SETTLE)]:
                run()
            times = timed_rounds(runs, rounds, order=Random(number))  # noqa: S311 - no secret
        rows += _rows(case, times, seconds, of_compute)
    return rows


def _rows(case: Case, times: dict[str, Times], compute: Times, of_compute: str) -> list[Workload]:
    transfers = {way: Times([*times[way].seconds, *times[way + AGAIN].seconds]) for way in WAYS}
    plain, bounce, direct = (transfers[way].median for way in WAYS)
    half = len(compute.seconds) // 2
    first, second = compute.seconds[:half] or compute.seconds, compute.seconds[half:]
    rows = []
    for way, moved in transfers.items():
        step = moved.median + compute.median
        again = [times[name].median + Times(part).median for name, part in ((way, first), (way + AGAIN, second))]
        rows.append(
            Workload(
                case.model,
                case.mode,
                case.batch,
                way,
                sum(case.inputs.values()),
                case.result,
                len(moved.seconds),
                moved.median,
                moved.quartiles,
                compute.median,
                of_compute,
                step,
                again[0] / again[1],
                step / (plain + compute.median),
                moved.median / step,
                1 - (direct - plain) / (bounce - plain) if way == DIRECT and bounce > plain else None,
            )
        )
    return rows


@contextmanager
def open_ways(case: Case, *, device: str, bits: int) -> Iterator[dict[str, Callable[[], Any]]]:
    """Prepare a case's tensors, of random bytes, and yield a function for each way, which moves all of them once.

    Each way is checked first: `RuntimeError` if other bytes arrive than were sent.
    """
    generator = np.random.default_rng(0)
    sizes = {**case.inputs, **({_RESULT: case.result} if case.result else {})}
    plain = {name: generator.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()}
    with ExitStack() as stack:
        key = Key.generate(bits)
        channel = stack.enter_context(Channel(device, keys=key))
        ends = _open_ends(plain, channel.device, bits, stack)
        result = ends.pop(_RESULT, None)
        if result is not None:
            result.put()  # as if it had been computed
        messages = {name: end.chain.seal(plain[name]) for name, end in ends.items()}
        moves = _Moves(channel, key, ends, result, {name: seal(plain[name], key) for name in ends}, messages)
        ways = {PLAIN: moves.copied, BOUNCE: moves.bounced, DIRECT: moves.direct}
        for way, run in ways.items():
            for end in ends.values():
                end.clear()
            came = moves.read(way, run())
            arrived = {name: end.read() for name, end in ends.items()} | ({} if result is None else {_RESULT: came})
            if any(not np.array_equal(arrived[name], array) for name, array in plain.items()):
                raise RuntimeError(f"{way!r} delivered other bytes than it was given; please report this")
        yield ways


def _open_ends(plain: dict[str, Bytes], device: str, bits: int, stack: ExitStack) -> dict[str, Endpoint]:
    if device == "cpu":
        return {name: CpuEndpoint(array, bits) for name, array in plain.items()}
    driver, ends = open_driver(device), dict[str, Endpoint]()
    for name, array in plain.items():
        ends[name] = end = CudaEndpoint(driver, array, bits)
        stack.callback(end.chain.close)
    return ends


@dataclass(frozen=True, slots=True)
class _Moves:
    """The tensors of a case, and each way to move them."""

    channel: Channel
    key: Key
    inputs: dict[str, Endpoint]
    result: Endpoint | None
    sealed: dict[str, SealedTensor]
    messages: dict[str, Bytes]  # for the bounce path

    def copied(self) -> Any:
        for end in self.inputs.values():
            end.put()
        return None if self.result is None else self.result.get()

    def bounced(self) -> Any:
        for name, end in self.inputs.items():
            end.chain.sealed_to_device(self.messages[name], end.view(writable=True))
        return None if self.result is None else self.result.chain.to_host(self.result.view(writable=False))

    def direct(self) -> Any:
        out = {name: end.array for name, end in self.inputs.items()}
        if len(out) == 1:  # alone, as a user passes it
            self.channel.to_device(*self.sealed.values(), out=next(iter(out.values())))
        else:
            self.channel.to_device(self.sealed, out=out)
        return None if self.result is None else self.channel.to_host(self.result.array, key=self.key)

    def read(self, way: str, came: Any) -> Any:
        """Return the bytes of a result that came back in a way, which its owner opens."""
        if self.result is None or way == PLAIN:
            return came
        return self.result.chain.open(came) if way == BOUNCE else unseal(came, self.key, framework="numpy")


# Compute.


def modelled_compute(name: str) -> Compute:
    """Return a `Compute` by the published figures of a GPU, by its name in ``tolls.toml``."""
    known = toll.load_data()["computes"]
    if name not in known:
        raise FormatError(f"compute: expected {' or '.join(known)}, got {name!r:.80}. Name one of them")
    return lambda case: Times([compute_seconds(name, case)])


def compute_seconds(name: str, case: Case) -> float:
    """Return the modelled seconds of a case: those of its operations, or of its kernels' launches if these are more."""
    each, model = toll.load_data()["computes"][name], toll.load_data()["workloads"][case.model]
    passes = 3 if case.mode == "training" else 1  # a backward pass has twice the multiplications of a forward pass
    operations = model[case.mode if case.mode in model else "operations"]
    speed = toll.parameter(each["peak"]) * toll.parameter(model["utilisation"])
    launches = model["kernels"] * toll.parameter(each["launch"])
    return float(passes * max(operations * case.batch / speed, launches))
