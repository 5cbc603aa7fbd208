"""fastrack itself, by its file functions.

Features: docs/format.md and docs/threat-model.md, and the tests that every sentence of those has.
"""

import os
from unittest import mock

import numpy as np

from bench.peers.peer import Features, Peer


class Fastrack(Peer):
    """Into fresh memory."""

    name, package, is_synced = "fastrack", "fastrack", True
    settings = "save_file, which syncs the file to disk; load_file and to_device, all threads"
    features = Features(
        "rows", "refused", "yes", "yes", "yes; not yet run on one", "safetensors and any Cobblestone", "authenticated"
    )

    def __init__(self):
        import fastrack

        self._fastrack, self._key = fastrack, fastrack.Key.generate()

    def seal(self, arrays, path):
        self._fastrack.save_file(arrays, path, key=self._key)

    def open(self, path):
        with self._fastrack.load_file(path) as file:
            return self._fastrack.to_device(dict(file), keys=self._key, framework="torch")


class FastrackUnsynced(Fastrack):
    """`save_file` without the sync to disk, which the others leave out."""

    name, is_synced = "fastrack, not synced", False
    settings = "as fastrack, with os.fsync doing nothing: for the comparison, not for use"

    def seal(self, arrays, path):
        with mock.patch.object(os, "fsync"):
            super().seal(arrays, path)


class FastrackInto(Fastrack):
    """Into memory that is there already."""

    name, is_fresh = "fastrack, out=", False
    settings = "as fastrack, with to_device(out=) into arrays that were filled before"
    _out = None

    def seal(self, arrays, path):
        super().seal(arrays, path)
        if self._out is None:
            self._out = {name: np.ones_like(array) for name, array in arrays.items()}

    def open(self, path):
        with self._fastrack.load_file(path) as file:
            sealed = {name: file[name] for name in self._out}
            return self._fastrack.to_device(sealed, keys=self._key, out=self._out)
