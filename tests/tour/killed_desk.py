"""Fork processes of the program fastrack on a made-up machine, each of which may kill itself at a durable write.

Each line of the input is a JSON object, and so is each answer. With "arguments" a process is forked, whose output goes
to the file "log", and whose id is the answer. Each durable write appends a letter to the file "writes": C for a COMMIT
of SQLite, s for an fsync, n for a new name. With "kill" the process ends itself by SIGKILL at the write of that number,
"before" or after it. With "wait" the exit status of a process is the answer, and null while it runs.

Forks share one made-up machine, whose vendors all of them trust, and import nothing again.
"""

import json
import os
import signal
import sqlite3
import sys
from datetime import timedelta
from pathlib import Path

import torch
from helpers import tour_files
from helpers.foundry.machine import Machine, roots

from fastrack import attest, tour
from fastrack._cli import app, tours
from fastrack._cli.tours import desks, plan, run
from fastrack._service import server
from fastrack.tour import _app

LOADED = (tours, server, _app, tour.visit, tour.finish, tour.serve, tour.HolderDesk, tour.OwnerDesk)
NAMES = {"fsync": "s", "rename": "n", "replace": "n", "link": "n"}


class Writes:
    """Counts durable writes, and ends the process at one of them."""

    def __init__(self, path, number, when):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.number, self.when, self.count = number, when, 0

    def do(self, letter, write):
        self.count += 1
        if self.count == self.number and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = write()
        os.write(self.file, letter.encode())
        if self.count == self.number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def watch(self):
        """Count the writes of this process from now on."""
        for name, letter in NAMES.items():
            setattr(os, name, self.watched(getattr(os, name), letter))
        outer = self

        class Connection(sqlite3.Connection):
            def execute(self, statement, *parameters):
                def write():
                    return sqlite3.Connection.execute(self, statement, *parameters)

                return outer.do("C", write) if statement == "COMMIT" else write()

        connect = sqlite3.connect
        sqlite3.connect = lambda *given, **options: connect(*given, **options, factory=Connection)

    def watched(self, function, letter):
        return lambda *given, **options: self.do(letter, lambda: function(*given, **options))


def run_forked(given):
    """Be the program fastrack, and return its exit status."""
    log = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    Writes(given["writes"], *(given.get("kill") or (0, ""))).watch()
    sys.argv = ["fastrack", *given["arguments"]]
    try:
        app.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def answer(given):
    if "wait" in given:
        pid, status = os.waitpid(given["wait"], 0 if given.get("block") else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = run_forked(given)
    except BaseException as error:  # noqa: BLE001 - there is no one else to tell
        sys.stderr.write(f"{error!r}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def main():
    torch.set_num_threads(1)  # a forked process has no threads of its parent
    machine = Machine("snp", 0, is_small=True)
    attest._verify_offer.VENDOR_ROOTS = roots()
    attest.collect_evidence = machine
    tour_files.OFFSET = timedelta(seconds=float(sys.argv[1]))
    for module in (plan, desks, run):
        module.read_clock = tour_files.clock
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
