"""Figures for the paths to a device, side by side: interleaved runs, medians, one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from fastrack import aead, arrays
from fastrack.arrays import Bytes
from fastrack.bounce import BouncePath, ParallelBouncePath
from fastrack.channel import Channel
from fastrack.keys import Key
from fastrack.sealed import seal

__all__ = ["BOUNCE", "COPY", "Row", "interleave", "path_table"]

COPY = "plain copy"
BOUNCE = "bounce"

Progress = Callable[[str], None]


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


def interleave(runs: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Run everything once to warm up, then `repeat` rounds of each in turn; seconds of every run, by name."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeat):
        for name, run in runs.items():
            start = time.perf_counter()
            result = run()
            times[name].append(time.perf_counter() - start)
            del result  # giving memory back is the next round's business, not this one's
    return times


@contextmanager
def _cases(nbytes: int, bits: int) -> Iterator[list[_Case]]:
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    out = arrays.empty_bytes(nbytes)
    out.fill(0)
    key = Key.generate(bits)
    sealed = seal(plain, key)
    bounce = BouncePath(nbytes, bits)
    whole = bounce.seal(plain)
    with ExitStack() as stack:
        channel = stack.enter_context(Channel("cpu", keys=key))
        single = stack.enter_context(Channel("cpu", keys=key, threads=1))
        parallel = stack.enter_context(ParallelBouncePath(nbytes, bits))
        chunked = parallel.seal(plain)
        pool = stack.enter_context(ThreadPoolExecutor(aead.default_threads()))
        cobblestone = _reference(sealed, key, bits)
        cases = [
            _Case(COPY, lambda: _copy(pool, out, plain), bounce=None, copy=None),
            _Case("plain copy, fresh", plain.copy, bounce=None, copy=None),
            _Case(BOUNCE, lambda: bounce.sealed_to_device(whole, out)),
            _Case("parallel bounce", lambda: parallel.sealed_to_device(chunked, out)),
            _Case("pyca Cobblestone", cobblestone),
            _Case("direct, one thread", lambda: single.to_device(sealed, out=out)),
            _Case("direct", lambda: channel.to_device(sealed, out=out)),
            _Case("direct, fresh", lambda: channel.to_device(sealed, framework="numpy"), copy="plain copy, fresh"),
            _Case("bounce, plain tensor", lambda: bounce.plain_to_device(plain, out), bounce="bounce, plain tensor"),
            _Case("direct, plain tensor", lambda: channel.to_device(plain, out=out), bounce="bounce, plain tensor"),
        ]
        yield cases
        if not np.array_equal(out, plain):
            raise RuntimeError("a path delivered something else than it was given")


def _reference(sealed: Any, key: Key, bits: int) -> Callable[[], None]:
    """The same message opened by pyca/cryptography's own Cobblestone, into memory that was touched before."""
    from cryptography import cobblestone

    decryptor: Any = {128: cobblestone.Cobblestone128Decryptor, 256: cobblestone.Cobblestone256Decryptor}[bits]
    secret, context = bytes(key.material()), sealed.claim.context()
    buffer = np.zeros(sealed.message.nbytes + (1 << 16), np.uint8)  # it wants room to spare

    def run() -> None:
        opening = decryptor(secret, context)
        opening.update_into(sealed.message, buffer.data)
        opening.finalize()

    return run


def _copy(pool: ThreadPoolExecutor, target: Bytes, source: Bytes) -> None:
    step = -(-source.size // aead.default_threads())
    starts = range(0, source.size, step)
    copies = [pool.submit(np.copyto, target[at : at + step], source[at : at + step]) for at in starts]
    for copy in copies:
        copy.result()


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
