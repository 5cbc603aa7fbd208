"""One thread of the soak: what it takes its decisions from, what it counts, and how it checks a result."""

import random
import re
import threading
import time
import traceback
from collections import Counter
from contextlib import nullcontext

import numpy as np
import torch

import fastrack
from fastrack import Channel, Key
from fastrack._tensors import arrays

KEYS = [Key.from_bytes(bytes(range(32))), Key.from_bytes(bytes(range(16)))]
RING = fastrack.KeyRing(KEYS)
STRANGER = Key.from_bytes(bytes(range(100, 132)))
LARGEST = 24 << 20
EDGES = [0, 1, 15, 16383, 16384, 16385, 32768, 1 << 20, (1 << 21) + 1]
DTYPES = [np.uint8, np.int16, np.float32, np.int64, np.bool_, np.complex64]

NOISE = np.random.default_rng(0).integers(0, 256, LARGEST + (8 << 20), np.uint8)
NOISE.flags.writeable = False


def without_folders(text):
    """Names of files instead of their paths, which are those of a machine."""
    quoted = re.sub(r"""(['"])/[^'"\n]*/""", r"\1", text)
    return re.sub(r"""(?<![\w.])/(?:[^\s/'"<>]+/)+""", "", quoted)


class Violation(AssertionError):  # noqa: N818 - it is a finding
    """A breach of an invariant."""


class Worker(threading.Thread):
    """Does one job after the other until the time is over, the same ones for the same seed."""

    def __init__(self, number, seed, jobs, until, folder):
        super().__init__(name=f"soak-{number}", daemon=True)
        self.number = number
        self.seed = seed
        self.random = random.Random(seed)
        self.until = until
        self.folder = folder / f"{number}"
        self.folder.mkdir(exist_ok=True)
        self.job, self.since = "", time.monotonic()  # what it does, and from when on, for the watchdog
        self.jobs, self.injected, self.caught = Counter(), Counter(), Counter()
        self.transfers = self.bytes = self.wrong = 0
        self.violations = []
        self._choices = jobs

    def run(self):
        jobs, weights = list(self._choices), list(self._choices.values())
        while time.monotonic() < self.until and not self.violations:
            (job,) = self.random.choices(jobs, weights)
            self.job, self.since = job.__name__.replace("_", " "), time.monotonic()
            try:
                job(self)
                left = list(self.folder.iterdir())
                assert not left, f"left in its folder: {left}"
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is told
                text = without_folders("".join(traceback.format_exception(error)))
                self.violations.append(f"{self.name}, seed {self.seed}, after {sum(self.jobs.values())} jobs:\n{text}")
            self.jobs[self.job] += 1
        self.job = ""

    # What to move, and by which way.

    def size(self):
        """Bytes: an edge, or anything up to the largest, small ones more often."""
        if self.random.random() < 0.3:
            return self.random.choice(EDGES)
        return int(2 ** self.random.uniform(0, np.log2(LARGEST)))

    def array(self, size=None, rows=None):
        """An array that nobody else has, of any type, in one dimension or two."""
        dtype = np.dtype(self.random.choice(DTYPES))
        size = self.size() if size is None else size
        start = self.random.randrange(NOISE.size - size)
        count = size // dtype.itemsize
        content = NOISE[start : start + count * dtype.itemsize]
        if dtype == np.bool_:
            content = content & 1
        array = content.view(dtype) if start % dtype.itemsize == 0 else content.copy().view(dtype)
        rows = rows or self.random.choice([None, None, 3, 7])
        return array[: count // rows * rows].reshape(rows, -1) if rows else array

    def key(self):
        return self.random.choice(KEYS)

    def sealed(self, size=None, **options):
        """A sealed tensor and what it says."""
        plain = self.array(size, **options)
        return fastrack.seal(plain, self.key(), name=f"t{self.random.randrange(100)}"), plain

    def way(self):
        """Return the provider of `to_device`, `to_host` and `synchronize`: the module, or a channel of its own."""
        if self.random.random() < 0.5:
            return nullcontext(fastrack)
        return Channel(threads=self.random.choice([None, 1, 2, 3]), keys=KEYS)

    def give(self, way, thing, **options):
        """Move something to the device and count it."""
        keys = {} if isinstance(way, Channel) and self.random.random() < 0.5 else {"keys": RING}
        moved = way.to_device(thing, **keys, **options)
        if options.get("non_blocking"):
            way.synchronize()
        return moved

    # What came of it.

    def check(self, found, plain, what="a transfer"):
        """Compare a result with what it must be, bit by bit."""
        found = found.numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
        self.transfers += 1
        self.bytes += plain.nbytes
        same = found.shape == plain.shape and found.dtype == plain.dtype
        if not same or not np.array_equal(arrays.bytes_of(found), arrays.bytes_of(plain)):
            self.wrong += 1
            raise Violation(f"{what} gave wrong bytes: {found.dtype} {found.shape} for {plain.dtype} {plain.shape}")

    def fault(self, kind, action, *errors):
        """Do what must fail in one of these ways. The error."""
        self.injected[kind] += 1
        try:
            action()
        except errors as error:
            self.caught[kind] += 1
            return error
        raise Violation(f"{kind}: nothing was raised")
