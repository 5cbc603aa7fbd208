"""Two workers, one an environment, that measure the same benchmarks in lock-step. Only one of them runs at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.compare import CannotCompareError

WORKER = Path(__file__).with_name("worker.py")
SIDES = ("base", "head")
_ROUND = 0.003  # seconds that a round is to take, if one call takes less
_MOST_CALLS = 5000
_ENOUGH = 0.75  # seconds for one benchmark in one pair, if they have enough rounds
_FEWEST = 11
_FAREWELL = 10  # seconds to clean up, before a worker is killed


@dataclass(slots=True)
class Found:
    """The measurements of one pair of runs."""

    names: list[str] = field(default_factory=list)  # of the benchmarks to measure
    rounds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # by benchmark, seconds of base and head
    broken: dict[str, dict[str, str]] = field(default_factory=dict)  # by benchmark and side, the reason


@dataclass
class DeadError(Exception):
    """A worker stopped answering."""

    side: str
    why: str


class Worker:
    """A process and the pipes to it."""

    def __init__(self, side: str, python: Path, root: Path, log: Path, *, seed: int, patience: float):
        self.side, self._patience, self._log, self._rest = side, patience, log, b""
        read, theirs = os.pipe()
        mine, write = os.pipe()
        command = [python, "-P", WORKER, root, str(mine), str(theirs)]
        environment = {name: text for name, text in os.environ.items() if name not in {"PYTHONPATH", "PYTEST_ADDOPTS"}}
        environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONHASHSEED": str(seed)}
        environment["TMPDIR"] = tempfile.mkdtemp(prefix="tmp-", dir=log.parent)
        with log.open("ab") as output:
            # In a session of its own: a Ctrl-C is for the coordinator, which ends the workers.
            self._process = subprocess.Popen(
                command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=(mine, theirs), start_new_session=True,
            )  # fmt: skip
        os.close(mine)
        os.close(theirs)
        self._read, self._write = read, write

    def say(self, **message: Any) -> None:
        try:
            os.write(self._write, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise DeadError(self.side, self._last_words()) from None

    def hear(self) -> dict[str, Any]:
        end = time.monotonic() + self._patience
        while b"\n" not in self._rest:
            if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                raise DeadError(self.side, f"no answer within {self._patience:.0f} s")
            more = os.read(self._read, 1 << 16)
            if not more:
                raise DeadError(self.side, self._last_words())
            self._rest += more
        text, self._rest = self._rest.split(b"\n", 1)
        return json.loads(text)

    def hang_up(self) -> None:
        """Close the pipes, so that the worker ends once it reads them."""
        for pipe in (self._read, self._write):
            os.close(pipe)

    def end(self) -> None:
        """Kill the worker and its children, if it is still running."""
        try:
            self._process.wait(_FAREWELL)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _last_words(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its pipes and runs on"
        tail = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-8:]
        return "\n".join([f"the process ended with {code}", *tail])


def run_pair(
    pythons: dict[str, Path],
    root: Path,
    folder: Path,
    *,
    number: int,
    rounds: int,
    names: list[str] | None = None,
    patience: float = 120,
    progress=lambda _: None,
) -> Found:
    """Measure `names`, or all guards that both sides have, with a new process a side.

    Raises CannotCompareError if a side does not even start, or imports `fastrack` from outside of its environment.
    """
    workers: dict[str, Worker] = {}
    results = Found()
    try:
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            log = folder / f"{side}.log"
            workers[side] = Worker(side, pythons[side], root, log, seed=number + 1, patience=patience)
        pair = [workers[side] for side in SIDES]
        sides = {worker.side: _collect(worker, pythons[worker.side]) for worker in pair}
        if names is None:
            names = [name for name in sides["base"]["names"] if name in sides["head"]["names"]]
            results.broken = _one_sided(sides)
        results.names = names
        for worker in pair:
            worker.say(run=names)
        for name in names:
            progress(name)
            try:
                measured = _measure(pair, name, rounds, results)
            except DeadError as dead:
                results.broken.setdefault(name, {})[dead.side] = dead.why
                break
            if measured:
                results.rounds[name] = measured
    finally:
        for worker in workers.values():
            worker.hang_up()
        for worker in workers.values():
            worker.end()
    return results


def _collect(worker: Worker, python: Path) -> dict[str, Any]:
    """Return the names of a side's benchmarks and, by place in the suites, the errors of collecting others."""
    prefix = python.parents[1].resolve()
    try:
        module = Path(worker.hear()["fastrack"])
        if not module.is_relative_to(prefix):
            raise CannotCompareError(
                f"{worker.side} imports fastrack from {module}, not from {prefix}; remove {prefix.parent} and try again"
            )
        return worker.hear()
    except DeadError as dead:
        raise CannotCompareError(f"{worker.side} does not start: {dead.why}") from dead


def _one_sided(sides: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the reasons why benchmarks cannot be measured, by benchmark and side."""
    broken: dict[str, dict[str, str]] = {}
    for side, other in (SIDES, SIDES[::-1]):
        errors, theirs = sides[side]["errors"], sides[other]["names"]
        missing = {name: "it is not there" for name in theirs if name not in sides[side]["names"]}
        for node, text in errors.items():
            below = [name for name in theirs if name.startswith(node)]
            missing |= {name: text for name in below if name in missing} if below else {node: text}
        for name, why in missing.items():
            broken.setdefault(name, {})[side] = why
    return broken


def _measure(pair: list[Worker], name: str, rounds: int, found: Found) -> list[tuple[float, float]]:
    """Measure the rounds of one benchmark; none if a side fails before."""
    first = {worker.side: worker.hear() for worker in pair}
    waiting = [worker for worker in pair if first[worker.side]["say"] == "ready"]
    failed = {side: told for side, told in first.items() if told["say"] == "done"}
    measured: list[tuple[float, float]] = []
    if len(waiting) == len(pair):
        measured, failed = _rounds(pair, rounds)
        waiting = [worker for worker in pair if worker.side not in failed]
    for worker in waiting:
        worker.say(do="end", **({"skip": "the other side cannot run it"} if failed else {}))
    for worker in waiting:
        told = worker.hear()
        if told["outcome"] != "passed" and not failed:
            failed[worker.side] = told
    for side, told in failed.items():
        found.broken.setdefault(name, {})[side] = f"{told['outcome']}: {told['why']}"
    return [] if failed else measured


def _rounds(pair: list[Worker], rounds: int) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Measure rounds, with alternating order. The first ones warm up, compile, and set the calls of a round."""
    calls, measured = 1, []
    warmups, start = 3, time.monotonic()
    for number in range(-warmups, rounds):
        seconds = {}
        for worker in pair if number % 2 == 0 else pair[::-1]:
            worker.say(do="round", calls=calls)
            told = worker.hear()
            if told["say"] == "done":
                return [], {worker.side: told}
            seconds[worker.side] = told["seconds"] / calls
        if number < 0:
            calls = max(1, min(_MOST_CALLS, round(_ROUND / max(*seconds.values(), 1e-9))))
        else:
            measured.append((seconds["base"], seconds["head"]))
            if len(measured) >= _FEWEST and time.monotonic() - start > _ENOUGH:
                break
    return measured, {}
