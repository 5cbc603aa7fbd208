"""Tours on made-up machines: a folder with keys, data, policy and plan, and the desks of it."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch

import fastrack
from fastrack import attest, tour
from fastrack.grants import Signer, Verifier
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

OFFSET = NOW - datetime.now(UTC)
START = torch.zeros(4)
TRAIN = "helpers.tour_files:train"


def clock():
    """Return the time that made-up evidence needs, which runs as fast as the real one."""
    return datetime.now(UTC) + OFFSET


def train(state, shards):
    """Add up a holder's data, so that the order of visits and each of them shows in the weights."""
    weights = state["model"]["w"]
    for shard in shards:
        weights = weights * 2 + shard["x"].sum(0)
    return {"model": {"w": weights}, "optimizer": {"step": state["optimizer"]["step"] + 1}}


class Tour:
    """A folder of a tour: ``v0`` with the model and the plan, files of all keys, and a shard of each holder."""

    def __init__(self, folder, order="ab", *, attempts=3, cpu="snp", gpus=0, train=TRAIN):
        self.folder, self.order, self.gpus = Path(folder), order, gpus
        self.machine = Machine(cpu, gpus, is_small=True)
        self.owner, self.key = Signer.generate(), fastrack.Key.generate()
        self.owner.save(self.folder / "owner.signer")
        self.owner.verifier.save(self.folder / "owner.signer.pub")
        self.key.save(self.folder / "model.key")
        (self.folder / "policy.toml").write_text(policy(gpus))
        self.holders = {name: self._make_holder(name) for name in sorted({*order})}
        model = self.folder / "model.safetensors"
        fastrack.save_checkpoint(model, {"model": {"w": START}, "optimizer": {"step": 0}}, key=self.key)
        fastrack.publish(model, signer=self.owner)
        self.plan = tour.start(
            model,
            self.folder / "v0",
            train,
            signer=self.owner,
            holders={name: signer.verifier for name, signer in self.holders.items()},
            order=order,
            lifetime=timedelta(hours=1),
            attempts=attempts,
            clock=clock,
        )

    def _make_holder(self, name):
        signer, key = Signer.generate(), fastrack.Key.generate()
        signer.save(self.folder / f"{name}.signer")
        signer.verifier.save(self.folder / f"{name}.signer.pub")
        key.save(self.folder / f"{name}.key")
        shard = {"x": np.full((2, 4), ord(name), np.float32)}
        fastrack.save_file(shard, self.data(name), key)
        return signer

    def data(self, name):
        return self.folder / f"{name}.safetensors"

    def desk(self, name):
        return open_desk(self.folder, name)

    def visit(self, source, out, *, owner_desk=None, holder_desk=None, **options):
        """Make the next visit from one folder to another, at desks of this process unless others are given."""
        folder = self.folder / source
        done = len(tour.Chain.load(folder / "tour.chain", owner=self.owner.verifier).visits)
        name = self.plan.order[done]
        return tour.visit(
            folder,
            self.folder / out,
            train,
            owner=self.owner.verifier,
            owner_desk=owner_desk or self.desk("owner"),
            holder_desk=holder_desk or self.desk(name),
            data=[self.data(name)],
            collect=self.machine,
            clock=clock,
            **options,
        )

    def expected(self):
        """Return the weights after all visits."""
        state = {"model": {"w": START}, "optimizer": {"step": 0}}
        for name in self.order:
            state = train(state, [{"x": torch.full((2, 4), float(ord(name)))}])
        return state["model"]["w"]


def open_desk(folder, name, offset=OFFSET, trusted=None, lease=None):
    """Open the desk of a holder, or of the owner, from the files of a tour."""
    folder = Path(folder)
    owner = Verifier.load(folder / "owner.signer.pub")
    plan = tour.Chain.load(folder / "v0" / "tour.chain", owner=owner).plan
    terms = tour.Terms.from_toml(
        folder / "policy.toml", roots=trusted or roots(), clock=lambda: datetime.now(UTC) + offset
    )
    given = {"terms": terms, "signer": Signer.load(folder / f"{name}.signer")}
    ledger = tour.TourLedger(folder / f"{name}.db")
    if name == "owner":
        return tour.OwnerDesk(plan, fastrack.Key.load(folder / "model.key"), ledger=ledger, **given)
    with fastrack.load_file(folder / f"{name}.safetensors") as file:
        files = [file.file_id]
    key = fastrack.Key.load(folder / f"{name}.key")
    return tour.HolderDesk(plan, [key], files=files, ledger=ledger, lease=lease, **given)


def lines_of(made):
    """Return the configuration of `tour run` for a tour."""
    lines = [f'train = "{TRAIN}"', 'owner = "http://127.0.0.1:1"', 'owner_key = "owner.signer.pub"']
    for port, name in enumerate(made.holders, 2):
        lines += [f"[holders.{name}]", f'desk = "http://127.0.0.1:{port}"', f'data = ["{name}.safetensors"]']
    return lines


def trusted_roots():
    """Return the made-up roots as JSON can hold them."""
    return {name: sorted(found) for name, found in asdict(roots()).items() if name != "others"}


def read_roots(members):
    return attest.TrustedRoots(**{name: frozenset(found) for name, found in members.items()})


class Served:
    """A program of ``tests/tour`` in a process of its own, which listens; it can be killed and started again."""

    def __init__(self, program, *arguments, log, environment=()):
        self.command = [sys.executable, "-W", "error", Path(__file__).parents[1] / "tour" / program, *arguments]
        self.environment = {"PYTHONPATH": os.pathsep.join(sys.path), **dict(environment)}
        self.log = Path(log)
        self.start()

    def start(self, **more):
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env=os.environ | self.environment | more)
        while not (written := self.log.read_bytes()[before:]).endswith(b"\n"):
            assert self.process.poll() is None, written
            time.sleep(0.01)
        line = json.loads(written.splitlines()[0])
        assert line["event"] == "listening", line
        self.port = line["port"]

    def kill(self):
        self.process.kill()
        self.process.wait()

    def lines(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def be_reached(patch, open_by):
    """Have `tour run` reach a desk that a function returns, which is given the configuration and the desk's URL."""
    patch.setattr("fastrack._cli.tours.run._desk", open_by)
