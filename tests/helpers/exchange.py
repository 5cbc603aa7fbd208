"""Files that this machine and a stranger seal for each other: the stranger runs `STRANGER` on a folder of them."""

import json

import numpy as np
import pytest

import fastrack

STRANGER = """
import json
import sys
from pathlib import Path

import numpy as np
import fastrack
from fastrack._crypto.engine import available_engines, get_engine, selected_engine

folder = Path(sys.argv[1])
key = fastrack.Key.load(folder / "key")
array = np.load(folder / "array.npy")
opened = fastrack.unseal(fastrack.load_file(folder / "sealed_here")["array"], key, framework="numpy")
assert (opened.dtype, opened.shape, opened.tobytes()) == (array.dtype, array.shape, array.tobytes())
fastrack.save_file({"array": array[::-1].copy()}, folder / "sealed_there", key=key)
bad = None
try:
    fastrack.verify_file(folder / "forged", keys=key)
except fastrack.AuthenticationError as error:
    bad = error.chunk
fault = selected_engine().fault
print(json.dumps({"engines": available_engines(), "engine": get_engine().name, "fault": fault, "bad": bad}))
"""


class Exchange:
    """A folder with a key, an array, a file with that sealed here, and the same with one bit of a chunk flipped."""

    def __init__(self, folder):
        self.folder = folder
        self._key = fastrack.Key.generate()
        self._key.save(folder / "key")
        self._array = np.random.default_rng(1).integers(0, 256, (700, 131), np.uint8)
        np.save(folder / "array.npy", self._array)
        fastrack.save_file({"array": self._array}, folder / "sealed_here", key=self._key)
        forged = bytearray((folder / "sealed_here").read_bytes())
        forged[-len(forged) // 3] ^= 1
        (folder / "forged").write_bytes(forged)
        with pytest.raises(fastrack.AuthenticationError) as caught:
            fastrack.verify_file(folder / "forged", keys=self._key)
        self._bad = caught.value.chunk

    def check(self, told, engines):
        """Check what a stranger with these engines told, and open what it sealed."""
        expected = {"engines": list(engines), "engine": engines[0], "fault": None, "bad": self._bad}
        assert json.loads(told) == expected
        file = fastrack.load_file(self.folder / "sealed_there")
        opened = fastrack.unseal(file["array"], self._key, framework="numpy")
        assert (opened.dtype, opened.shape) == (self._array.dtype, self._array.shape)
        assert opened.tobytes() == self._array[::-1].tobytes()
        (self.folder / "sealed_there").unlink()
