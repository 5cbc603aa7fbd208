"""`Order`: the samples of an epoch by their positions in it, without a table of samples."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from fastrack._sealed.indexing import Indices

_ROUNDS = 8  # of the Feistel network; four are the least that Luby and Rackoff prove (SIAM J. Comput. 17, 1988)
_SHARDS = -1  # in the place of a window's number, for the permutation of the shards

Words = npt.NDArray[np.uint64]


class Order:
    """Order of the samples of an epoch, which depends only on the sizes of the shards, seed, epoch and window.

    The shards are permuted. Each `window` of them in a row is a window, whose samples are permuted among each other.
    Both permutations are part of what a saved state means: other ones need another name for their states.
    """

    def __init__(self, ends: Indices, seed: int, epoch: int, window: int) -> None:
        self._sizes = np.diff(ends, prepend=0)
        self._shift = ends - self._sizes  # of each shard's first sample
        self._id = f"{seed} {epoch}"
        self._window = window
        self._shards = np.argsort(_mix(np.arange(ends.size, dtype=np.uint64) + self._words(_SHARDS)[0]), kind="stable")
        cumulative = np.cumsum(self._sizes[self._shards])
        self._ends = np.append(cumulative[window - 1 :: window], cumulative[-1])  # of the windows

    def samples(self, start: int, stop: int) -> Indices:
        """Return the numbers of the samples at positions from `start` to before `stop`."""
        parts = []
        while start < stop:
            window = int(np.searchsorted(self._ends, start, side="right"))
            end = min(stop, int(self._ends[window]))
            parts.append(self._in_window(window, start, end))
            start = end
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _in_window(self, window: int, start: int, stop: int) -> Indices:
        shards = self._shards[window * self._window : (window + 1) * self._window]
        ends = np.cumsum(self._sizes[shards])
        count = int(ends[-1])
        first = int(self._ends[window]) - count
        places = permute(np.arange(start - first, stop - first), count, self._words(window))
        which = np.searchsorted(ends, places, side="right")
        samples: Indices = places + (self._shift[shards] - ends + self._sizes[shards])[which]
        return samples

    def _words(self, window: int) -> Words:
        text = f"{self._id} {window}".encode()
        return np.frombuffer(hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest(), "<u8")


def permute(places: Indices, count: int, words: Words) -> Indices:
    """Return the images of `places` under a permutation of the numbers below `count`, one for each round's words.

    A Feistel network on pairs of digits permutes the next square. What falls between it and `count` is permuted again,
    until it falls below: the cycle through a number below `count` comes back to one (Black and Rogaway, CT-RSA 2002).
    """
    side = math.isqrt(count - 1) + 1  # so that at most 2 side - 1 numbers of the square are too many
    values = places.astype(np.uint64)
    outside: slice | npt.NDArray[np.intp] = slice(None)
    while True:
        left, right = np.divmod(values[outside], np.uint64(side))
        for word in words:
            # The remainder first: a sum beyond 64 bits would map two numbers to one.
            left, right = right, (left + _mix(right + word) % np.uint64(side)) % np.uint64(side)
        values[outside] = left * np.uint64(side) + right
        outside = np.flatnonzero(values >= np.uint64(count))
        if not outside.size:
            return values.astype(np.int64)


def _mix(values: Words) -> Words:
    """Return the values after the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
