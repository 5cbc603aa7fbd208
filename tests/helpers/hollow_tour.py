"""A tour without keys, whose visits are quick: what NVFlare carries, and what sites do with it."""

import hashlib
import json
import os

from fastrack import RollbackError


def start(folder):
    folder.mkdir(parents=True)
    _write(folder, "model.safetensors", b"model 0")
    _write(folder, "model.safetensors.manifest", b"manifest")
    _write(folder, "plan", b"plan")
    _write(folder, "chain", json.dumps([_receipt(b"model 0", "owner")]).encode())
    return folder


def receipts(folder):
    return json.loads((folder / "chain").read_bytes())


def visit(folder, home):
    model, chain = (folder / "model.safetensors").read_bytes(), receipts(folder)
    if chain[-1]["model"] != hashlib.sha256(model).hexdigest():
        raise RollbackError("the model: expected that of the last receipt, got another. Get it again")
    model = b"model " + str(len(chain)).encode()
    _write(folder, "model.safetensors", model)
    _write(folder, "chain", json.dumps([*chain, _receipt(model, home.name)]).encode())


def fail(*_):
    patient, value = 17, 3.590417
    raise ValueError(f"patient {patient} has {value}")


def leave(*_):
    raise SystemExit(0)


def die(*_):
    os._exit(1)


def _receipt(model, site):
    return {"model": hashlib.sha256(model).hexdigest(), "process": os.getpid(), "site": site}


def _write(folder, name, content):
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(content)
