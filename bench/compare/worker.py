"""One side of a pair: a pytest process that measures a round when it is told to, and at no other time.

Run by the Python of one environment, which must have `fastrack`, as ``python -P worker.py ROOT READ WRITE``: the
folder that has the suites, and the ends of the pipes to the coordinator. It imports nothing of its package, which
the environment lacks.

Messages are JSON, one a line. This side says ``hello`` and ``collected``; of every benchmark ``ready``, ``took`` after
each round, and ``done``. The coordinator says ``run`` once; of every benchmark ``round``, for each, and ``end``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest


class Line:
    def __init__(self, read: int, write: int):
        self._read, self._write = os.fdopen(read), os.fdopen(write, "w")

    def close(self) -> None:
        self._read.close()
        self._write.close()

    def say(self, what: str, **more: Any) -> None:
        self._write.write(json.dumps({"say": what, **more}) + "\n")
        self._write.flush()

    def hear(self) -> dict[str, Any]:
        text = self._read.readline()
        if not text:
            pytest.exit("the coordinator is gone", returncode=3)
        return json.loads(text)


class Rounds:
    """Stands in for pytest-benchmark's fixture, as far as the suites use it."""

    def __init__(self, line: Line, name: str):
        self._line, self._name, self._used = line, name, False
        self.group, self.stats, self.extra_info = None, None, {}

    def __call__(self, action, /, *arguments, **options):
        return self.pedantic(action, arguments, options)

    def pedantic(self, action, args=(), kwargs=None, *, rounds=1, iterations=1, warmup_rounds=0):
        """Run rounds with the coordinator's number of calls; the arguments are ignored."""
        if self._used:
            raise RuntimeError(f"{self._name} measures twice; make it two benchmarks")
        self._used, options = True, kwargs or {}
        self._line.say("ready", name=self._name)
        gc.collect()
        gc.freeze()  # or some round pays for a collection of all objects that torch has imported
        try:
            while (order := self._line.hear())["do"] == "round":
                self._line.say("took", seconds=_time(action, args, options, order["calls"]))
        finally:
            gc.unfreeze()
        if order.get("skip"):
            pytest.skip(order["skip"])
        return action(*args, **options)


class Baton:
    """The pytest plugin."""

    def __init__(self, line: Line):
        self.line = line
        self.errors: dict[str, str] = {}
        self.outcomes: dict[str, tuple[str, str]] = {}

    @pytest.fixture
    def benchmark(self, request):
        return Rounds(self.line, request.node.nodeid)

    def pytest_addoption(self, parser):
        parser.addini("timeout", "as of pytest-timeout, which an environment may lack")

    def pytest_configure(self, config):
        config.addinivalue_line("markers", "benchmark: as of pytest-benchmark")

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors[report.nodeid] = _why(report)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        guards = [item for item in items if item.get_closest_marker("guard")]
        self.line.say("collected", names=[item.nodeid for item in guards], errors=self.errors)
        by_name = {item.nodeid: item for item in guards}
        items[:] = [by_name[name] for name in self.line.hear()["run"]]

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.outcomes.setdefault(report.nodeid, (report.outcome, _why(report)))
        if report.when == "teardown":
            outcome, why = self.outcomes.get(report.nodeid, ("passed", ""))
            self.line.say("done", name=report.nodeid, outcome=outcome, why=why)


def _time(action, arguments, options, calls: int) -> float:
    """Return the seconds of some calls. Short calls follow an untimed one, which refills the caches."""
    if calls > 1:
        action(*arguments, **options)
    start = perf_counter()
    for _ in range(calls):
        action(*arguments, **options)
    return perf_counter() - start


def _why(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return crash.message.splitlines()[0]
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    lines = text.strip().splitlines()
    return next((line[1:].strip() for line in reversed(lines) if line.startswith("E ")), lines[-1] if lines else "")


def main(root: str, read: str, write: str) -> int:
    with closing(Line(int(read), int(write))) as line:
        return measure(root, line)


def measure(root: str, line: Line) -> int:
    import fastrack

    module = Path(fastrack.__file__).resolve()
    line.say("hello", fastrack=str(module))
    if not module.is_relative_to(Path(sys.prefix).resolve()):
        return 2
    sys.path.append(root)  # scripts of bench/ import others as `bench.…`; fastrack itself is imported already
    options = ["--rootdir", root, "-c", f"{root}/pyproject.toml", "--continue-on-collection-errors", "-m", "guard"]
    options += ["-p", "no:cacheprovider", "--tb=short", "-q", "-s", f"{root}/bench"]
    return int(pytest.main(options, plugins=[Baton(line)]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
