"""The owner and the holders, each a process that keeps its keys, and a pipe for what they would tell each other openly.

A party serves its desk over HTTP on a loopback address. Between machines give `tour.serve` certificates.
"""

import json
import logging
import multiprocessing
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fastrack
from examples.tour import stand_ins
from fastrack import tour
from fastrack.grants import Signer, Verifier

_FORK = multiprocessing.get_context("fork")


class Party:
    """A process with an object of its own, whose methods are called through a pipe.

    What goes through the pipe is public: keys that verify, plans, addresses, the report at the end.
    """

    def __init__(self, make: Callable[..., Any], *given: Any) -> None:
        self._pipe, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_answer, args=(theirs, make, given), daemon=True)
        self._process.start()

    def begin(self, method: str, *given: Any) -> None:
        self._pipe.send((method, given))

    def result(self) -> Any:
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def call(self, method: str, *given: Any) -> Any:
        self.begin(method, *given)
        return self.result()

    def end(self) -> None:
        self._process.terminate()
        self._process.join()


def _answer(pipe: Any, make: Callable[..., Any], given: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    party = make(*given)
    with suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            try:
                pipe.send(getattr(party, method)(*arguments))
            except Exception as error:  # noqa: BLE001 - the other end raises it
                pipe.send(error)


def all_at_once(parties: Sequence[Party], method: str, *given: Any) -> list[Any]:
    """Call a method of several parties, which work at the same time."""
    for party in parties:
        party.begin(method, *given)
    return [party.result() for party in parties]


def _serve(desk: Any) -> str:
    """Serve a desk on any free port, and return its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    logging.getLogger("fastrack").propagate = False
    given = {"port": port, "insecure_loopback": True, "rate": 1e6, "burst": 1000}
    threading.Thread(target=tour.serve, args=(desk,), kwargs=given, daemon=True).start()
    for _ in range(400):
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
            return f"http://127.0.0.1:{port}"
        time.sleep(0.01)
    raise TimeoutError("the desk does not listen")


class Owner:
    """The owner of the model: it has the key of the model, and never the data."""

    def __init__(self, folder: Path, task: ModuleType) -> None:
        self.folder, self.task = folder, task
        self.signer, self.key = Signer.generate(name="owner"), fastrack.Key.generate()

    def public(self) -> str:
        return str(self.signer.verifier)

    def plan(self, holders: dict[str, str], order: Sequence[str], target: Path) -> tuple[bytes, str]:
        """Write the first folder. Return the plan, which holders decide on, and the address of the desk."""
        model = self.folder / "model.safetensors"
        fastrack.save_checkpoint(model, self.task.first_state(), key=self.key)
        fastrack.publish(model, signer=self.signer)
        plan = tour.start(
            model,
            target,
            self.task.train,
            signer=self.signer,
            holders={name: Verifier.parse(line) for name, line in holders.items()},
            order=order,
            lifetime=timedelta(hours=1),
            visit_limit=timedelta(minutes=5),
            attempts=2,
            clock=stand_ins.clock,
        )
        ledger = tour.TourLedger(self.folder / "owner.db")
        self.desk = tour.OwnerDesk(plan, self.key, terms=stand_ins.terms(), signer=self.signer, ledger=ledger)
        return plan.envelope, _serve(self.desk)

    def finish(self, folder: Path, target: Path) -> dict[str, Any]:
        """Complete the tour, and return the state of the model."""
        tour.finish(folder, target, owner=self.signer.verifier, owner_desk=self.desk).require_complete()
        return self.open(target)

    def open(self, folder: Path) -> dict[str, Any]:
        """Return the state of the model in a folder of the tour."""
        chain = tour.Chain.load(folder / "tour.chain", owner=self.signer.verifier)
        return fastrack.load_checkpoint(folder / "model.safetensors", keys=tour.model_key(chain, self.key))


class Holder:
    """A holder of data: it seals them, and has their keys."""

    def __init__(self, folder: Path, name: str, task: ModuleType, sealed: Path, policy: str) -> None:
        self.folder, self.name, self.task, self.policy = folder, name, task, policy
        self.signer, self.key = Signer.generate(name=name), fastrack.Key.generate()
        fastrack.save_file(task.data_of(name), sealed, self.key)
        with fastrack.load_file(sealed) as file:
            self.file_id = file.file_id

    def public(self) -> str:
        return str(self.signer.verifier)

    def join(self, envelope: bytes, owner: str) -> str:
        """Accept a plan, whose code this holder has read, and return the address of its desk."""
        plan = tour.Plan.from_bytes(envelope, signer=Verifier.parse(owner))
        if plan.code != tour.code_digest(self.task.train) or plan.attempts > 2 or plan.order.count(self.name) > 2:
            raise ValueError(f"{self.name} does not accept this plan")
        self.path = self.folder / f"{self.name}.db"
        self.desk = tour.HolderDesk(
            plan,
            [self.key],
            files=[self.file_id],
            terms=stand_ins.terms(self.policy),
            signer=self.signer,
            ledger=tour.TourLedger(self.path),
        )
        return _serve(self.desk)

    def receipts(self) -> list[str]:
        """Return what this holder can prove, without anyone else."""
        return [
            "a consent without a receipt"
            if receipt is None
            else f"a receipt: {receipt.chunks} chunks opened, {receipt.scrubbed} bytes overwritten"
            for _, receipt in self.desk.receipts()
        ]

    def refusals(self) -> list[str]:
        """Return the reasons in the log, which visitors do not get to know."""
        with sqlite3.connect(self.path) as database:
            rows = database.execute("SELECT details FROM log WHERE event = 'refused'").fetchall()
        return [json.loads(details)["reason"] for (details,) in rows]
