"""The command: one step after another, each of them on its own."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import time
import traceback
from pathlib import Path

from bench.gpu import needs
from bench.gpu.plan import FULL, QUICK

ROOT = Path(__file__).resolve().parents[2]
STEPS = (
    "known answers",
    "tests on the device",
    "kernels",
    "transfers",
    "ablation",
    "timeline",
    "slowdown",
    "slabs, ring and share",
    "compute-sanitizer",
    "picture",
)


def main(argv):
    """Run all of it. Gives 0, 1 if a check failed, or 2 if there is no device to use."""
    options = _parse(argv)
    print(f"fastrack on {options.device}, by {sys.executable}")
    vital, other = needs.missing()
    for sentence in other:
        print(f"  {sentence}")
    if vital:
        return _nothing(f"{options.device} cannot be used by {sys.executable}: {', '.join(vital)}")
    try:
        from bench.gpu.gpu import Gpu

        start = time.perf_counter()
        gpu = Gpu(options.device)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is wrong
        return _nothing(f"{type(error).__name__}: {error}")
    print(f"{gpu.name}, {gpu.driver.multiprocessors} multiprocessors; opened in {time.perf_counter() - start:.1f} s")
    return Session(gpu, QUICK if options.quick else FULL, options).run()


class Session:
    """One run on one GPU."""

    def __init__(self, gpu, plan, options, *, say=print, watch=True):
        from bench.gpu.report import Report

        self.gpu, self.plan, self._device = gpu, plan, options.device
        self.report = Report(gpu, plan, quick=options.quick, folder=options.out)
        self._say, self._watch, self._lost = say, watch, None
        self._start = time.perf_counter()

    def run(self):
        from bench.gpu import ablation, kernels, known, slowdown, sweep, timeline, transfers

        known_answers, tests, *figures, _, picture = STEPS
        self.step(known_answers, lambda: f"{known.check(self.gpu)} right", is_check=True)
        self.step(tests, self._run_tests, is_check=True, here=False, limit=self.plan.suite_seconds + 30)
        for name, part in zip(figures, (kernels, transfers, ablation, timeline, slowdown, sweep), strict=True):
            self.step(name, lambda part=part: self._measure(part))
        for tool in self.plan.tools:
            name = f"compute-sanitizer {tool}"
            limit = self.plan.tool_seconds + 30
            self.step(name, lambda tool=tool: self._sanitize(tool), is_check=True, here=False, limit=limit)
        self.step(picture, self._draw, here=False)
        self._say(f"\n{self.report.tables()}\n\n{time.perf_counter() - self._start:.0f} s; {self.report.path}")
        return 1 if self.report.is_wrong else 0

    def step(self, name, action, *, is_check=False, here=True, limit=None):
        """Do a part, whatever became of those before, and keep how it ended.

        `here` says that it needs the device in this process. One that takes longer than its limit ends the process,
        with a word on where every thread stood: that is how a part that hangs is found.
        """
        from bench.gpu.gpu import Skip, WrongResultError
        from bench.gpu.report import DONE, FAILED, SKIPPED, Outcome
        from fastrack.errors import FastrackError

        self._say(name)
        start = time.perf_counter()
        outcome, why = DONE, ""
        if self._watch:
            faulthandler.dump_traceback_later(limit or self.plan.step_seconds, exit=True, file=sys.__stderr__)
        try:
            self._require_possible(start, here=here)
            why = action() or ""
        except Skip as skip:
            outcome, why = SKIPPED, str(skip)
        except Exception as error:  # noqa: BLE001 - the others go on
            outcome, why = FAILED, f"{type(error).__name__}: {error}"
            is_check = is_check or isinstance(error, (WrongResultError, FastrackError))
            self._say(traceback.format_exc())
        finally:
            if self._watch:
                faulthandler.cancel_dump_traceback_later()
        if outcome == FAILED and here and self._lost is None and not self.gpu.is_well():
            self._lost = name
        taken = time.perf_counter() - start
        self._say(f"  {outcome}{f': {why}' if why else ''} ({taken:.1f} s)")
        self.report.outcomes.append(Outcome(name, outcome, why, taken, is_check))
        self.report.save()
        gc.collect()
        self.gpu.tidy()

    def _require_possible(self, now, *, here):
        from bench.gpu.gpu import Skip

        if here and self._lost is not None:
            raise Skip(f"the device does not answer since the step {self._lost!r}")

        if now - self._start > self.plan.total_seconds:
            raise Skip(f"no time was left of {self.plan.total_seconds:g} s")

    def _run_tests(self):
        from bench.gpu.gpu import Skip
        from bench.gpu.suite import run_tests

        if not self.plan.suite_seconds:
            raise Skip("left out by --quick")
        return run_tests(self._device, self.plan.suite_seconds, say=self._say)

    def _sanitize(self, tool):
        from bench.gpu.suite import sanitize

        return sanitize(self._device, tool, self.plan.tool_seconds, say=self._say)

    def _measure(self, part):
        before = len(self.report.rows)
        for found in part.measure(self.gpu, self.plan, self._say):
            self.report.add(found)
        return f"{len(self.report.rows) - before} figures"

    def _draw(self):
        from bench.gpu.gpu import Skip
        from bench.gpu.picture import draw

        problem = needs.lacks("matplotlib")
        if problem:
            raise Skip(problem)
        path = self.report.path.with_suffix(".png")
        draw(self.report, path)
        return str(path)


def _parse(argv):
    parser = argparse.ArgumentParser(prog="make gpu", description="Check and measure fastrack on a GPU.")
    parser.add_argument("--device", default="cuda:0", help="which GPU: cuda:N")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, and no test suite: a minute")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for the results")
    return parser.parse_args(argv)


def _nothing(why):
    """Say that nothing can be done."""
    print(f"\nThere is no usable CUDA device: {why}\n\nskipped:")
    for name in STEPS:
        print(f"  {name}")
    print(f"{os.linesep}docs/benchmarks.md says what a machine needs for `make gpu`.")
    return 2
