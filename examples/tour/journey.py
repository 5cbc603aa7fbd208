"""Carry the model folder from visit to visit, without any key, as NVFlare or a person could."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from examples.tour import stand_ins
from examples.tour.parties import Holder, Owner, Party, all_at_once
from fastrack import tour
from fastrack.errors import AttestationError
from fastrack.grants import Verifier


@dataclass(frozen=True)
class Tour:
    """The parties of a tour, their addresses, and a folder to carry things in: plans, sealed data, sealed models."""

    folder: Path
    task: ModuleType
    order: Sequence[str]
    owner: Party
    owner_key: str
    holders: dict[str, Party]
    desks: dict[str, str]

    def visit(self, number: int) -> str:
        """Make a visit in a new process, as on another machine, and return a line on it."""
        name = self.order[number]
        folders = (self.folder / f"visit-{number}", self.folder / f"visit-{number + 1}")
        addresses = (self.desks["owner"], self.desks[name])
        visitor = Party(Visitor, f"{self.task.__name__}:train", self.owner_key)
        try:
            return visitor.call("visit", *folders, *addresses, self.folder / f"{name}.safetensors")
        finally:
            visitor.end()


@dataclass(frozen=True)
class Visitor:
    """A process on a confidential machine: `tour.visit` is all of it."""

    code: str
    owner_key: str

    def visit(self, before: Path, after: Path, owner_desk: str, holder_desk: str, data: Path) -> str:
        chain = tour.visit(
            before,
            after,
            self.code,
            owner=Verifier.parse(self.owner_key),
            owner_desk=tour.RemoteDesk(owner_desk),
            holder_desk=tour.RemoteDesk(holder_desk),
            data=[data],
            collect=stand_ins.MACHINE,  # leave it out on a confidential machine, and the clock
            clock=stand_ins.clock,
        )
        done = chain.visits[-1]
        return f"visit {done.number}, {done.holder}: version {done.after.number} of the model"


@contextmanager
def parties(task: ModuleType, order: Sequence[str], policies: dict[str, str]) -> Iterator[Tour]:
    """Start the owner and the holders of a tour, and have them agree on a plan."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        owner = Party(Owner, folder, task)
        holders = {
            name: Party(
                Holder, folder, name, task, folder / f"{name}.safetensors", policies.get(name, stand_ins.POLICY)
            )
            for name in sorted(set(order))
        }
        try:
            keys = dict(zip(holders, all_at_once(list(holders.values()), "public"), strict=True))
            owner_key = owner.call("public")
            plan, address = owner.call("plan", keys, order, folder / "visit-0")
            joined = all_at_once(list(holders.values()), "join", plan, owner_key)
            desks = {"owner": address, **dict(zip(holders, joined, strict=True))}
            yield Tour(folder, task, order, owner, owner_key, holders, desks)
        finally:
            for party in (owner, *holders.values()):
                party.end()


def whole(task: ModuleType, order: Sequence[str]) -> bool:
    """Make all visits. Return whether the model is that of training in one place, bit for bit."""
    with parties(task, order, {}) as given:
        for number in range(len(order)):
            print(given.visit(number), flush=True)
        state = given.owner.call("finish", given.folder / f"visit-{len(order)}", given.folder / "final")
        for name, holder in given.holders.items():
            print(f"{name} keeps:", *holder.call("receipts"), sep="\n  ")
    joined = train_joined(task, order)
    print(task.describe(state))
    same = is_same(state, joined)
    print("equal to training on the joined data, bit for bit" if same else "DIFFERENT from training on the joined data")
    return same


def refused(task: ModuleType, order: Sequence[str]) -> bool:
    """Have the second holder ask for a newer driver than any machine has. Return whether all see what they should."""
    newer = stand_ins.POLICY.replace("min_driver = '550'", "min_driver = '999'")
    with parties(task, order, {order[1]: newer}) as given:
        print(given.visit(0))
        try:
            given.visit(1)
        except AttestationError as error:
            print(f"the visitor sees: {error}")
        else:
            return False
        (reason,) = given.holders[order[1]].call("refusals")
        print(f"{order[1]} sees in its log: {reason}")
        for name, holder in given.holders.items():
            print(f"{name} keeps:", *holder.call("receipts") or ["nothing, as it granted nothing"], sep="\n  ")
        left = sorted(path.name for path in given.folder.glob("visit-*"))
        chain = tour.Chain.load(given.folder / left[-1] / "tour.chain", owner=Verifier.parse(given.owner_key))
        print(f"{', '.join(left)} are left; the chain has {len(chain.visits)} visit and no completion")
        state = given.owner.call("open", given.folder / "visit-1")
    same = is_same(state, train_joined(task, order[:1]))
    print(f"the owner opens the model of before: {'equal' if same else 'DIFFERENT'} to training on {order[0]}'s data")
    return same and left == ["visit-0", "visit-1"] and chain.completion is None


def train_joined(task: ModuleType, order: Sequence[str]) -> dict:
    """Train on the plain data of all holders, in the same order. Only an example can do so."""
    torch.set_num_threads(1)
    state = task.first_state()
    for name in order:
        state = task.train(state, iter([{key: torch.from_numpy(value) for key, value in task.data_of(name).items()}]))
    return state


def is_same(one: object, other: object) -> bool:
    """Return whether two states are equal, all their tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(is_same, one, other))
    return one == other
