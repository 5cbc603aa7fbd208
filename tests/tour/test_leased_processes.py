"""A visitor in a process of its own, and a holder's desk over TLS that is killed, or whose holder ends the visit."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path

import pytest
from broker.conftest import find_port, make_certificate
from helpers import made_up_machine, tour_files, visiting
from helpers.process_memory import find_in_process
from helpers.tour_files import Served, Tour

import fastrack
from fastrack import tour
from fastrack.tour._ledger import read_kept

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

SECONDS = {"stopped": 4, "killed": 4, "started again": 16}  # the last for as long as a desk takes to start
WAYS = [*list(SECONDS)[:2], pytest.param("started again", marks=pytest.mark.nightly)]
POLICY = f"""version = 1
[cpu.snp]
measurement = ['{"22" * 48}']
min_tcb = {{ snp = 8, microcode = 115 }}
revocation = 'cached'
"""


class World:
    """A tour of one holder on the real clock: its desk, a machine, and a visitor."""

    def __init__(self, folder, ending, lease):
        self.folder = folder
        machine = Served(made_up_machine.__file__, log=folder / "machine.log")
        ending.callback(machine.kill)
        roots = machine.lines()[0]["roots"]
        make_certificate(folder)
        self.made = Tour(folder, "a", train=visiting.train)
        (folder / "policy.toml").write_text(POLICY)
        port = find_port()
        paths = {"certificate": "tls.pem", "private_key": "tls.key", "ca": "ca.pem"}
        options = {"port": port, **{name: str(folder / path) for name, path in paths.items()}}
        given = {"name": "a", "offset": 0, "roots": roots, "options": options, "lease": lease}
        (folder / "served.json").write_text(json.dumps(given))
        self.desk = Served("served_desk.py", folder / "served.json", log=folder / "a.log")
        ending.callback(self.desk.kill)
        told = {"url": f"https://127.0.0.1:{port}", "roots": roots, "lingers": True}
        (folder / "visiting.json").write_text(json.dumps(told))
        environment = os.environ | {made_up_machine.PORT: str(machine.port), "PYTHONPATH": os.pathsep.join(sys.path)}
        with (folder / "visitor.err").open("wb") as errors:
            self.visitor = subprocess.Popen(
                [sys.executable, visiting.__file__, folder], cwd=folder, env=environment, stderr=errors
            )
        ending.callback(self.visitor.wait)
        ending.callback(self.visitor.kill)

    def wait(self, holds, seconds=60):
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, (self.told(), self.desk.lines()[-3:])
            time.sleep(0.05)
        return found

    def told(self):
        return (self.folder / "visitor.err").read_text()

    def last(self):
        """Return when a shard was opened last; 0 before the first."""
        path = self.folder / "visit.log"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max((float(line) for line in lines if line.endswith("\n")), default=0.0)

    def renewals(self):
        return sum(line.get("step") == "begin" and line.get("status") == 200 for line in self.desk.lines()) - 1


@pytest.fixture
def world(tmp_path, monkeypatch, way):
    monkeypatch.setattr(tour_files, "OFFSET", timedelta(0))
    with ExitStack() as ending:
        yield World(tmp_path, ending, SECONDS[way])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", WAYS)
def test_keys_leave_the_process_of_a_visitor_within_the_lease(world, way):
    secret = {"key": bytes(fastrack.Key.load(world.folder / "a.key").material())}
    world.wait(lambda: world.renewals() >= 1)
    assert find_in_process(world.visitor.pid, secret)  # the control
    if way == "started again":  # in time, so that nothing ends: the state is in its database
        world.desk.kill()
        before = world.renewals()
        world.desk.start()
        world.wait(lambda: world.renewals() > before)
    if way == "killed":
        world.desk.kill()
    else:
        with closing(tour.TourLedger(world.folder / "a.db")) as ledger:
            ledger.stop("the wrong cohort", now=tour_files.clock())
    ended = time.time()
    told = world.wait(world.told)
    assert told.startswith("LeaseError: using key")
    assert told.count("\n") == 1
    assert ("its holder ended" in told) == (way != "killed")
    assert world.last() < ended + SECONDS[way] + 0.1
    assert find_in_process(world.visitor.pid, secret) == set()
    assert not (world.folder / "v1").exists()
    [attempt], [details] = (getattr(read_kept(world.folder / "a.db"), name) for name in ("attempts", "details"))
    assert (attempt.receipt is None) == (way == "killed")
    assert details["stopped"] == (None if way == "killed" else "the wrong cohort")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["stopped"])
def test_a_visit_of_several_leases_ends_with_a_receipt(world):
    world.wait(lambda: world.renewals() >= 2)
    Path(world.folder / "enough").touch()
    assert world.visitor.wait(60) == 0
    chain = tour.Chain.load(world.folder / "v1" / "tour.chain", owner=world.made.owner.verifier)
    assert read_kept(world.folder / "a.db").attempts[0].receipt == chain.visits[0].receipt.envelope
