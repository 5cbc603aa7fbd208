"""Kernels that may be faster than the tree's, kept until a measurement on a GPU decides.

A candidate is a folder whose `candidate.py` has `EDITS` of the sources in `kernels/`: pairs of a text that a source has
once and its replacement, by the name of the source. Names and arguments of the kernels stay.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

from fastrack._devices.cuda.nvrtc import Kernels, find_kernels, read_kernels

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Candidate:
    """Sources to compile."""

    kernels: Kernels  # the whole sources, with their own metadata

    @property
    def blocks(self):
        """Blocks that a multiprocessor runs at a time, if they fill its registers."""
        return 1024 // self.kernels.threads


def names():
    return sorted(path.parent.name for path in FOLDER.glob("*/candidate.py"))


def assemble(name, folder):
    """Copy the tree's sources into an empty folder, and apply a candidate's edits."""
    for path in sorted(find_kernels().folder.glob("*.cu*")):
        shutil.copyfile(path, folder / path.name)
    for source, edits in run_path(str(FOLDER / name / "candidate.py"))["EDITS"].items():
        apply_edits(folder / source, edits)
    return Candidate(read_kernels(folder))


def apply_edits(path, edits):
    """Replace texts in a file, given as pairs of a text that it has once and another."""
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"expected {old!r} once in {path.name}, got it {text.count(old)} times; adapt the edit")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
