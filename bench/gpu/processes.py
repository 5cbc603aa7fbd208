"""Processes of their own: run with a time limit, and ended with their children."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.machine import ROOT

_GRACE = 5  # seconds for a process to end its own children before it is killed


def run(command, seconds):
    """Return the exit status of a command, or None if it took too long, and its output.

    It gets a process group of its own, but stays in the session, so that it ends with the session.
    """
    # Last, because the kit has its own fastrack.
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        return None, _end(process)
    except BaseException:
        _end(process)
        raise
    return process.returncode, output


@contextmanager
def watch(gpu, path):
    """Have `nvidia-smi` write clock, power, temperature and reasons to throttle of a GPU each 100 ms of a block."""
    tool = shutil.which("nvidia-smi")
    if tool is None or gpu is None:
        yield
        return
    queried = "timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_throttle_reasons.active"
    command = [tool, f"--query-gpu={queried}", "--format=csv", "-lms", "100", "-i", gpu, "-f", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def find_tool(name, *places):
    """Return the path of a tool of the CUDA toolkit, or None. `places` are folders of it within a toolkit."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    paths = (Path(home) / folder / name for folder in places for home in homes if home)
    there = (str(path) for path in paths if path.is_file() and os.access(path, os.X_OK))
    return shutil.which(name) or next(there, None)


def exit_on_sigterm():
    """Turn SIGTERM into `SystemExit`, so that processes of `run` end with this one."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _end(process):
    """End the group: politely, as its first process may have groups of its own to end, then for good."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_GRACE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]
