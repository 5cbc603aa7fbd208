"""Kernels that may be faster than the tree's, kept until a measurement on a GPU decides.

A candidate is a folder whose `candidate.py` has `EDITS` of the sources in `kernels/`: pairs of a text that a source has
once and its replacement, by the name of the source. Names and arguments of the kernels stay. Sources that the
tree lacks lie in that folder. Where kernels read more than a state, `candidate.py` has
`extend_state(state: bytes) -> bytes`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from runpy import run_path

from fastrack._devices.cuda.nvrtc import Kernels, find_kernels, read_kernels

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Candidate:
    """Sources to compile."""

    kernels: Kernels  # the whole sources, with their own metadata
    extend_state: Callable[[bytes], bytes] = bytes  # applied to a state before its upload

    @property
    def blocks(self):
        """Blocks that a multiprocessor runs at a time, if they fill its registers."""
        return 1024 // self.kernels.threads


def names():
    return sorted({path.parent.name for pattern in ("*/*.cu*", "*/candidate.py") for path in FOLDER.glob(pattern)})


def assemble(name, folder):
    """Copy the tree's sources and, over them, a candidate's into an empty folder."""
    for source in (find_kernels().folder, FOLDER / name):
        for path in sorted([*source.glob("*.cu"), *source.glob("*.cuh")]):
            shutil.copyfile(path, folder / path.name)
    path = FOLDER / name / "candidate.py"
    options = run_path(str(path)) if path.is_file() else {}
    for source, edits in options.get("EDITS", {}).items():
        apply_edits(folder / source, edits)
    return Candidate(read_kernels(folder), options.get("extend_state", bytes))


def apply_edits(path, edits):
    """Replace texts in a file, given as pairs of a text that it has once and another."""
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"expected {old!r} once in {path.name}, got it {text.count(old)} times; adapt the edit")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
