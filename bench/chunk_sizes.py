"""Compare sizes of chunks on `cpu`: ``python -m bench.chunk_sizes [--rounds N] [--json FILE]``.

The format has 16 KiB. Each size is a copy of the package with its own number in the format, whose machine code is made
anew, in a process of its own. They take turns: all others wait while one opens a message.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import quantiles

from bench.machine import ROOT, read_machine
from fastrack.format import TAG_SIZE

SIZES = tuple(kib << 10 for kib in (4, 8, 16, 32, 64))
MIB = 1 << 20
# Bytes of a message and threads, of which None are all: out of the caches, and in those of one core.
CASES = ((64 * MIB, None), (64 * MIB, 1), (MIB, 1))
RESULT = ROOT / "bench/results/2026-11-24-chunks-cpu-xeon-avx512-2cores.json"
H100_BLOCKS = 2 * 132  # of threads, of which each opens a chunk
FOLDER = ROOT / ".benchmarks/chunk-sizes"
PRESENT = 16384
LINE = f"CHUNK_SIZE: Final = {PRESENT}"


class Copy:
    """Runs a copy of the package with chunks of another size, in a process of its own."""

    def __init__(self, size):
        root = FOLDER / str(size)
        # Machine code that an earlier run has left there is kept if it is of these sources.
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        for name in ("fastrack", "kernels"):
            shutil.copytree(ROOT / name, root / name, ignore=ignored, dirs_exist_ok=True)
        source = root / "fastrack/format.py"
        source.write_text(source.read_text().replace(LINE, f"CHUNK_SIZE: Final = {size}"))
        own = {
            "cwd": root,
            "env": {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [root, root / "kernels", ROOT]))},
        }
        subprocess.run([sys.executable, "-m", "fastrack_native"], check=True, stdout=sys.stderr, **own)
        command = [sys.executable, "-m", "bench.chunk_sizes", "--serve", str(size)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, bufsize=1, **pipes, **own)

    def measure(self, case):
        """Return the seconds of one opening."""
        self._process.stdin.write(f"{case}\n")
        return float(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def serve(size):
    """Open messages as asked by lines of the standard input, which are indices into `CASES`."""
    import numpy as np
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from fastrack._crypto import engine as engines
    from fastrack._crypto.cobblestone import MessageKey, chunk_nonce
    from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, ciphertext_size

    assert size == CHUNK_SIZE, f"chunks of {CHUNK_SIZE} bytes, expected {size}"
    engines._fault = lambda _: None  # known answers are for the format's chunks; pyca's answer is compared below
    name = engines.available_engines()[0]
    assert name != "openssl", "fastrack's native extension was not loaded"
    plain, key, nonce = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8), os.urandom(32), os.urandom(12)
    sealed, target = np.zeros(ciphertext_size(plain.size), np.uint8), np.ones_like(plain)
    for line in sys.stdin:
        nbytes, threads = CASES[int(line)]
        engine, whole, seconds = engines.get_engine(name, threads=threads), ciphertext_size(nbytes), []
        schedule = engine.expand_key(MessageKey.raw(key, nonce))
        engine.seal_run(schedule, plain[:nbytes], sealed[:whole], 0)
        second = sealed[SEALED_CHUNK_SIZE : 2 * SEALED_CHUNK_SIZE].tobytes()
        assert AESGCM(key).decrypt(chunk_nonce(nonce, 1), second, None) == plain[size : 2 * size].tobytes()
        repeat = max(1, 64 * MIB // nbytes // 4)
        for _ in range(3):  # the first ones bring clocks and caches to where they stay
            start = time.perf_counter()
            for _ in range(repeat):
                assert engine.open_run(schedule, sealed[:whole], target[:nbytes], 0) is None
            seconds.append((time.perf_counter() - start) / repeat)
        assert np.array_equal(target[:nbytes], plain[:nbytes])
        print(min(seconds), flush=True)


def measure(rounds):
    """Yield a row for each size and case: seconds, and the ratios of speeds to those of 16 KiB in the same round."""
    copies = {size: Copy(size) for size in SIZES}
    seconds = {(size, case): [] for size in SIZES for case in range(len(CASES))}
    for _ in range(rounds):
        for case in range(len(CASES)):
            for size in random.sample(SIZES, len(SIZES)):
                seconds[size, case].append(copies[size].measure(case))
    for copy in copies.values():
        copy.close()
    for (size, case), times in seconds.items():
        ratios = [base / each for each, base in zip(times, seconds[PRESENT, case], strict=True)]
        what = dict(zip(("bytes", "threads"), CASES[case], strict=True))
        yield {"chunk": size, **what, "seconds": _spread(times), "speed": _spread(ratios)}


def _spread(values):
    lower, median, upper = quantiles(values, n=4)
    return {"median": median, "lower": lower, "upper": upper, "runs": len(values)}


def table(machine_code):
    """Return the sizes by what was measured, and by the instructions that a GPU needs: rows of text for DESIGN.md."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    measured = {(row["chunk"], row["bytes"], row["threads"]): row["speed"]["median"] for row in rows}
    names = [f"{nbytes // MIB} MiB, {'one thread' if threads else 'all threads'}" for nbytes, threads in CASES]
    yield "chunks", "tags", "opened for a row of 2 KiB", *names, "instructions for 16 bytes", "fill an H100"
    for size in SIZES:
        speeds = [f"{measured[size, *case]:.2f}" for case in CASES]
        # What one warp does for a chunk is shared by more bytes of a longer one.
        once = machine_code["once"]["all"] * (PRESENT / size - 1)
        needed = f"{sum(part['all'] for part in machine_code.values()) + once:.0f}"
        filled = f"{H100_BLOCKS * size / MIB:.1f} MiB"
        yield f"{size >> 10} KiB", f"{TAG_SIZE / size:.2%}", f"{size >> 10} KiB", *speeds, needed, filled


def main():
    """Measure, print the rows, and write them to a file."""
    parser = argparse.ArgumentParser(prog="python -m bench.chunk_sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="15 by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    load, rows = [os.getloadavg()[0]], []
    for row in measure(options.rounds):
        rows.append(row)
        rate, speed = row["bytes"] / row["seconds"]["median"] / 1e9, row["speed"]
        what = f"{row['chunk'] >> 10:3} KiB  {row['bytes'] >> 20:3} MiB, {row['threads'] or 'all':>3} threads"
        print(f"{what} {rate:6.2f} GB/s, {speed['median']:.2f} [{speed['lower']:.2f}, {speed['upper']:.2f}] of 16 KiB")
    if options.json:
        load.append(os.getloadavg()[0])
        document = {"machine": read_machine(), "load": load, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
