"""The golden files that a test is given."""

import subprocess
import sys
from fnmatch import fnmatchcase

import pytest
from golden_files import HERE, VERSIONS, Golden, environment


@pytest.fixture(params=[*VERSIONS, pytest.param("written now", marks=pytest.mark.nightly)])
def golden(request, tmp_path, newly_written):
    """Return the files of a version. That all of them are taken that the test names is checked when it ends."""
    source = HERE / request.param if request.param in VERSIONS else newly_written()
    found = Golden(source, tmp_path / "golden")
    names = found.list()
    yield found
    for pattern in request.function.opens:
        matching = {name for name in names if fnmatchcase(name, pattern)}
        assert matching, f"{pattern} is gone"
        assert matching <= found.taken


@pytest.fixture(scope="session")
def newly_written(tmp_path_factory):
    """Return a function that runs the script once, so that it works when the next version needs it."""
    target = tmp_path_factory.mktemp("golden") / "now"

    def write():
        if not target.exists():
            command = [sys.executable, HERE / "make_golden.py", target]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        return target

    return write
