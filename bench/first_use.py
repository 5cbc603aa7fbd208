"""Measure a process from its start to its first tensor on device `cpu`, by parts: ``python -m bench.first_use``.

Each process is a new one that finds compiled code on disk. With ``--beside CHECKOUT``, processes run the code of
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
    "load": "keys of compiled code, its files, and their linking",
    "tests": "known answers of the engine",
    "rest": "all else, fastrack's own modules included",
    "total": "start to result",
    "cpu": "start to result, time of the CPU",
    "warm": "the next transfer",
}

# Imports are timed without those that they cause of other parts. "rest" is what no part has.
CHILD = """
import time
began = time.time()
import builtins, os, sys
spent = {"interpreter": began - float(os.environ["BENCH_STARTED"])}
active, importing = [], builtins.__import__
clock = time.perf_counter

def timed(part, call, *arguments, **options):
    active.append(0.0)
    start = clock()
    try:
        return call(*arguments, **options)
    finally:
        elapsed = clock() - start
        spent[part] = spent.get(part, 0.0) + elapsed - active.pop()
        if active:
            active[-1] += elapsed

def imported(name, globals=None, locals=None, names=(), level=0):
    part = name.partition(".")[0]
    if level or part not in ("numpy", "cryptography", "llvmlite", "numba", "scipy") or name in sys.modules:
        return importing(name, globals, locals, names, level)
    return timed(part, importing, name, globals, locals, names, level)

def wrap(owner, name, part):
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: timed(part, function, *arguments, **options))

builtins.__import__ = imported
start = clock()
import fastrack
try:
    from fastrack._crypto import library
    wrap(library, "_load", "load")
except ImportError:
    library = None  # a checkout that has none
from fastrack._crypto import known_answers
wrap(known_answers, "find_fault", "tests")
folder = sys.argv[1]
file = fastrack.load_file(f"{folder}/sealed.safetensors")
key = fastrack.Key.load(f"{folder}/owner.key")
fastrack.to_device(file["tensor"], keys=key, framework="numpy")
spent["total"] = spent["interpreter"] + clock() - start
spent["cpu"] = time.process_time()
spent["rest"] = 2 * spent["total"] + spent["cpu"] - sum(spent.values())
start = clock()
fastrack.to_device(file["tensor"], keys=key, framework="numpy")
spent["warm"] = clock() - start
spent["compiled"] = [record.unit.name for record in library.loaded() if record.compiled] if library else []
import json
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


def measure(checkouts: list[Path], processes: int, size: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each part in each process, by checkout."""
    with tempfile.TemporaryDirectory() as folder:
        run(ROOT, MAKE, folder, str(size))
        for checkout in checkouts:
            run(checkout, CHILD, folder)  # compiles, and keeps bytecode
        rounds = [[run(checkout, CHILD, folder) for checkout in checkouts] for _ in range(processes)]
    results = {}
    for index, checkout in enumerate(checkouts):
        runs = [each[index] for each in rounds]
        if any(each.pop("compiled") for each in runs):
            raise SystemExit(f"a process of {checkout} compiled something, so that no time counts")
        results[str(checkout)] = {part: [each.get(part, 0.0) for each in runs] for part in PARTS}
    return results


def run(checkout: Path, code: str, *arguments: str) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(checkout), "PYTHONPYCACHEPREFIX": arguments[0]}
    environment["BENCH_STARTED"] = repr(time.time())
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    return json.loads(done.stdout) if done.stdout else {}


def show(times: dict[str, dict[str, list[float]]]) -> None:
    table = Table("ms, median", *(Path(checkout).name for checkout in times))
    for part, text in PARTS.items():
        row = [f"{1000 * median(parts[part]):.1f}" for parts in times.values()]
        if any(value != "0.0" for value in row):
            table.add_row(text, *row)
    Console().print(table)


if __name__ == "__main__":
    main()
