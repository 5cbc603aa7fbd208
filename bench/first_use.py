"""Measure a process from its start to its first tensor on device `cpu`, by parts: ``python -m bench.first_use``.

Each process is a new one. With ``--beside CHECKOUT``, processes run the code of
another checkout in turns with this one. ``--json FILE`` writes everything. The machine should be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.machine import ROOT, read_machine

PROCESSES = 15
PARTS = {
    "interpreter": "start of the interpreter",
    "numpy": "import of NumPy",
    "cryptography": "import of cryptography",
    "llvmlite": "import of llvmlite",
    "numba": "import of numba",
    "scipy": "import of scipy, by numba",
    "load": "machine code: its module, and a digest of its sources",
    "tests": "known answers of the engine",
    "rest": "all else, fastrack's own modules included",
    "total": "start to result",
    "warm": "the next transfer",
}

# Imports are timed without those that they cause of other parts. "rest" is what no part has. Each time is a pair: of
# the wall clock, and of the CPU, which other work on the machine changes less.
CHILD = """
import time
began, used = time.time(), time.process_time()
import builtins, os, sys
import json
active, importing = [], builtins.__import__

def clock():
    return time.perf_counter(), time.process_time()

def add(first, second, sign=1):
    return first[0] + sign * second[0], first[1] + sign * second[1]

def timed(part, call, *arguments, **options):
    active.append((0.0, 0.0))
    start = clock()
    try:
        return call(*arguments, **options)
    finally:
        elapsed = add(clock(), start, -1)
        spent[part] = add(spent.get(part, (0.0, 0.0)), add(elapsed, active.pop(), -1))
        if active:
            active[-1] = add(active[-1], elapsed)

def imported(name, globals=None, locals=None, names=(), level=0):
    part = name.partition(".")[0]
    if level or part not in ("numpy", "cryptography", "llvmlite", "numba", "scipy") or name in sys.modules:
        return importing(name, globals, locals, names, level)
    return timed(part, importing, name, globals, locals, names, level)

def wrap(owner, name, part):
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: timed(part, function, *arguments, **options))

builtins.__import__ = imported
spent = {"interpreter": (began - float(os.environ["BENCH_STARTED"]), used)}
start = clock()
import fastrack
try:
    from fastrack._crypto import native
    wrap(native, "_find", "load")
except ImportError:  # a checkout that compiles at run time, and keeps that on disk
    from fastrack._crypto import library
    wrap(library, "_load", "load")
from fastrack._crypto import known_answers
wrap(known_answers, "find_fault", "tests")
folder = sys.argv[1]
file = fastrack.load_file(f"{folder}/sealed.safetensors")
key = fastrack.Key.load(f"{folder}/owner.key")
fastrack.to_device(file["tensor"], keys=key, framework="numpy")
total = add(spent["interpreter"], add(clock(), start, -1))
rest = total
for part in spent.values():
    rest = add(rest, part, -1)
spent |= {"rest": rest, "total": total}
start = clock()
fastrack.to_device(file["tensor"], keys=key, framework="numpy")
spent["warm"] = add(clock(), start, -1)
print(json.dumps(spent))
"""

MAKE = """
import sys
import numpy as np
import fastrack
key = fastrack.Key.generate()
key.save(f"{sys.argv[1]}/owner.key")
values = np.random.default_rng(0).random(int(sys.argv[2]) // 8)
fastrack.save_file({"tensor": values}, f"{sys.argv[1]}/sealed.safetensors", key=key)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"processes a checkout; {PROCESSES} if absent")
    parser.add_argument("--size", type=int, default=1 << 20, help="bytes of the tensor; 1 MiB if absent")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout, in turns with this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    checkouts = [ROOT, *([options.beside.resolve()] if options.beside else [])]
    times = measure(checkouts, options.processes, options.size)
    show(times)
    if options.json:
        document = {"machine": read_machine(), "size": options.size, "seconds": times}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def measure(checkouts: list[Path], processes: int, size: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the seconds of each part in each process, by checkout."""
    with tempfile.TemporaryDirectory() as folder:
        run(ROOT, MAKE, folder, str(size))
        for checkout in checkouts:
            run(checkout, CHILD, folder)  # keeps bytecode
        rounds = [[json.loads(run(checkout, CHILD, folder)) for checkout in checkouts] for _ in range(processes)]
    results = {}
    for index, checkout in enumerate(checkouts):
        runs = [each[index] for each in rounds]
        results[str(checkout)] = {part: [each.get(part, (0.0, 0.0)) for each in runs] for part in PARTS}
    return results


def run(checkout: Path, code: str, folder: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": folder}
    environment["BENCH_STARTED"] = repr(time.time())
    command = [sys.executable, "-c", code, folder, *arguments]
    return subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True).stdout


def show(times: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    columns = [f"{Path(checkout).name}{kind}" for checkout in times for kind in ("", ", CPU")]
    table = Table("median in ms", *columns)
    for part, text in PARTS.items():
        medians = [median(pair[kind] for pair in parts[part]) for parts in times.values() for kind in (0, 1)]
        if any(medians):
            table.add_row(text, *(f"{1000 * value:.1f}" for value in medians))
    Console().print(table)


if __name__ == "__main__":
    main()
