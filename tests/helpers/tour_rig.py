"""A tour of three holders in one process, on a clock of its own, with machines of made-up vendors."""

from dataclasses import replace
from datetime import timedelta
from functools import cache

import numpy as np
import torch

import fastrack
from fastrack import tour
from fastrack.grants import Signer
from fastrack.tour._messages import pack, unpack
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

NAMES = ("ada", "ben", "cleo")


def train(state, shards):
    """Add up the rows of a holder: exact in any order, and another sum for other data."""
    total = state["model"]["total"]
    for shard in shards:
        total = total + shard["x"].sum(0)
    return {"model": {"total": total}, "optimizer": {"steps": state["optimizer"]["steps"] + 1}}


@cache
def machine():
    return Machine("snp", 0)


class Rig:
    """Owner, holders and their folders below `folder`. Folder v0 has the first model; `visit` makes the next one."""

    def __init__(self, folder, order=NAMES, *, train=train, attempts=3, owner=None, key=None, minutes=10, versions=1):
        self.folder, self.train, self.moment = folder, train, NOW
        self.owner, self.key = owner or Signer.generate(), key or fastrack.Key.generate()
        self.signers = {name: Signer.generate() for name in NAMES}
        self.data_keys = {name: fastrack.Key.generate() for name in NAMES}
        self.rows = {name: np.arange(8, dtype=np.float64).reshape(2, 4) + 100 * n for n, name in enumerate(NAMES)}
        for name in NAMES:
            fastrack.save_file({"x": self.rows[name]}, self.data(name), self.data_keys[name])
        state = {"model": {"total": torch.zeros(4, dtype=torch.float64)}, "optimizer": {"steps": 0}}
        fastrack.save_checkpoint(folder / "model.safetensors", state, key=self.key)
        for _ in range(versions):
            fastrack.publish(folder / "model.safetensors", signer=self.owner)
        used = {name: self.signers[name].verifier for name in NAMES if name in order}
        self.plan = tour.start(
            folder / "model.safetensors",
            folder / "v0",
            train,
            signer=self.owner,
            holders=used,
            order=order,
            lifetime=timedelta(hours=1),
            visit_limit=timedelta(minutes=minutes),
            attempts=attempts,
            clock=self.clock,
        )
        self.open_desks()

    def clock(self):
        self.moment += timedelta(milliseconds=1)
        return self.moment

    def open_desks(self, databases=None):
        """Open the desks, as after a restart. `databases` has other names of their files, by names of the desks."""
        terms = tour.Terms.from_toml(policy(0), roots=roots(), clock=self.clock)
        ledger = self.ledger("owner", databases)
        self.owner_desk = tour.OwnerDesk(self.plan, self.key, terms=terms, signer=self.owner, ledger=ledger)
        self.desks = {name: self.open_desk(name, terms, databases) for name in self.plan.holders}

    def open_desk(self, name, terms, databases=None):
        with fastrack.load_file(self.data(name)) as file:
            files = [file.file_id]
        ledger = self.ledger(name, databases)
        return tour.HolderDesk(
            self.plan, [self.data_keys[name]], files=files, terms=terms, signer=self.signers[name], ledger=ledger
        )

    def ledger(self, name, databases):
        return tour.TourLedger(self.folder / (databases or {}).get(name, f"{name}.db"))

    def data(self, name):
        return self.folder / f"{name}.safetensors"

    def visit(self, number, *, folder=None, out=None, holder=None, train=None, data=None, **changes):
        """Make visit `number`, from the folder of the visit before to the folder of the next one."""
        name = holder or self.plan.order[number]
        given = {"owner_desk": self.owner_desk, "holder_desk": self.desks[name], "collect": machine(), **changes}
        return tour.visit(
            folder or self.folder / f"v{number}",
            out or self.folder / f"v{number + 1}",
            train or self.train,
            owner=self.owner.verifier,
            data=data or [self.data(name)],
            clock=self.clock,
            **given,
        )

    def whole(self):
        """Make all visits, and return the chain."""
        for number in range(len(self.plan.order)):
            chain = self.visit(number)
        return chain

    def finish(self, chain, number=None):
        """Return the chain with the owner's completion, and the manifest that the owner signed."""
        folder = self.folder / f"v{len(self.plan.order) if number is None else number}"
        manifest = (folder / "model.safetensors.manifest").read_bytes()
        answer = unpack(
            "finished", self.owner_desk.ask("finish", pack("finish", chain=chain.to_bytes(), manifest=manifest))
        )
        return chain.extend(answer["completion"]), answer["manifest"]

    def finish_by_hand(self, chain):
        """Return a completion as the owner's key may sign it, whatever its desk would."""
        return tour.Completion(
            plan=self.plan.digest, head=chain.head, visits=len(chain.visits), model=chain.model, issued=self.moment
        ).sign(self.owner)

    def total(self, order=None):
        """Return what training in one place gives."""
        rows = [self.rows[name].sum(0) for name in order or self.plan.order]
        return torch.from_numpy(np.sum(rows, axis=0))


class Between:
    """A desk whose messages something changes on their way."""

    def __init__(self, desk, *, asked=None, answered=None):
        self.desk, self.asked, self.answered = desk, asked or (lambda body: body), answered or (lambda answer: None)

    def ask(self, step, body=b""):
        if step != "begin":
            return self.desk.ask(step, body)
        answer = self.desk.ask(step, self.asked(body))
        self.answered(answer)
        return answer


def delegate_with(patch, **changes):
    """Have delegations be signed with other members than their owner's desk gives them."""
    sign = tour.Delegation.sign
    patch.setattr(tour.Delegation, "sign", lambda self, signer: sign(replace(self, **changes), signer))
