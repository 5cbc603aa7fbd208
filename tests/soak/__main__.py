"""Soaks fastrack: ``python -m soak``. See docs/dev/testing.md."""

import argparse
import faulthandler
import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

import fastrack
from soak import faults, gauges, gpu, together, transfers
from soak.worker import KEYS, Worker

FAILED = 1
HUNG = 3
LIMIT = 60  # seconds that one job may take
ROUNDS = 10


def main():
    options = _options()
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads about, which are what is tried
    faulthandler.enable()
    torch.set_num_threads(1)
    _begin(light=options.light)
    with tempfile.TemporaryDirectory(prefix="fastrack-soak-") as folder:
        report = _Soak(options, Path(folder)).run()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(_told(report))
    return FAILED if report["violations"] else 0


def _options():
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=8, help="of which every fourth uses the GPU made for tests")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--light", action="store_true", help="without worker processes, which take seconds to start")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def _begin(*, light):
    """Start what starts once, so that it is there when the process is first looked at."""
    gauges.give_back_arrays()
    gpu.install()
    together.install()
    fastrack.to_device(fastrack.seal(torch.zeros(1 << 20), KEYS[0]), keys=KEYS)
    if not light:
        loaded = ["torch", "fastrack._training.dataset", "fastrack._training.collate", "helpers.loading"]
        multiprocessing.set_forkserver_preload(loaded)
        multiprocessing.forkserver.ensure_running()


class _Soak:
    """Rounds of threads. Between them nothing runs, and what the process holds is compared with the first round's."""

    def __init__(self, options, folder):
        self._options = options
        self._folder = folder
        self._rounds = min(ROUNDS, max(2, int(options.seconds / 10)))
        self._workers = []
        self._problems = []
        self._gauges = []

    def run(self):
        start = time.monotonic()
        sys.stdout.write(f"seed {self._options.seed}\n")
        sys.stdout.flush()
        for number in range(self._rounds):
            self._round(number, start + self._options.seconds * (number + 1) / self._rounds)
            if self._problems:
                break
        return self._report(time.monotonic() - start)

    def _round(self, number, until):
        workers = [self._worker(number, place, until) for place in range(self._options.threads)]
        for worker in workers:
            worker.start()
        self._watch(workers)
        self._workers += workers
        self._problems += [problem for worker in workers for problem in worker.violations]
        now, leaks = gauges.settled(self._gauges[0]) if self._gauges else (gauges.read(), [])
        self._gauges.append(now)
        self._problems += [f"leak: {leak}" for leak in leaks]

    def _worker(self, number, place, until):
        jobs = transfers.LIGHT | faults.LIGHT | together.JOBS
        if not self._options.light:
            jobs = jobs | transfers.HEAVY | faults.HEAVY
        jobs = gpu.JOBS if place % 4 == 3 else jobs
        return Worker(place, f"{self._options.seed}-{number}-{place}", jobs, until, self._folder)

    def _watch(self, workers):
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.05)
            for worker in workers:
                if worker.is_alive() and time.monotonic() - worker.since > LIMIT:
                    sys.stderr.write(f"{worker.name} hangs in {worker.job!r}, seed {worker.seed}\n")
                    faulthandler.dump_traceback(all_threads=True)
                    os._exit(HUNG)

    def _report(self, seconds):
        injected, caught, jobs = Counter(), Counter(), Counter()
        for worker in self._workers:
            injected += worker.injected
            caught += worker.caught
            jobs += worker.jobs
        lost = [f"{kind}: {injected[kind] - caught[kind]} were not caught" for kind in injected - caught]
        return {
            "python": sys.version.split()[0],
            "seconds": round(seconds, 1),
            "seed": self._options.seed,
            "threads": self._options.threads,
            "transfers": sum(worker.transfers for worker in self._workers),
            "bytes": sum(worker.bytes for worker in self._workers),
            "wrong": sum(worker.wrong for worker in self._workers),
            "jobs": dict(sorted(jobs.items())),
            "faults": {kind: {"injected": n, "caught": caught[kind]} for kind, n in sorted(injected.items())},
            "gauges": [one._asdict() for one in self._gauges],
            "violations": self._problems + lost,
        }


def _told(report):
    moved = f"{report['transfers']} transfers of {report['bytes'] / 2**30:.1f} GiB in {report['seconds']} s"
    lines = [f"{moved}, {report['wrong']} with wrong bytes"]
    for kind, one in report["faults"].items():
        lines.append(f"  {kind:24} {one['injected']:7} injected, {one['caught']:7} caught")
    for number, one in enumerate(report["gauges"]):
        held = f"{one['resident'] >> 20} MiB, {one['threads']} threads and {one['pool']} in the pool"
        lines.append(f"  after round {number}: {held}, {one['files']} files, {one['children']} processes")
    lines += report["violations"]
    lines.append("failed" if report["violations"] else "nothing was lost, and nothing leaked")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
