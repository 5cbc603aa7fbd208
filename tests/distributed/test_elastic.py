"""Machines under torchrun's elastic launch: one is killed, others go on, and one that was granted takes its place."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import elastic_runs

import fastrack
from fastrack.grants import Grants, Identity, Signer

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

CONF = "is_host=0,join_timeout=120,last_call_timeout=5,keep_alive_interval=3,keep_alive_max_attempt=4"


class Run:
    """The machines of a run, as processes with a session each."""

    def __init__(self, folder):
        self.folder = folder
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of the rendezvous
        self.agents = {}

    def environment(self, machine):
        path = os.pathsep.join([str(Path(elastic_runs.__file__).parents[1]), *sys.path])
        own = {
            "FASTRACK_IDENTITY": self.folder / f"machine{machine}",
            "FASTRACK_OWNER": self.folder / "owner.signer.pub",
        }
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": path,
            **{name: str(each) for name, each in own.items()},
        }

    def begin(self, machine):
        elastic = ["--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=9", "--monitor-interval=0.1"]
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.store.port}", f"--rdzv-conf={CONF}"]
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *elastic, *meeting]
        with (self.folder / f"log{machine}").open("wb") as log:
            self.agents[machine] = subprocess.Popen(
                [*command, elastic_runs.__file__, str(self.folder)],
                env=self.environment(machine), start_new_session=True, stdout=log, stderr=log,
            )  # fmt: skip

    def kill(self, machine):
        """Take a machine away, with all that runs on it."""
        agent = self.agents.pop(machine)
        for process in [agent.pid, *children_of(agent.pid)]:  # workers have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        agent.wait(60)

    def events(self):
        """Return what ranks have noted, in order."""
        lines = [line for path in (self.folder / "journals").glob("*") for line in path.read_text().splitlines(True)]
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return sorted(events, key=lambda event: event["at"])

    def wait_for(self, is_there, seconds=200):
        """Wait until an event is noted, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for event in self.events():
                if is_there(event):
                    return event
            assert all(agent.poll() is None for agent in self.agents.values()), self.logs()
            time.sleep(0.2)
        raise AssertionError(f"nothing within {seconds} s\n{self.logs()}")

    def wait_for_steps(self, size, count, since=0.0):
        """Wait until a group of this size has taken so many steps."""
        first = self.wait_for(lambda event: event.get("size") == size and "step" in event and event["at"] > since)
        return self.wait_for(lambda event: event.get("size") == size and event.get("step", 0) >= first["step"] + count)

    def logs(self):
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("log*")))

    def fastrack(self, *arguments, machine=0):
        return subprocess.run(
            [sys.executable, "-m", "fastrack", *map(str, arguments)],
            env=self.environment(machine), cwd=self.folder, capture_output=True, text=True, check=False,
        )  # fmt: skip


def children_of(process):
    return [
        int(child) for path in Path(f"/proc/{process}/task").glob("*/children") for child in path.read_text().split()
    ]


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    owner, key = Signer.generate(name="owner"), fastrack.Key.generate()
    owner.save(tmp_path / "owner.signer")
    (tmp_path / "owner.signer.pub").write_text(f"{owner.verifier}\n")
    key.save(tmp_path / "run.key")
    identities = [Identity.generate(name=f"machine{machine}") for machine in range(5)]
    for machine, identity in enumerate(identities):
        identity.save(tmp_path / f"machine{machine}")
        (tmp_path / f"machine{machine}.pub").write_text(f"{identity.recipient}\n")
    Grants.issue(key, [each.recipient for each in identities[:4]], signer=owner).save(tmp_path / "run.grants")
    yield made
    for machine in list(made.agents):
        made.kill(machine)


def weights_by_sizes(sizes):
    """Train in one process what a group did that had these sizes, adding in the order of ranks."""
    model, optimizer = elastic_runs.start()
    for step, size in enumerate(sizes):
        parts = [elastic_runs.gradient_of(model, step, rank, size) for rank in range(size)]
        elastic_runs.apply(model, optimizer, sum(parts[1:], parts[0]))
    return model.state_dict()


def test_a_group_of_four_goes_on_as_three_and_as_four_with_a_machine_that_was_granted(run, monkeypatch):
    for machine in range(4):
        run.begin(machine)
    run.wait_for_steps(4, 12)
    killed = time.time()
    run.kill(3)
    three = run.wait_for_steps(3, 12, killed)

    refused = run.fastrack("verify", "checkpoint.safetensors", "--key", "run.grants", machine=4)
    assert refused.returncode != 0
    assert "was not granted" in refused.stderr
    run.wait_for_steps(3, 5, time.time())  # the others go on
    renewed = run.fastrack(
        "grant",
        "run.grants",
        "--to",
        "machine4.pub",
        "--drop",
        "machine3",
        "--key",
        "run.key",
        "--sign",
        "owner.signer",
    )
    assert renewed.returncode == 0, renewed.stderr
    assert run.fastrack("verify", "checkpoint.safetensors", "--key", "run.grants", machine=3).returncode != 0
    assert run.fastrack("verify", "checkpoint.safetensors", "--key", "run.grants", machine=4).returncode == 0
    joined = time.time()
    run.begin(4)
    run.wait_for_steps(4, 12, joined)
    (run.folder / "finish").touch()
    for agent in run.agents.values():
        assert agent.wait(120) == 0, run.logs()

    events = run.events()
    require_no_repeats(events)
    # Steps that three took are kept, also the last ones: joining is a notice, after which they save.
    saved = [event["preempted"] for event in events if "preempted" in event and event["at"] > joined]
    begun = [event["started"] for event in events if "started" in event and event["at"] > joined]
    assert max(saved) >= three["step"]
    assert set(begun) == {max(saved)}
    replays = [event for event in events if "refused" in event]
    assert len(replays) == 4
    assert sum(event["replayed"] for event in replays) == 1

    for name, value in (("IDENTITY", "machine4"), ("OWNER", "owner.signer.pub")):
        monkeypatch.setenv(f"FASTRACK_{name}", str(run.folder / value))
    state = fastrack.load_checkpoint(run.folder / "checkpoint.safetensors", run.folder / "run.grants")
    assert {3, 4} <= set(state["sizes"])
    assert state["sizes"][-1] == 4
    torch.set_num_threads(1)
    expected = weights_by_sizes(state["sizes"])
    assert all(torch.equal(state["model"][name], value) for name, value in expected.items())


def require_no_repeats(events):
    """Require that no key is used with two base nonces, and no chunk is sealed twice, over all processes."""
    nonces, chunks = defaultdict(set), defaultdict(list)
    for event in events:
        if "key" in event:
            nonces[event["key"]].add(event["nonce"])
            chunks[event["key"]] += range(*event["chunks"])
    assert len(nonces) > 500
    assert all(len(found) == 1 for found in nonces.values())
    assert all(len(found) == len(set(found)) for found in chunks.values())
    sessions = defaultdict(int)
    for event in events:
        if "session" in event:
            sessions[event["session"]] += 1
    starts = [event for event in events if "started" in event]
    assert sorted(sessions.values()) == sorted(event["size"] for event in starts if event["rank"] == 0)
