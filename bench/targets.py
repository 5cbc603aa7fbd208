"""Measure every path to the `cpu` device, and check the targets: ``python -m bench.targets [--json FILE]``.

Takes a minute or two, and about 2 GiB of memory. The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import read_machine
from bench.metric import Metric
from fastrack import Channel, Key, save_file, seal, verify_file
from fastrack._bench import paths
from fastrack._bench.measure import BOUNCE, COPY, interleave, timed_rounds
from fastrack._bench.paths import BouncePath, ParallelBouncePath, touched

MIB = 1 << 20
SIZE = 256  # MiB, for which the targets of the paths are set
_READ_SIZE = 128 << 10  # bytes that `cat` reads at a time


# The paths.


@dataclass(frozen=True, slots=True)
class Row:
    """One path at one size."""

    size: int  # bytes of plaintext
    path: str
    seconds: float  # median of the runs
    gbps: float  # 1e9 bytes of plaintext a second
    over_bounce: float | None  # speed relative to the bounce path for the same kind of tensor; None for plain copies
    of_copy: float | None  # speed relative to the plain copy into memory of the same kind, prepared or fresh


@dataclass(frozen=True, slots=True)
class _Case:
    path: str
    run: Callable[[], Any]
    bounce: str | None = BOUNCE
    copy: str | None = COPY


def measure_paths(sizes_mib=(SIZE,), *, bits=256, repeat=9, say=lambda _: None):
    """Return a `Row` for each path at each size, from the plain copy to the direct path."""
    rows = []
    for size in sizes_mib:
        nbytes = int(size * MIB)
        say(f"{size:g} MiB")
        with _open_cases(nbytes, bits) as cases:
            times = interleave({case.path: case.run for case in cases}, repeat)
        seconds = {path: median(runs) for path, runs in times.items()}
        for case in cases:
            own = seconds[case.path]
            over_bounce, of_copy = (seconds[other] / own if other else None for other in (case.bounce, case.copy))
            rows.append(Row(nbytes, case.path, own, nbytes / own / 1e9, over_bounce, of_copy))
    return rows


@contextmanager
def _open_cases(nbytes, bits):
    plain = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    out = touched(nbytes)
    key = Key.generate(bits)
    sealed = seal(plain, key)
    chain = BouncePath(nbytes, bits)
    whole = chain.seal(plain)
    parallel = ParallelBouncePath(nbytes, bits)
    chunked = parallel.seal(plain)
    plain_bounce = "bounce, plain tensor"
    with ExitStack() as stack:
        channel = stack.enter_context(Channel("cpu", keys=key))
        single = stack.enter_context(Channel("cpu", keys=key, threads=1))
        yield [
            _Case(COPY, lambda: paths.copy(out, plain), bounce=None, copy=None),
            _Case("plain copy, fresh", plain.copy, bounce=None, copy=None),
            _Case(BOUNCE, lambda: chain.sealed_to_device(whole, out)),
            _Case("parallel bounce", lambda: parallel.sealed_to_device(chunked, out)),
            _Case("pyca Cobblestone", _reference(sealed, key, bits)),
            _Case("direct, one thread", lambda: single.to_device(sealed, out=out)),
            _Case("direct", lambda: channel.to_device(sealed, out=out)),
            _Case("direct, fresh", lambda: channel.to_device(sealed, framework="numpy"), copy="plain copy, fresh"),
            _Case(plain_bounce, lambda: chain.plain_to_device(plain, out), bounce=plain_bounce),
            _Case("direct, plain tensor", lambda: channel.to_device(plain, out=out), bounce=plain_bounce),
        ]
        if not np.array_equal(out, plain):
            raise RuntimeError("a path delivered something else than it was given")


def _reference(sealed, key, bits):
    """Open the same message with pyca/cryptography's own Cobblestone, into memory that was touched before."""
    from cryptography import cobblestone

    decryptor = {128: cobblestone.Cobblestone128Decryptor, 256: cobblestone.Cobblestone256Decryptor}[bits]
    secret, context = bytes(key.material()), sealed.context.encode()
    buffer = np.zeros(sealed.message.nbytes + (1 << 16), np.uint8)  # the decryptor requires spare room

    def run():
        opening = decryptor(secret, context)
        opening.update_into(sealed.message, buffer.data)
        opening.finalize()

    return run


# The targets.

RATIOS = [  # at least so many times as fast as another path
    ("direct", "bounce", 5),
    ("direct", "parallel bounce", 1.8),
    ("direct", "plain copy", 0.8),
    ("direct, fresh", "plain copy, fresh", 0.9),
    ("direct", "pyca Cobblestone", 2.5),
    ("direct, one thread", "pyca Cobblestone", 1.5),
    ("direct, plain tensor", "bounce, plain tensor", 3),
    ("direct, plain tensor", "plain copy", 0.75),
]


def check_targets(rows, *, repeat=9, file_mib=1024, say=lambda _: None):
    """Return a `Metric` for every target: those of paths from `rows`, at the largest size, and others measured here."""
    size = max(row.size for row in rows)
    seconds = {row.path: row.seconds for row in rows if row.size == size}
    metrics = [
        Metric(f"{path}, {size // MIB} MiB, over {other}", seconds[other] / seconds[path], "x", target)
        for path, other, target in RATIOS
    ]
    say("small tensors")
    metrics.append(Metric("sealed 4 KiB tensor, a call, warm", _small_call(), "us", 150, at_most=True))
    say("a busy interpreter")
    name = "direct beside a pure-Python thread, of its quiet speed"
    metrics.append(Metric(name, _busy_share(size, repeat), "x", 0.5))
    say(f"verifying {file_mib} MiB")
    name = f"verify of a {file_mib} MiB file, of the speed of cat"
    metrics.append(Metric(name, _verify_share(file_mib, repeat), "x", 0.8))
    say("imports")
    name = "import fastrack, beyond import numpy"
    metrics.append(Metric(name, _import_cost(repeat), "ms", 50, at_most=True))
    return metrics


def _small_call():
    key = Key.generate()
    sealed = seal(np.zeros(4096, np.uint8), key)
    with Channel("cpu", keys=key) as channel:
        times = interleave({"call": lambda: channel.to_device(sealed, framework="numpy")}, 2000)
    return median(times["call"]) * 1e6


def _busy_share(size, repeat):
    key, out = Key.generate(), np.ones(size, np.uint8)
    sealed = seal(out, key)
    quiet, busy = [], []
    with Channel("cpu", keys=key) as channel:
        runs = {"move": lambda: channel.to_device(sealed, out=out)}
        timed_rounds(runs, 1)
        for _ in range(repeat):
            quiet += timed_rounds(runs, 1)["move"].seconds
            with _busy_thread():
                busy += timed_rounds(runs, 1)["move"].seconds
    return median(quiet) / median(busy)


@contextmanager
def _busy_thread():
    stop = False

    def spin():
        while not stop:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


def _verify_share(mib, repeat):
    key = Key.generate()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "verify.safetensors"
        save_file({"data": np.ones(mib * MIB, np.uint8)}, path, key)
        times = interleave({"verify": lambda: verify_file(path, key), "cat": lambda: _read_all(path)}, repeat)
    return median(times["cat"]) / median(times["verify"])


def _read_all(path):
    """Read a file as `cat file > /dev/null` does, without the start of a process."""
    buffer = bytearray(_READ_SIZE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _import_cost(repeat):
    def fresh_import(modules):
        return lambda: subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)

    times = interleave({modules: fresh_import(modules) for modules in ("numpy", "numpy, fastrack")}, repeat)
    return (median(times["numpy, fastrack"]) - median(times["numpy"])) * 1e3


# The report.


def main(argv):
    """Print both tables. Return 0, or 1 if a target was missed."""
    options = _parse(argv)
    with _progress() as say:
        rows = measure_paths([options.size], bits=options.bits, repeat=options.repeat, say=say)
        metrics = check_targets(rows, repeat=options.repeat, file_mib=max(1, int(4 * options.size)), say=say)
    if options.json:
        document = {
            "machine": read_machine(),
            "bits": options.bits,
            "repeat": options.repeat,
            "rows": [asdict(row) for row in rows],
            "promised": [metric.as_dict() for metric in metrics],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    console.print(path_table(rows))
    console.print(target_table(metrics))
    return int(not all(metric.is_met for metric in metrics))


def path_table(rows):
    table = Table("path", "ms", "GB/s", "x bounce", "of copy")
    for row in rows:
        table.add_row(
            row.path,
            f"{1000 * row.seconds:.2f}",
            f"{row.gbps:.2f}",
            "" if row.over_bounce is None else f"{row.over_bounce:.2f}",
            "" if row.of_copy is None else f"{100 * row.of_copy:.0f} %",
        )
    return table


def target_table(metrics):
    table = Table("metric", "measured", "target", "")
    for metric in metrics:
        sign, verdict = "<=" if metric.at_most else ">=", "" if metric.is_met else "MISSED"
        value, target = f"{metric.value:.2f} {metric.unit}", f"{sign} {metric.target:g} {metric.unit}"
        table.add_row(metric.name, value, target, verdict)
    return table


@contextmanager
def _progress():
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with Console(stderr=True).status("measuring") as status:
        yield lambda text: status.update(f"measuring {text}")


def _parse(argv):
    parser = argparse.ArgumentParser("python -m bench.targets", description=__doc__.partition(":")[0])
    parser.add_argument("--size", type=float, default=SIZE, metavar="MIB", help="of the tensors (default: 256)")
    parser.add_argument("--bits", type=int, choices=(128, 256), default=256, help="of all keys (default: 256)")
    parser.add_argument("--repeat", type=int, default=9, metavar="N", help="rounds of measurement (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
