"""The environment of tests and of the processes that they start, which is the same on every machine."""

import os
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

KEEP = "FASTRACK_TEST_KEEP"
"""Names what tests take from the machine besides: variables, and umask. `python -m matrix` sets it."""

COMMANDS_UMASK = "FASTRACK_TEST_UMASK"
"""An umask for commands and processes that tests start, and not for what tests make for them.

An owner whose umask is 000 has policies and folders that others may replace, which fastrack refuses. What fastrack
makes itself it has to take.
"""

# Where programs, libraries and packages are, and what is set for tests on purpose. All else belongs to the machine.
_PLACES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSAFEPATH")
_ON_PURPOSE = ("FASTRACK_", "PYTEST_", "COVERAGE_", "EMU_", "CUDA_", "CUPY_", "NVIDIA_")
_NUMERICS = ("OPENBLAS_", "NVPL_")  # set where a library is wrong without
_UMASK = 0o022


def take_over():
    """Give this process an environment of its own: variables, umask, time zone, and empty folders HOME and TMPDIR.

    Processes that pytest-xdist starts share the folders of the one that started them. Return a function that removes
    them.
    """
    kept = os.environ.get(KEEP, "").split()
    if "umask" not in kept:
        os.umask(_UMASK)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    inherited = ("HOME", "TMPDIR") if is_worker else ()
    for name in set(os.environ) - {*kept, *_PLACES, *inherited}:
        if not name.startswith((*_ON_PURPOSE, *_NUMERICS)) or name == "FASTRACK_KEY_FILE":
            del os.environ[name]
    for name in {"COLUMNS", "LINES"} - {*kept}:
        os.unsetenv(name)  # of GNU Readline, which os.environ does not see
    if COMMANDS_UMASK in os.environ:
        subprocess.Popen = _Popen
    os.environ.setdefault("LANG", "C.UTF-8")
    time.tzset()
    if is_worker:
        return lambda: None
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # results of tests stay to be looked at
    folder = Path(tempfile.mkdtemp(prefix="fastrack-tests-"))
    folder.chmod(0o755)  # tests become other users
    for name in ("HOME", "TMPDIR"):
        if name not in kept:
            (folder / name).mkdir()
            (folder / name).chmod(0o755)
            os.environ[name] = str(folder / name)
    (folder / "HOME" / ".cache").mkdir(mode=0o700, parents=True)  # other programs would make it with any umask
    tempfile.tempdir = None  # is to be looked up again
    return lambda: shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def umask_of_commands():
    """Have the umask that commands are to be run with, if there is one."""
    if COMMANDS_UMASK not in os.environ:
        yield
        return
    before = os.umask(int(os.environ[COMMANDS_UMASK], 8))
    try:
        yield
    finally:
        os.umask(before)


class _Popen(subprocess.Popen):
    def __init__(self, *arguments, umask=-1, **options):
        umask = int(os.environ[COMMANDS_UMASK], 8) if umask == -1 else umask
        super().__init__(*arguments, umask=umask, **options)
