"""Measure a process from its start to its first tensor on device `cpu`, by parts: ``python -m bench.first_use``.

Each process is a new one. With ``--python PATH``, they are those of an environment that has fastrack's wheel, in place
of this checkout. With ``--beside CHECKOUT``, processes run the code of another checkout in turns with these.
``--json FILE`` writes everything. The machine should be idle.

CPU time is that of all threads. The threads that NumPy's import starts, those of its OpenBLAS, spin for milliseconds
before they sleep, whatever imports it: they have a part of their own, by their own clocks, and count in the total.
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
    "spin": "threads that NumPy started, which wait for work",
    "cryptography": "import of cryptography",
    "safetensors": "import of safetensors",
    "load": "machine code: its module, and a digest of its sources",
    "tests": "known answers of the engine",
    "rest": "all else, fastrack's own modules included",
    "total": "start to result",
    "above": "of that, above start and imports of NumPy, cryptography and safetensors",
    "warm": "the next transfer",
}
BELOW = ("interpreter", "numpy", "spin", "cryptography", "safetensors")  # parts that a program without fastrack has too
TARGETS = {"total": 0.25, "above": 0.1}  # seconds of CPU time

# Imports are timed without nested imports of other parts. "rest" is the time outside of all parts. Each time is a pair:
# of the wall clock, and of the CPU, which other work on the machine changes less.
CHILD = """
import time
began, start = time.time(), (time.perf_counter(), time.process_time())
import builtins, os, sys
import json
active, importing, spinning = [], builtins.__import__, []

def clock():
    return time.perf_counter(), time.process_time() - spun()

def spun():
    return sum(time.clock_gettime(thread) for thread in spinning)

def clocks():  # of all threads, as Linux numbers them
    return {~int(thread) << 3 | 6 for thread in os.listdir("/proc/self/task")}

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
    if level or part not in PARTS or name in sys.modules:
        return importing(name, globals, locals, names, level)
    return timed(part, load if name == "numpy" else importing, name, globals, locals, names, level)

def load(*arguments):
    before = clocks()
    try:
        return importing(*arguments)
    finally:
        spinning.extend(clocks() - before)

def wrap(owner, name, part):
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: timed(part, function, *arguments, **options))

PARTS = {"numpy", "cryptography", "safetensors"}
builtins.__import__ = imported
spent = {"interpreter": (began - float(os.environ["BENCH_STARTED"]), start[1])}
import fastrack
from fastrack._crypto import known_answers, native
wrap(native, "_find", "load")
wrap(known_answers, "find_fault", "tests")
folder = sys.argv[1]
file = fastrack.load_file(f"{folder}/sealed.safetensors")
key = fastrack.Key.load(f"{folder}/owner.key")
fastrack.to_device(file["tensor"], keys=key, framework="numpy")
end = time.perf_counter(), time.process_time()
spent["spin"] = 0.0, spun()
total = add(spent["interpreter"], add(end, start, -1))
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
    parser.add_argument("--python", type=Path, metavar="PATH", help="the interpreter of an environment with the wheel")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout, in turns with this one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    # The interpreter of an environment is a link, which must not be followed.
    first = options.python.absolute() if options.python else ROOT
    subjects = [first, *([options.beside.resolve()] if options.beside else [])]
    times = measure(subjects, options.processes, options.size)
    show(times)
    if options.json:
        document = {"machine": read_machine(), "size": options.size, "seconds": times}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


def measure(subjects: list[Path], processes: int, size: int) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return the seconds of each part in each process, by subject: a checkout, or an environment's interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        run(subjects[0], MAKE, folder, str(size))
        for subject in subjects:
            run(subject, CHILD, folder)  # keeps bytecode
        rounds = [[json.loads(run(subject, CHILD, folder)) for subject in subjects] for _ in range(processes)]
    results = {}
    for index, subject in enumerate(subjects):
        runs = [times[index] for times in rounds]
        parts = {part: [tuple(times.get(part, (0.0, 0.0))) for times in runs] for part in PARTS}
        for row, total in enumerate(parts["total"]):
            below = [parts[part][row] for part in BELOW]
            parts["above"][row] = total[0] - sum(pair[0] for pair in below), total[1] - sum(pair[1] for pair in below)
        results[str(subject)] = parts
    return results


def run(subject: Path, code: str, folder: str, *arguments: str) -> str:
    """Run a program with the fastrack of a subject. An environment has the bytecode that pip compiled."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if subject.is_dir():
        environment |= {"PYTHONPATH": str(subject), "PYTHONPYCACHEPREFIX": folder}
    environment["BENCH_STARTED"] = repr(time.time())
    command = [sys.executable if subject.is_dir() else str(subject), "-c", code, folder, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True).stdout


def show(times: dict[str, dict[str, list[tuple[float, float]]]]) -> None:
    columns = [f"{name_of(subject)}{kind}" for subject in times for kind in ("", ", CPU")]
    table = Table("median in ms", *columns)
    for part, text in PARTS.items():
        medians = [median(pair[kind] for pair in parts[part]) for parts in times.values() for kind in (0, 1)]
        if any(medians):
            table.add_row(text, *(f"{1000 * value:.1f}" for value in medians))
    console = Console()
    console.print(table)
    for subject, parts in times.items():
        for part, target in TARGETS.items():
            spent = median(pair[1] for pair in parts[part])
            told = f"{1000 * spent:.0f} ms of CPU time, target {1000 * target:.0f}"
            console.print(f"{name_of(subject)}: {PARTS[part]}: {told}: {'met' if spent <= target else 'missed'}")


def name_of(subject: str) -> str:
    """Return the folder of a checkout or of an environment."""
    path = Path(subject)
    return path.name if path.is_dir() else path.parents[1].name


if __name__ == "__main__":
    main()
