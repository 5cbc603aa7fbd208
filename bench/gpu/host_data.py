"""Random bytes on the host, and what is made of them before anything is measured."""

import numpy as np

from bench.gpu.gpu import WrongResultError

_PIECE = 16 << 20


def noise(size):
    """Fresh random bytes."""
    return np.random.default_rng().integers(0, 256, size, dtype=np.uint8)


def sets_of(size, plan, most=64):
    """How many buffers of that size it takes so that no cache holds them all."""
    return max(2, min(most, -(-plan.spread // max(size, 1))))


class Plains:
    """Some plain arrays of one size, in ordinary memory, out of one stock of random bytes."""

    def __init__(self, size, count, stock):
        room = stock.size - size
        self._arrays = [stock[start : start + size] for start in (room * n // max(count - 1, 1) for n in range(count))]

    def __len__(self):
        return len(self._arrays)

    def __getitem__(self, number):
        return self._arrays[number % len(self._arrays)]


def require_same(what, gpu, pointer, expected, stream):
    """Compare what is on the device with what has to be there.

    Raises
    ------
    WrongResultError
        If it is something else.
    """
    staged = gpu.host(min(_PIECE, max(expected.size, 1)))
    for start in range(0, expected.size, _PIECE):
        part = expected[start : start + _PIECE]
        here = staged[: part.size]
        gpu.download(here, pointer + start, stream)
        gpu.wait(stream)
        if not np.array_equal(here, part):
            raise WrongResultError(f"{what}: something else arrived than was sent, near byte {start}")
