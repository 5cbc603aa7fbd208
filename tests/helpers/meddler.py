"""Another process that keeps changing memory while a test works on it."""

import mmap
import subprocess
import sys
from contextlib import contextmanager

import numpy as np

_MEDDLE = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
places = [int(place) for place in sys.argv[2:]]
print("ready", flush=True)
while True:
    for place in places:
        memory[place] ^= 1
"""


@contextmanager
def shared_with_a_meddler(path, content, places):
    """Share `content` with a process that flips a bit at each of `places`, over and over: an array of it."""
    path.write_bytes(content)
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    command = [sys.executable, "-c", _MEDDLE, str(path), *map(str, places)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as meddler:
        try:
            assert meddler.stdout.readline() == b"ready\n"
            yield memory
        finally:
            meddler.kill()
