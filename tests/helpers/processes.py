"""Python programs in processes of their own, and limits of this one."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest


def run_python(code, *arguments, cwd=None, status=0, limit=60, **variables):
    """Run a program that ends so and complains of nothing, with these environment variables: what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning:typer"]  # an old typer imports what click deprecates
    command = [sys.executable, *warnings, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=limit, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    return done.stdout


@contextmanager
def limited(kind, value):
    """Bound a resource of this process: its files, or their size."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def room_for(descriptors):
    """Let this process open so many files more, at most."""
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    return limited(resource.RLIMIT_NOFILE, highest + 1 + descriptors)


@contextmanager
def largest_file(size):
    """Let no file of this process and of those that it starts grow beyond so many bytes, as a full disk would."""
    # Python would leave the first part of a module's bytecode, and load it the next time.
    with pytest.MonkeyPatch.context() as patch, limited(resource.RLIMIT_FSIZE, size):
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield
