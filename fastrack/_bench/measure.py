"""Figures for the paths to a device, side by side: interleaved runs, medians, one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

import numpy as np

from fastrack._bench import paths as bounce
from fastrack._bench.paths import BouncePath, ParallelBouncePath, touched
from fastrack._crypto.keys import Key
from fastrack._sealed.tensor import seal
from fastrack._transfer.channel import Channel

COPY = "plain copy"
BOUNCE = "bounce"
ENOUGH = 100  # runs without which the slowest in a hundred cannot be told

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Times:
    """What the runs of one thing took.

    seconds : of every run, by the clock
    cpu : seconds of all of this process's threads, in all runs together
    """

    seconds: Sequence[float]
    cpu: float

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    @property
    def p99(self) -> float | None:
        """What 99 of 100 runs stay below; None where there were fewer runs than that."""
        return quantiles(self.seconds, n=100, method="inclusive")[-1] if len(self.seconds) >= ENOUGH else None


@dataclass(frozen=True, slots=True)
class Row:
    """One path at one size.

    size : bytes of plaintext
    path : what was measured
    seconds : median of the runs
    gbps : 1e9 bytes of plaintext a second
    over_bounce : times as fast as the bounce path for the same kind of tensor; None for the plain copies
    of_copy : share of the speed of the plain copy into memory of the same kind, prepared or fresh
    """

    size: int
    path: str
    seconds: float
    gbps: float
    over_bounce: float | None
    of_copy: float | None

    def as_dict(self) -> dict[str, Any]:
        """The row for a program to read."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Case:
    path: str
    run: Callable[[], Any]
    bounce: str | None = BOUNCE
    copy: str | None = COPY


def path_table(
    sizes_mib: Sequence[float] = (16, 64, 256),
    *,
    bits: int = 256,
    repeat: int = 9,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure every path to the `cpu` device at each size.

    Parameters
    ----------
    sizes_mib : sequence of float
        Sizes of the tensors, in MiB (1048576 bytes).
    bits : {256, 128}
        The size of all keys.
    repeat : int
        Rounds. Each runs every path once, in turn, so that a slow moment of the machine falls on all of them.
    progress : callable, optional
        Called with what is about to be measured.

    Returns
    -------
    list of Row
        Sizes in the order given, and paths from the plain copy to the direct path.
    """
    rows = []
    for size in sizes_mib:
        nbytes = int(size * (1 << 20))
        if progress is not None:
            progress(f"{size:g} MiB")
        with _cases(nbytes, bits) as cases:
            times = interleave({case.path: case.run for case in cases}, repeat)
        seconds = {path: median(runs) for path, runs in times.items()}
        rows += [_row(nbytes, case, seconds) for case in cases]
    return rows


def interleave(runs: Mapping[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Run everything once to warm up, then `repeat` rounds of each in turn; seconds of every run, by name."""
    for run in runs.values():
        run()
    return {name: list(times.seconds) for name, times in timed_rounds(runs, repeat).items()}


def timed_rounds(runs: Mapping[str, Callable[[], Any]], repeat: int, *, settle: int = 0) -> dict[str, Times]:
    """`repeat` rounds, each of which runs each in turn: so a slow moment of the machine falls on all of them.

    `settle` runs each so many times more, untimed, right before it is timed: then caches hold what it leaves there
    itself, and not what its neighbour does.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    cpu = dict.fromkeys(runs, 0.0)
    for _ in range(repeat):
        for name, run in runs.items():
            for _ in range(settle):
                run()
            before = time.process_time()
            start = time.perf_counter()
            result = run()
            seconds[name].append(time.perf_counter() - start)
            cpu[name] += time.process_time() - before
            del result  # giving memory back is the next round's business, not this one's
    return {name: Times(seconds[name], cpu[name]) for name in runs}


@contextmanager
def _cases(nbytes: int, bits: int) -> Iterator[list[_Case]]:
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    out = touched(nbytes)
    key = Key.generate(bits)
    sealed = seal(plain, key)
    chain = BouncePath(nbytes, bits)
    whole = chain.seal(plain)
    parallel = ParallelBouncePath(nbytes, bits)
    chunked = parallel.seal(plain)
    with ExitStack() as stack:
        channel = stack.enter_context(Channel("cpu", keys=key))
        single = stack.enter_context(Channel("cpu", keys=key, threads=1))
        cobblestone = _reference(sealed, key, bits)
        cases = [
            _Case(COPY, lambda: bounce.copy(out, plain), bounce=None, copy=None),
            _Case("plain copy, fresh", plain.copy, bounce=None, copy=None),
            _Case(BOUNCE, lambda: chain.sealed_to_device(whole, out)),
            _Case("parallel bounce", lambda: parallel.sealed_to_device(chunked, out)),
            _Case("pyca Cobblestone", cobblestone),
            _Case("direct, one thread", lambda: single.to_device(sealed, out=out)),
            _Case("direct", lambda: channel.to_device(sealed, out=out)),
            _Case("direct, fresh", lambda: channel.to_device(sealed, framework="numpy"), copy="plain copy, fresh"),
            _Case("bounce, plain tensor", lambda: chain.plain_to_device(plain, out), bounce="bounce, plain tensor"),
            _Case("direct, plain tensor", lambda: channel.to_device(plain, out=out), bounce="bounce, plain tensor"),
        ]
        yield cases
        if not np.array_equal(out, plain):
            raise RuntimeError("a path delivered something else than it was given")


def _reference(sealed: Any, key: Key, bits: int) -> Callable[[], None]:
    """The same message opened by pyca/cryptography's own Cobblestone, into memory that was touched before."""
    from cryptography import cobblestone

    decryptor: Any = {128: cobblestone.Cobblestone128Decryptor, 256: cobblestone.Cobblestone256Decryptor}[bits]
    secret, context = bytes(key.material()), sealed.context.encode()
    buffer = np.zeros(sealed.message.nbytes + (1 << 16), np.uint8)  # it wants room to spare

    def run() -> None:
        opening = decryptor(secret, context)
        opening.update_into(sealed.message, buffer.data)
        opening.finalize()

    return run


def _row(nbytes: int, case: _Case, seconds: dict[str, float]) -> Row:
    mine = seconds[case.path]
    return Row(
        nbytes,
        case.path,
        mine,
        nbytes / mine / 1e9,
        seconds[case.bounce] / mine if case.bounce else None,
        seconds[case.copy] / mine if case.copy else None,
    )
