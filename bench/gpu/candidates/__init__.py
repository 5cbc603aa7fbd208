"""Kernels that may be faster than those of the tree, kept until a measurement on a GPU decides.

A candidate is a folder with the sources that differ from `kernels/`: kernels of the same names and arguments. Where
they read more than a state, its `candidate.py` has `extend_state(state: bytes) -> bytes`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastrack._devices.cuda.nvrtc import Kernels, find_kernels, read_kernels

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Candidate:
    """Sources to compile.

    name : of the folder
    kernels : the whole sources, with what they say about themselves
    extend_state : what to make of a state before it is uploaded
    """

    name: str
    kernels: Kernels
    extend_state: Callable[[bytes], bytes] = bytes

    @property
    def blocks(self):
        """Blocks that a multiprocessor runs at once, of those that fill its registers."""
        return 1024 // self.kernels.threads


def names():
    """Names of all candidates."""
    return sorted({path.parent.name for path in FOLDER.glob("*/*.cu*")})


def assemble(name, folder):
    """Copy the sources of the tree and, over them, those of a candidate into an empty folder."""
    for source in (find_kernels().folder, FOLDER / name):
        for path in sorted([*source.glob("*.cu"), *source.glob("*.cuh")]):
            shutil.copyfile(path, folder / path.name)
    return Candidate(name, read_kernels(folder), _extension(FOLDER / name / "candidate.py"))


def _extension(path):
    if not path.is_file():
        return bytes
    spec = importlib.util.spec_from_file_location(f"candidate_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.extend_state
