"""Measure every path to the `cpu` device, and check the targets: ``python -m bench.targets [--json FILE]``.

Takes some minutes, and about 4 GiB of memory. The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import bench_distributed_checkpoint, bench_epochs, bench_nests, first_use
from bench.machine import read_machine
from bench.metric import Metric
from fastrack import Channel, Key, save_file, seal, verify_file
from fastrack._bench import paths
from fastrack._bench.measure import BOUNCE, COPY, medians, timed_rounds
from fastrack._bench.paths import BouncePath, ParallelBouncePath, touched
from fastrack._cli.console import reporter

MIB = 1 << 20
SIZES = (16, 64, 256)  # MiB, with targets for the paths
FRESH_COPY, PLAIN_BOUNCE = f"{COPY}, fresh", "bounce, plain tensor"
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


def measure_paths(sizes_mib=SIZES, *, bits=256, repeat=9, say=lambda _: None):
    """Return a `Row` for each path at each size, from the plain copy to the direct path."""
    rows = []
    for size in sizes_mib:
        nbytes = int(size * MIB)
        say(f"{size:g} MiB")
        with _open_cases(nbytes, bits) as cases:
            seconds = medians(cases, repeat)
        for path, spent in seconds.items():
            over_bounce = of_copy = None
            if not path.startswith(COPY):
                over_bounce = seconds[PLAIN_BOUNCE if path.endswith("plain tensor") else BOUNCE] / spent
                of_copy = seconds[FRESH_COPY if path.endswith("fresh") else COPY] / spent
            rows.append(Row(nbytes, path, spent, nbytes / spent / 1e9, over_bounce, of_copy))
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
    with ExitStack() as stack:
        channel = stack.enter_context(Channel("cpu", keys=key))
        single = stack.enter_context(Channel("cpu", keys=key, threads=1))
        yield {
            COPY: lambda: paths.copy(out, plain),
            FRESH_COPY: plain.copy,
            BOUNCE: lambda: chain.sealed_to_device(whole, out),
            "parallel bounce": lambda: parallel.sealed_to_device(chunked, out),
            "pyca Cobblestone": _reference(sealed, key, bits),
            "direct, one thread": lambda: single.to_device(sealed, out=out),
            "direct": lambda: channel.to_device(sealed, out=out),
            "direct, fresh": lambda: channel.to_device(sealed, framework="numpy"),
            PLAIN_BOUNCE: lambda: chain.plain_to_device(plain, out),
            "direct, plain tensor": lambda: channel.to_device(plain, out=out),
        }
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

RATIOS = (  # the least speed relative to another path, at every size
    ("direct", "plain copy", 1.0),
    ("direct, fresh", "plain copy, fresh", 1.2),
    ("direct", "pyca Cobblestone", 3),
    ("direct, plain tensor", "plain copy", 0.8),
)
CALLS = {4 << 10: 18, 64 << 10: 24, MIB: 60}  # microseconds of a call, by bytes of the tensor
EPOCHS = {"224x224x3, batch 64": 1.05, "windows of 1024, batch 32": 1.2}
NOT_MEASURED, VLLM, KV = "not yet measured", "by bench_vllm.py", "by bench_kv.py"
# Targets that take a GPU, and targets that take other packages.
PENDING = (
    (
        Metric("model folder into a server, of the server's start with a plain one", None, "x", 1.1, True),
        VLLM,
    ),
    (Metric("KV block of 8 to 80 MiB, store, over LMCache aesgcm", None, "x", 12), KV),
    (Metric("KV block of 8 to 80 MiB, load, over LMCache aesgcm", None, "x", 25), KV),
    (Metric("cuda, open kernel, AES-256, 1 GiB; bound 483 to 528 GB/s", None, "GB/s", 330), NOT_MEASURED),
    (Metric("cuda, to_device(sealed), 64 MiB, over a page-locked copy", None, "x", 0.98), NOT_MEASURED),
    (Metric("cuda, to_device(sealed), 4 KiB", None, "us", 100, True), NOT_MEASURED),
    (Metric("cuda, wrapped loader, of batches on the device", None, "x", 1.02, True), NOT_MEASURED),
)


def check_targets(rows, *, repeat=9, file_mib=1024, scale=1.0, say=lambda _: None):
    """Return a `Metric` for every target: for paths from `rows`, at each size, and for others measured here."""
    seconds = {(row.size, row.path): row.seconds for row in rows}
    sizes = dict.fromkeys(row.size for row in rows)
    metrics = [
        Metric(f"{path}, {size / MIB:g} MiB, over {other}", seconds[size, other] / seconds[size, path], "x", target)
        for path, other, target in RATIOS
        for size in sizes
    ]
    say("small tensors")
    for size, taken in _small_calls().items():
        metrics.append(Metric(f"sealed {size >> 10} KiB tensor, a call, warm", taken, "us", CALLS[size], at_most=True))
    name = "1,024 sealed tensors of 8 KiB, over deriving their keys by OpenSSL"
    metrics.append(Metric(name, _nest_over_keys(repeat), "x", 1.5, at_most=True))
    say("first use")
    (parts,) = first_use.measure([first_use.ROOT], repeat, MIB).values()
    first = median(cpu for _, cpu in parts["total"])
    metrics.append(Metric("first use, start to result, CPU time", first, "s", 0.25, at_most=True))
    say("a busy interpreter")
    name = "direct beside a pure-Python thread, of its quiet speed"
    metrics.append(Metric(name, _busy_share(max(sizes), repeat), "x", 0.5))
    say(f"verifying {file_mib} MiB")
    name = f"verify of a {file_mib} MiB file, of the speed of cat"
    metrics.append(Metric(name, _verify_share(file_mib, repeat), "x", 0.8))
    for case, target in EPOCHS.items():
        say(f"epochs: {case}")
        spent = bench_epochs.measure(case, scale=scale, repeat=min(repeat, 5), batches=200)
        name = f"sealed epoch, {case}, of plain in memory"
        metrics.append(Metric(name, spent["sealed"] / spent["plain, in memory"], "x", target, at_most=True))
    say("distributed checkpoints")
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        size = int(bench_distributed_checkpoint.SIZE * scale)
        spent = bench_distributed_checkpoint.measure(Path(folder), Key.generate(), size=size, rounds=repeat)
    for step, target in (("save", 1.8), ("load", 6.5)):
        speed = spent[f"{step}, plain"] / spent[f"{step}, sealed"]
        metrics.append(Metric(f"distributed checkpoint, {step}, over plain", speed, "x", target))
    return metrics


def _small_calls():
    key = Key.generate()
    with Channel("cpu", keys=key) as channel:
        tensors = {size: (seal(np.zeros(size, np.uint8), key), np.ones(size, np.uint8)) for size in CALLS}
        runs = {size: partial(channel.to_device, sealed, out=out) for size, (sealed, out) in tensors.items()}
        # One size after the other: the target is for a call in a streak of such calls.
        return {size: 1e6 * medians({size: run}, 1000)[size] for size, run in runs.items()}


def _nest_over_keys(repeat):
    key, (count, size) = Key.generate(), bench_nests.NESTS["1024-of-8KiB"]
    sealed = [seal(np.zeros(size, np.uint8), key, f"layers.{number}.weight") for number in range(count)]
    with Channel("cpu", keys=key) as channel:
        runs = {"nest": partial(channel.to_device, sealed), "keys": partial(bench_nests.derive, count)}
        spent = medians(runs, 5 * repeat, settle=1)
    return spent["nest"] / spent["keys"]


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
        spent = medians({"verify": lambda: verify_file(path, key), "cat": lambda: _read_all(path)}, repeat)
    return spent["cat"] / spent["verify"]


def _read_all(path):
    """Read a file like `cat file > /dev/null`, without the start of a process."""
    buffer = bytearray(_READ_SIZE)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


# The report.


def main(argv):
    """Print both tables. Return 0, or 1 if a target was missed."""
    parser = argparse.ArgumentParser("python -m bench.targets", description=__doc__.partition(":")[0])
    parser.add_argument(
        "--size", type=float, action="append", metavar="MIB", help="of the tensors; may be repeated (16, 64, 256)"
    )
    parser.add_argument("--bits", type=int, choices=(128, 256), default=256, help="of all keys (default: 256)")
    parser.add_argument("--repeat", type=int, default=9, metavar="N", help="rounds of measurement (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(argv)
    with reporter("measuring") as say:
        sizes = options.size or SIZES
        rows = measure_paths(sizes, bits=options.bits, repeat=options.repeat, say=say)
        largest = max(sizes)
        scale = min(1.0, largest / max(SIZES))
        metrics = check_targets(rows, repeat=options.repeat, file_mib=max(1, int(4 * largest)), scale=scale, say=say)
    if options.json:
        document = {"machine": read_machine(), "bits": options.bits, "repeat": options.repeat}
        document |= {"rows": [asdict(row) for row in rows], "promised": [metric.as_dict() for metric in metrics]}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console = Console(highlight=False)
    console.print(path_table(rows))
    console.print(target_table(metrics))
    return int(not all(metric.is_met for metric in metrics))


def path_table(rows):
    table = Table("size", "path", "ms", "GB/s", "x bounce", "of copy")
    for row in rows:
        ratios = ["", ""] if row.of_copy is None else [f"{row.over_bounce:.2f}", f"{100 * row.of_copy:.0f} %"]
        times = [f"{1000 * row.seconds:.2f}", f"{row.gbps:.2f}"]
        table.add_row(f"{row.size / MIB:g} MiB", row.path, *times, *ratios)
    return table


def target_table(metrics):
    """Return a table of the targets. Targets without a figure have the reason."""
    table = Table("what, and what it is against", "measured", "to reach", "")
    verdicts = [(metric, "reached" if metric.is_met else "MISSED") for metric in metrics]
    for metric, verdict in (*verdicts, *PENDING):
        value = "" if metric.value is None else f"{metric.value:.2f} {metric.unit}"
        sign = "<=" if metric.at_most else ">="
        table.add_row(metric.name, value, f"{sign} {metric.target:g} {metric.unit}", verdict)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
