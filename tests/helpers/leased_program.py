"""Programs that use keys on a lease in several processes, which write what they opened to a log.

``python leased_program.py FOLDER serve|train``. Each process writes a line of JSON at once, and then when it opened
something last; it ends when there is a file ``stop``.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


def main(folder, role):
    from fastrack import attest
    from fastrack.grants import Verifier
    from helpers import made_up_machine

    if role == "train":
        import torch  # noqa: F401 - which takes longer than a lease where others compute
    given = json.loads((folder / "program.json").read_text())
    log = Log(folder, role)
    options = {"owner": Verifier.load(folder / "owner.pub"), "collect": made_up_machine.collect}
    with attest.lease_keys(given["url"], ca=folder / "ca.pem", on_expiry=log.tell, **options) as keys:
        assert opened(folder, keys) is None  # all is imported, before threads fork
        threading.Thread(target=count, args=(log, keys), daemon=True).start()
        if role == "serve":
            serve(folder, keys, log)
        else:
            train(folder, keys, log)


def serve(folder, keys, log):
    """Open tensors in two threads, a forked child and a spawned one."""
    fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    children = [
        fork.Process(target=work, args=(folder, keys, "serve forked")),
        spawn.Process(target=work, args=(folder, keys.source, "serve spawned")),
    ]
    for child in children:
        child.start()
    second = threading.Thread(target=work, args=(folder, keys, "serve thread"))
    second.start()
    work(folder, keys, log)
    second.join()
    for child in children:
        child.join()


def train(folder, keys, log):
    """Read rows in workers of data loaders that are forked and spawned, epoch after epoch."""
    from torch.utils.data import DataLoader

    for context, source in (("fork", keys), ("spawn", keys.source)):
        options = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
        loader = DataLoader(Rows(folder, source, context), **options)
        threading.Thread(target=repeat, args=(loader, folder, f"train {context}"), daemon=True).start()
    work(folder, keys, log)


def repeat(loader, folder, name):
    log = Log(folder, name)
    with suppress(RuntimeError):  # its workers end with the program
        while not (folder / "stop").exists():
            for batch in loader:
                for ok, error in zip(batch["ok"], batch["error"], strict=True):
                    log.note(None if ok else error)
            time.sleep(0.2)


class Rows:
    """Rows that a worker opens, or why it could not."""

    def __init__(self, folder, source, context):
        self.folder, self.source, self.context = folder, source, context

    def __len__(self):
        return 40

    def __getitem__(self, index):
        error = opened(self.folder, self.source, index)
        Log(self.folder, f"train worker {self.context}").pid()
        return {"ok": error is None, "error": error or ""}


def work(folder, keys, log):
    """Open something again and again, and note when that went well last, and what went wrong first."""
    log = Log(folder, log) if isinstance(log, str) else log
    while not (folder / "stop").exists():
        log.note(opened(folder, keys))
        time.sleep(0.03)


def opened(folder, keys, row=None):
    import numpy as np

    import fastrack

    tensor = fastrack.load_file(folder / "data.safetensors")["x"]
    try:
        found = fastrack.to_device(tensor if row is None else tensor[row : row + 2], keys=keys, framework="numpy")
    except Exception as error:  # noqa: BLE001 - it is noted
        return f"{type(error).__name__}: {error}"
    assert np.all(found == 7.0)
    return None


def count(log, keys):
    while True:
        log.renewals = keys.renewals
        time.sleep(0.05)


class Log:
    """A file for one process: when it opened something last, and what went wrong after that."""

    def __init__(self, folder, name):
        self.path = folder / f"{name} {os.getpid()}.log"
        self.state = {"name": name, "pid": os.getpid(), "opened": 0, "last": 0.0, "failures": 0, "error": None}
        self.renewals, self.written = 0, 0.0

    def note(self, error):
        now = time.time()
        if error is None:
            self.state["opened"] += 1
            self.state["last"] = now
        else:
            self.state["failures"] += 1
            self.state["error"] = error
        if now - self.written > 0.2:
            self.write()

    def tell(self, error):
        self.state["told"] = self.state.get("told", 0) + 1

    def pid(self):
        if not self.path.exists():
            self.write()

    def write(self):
        self.written = time.time()
        temporary = self.path.with_suffix(".new")
        temporary.write_text(json.dumps(self.state | {"renewals": self.renewals}))
        temporary.rename(self.path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
