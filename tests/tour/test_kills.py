"""Processes of a tour that are killed at their durable writes: the tour ends as one without kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from broker.conftest import find_port, make_certificate
from helpers.commands import invoke
from helpers.tour_files import OFFSET, TRAIN, Tour

import fastrack
from fastrack import tour
from fastrack.tour import _ledger

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

HOLDERS = "abc"
SECONDS = 30


class Forks:
    """The processes that ``killed_desk.py`` forks."""

    def __init__(self, folder):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, Path(__file__).with_name("killed_desk.py"), str(OFFSET.total_seconds())]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, **pipes, env=environment, cwd=folder)

    def ask(self, **given):
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Run:
    """One run of a tour in a folder of its own: three holders, the owner and the visitor, each a process."""

    def __init__(self, made, forks, ports, folder, victim=None, kill=None):
        self.made, self.forks, self.ports, self.folder = made, forks, ports, folder
        self.victim, self.kill = victim, kill
        self.pids, self.killed, self.listened = {}, 0, Counter()
        folder.mkdir()
        paths = {"owner_key": "owner.signer.pub", "certificate": "tls.pem", "private_key": "tls.key", "ca": "ca.pem"}
        lines = [f'train = "{TRAIN}"', f'owner = "{self.url("owner")}"']
        lines += [f'{name} = "{made.folder / path}"' for name, path in paths.items()]
        for name in HOLDERS:
            lines += [f"[holders.{name}]", f'desk = "{self.url(name)}"', f'data = ["{made.data(name)}"]']
        (folder / "run.toml").write_text("\n".join(lines))

    def url(self, name):
        return f"https://127.0.0.1:{self.ports[name]}"

    def fork(self, name, *arguments):
        kill = self.kill if name == self.victim and not self.killed else None
        given = {"arguments": list(map(str, arguments)), "log": str(self.folder / f"{name}.log"), "kill": kill}
        return self.forks.ask(**given, writes=str(self.folder / f"{name}.writes"))

    def start(self, name):
        """Start a desk, and wait until it answers or is dead."""
        files = self.made.folder
        common = {
            "--policy": files / "policy.toml",
            "--signer": files / f"{name}.signer",
            "--database": self.folder / f"{name}.db",
            "--certificate": files / "tls.pem",
            "--private-key": files / "tls.key",
            "--client-ca": files / "ca.pem",
            "--port": self.ports[name],
            "--rate": 1e6,
            "--burst": 1000,
        }
        if name == "owner":
            given = ("own", files / "v0", "--key", files / "model.key")
        else:
            owner = ("--owner", files / "owner.signer.pub", "--plan-digest", self.made.plan.digest)
            given = ("hold", files / "v0", *owner, "--key", files / f"{name}.key", "--data", self.made.data(name))
        self.pids[name] = self.fork(name, "tour", *given, *(part for pair in common.items() for part in pair))
        end = time.monotonic() + SECONDS
        while not self.log(name).count('"listening"') > self.listened[name]:
            if self.is_dead(name):
                return
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.005)
        self.listened[name] = self.log(name).count('"listening"')

    def is_dead(self, name):
        """Return whether a process has ended, which it does only by its own kill."""
        status = self.forks.ask(wait=self.pids[name])
        if status is None:
            return False
        assert status == -signal.SIGKILL, (name, status, self.log(name))
        self.killed += 1
        del self.pids[name]
        return True

    def log(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def visit(self):
        """Run the visitor once, and return its status."""
        given = (self.made.folder / "v0", self.folder / "out", "--config", self.folder / "run.toml")
        pid = self.fork("visitor", "tour", "run", *given)
        status = self.forks.ask(wait=pid, block=True)
        self.killed += status == -signal.SIGKILL
        return status

    def whole(self):
        """Run the tour to its end, through one kill, and return the number of runs of the visitor that it took."""
        try:
            for runs in range(1, 4):
                for name in ("owner", *HOLDERS):
                    if name not in self.pids or self.is_dead(name):
                        self.start(name)
                    if name not in self.pids:
                        self.start(name)  # killed at its start
                status = self.visit()
                if status == 0:
                    return runs
                assert status in {1, -signal.SIGKILL}, self.log("visitor")
            raise AssertionError(self.log("visitor"))
        finally:
            for name, pid in list(self.pids.items()):
                if not self.is_dead(name):
                    os.kill(pid, signal.SIGKILL)
                    self.forks.ask(wait=pid, block=True)

    def check(self):
        """Require the weights of a tour without kills, a whole chain, and each receipt at its holder."""
        files, final = self.made.folder, self.folder / "out" / "final"
        owner = files / "owner.signer.pub"
        line = ["tour", "verify", final, "--owner", owner, "--plan-digest", self.made.plan.digest, "--model", final]
        for name in HOLDERS:
            found = invoke([*map(str, line), "--database", str(self.folder / f"{name}.db"), "--json"])
            assert found.exit_code == 0, found.output
            assert json.loads(found.stdout)["complete"]
            self.check_receipts(name)
        key = self.folder / "final.key"
        owned = ["--owner", owner, "--key", files / "model.key"]
        done = invoke([*map(str, ["tour", "key", final, key, *owned])])
        assert done.exit_code == 0, done.output
        state = fastrack.load_checkpoint(final / "model.safetensors", keys=key)
        assert torch.equal(state["model"]["w"], self.made.expected())
        assert state["optimizer"]["step"] == len(self.made.order)

    def check_receipts(self, name):
        chain = tour.Chain.load(self.folder / "out" / "final" / "tour.chain", owner=self.made.owner.verifier)
        wanted = {visit.receipt.envelope for visit in chain.visits if visit.holder == name}
        kept = _ledger.read_kept(self.folder / f"{name}.db")
        assert wanted <= {attempt.receipt for attempt in kept.attempts}, name
        assert len(kept.attempts) <= len(wanted) + 1

    def writes(self):
        return {path.stem: path.read_text() for path in self.folder.glob("*.writes")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tour")
    make_certificate(folder)
    return Tour(folder, HOLDERS)


@pytest.fixture(scope="module")
def forks(made):
    found = Forks(made.folder)
    yield found
    found.close()


@pytest.fixture
def begin(made, forks, tmp_path):
    ports, runs = {}, Counter()
    for name in ("owner", *HOLDERS):
        ports[name] = next(port for port in iter(find_port, None) if port not in ports.values())

    def make(victim=None, kill=None):
        runs["made"] += 1
        return Run(made, forks, ports, tmp_path / f"run-{runs['made']}", victim, kill)

    return make


def run_with_kill(begin, victim, number, when):
    run = begin(victim, (number, when))
    runs = run.whole()
    assert run.killed == 1, (victim, number, when, run.writes())
    run.check()
    shutil.rmtree(run.folder)
    return runs


@pytest.mark.parametrize(
    ("victim", "number", "when"), [("a", 4, "before"), pytest.param("visitor", 10, "before", marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_a_tour_goes_on_after_a_process_was_killed_in_its_middle(begin, victim, number, when):
    assert run_with_kill(begin, victim, number, when) == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_tour_ends_the_same_whichever_durable_write_was_the_last_of_a_process(begin, record_property):
    whole = begin()
    assert whole.whole() == 1
    whole.check()
    writes, runs = whole.writes(), Counter()
    started = time.monotonic()
    for victim, letters in sorted(writes.items()):
        for number in range(1, len(letters) + 1):
            for when in ("before", "after"):
                runs[run_with_kill(begin, victim, number, when)] += 1
    record_property("kills", f"{time.monotonic() - started:.0f} s, by runs of the visitor {dict(runs)}: {writes}")
    assert runs.total() >= 50
    assert runs[2] > runs.total() // 2
