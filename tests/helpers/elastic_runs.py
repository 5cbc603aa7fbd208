"""Program of a machine that trains in an elastic group: ``elastic_runs.py FOLDER``, under torchrun.

Ranks go on from the last sealed checkpoint, with whatever size the group has, until the file ``finish`` is there. What
they seal with goes to journals, by which a test sees that no key and nonce are used twice, over all that were killed.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import fastrack
from fastrack.distributed import SecureGroup, _link, _session, _transport
from fastrack.format import NONCE_SIZE
from helpers.nonces import RecordingEngine

BATCH, SAVE_EVERY = 12, 5


class Journal:
    """A file that has a line for each event of this process at once, as the process may be killed."""

    def __init__(self, folder):
        folder.mkdir(exist_ok=True)
        self.file = os.open(folder / f"{os.getpid()}-{time.time_ns()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def add(self, **event):
        os.write(self.file, json.dumps({"at": time.time(), **event}).encode() + b"\n")

    @property
    def uses(self):
        return self

    def __getitem__(self, material):
        key, whole = digest(material[:-NONCE_SIZE]), digest(material)
        return SimpleNamespace(append=lambda chunks: self.add(key=key, nonce=whole, chunks=[chunks.start, chunks.stop]))

    def install(self):
        init, find = _session.GroupSession.__init__, _link.get_engine

        def recorded(session, *arguments):
            init(session, *arguments)
            self.add(session=digest(bytes(session._secrets)))

        _session.GroupSession.__init__ = recorded
        _link.get_engine = lambda: RecordingEngine(find(), self)


class Wire:
    """Keeps the first large message to rank 0 of a group of four, and sends it again when it is told to."""

    def __init__(self, path):
        self.path = path
        self.has_replayed = self.is_replaying = False
        send = _transport.PointToPoint.send
        _transport.PointToPoint.send = lambda transport, data, target: send(
            transport, self.pass_on(transport, data, target), target
        )

    def pass_on(self, transport, data, target):
        if transport.size == 4 and target == 0 and data.numel() > 1000:
            if self.is_replaying:
                old = torch.frombuffer(bytearray(self.path.read_bytes()), dtype=torch.uint8)
                assert old.numel() == data.numel()
                assert not torch.equal(old, data)
                self.has_replayed, self.is_replaying = True, False
                return old
            if not self.path.exists():
                self.path.write_bytes(data.numpy().tobytes())
        return data


def digest(content):
    return hashlib.sha256(content).hexdigest()[:32]


def start():
    """Return a model and its optimizer before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def gradient_of(model, step, rank, size):
    """Return the gradient of a rank's part of the batch of a step, in one tensor."""
    batch = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))[rank::size]
    model.zero_grad()
    (model(batch).square().sum() / BATCH).backward()
    return torch.cat([weight.grad.view(-1) for weight in model.parameters()])


def apply(model, optimizer, gradient):
    """Take a step with a gradient of all ranks."""
    for weight, part in zip(model.parameters(), gradient.split([w.numel() for w in model.parameters()]), strict=True):
        weight.grad = part.view_as(weight).clone()
    optimizer.step()


def main():
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    journal = Journal(folder / "journals")
    journal.install()
    dist.init_process_group("gloo")
    wire = Wire(folder / f"wire-{dist.get_rank()}")
    with fastrack.PreemptionNotice(deadline=60) as notice, SecureGroup(folder / "run.grants", timeout=30) as group:
        train(folder, journal, notice, group)
        end_with_a_replay(group, wire, journal)


def train(folder, journal, notice, group):
    path, keys = folder / "checkpoint.safetensors", folder / "run.grants"
    model, optimizer = start()
    sizes = []  # of the group at each step
    if path.exists():
        state = fastrack.load_checkpoint(path, keys)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sizes = state["sizes"]
    journal.add(started=len(sizes), size=group.size, rank=group.rank)

    def save():
        if group.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sizes": sizes}
            fastrack.save_checkpoint(path, state, keys)
        group.broadcast(torch.zeros(1), 0)  # all wait for the file

    while True:
        if notice.is_due(group):
            save()
            journal.add(preempted=len(sizes))
            sys.exit(143)
        finish = torch.tensor([int((folder / "finish").exists())])
        if group.broadcast(finish, 0).item():
            break
        apply(model, optimizer, group.all_reduce(gradient_of(model, len(sizes), group.rank, group.size)))
        sizes.append(group.size)
        journal.add(step=len(sizes), size=group.size)
        if len(sizes) % SAVE_EVERY == 0:
            save()
        time.sleep(0.02)
    save()
    journal.add(finished=len(sizes))


def end_with_a_replay(group, wire, journal):
    """Have rank 1 send what it sent in an earlier group, and note what comes of it."""
    wire.is_replaying = group.rank == 1
    model, _ = start()
    try:
        group.all_reduce(gradient_of(model, 0, group.rank, group.size))
    except fastrack.AuthenticationError as error:
        journal.add(refused=str(error), replayed=wire.has_replayed)


if __name__ == "__main__":
    main()
