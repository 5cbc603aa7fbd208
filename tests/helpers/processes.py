"""Python programs in processes of their own, and limits of this one."""

import os
import resource
import subprocess
import sys
from contextlib import contextmanager


def run_python(code, *arguments, cwd=None, status=0, limit=60, **variables):
    """Run a program that ends so and complains of nothing, with these environment variables: what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    warnings = ["-W", "error", "-W", "ignore::DeprecationWarning:typer"]  # an old typer imports what click deprecates
    command = [sys.executable, *warnings, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=limit, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    return done.stdout


@contextmanager
def room_for(descriptors):
    """Let this process open so many files more, at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + descriptors, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
