"""Plain ``.npy`` files.

Features: the documentation of numpy.lib.format and numpy.load, and the trials of every run.
"""

import numpy as np

from bench.peers.peer import Features, Peer


class Numpy(Peer):
    """A folder with a file for each array."""

    name, package = "np.load", "numpy"
    settings = "np.save of each array into a file of its own; np.load"
    features = Features(
        "rows, with mmap_mode",
        "cut: refused; reordered: no",
        "not encrypted",
        "array by array",
        "not encrypted",
        "every .npy reader",
        "in the clear",
    )

    def seal(self, arrays, path):
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)

    def open(self, path):
        return {file.stem: np.load(file) for file in sorted(path.iterdir())}
