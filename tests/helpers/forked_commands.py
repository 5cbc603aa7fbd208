"""Runs commands in forks of one process, each with the streams that a test names. Python ends in each as in any."""

import gc
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastrack._cli import app, main  # noqa: F401 - once for all forks
from helpers import local_machine, measuring

pytest.importorskip("fastrack_bench")

from fastrack_bench.prediction import gather
from fastrack_bench.prediction.profiles import Row, Stage
from helpers.commands import invoke
from helpers.every_command import machine
from helpers.foundry.machine import Machine
from helpers.profiles import GRID

STREAMS = {"stdout": 1, "stderr": 2}
FULL, CLOSED = "/dev/full", "a pipe without a reader"
_LONGEST = 140  # seconds of a command: a test runs two, and the answer to one that it stopped would be the next one's


@contextmanager
def running():
    """Yield a function that runs the words of a command in a folder, and returns its status.

    `stdout` and `stderr` are paths of files, or `FULL` or `CLOSED`; without a buffer they are as of ``python -u``.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "helpers.forked_commands"]
    with subprocess.Popen(line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(words, folder, *, has_buffer=True, **streams):
            request = {"words": words, "folder": str(folder), "has_buffer": has_buffer, **streams}
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            return json.loads(server.stdout.readline())

        yield run
        server.stdin.close()


def become(words, folder, *, has_buffer, **streams):
    """Have this process be one that was started for a command, with these streams."""
    os.chdir(folder)
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    for name, target in streams.items():
        if target == CLOSED:
            reading, writing = os.pipe()
            os.close(reading)
        else:
            writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(writing, STREAMS[name])
        os.close(writing)
        raw = io.FileIO(STREAMS[name], "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw) if has_buffer else raw,
            errors="strict" if name == "stdout" else "backslashreplace",
            line_buffering=name == "stderr",
            write_through=not has_buffer,
        )
        setattr(sys, name, stream)
    sys.argv = ["fastrack", *words]


def prepare(patch):
    """Have commands know a made-up machine and measured stages. Load what they need, once for all."""
    machine(patch)
    rows = [Row(Stage("to_device", 2), size, (1e-3, 1e-3, 1e-3)) for size in GRID]
    patch.setattr(gather, "measure_stages", lambda *_, **__: rows)
    measuring.shorten(patch)
    with tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        Path("x.txt").touch()
        for line in ("keygen x.key", "seal x.txt x -k x.key", "unseal x y -k x.key", "verify x -k x.key"):
            invoke(line.split())
        patch.chdir("/")


def prepare_tour(patch):
    """Have `tour run` visit desks of this process, on another made-up machine."""
    from helpers.tour_files import be_reached, clock, open_desk

    be_reached(patch, lambda given, url: open_desk(given["owner_key"].parent, {"1": "owner", "2": "a"}[url[-1]]))
    local_machine.replace(patch, Machine("snp", 0, is_small=True), clock)


def prepare_collectives(patch):
    """Have `bench --collectives` train models that are small."""
    from fastrack_bench import models

    tiny = (models.ResNetSpec("a ResNet", 2, 1, (4, 8)), models.TransformerSpec("a decoder", 1, 8, 1, 16, 2, 50, 16))
    patch.setattr(models, "SPECS", tiny)


def serve():
    prepare(patch := pytest.MonkeyPatch())
    gc.freeze()  # else each fork looks through all modules as it ends
    answers = os.fdopen(os.dup(1), "w")
    for request in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.alarm(_LONGEST)
            wanted = json.loads(request)
            if "--collectives" in wanted["words"]:
                prepare_collectives(patch)
            if wanted["words"][:2] == ["tour", "run"]:
                prepare_tour(patch)
            become(**wanted)
            main()
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    serve()
