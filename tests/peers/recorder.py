"""Write how each test ends as a line of JSON, so that a run goes on where it stopped: a plugin of pytest."""

import json
import os
import re
from pathlib import Path

RESULTS = Path(os.environ["FASTRACK_PEERS_RESULTS"])

_seen = {}


def pytest_collection_modifyitems(config, items):
    done = {line["test"] for line in map(json.loads, RESULTS.read_text().splitlines()) if "outcome" in line}
    left = [item for item in items if item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = left


def pytest_runtest_logstart(nodeid):
    _seen.clear()
    _write(test=nodeid)


def pytest_runtest_logreport(report):
    """Keep the first failure of a test, its parts and its subtests."""
    if report.failed and "raised" not in _seen:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr)
        # pytest leaves the name of the class out where it explains an assertion.
        found = re.match(r"([A-Za-z_][\w.]*)(?::|\Z|\n)", message)
        _seen.update(raised=found[1].rpartition(".")[2] if found else "AssertionError", message=message[:300])
    _seen.setdefault("reports", []).append(report.outcome)
    if report.when == "call" and report.passed:
        _seen["ran"] = True


def pytest_runtest_logfinish(nodeid):
    reports = _seen.pop("reports", [])
    outcome = next((each for each in ("failed", "skipped") if each in reports), "passed")
    if _seen.pop("ran", False) and outcome == "skipped":  # some of its subtests only
        outcome = "passed"
    _write(test=nodeid, outcome=outcome, **_seen)


def pytest_sessionfinish(exitstatus):
    if exitstatus in {0, 1, 5}:  # all ran; the last, as none was left
        _write(complete=True)


def _write(**line):
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
