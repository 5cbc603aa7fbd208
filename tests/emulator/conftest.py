import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 400

os.environ.setdefault("EMU_DEVICES", "2")


def start(*arguments, **environment):
    """Run a module on an emulator of its own."""
    paths = [str(ROOT), str(ROOT / "tests")]
    return subprocess.run(
        [sys.executable, "-m", "emulator", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        cwd=ROOT,
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def run_case():
    """Run one of cases.py with these environment variables, and return its result."""

    def run(name, **environment):
        done = start("emulator.cases", name, **environment)
        if done.returncode:
            raise RuntimeError(
                f"{name} ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-6000:]}"
            )
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def emulator():
    """Attach the emulator to this process, with two devices."""
    from emulator.attach import Emulator

    return Emulator()


@pytest.fixture(autouse=True)
def _reset(request):
    yield
    if "emulator" in request.fixturenames:
        request.getfixturevalue("emulator").reset()
