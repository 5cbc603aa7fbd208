"""Read candidates: folders under `candidates/` with other sources of the kernels, of the same names and arguments.

A folder holds only the files in which it differs from `kernels/`. Its optional ``candidate.py`` may define ``threads``
and ``shared``, the threads and the bytes of shared memory of a block that opens or seals, and ``extend_state``, a
function that appends to the bytes of a key's state what these kernels need besides.
"""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory

from fastrack.devices.kernels import find_kernels, read_kernels

FOLDER = Path(__file__).parent / "candidates"


def names():
    """Return the names of all candidates."""
    return sorted(path.name for path in FOLDER.glob("*/") if any(path.glob("*.cu*")))


@contextmanager
def sources(name):
    """Give the sources of a candidate, and its `extend_state` or None. They lie in a temporary folder."""
    with TemporaryDirectory(prefix="fastrack-") as folder:
        here = Path(folder)
        for path in [*find_kernels().folder.glob("*.cu*"), *(FOLDER / name).glob("*.cu*")]:
            shutil.copy(path, here / path.name)
        script = FOLDER / name / "candidate.py"
        options = run_path(str(script)) if script.is_file() else {}
        kernels = read_kernels(here)
        given = {"THREADS": options.get("threads"), "SHARED_BYTES": options.get("shared")}
        constants = {**kernels.constants, **{key: value for key, value in given.items() if value is not None}}
        yield replace(kernels, constants=constants), options.get("extend_state")
