"""A tour of three holders with Adam, its owner and holders as processes, and what their sites say in ``visit.toml``."""

import base64
import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import chain

import torch
from broker.conftest import find_port, make_certificate

import fastrack
from fastrack import tour
from fastrack.grants import Signer
from helpers import flare_desk, flare_training, made_up_machine
from helpers.flare_desk import TLS
from helpers.foundry.machine import policy
from helpers.tour_files import Served

HOLDERS = ("ada", "ben", "cleo")
SITES = {name: f"site-{number}" for number, name in enumerate(HOLDERS, 1)}
ORDER = HOLDERS * 2
MODEL = "model.safetensors"


@contextlib.contextmanager
def machine(folder):
    """Start the machine of all sites. Yield the environment of sites, and the roots of the machine."""
    served = Served(made_up_machine.__file__, log=folder / "machine.log")
    try:
        yield (
            {made_up_machine.PORT: str(served.port), flare_training.FAULT: str(folder / "fault")},
            served.lines()[0]["roots"],
        )
    finally:
        served.kill()


class Tour:
    """A tour in a folder: ``v0`` is where it starts, ``end`` where NVFlare writes it, ``final`` where itits owner."""

    def __init__(self, folder, roots):
        self.folder, self.roots = folder, roots
        make_certificate(folder)
        self.key = fastrack.Key.generate()
        self.key.save(folder / "owner.key")
        self.signers = {name: Signer.generate() for name in ("owner", *HOLDERS)}
        for name, signer in self.signers.items():
            signer.save(folder / f"{name}.signer")
            signer.verifier.save(folder / f"{name}.signer.pub")
        self.owner = self.signers["owner"].verifier
        self.rows = {name: self._make_data(name) for name in HOLDERS}
        fastrack.save_checkpoint(folder / MODEL, flare_training.first_state(), key=self.key)
        fastrack.publish(folder / MODEL, signer=self.signers["owner"])
        tour.start(
            folder / MODEL, folder / "v0", flare_training.train, signer=self.signers["owner"], order=ORDER,
            holders={name: self.signers[name].verifier for name in HOLDERS}, lifetime=timedelta(hours=1), attempts=20,
        )  # fmt: skip
        self.ports = {name: find_port() for name in self.signers}
        self._served = {}

    def _make_data(self, name):
        rows = {"x": torch.randn(24, 16), "y": torch.randint(2, (24,))}
        key = fastrack.Key.generate()
        key.save(self.folder / f"{name}.key")
        fastrack.save_file(rows, self.folder / f"{name}.safetensors", key)
        return rows

    # Its desks.

    @contextlib.contextmanager
    def served(self):
        """Serve all desks, each by a process."""
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(self.serve, self.signers))
            yield self
        finally:
            for served in self._served.values():
                served.kill()

    def serve(self, name, gpus=0):
        """Serve a desk, anew if it is served. With a number of GPUs its policy asks for machines that have them."""
        if name in self._served:
            self._served[name].kill()
        (self.folder / f"{name}.toml").write_text(policy(gpus))
        given = self.folder / f"{name}.json"
        given.write_text(json.dumps({"name": name, "roots": self.roots, "port": self.ports[name]}))
        self._served[name] = Served(flare_desk.__file__, given, log=self.folder / f"{name}.log")

    def settings(self, holder):
        """Return the content of ``visit.toml`` at the site of a holder."""
        desk = "\n".join(f'{name} = "{self.folder / path}"' for name, path in TLS.items())
        values = {
            "owner": str(self.owner), "holder": holder, "train": "helpers.flare_training:train",
            "data": [str(self.folder / f"{holder}.safetensors")], "collect": "helpers.made_up_machine:collect",
        }  # fmt: skip
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        for table, name in (("owner_desk", "owner"), ("holder_desk", holder)):
            lines += [f'[{table}]\nurl = "https://127.0.0.1:{self.ports[name]}"\n{desk}']
        return "\n".join(lines)

    def visit(self, number):
        """Make a visit from folder ``v{number}`` to the next one, in this process."""
        name = ORDER[number]
        tour.visit(
            self.folder / f"v{number}", self.folder / f"v{number + 1}", flare_training.train, owner=self.owner,
            owner_desk=self.desk("owner"), holder_desk=self.desk(name), collect=made_up_machine.collect,
            data=[self.folder / f"{name}.safetensors"],
        )  # fmt: skip

    def desk(self, name):
        """Return a desk that is served."""
        paths = {member: self.folder / path for member, path in TLS.items()}
        return tour.RemoteDesk(f"https://127.0.0.1:{self.ports[name]}", **paths)

    # Its end.

    def finish(self):
        """Have the owner complete the tour, and return the state that it ended with."""
        final, desk = self.folder / "final", self.desk("owner")
        tour.finish(self.folder / "end", final, owner=self.owner, owner_desk=desk).require_complete()
        return fastrack.load_checkpoint(final / MODEL, keys=self.model_keys()[-1])

    def model_keys(self):
        """Return the key of each version of the model, from the chain of the tour that was finished."""
        whole = tour.Chain.load(self.folder / "final" / "tour.chain", owner=self.owner)
        begun = [replace(whole, visits=whole.visits[:number], completion=None) for number in range(len(ORDER) + 1)]
        return [tour.model_key(each, self.key) for each in begun]

    def joined(self):
        """Return the state that training on the joined data in one place ends with."""
        return flare_training.train(flare_training.first_state(), chain(self.rows[name] for name in ORDER))

    def secrets(self):
        """Return bytes that no carrier may have, by what they are: rows, weights, and keys as bytes and as text."""
        found = {f"a row of {name}": rows["x"].numpy().tobytes()[:64] for name, rows in self.rows.items()}
        found |= {f"a value of {name}": str(rows["x"][0, 0].item()).encode() for name, rows in self.rows.items()}
        for when, state in (("first", flare_training.first_state()), ("last", self.joined())):
            for name, tensor in state["model"].items():
                found[f"{when} {name}"] = tensor.numpy().tobytes()[:64]
        for path in [*self.folder.glob("*.key"), *self.folder.glob("*.signer")]:
            if path.name != "tls.key":
                found[f"the text of {path.name}"] = re.search(rb"fastrack-\w+-1:\S+", path.read_bytes())[0][-40:]
        for key in self.model_keys():
            material = bytes(key.material())
            found |= {f"key {key.id}": material, f"key {key.id} in hexadecimal": material.hex().encode()}
            found[f"key {key.id} in base64"] = base64.b64encode(material)[:40]
        return found
