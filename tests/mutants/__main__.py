"""Break the kernels on purpose, one edit at a time, and see whether the tests notice: ``python -m mutants``.

A mutant is caught if a test fails that is named for it. One that does not compile, takes too long or ends the process
is not.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from helpers import kernel_host, kernel_suite, runs  # noqa: F401 - so that every test finds them imported

from bench.gpu.candidates import apply_edits
from mutants.edits import MUTANTS

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"
TESTS = ROOT / "tests"
# What `--wide` runs: all that runs the kernels on the shim.
_NAMES = ("cache", "ghash", "chunks", "gather", "prepare", "segments", "vectors", "wrapped")
WIDE = tuple(f"kernels/test_cu_{name}.py" for name in _NAMES)
FORK = multiprocessing.get_context("fork")
# A process that starts while another does would keep a pipe of it open, and its end would go unnoticed. One that starts
# amid a line of output might wait for that line forever.
ONE_AT_A_TIME = threading.Lock()
FOLDER = "FASTRACK_KERNELS"  # which mutants.plugin reads
UNCHANGED = "(unchanged)"
CAUGHT, SURVIVED = "caught", "SURVIVED"
FAILURE = re.compile(r"^(FAILED|ERROR) \S*?((?:kernels|ptx)/test_\w+\.py\S*)(?: - (.*))?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one mutant."""

    name: str
    outcome: str
    by: str  # the test that failed, or what went wrong
    complaint: str  # of that test
    seconds: float


def main():
    options = _options()
    chosen = [mutant for mutant in MUTANTS if not options.names or any(part in mutant.name for part in options.names)]
    if not chosen:
        sys.exit(f"choosing mutants failed: expected parts of names, got {' '.join(options.names)!r}. See --list.")
    if options.list:
        sys.stdout.writelines(f"{mutant.name:<34} {mutant.file:<12} {mutant.breaks}\n" for mutant in chosen)
        return 0
    _import_what_tests_use()
    width = max(len(mutant.name) for mutant in chosen)
    results = []
    with tempfile.TemporaryDirectory(prefix="fastrack-mutants-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        # Tests that fail anyway would catch every mutant.
        unchanged = pool.submit(try_one, Path(folder), UNCHANGED, (), every, 10 * options.limit)
        tries = [
            pool.submit(
                try_one,
                Path(folder),
                mutant.name,
                [(mutant.file, mutant.old, mutant.new)],
                WIDE if options.wide else mutant.tests,
                options.limit * (10 if options.wide else 1),
            )
            for mutant in chosen
        ]
        for mutant, each in zip(chosen, tries, strict=True):
            result = each.result()
            results.append(result)
            _print(mutant, result, width)
        result = unchanged.result()
    caught = sum(result.outcome == CAUGHT for result in results)
    right = result.outcome == SURVIVED
    sys.stdout.write(
        f"\n{caught} of {len(chosen)} caught; the unchanged kernels pass: {'yes' if right else result.by}\n"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "caught": caught,
            "mutants": len(chosen),
            "unchanged_passes": right,
            "results": [
                asdict(result) | {"file": mutant.file, "breaks": mutant.breaks}
                for mutant, result in zip(chosen, results, strict=True)
            ],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if right and caught == len(chosen) else 1


def _print(mutant, result, width):
    with ONE_AT_A_TIME:
        sys.stdout.write(f"{result.name:<{width}}  {result.outcome:<8}  {result.seconds:5.1f} s  {result.by}\n")
        if result.outcome != CAUGHT:
            sys.stdout.write(f"{'':<{width}}  {mutant.file}: {mutant.breaks}\n")
        sys.stdout.flush()


def try_one(folder, name, edits, tests, limit):
    """Run tests on a copy of the kernels with these edits, as (file, old, new)."""
    start = time.monotonic()
    kernels, output = folder / name, folder / f"{name}.txt"
    shutil.copytree(KERNELS, kernels)
    for file, old, new in edits:
        apply_edits(kernels / file, [(old, new)])
    # A copy of this process, in which all that the tests import is there already.
    process = FORK.Process(target=_run_pytest, args=(kernels, tests, folder / "cache", output), daemon=True)
    with ONE_AT_A_TIME:
        process.start()
    process.join(limit)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        outcome = "no end", f"after {limit:.0f} seconds", ""
    else:
        outcome = judge(process.exitcode, output.read_text(errors="replace"), tests)
    return Result(name, *outcome, time.monotonic() - start)


def judge(code, output, tests):
    """Tell from the end of pytest and its output whether a test caught the mutant: outcome, test and complaint."""
    if code == 0 and " passed" in output:
        return SURVIVED, ", ".join(tests), ""
    found = FAILURE.search(output)
    if code == 1 and found and found[1] == "FAILED":
        return CAUGHT, found[2], found[3] or ""
    return "broken", f"pytest ended with {code}", output[-5000:]


def _run_pytest(kernels, tests, cache, output):
    os.setsid()  # a group of its own, so that a compiler is stopped with its test
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {FOLDER: str(kernels), "COLUMNS": "500"}  # so that no complaint is cut short
    os.chdir(ROOT)
    # Nothing that is imported already could be rewritten.
    command = ["-p", "mutants.plugin", "-x", "-q", "-rfE", "--tb=short", "--assert=plain", "--timeout=0"]
    code = pytest.main([*command, "-o", f"cache_dir={cache}", *(str(TESTS / test) for test in tests)])
    sys.stdout.flush()
    os._exit(code)


def _import_what_tests_use():
    kernel_host.Host({}, {}).prepare(bytes(16), bytes(12))


def _options():
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of mutants; all without any")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count(), help="how many at a time; all cores")
    parser.add_argument("--limit", type=float, default=180, help="seconds that one may take")
    parser.add_argument("--wide", action="store_true", help="run all tests on the shim, not only those named")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument("--json", type=Path, help="where to write the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
