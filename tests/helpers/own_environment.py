"""The environment of tests and of the processes that they start, which is the same on every machine."""

import os
import shutil
import tempfile
import time
from pathlib import Path

KEEP = "FASTRACK_TEST_KEEP"
"""Names what tests take from the machine besides: variables, and umask. `python -m matrix` sets it."""

# Where programs, libraries and packages are, and what is set for tests on purpose. All else is of whoever runs them.
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
    os.environ.setdefault("LANG", "C.UTF-8")
    time.tzset()
    if is_worker:
        return lambda: None
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # results of tests stay to be looked at
    folder = Path(tempfile.mkdtemp(prefix="fastrack-tests-"))
    folder.chmod(0o755)  # tests become other users
    for name in ("HOME", "TMPDIR"):
        if name not in kept:
            (folder / name).mkdir(mode=0o755)
            os.environ[name] = str(folder / name)
    tempfile.tempdir = None  # is to be looked up again
    return lambda: shutil.rmtree(folder, ignore_errors=True)
