"""A server and a training loop with keys on a lease, each with forked and spawned workers, and a broker over TLS."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest
from helpers import leased_program, made_up_machine
from helpers.process_memory import find_in_process
from helpers.tour_files import Served, read_roots

import fastrack
from fastrack.grants import Signer

SECONDS = 5
HOLDERS = ["serve", "train"]
NAMES = {*HOLDERS, "serve thread", "serve forked", "serve spawned", "train fork", "train spawn"}
POLICY = f"""version = 1
[cpu.snp]
measurement = ['{"22" * 48}']
min_tcb = {{ snp = 8, microcode = 115 }}
revocation = 'cached'
"""


@pytest.fixture
def world(serve, tmp_path):
    """Return a broker, and a function that waits until the programs' states are as a function of them says."""
    pytest.importorskip("torch")
    with ExitStack() as ending:
        machine = Served(made_up_machine.__file__, log=tmp_path / "machine.log")
        ending.callback(machine.kill)
        # Both programs are machines of one address here, which would wait for each other where others compute.
        server = serve(timedelta(0), POLICY, read_roots(machine.lines()[0]["roots"]), lease=SECONDS, rest=0)
        Signer.load(server.folder / "owner.signer").verifier.save(server.folder / "owner.pub")
        fastrack.save_file({"x": np.full((50, 64), 7.0)}, server.folder / "data.safetensors", server.key)
        (server.folder / "program.json").write_text(json.dumps({"url": server.url}))
        environment = os.environ | {made_up_machine.PORT: str(machine.port), "PYTHONPATH": os.pathsep.join(sys.path)}
        commands = [[sys.executable, leased_program.__file__, server.folder, role] for role in HOLDERS]
        programs = [subprocess.Popen(command, env=environment) for command in commands]
        for program in programs:
            ending.callback(program.wait, 60)
        ending.callback((server.folder / "stop").touch)

        def wait(holds, seconds):
            end = time.monotonic() + seconds
            while not ((found := states(server.folder)).keys() >= NAMES and holds(found)):
                assert time.monotonic() < end, json.dumps(found, indent=1)
                assert all(program.poll() is None for program in programs)
                time.sleep(0.1)
            return found

        yield server, wait


def states(folder):
    found = [json.loads(path.read_text()) for path in folder.glob("* *.log")]
    return {f"{each['name']} {each['pid']}" if "worker" in each["name"] else each["name"]: each for each in found}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("renewals", [2, pytest.param(100, marks=pytest.mark.nightly)])
def test_a_server_and_a_training_loop_renew_and_end_with_their_broker(world, renewals):
    server, wait = world
    secret = bytes(server.key.material())
    wait(lambda found: all(found[name]["opened"] for name in NAMES), 120)
    found = wait(lambda found: min(found[name]["renewals"] for name in HOLDERS) >= renewals, 60 + 5 * renewals)
    assert {name: each["error"] for name, each in found.items() if each["failures"]} == {}
    # The control: the page is found, in the processes that write to it and in their forked children.
    assert [find_in_process(found[name]["pid"], {"key": secret}) for name in HOLDERS] == [{("key", "other")}] * 2
    assert find_in_process(found["serve forked"]["pid"], {"key": secret}) == {("key", "other")}
    server.kill()
    killed = time.time()
    wait(lambda found: all(found[name]["failures"] > 3 for name in NAMES), 60)
    time.sleep(1.5)
    found = states(server.folder)
    for name in NAMES:
        assert found[name]["last"] < killed + SECONDS + 0.1, found[name]
        assert found[name]["error"].startswith("LeaseError: using key"), found[name]
        assert "\n" not in found[name]["error"]
    assert [found[name]["told"] for name in HOLDERS] == [1, 1]
    assert {name for name, each in found.items() if find_in_process(each["pid"], {"key": secret})} == set()
