"""Random bytes on the host, and buffers and tensors made of them."""

import numpy as np

from bench.gpu.gpu import WrongResultError
from bench.gpu.plan import MIB
from fastrack import Key, seal

_PIECE = 16 * MIB


def noise(size):
    return np.random.default_rng().integers(0, 256, size, dtype=np.uint8)


def sets_of(size, plan, most=64):
    """Count the buffers of a size that together exceed every cache."""
    return max(2, min(most, -(-plan.spread // max(size, 1))))


def plains_of(size, count, stock):
    """Return plain arrays of one size, in ordinary memory, out of one stock of random bytes."""
    room = stock.size - size
    return [stock[start : start + size] for start in (room * n // max(count - 1, 1) for n in range(count))]


class Pair:
    """Two sealed tensors of one size, to be moved in turn, so that no cache holds the next one."""

    def __init__(self, gpu, size):
        self.size, self.key, stock = size, Key.generate(256), noise(size + MIB)
        self.sealed = [seal(stock[start : start + size], self.key) for start in (0, MIB)]
        self.out = [gpu.array(size) for _ in self.sealed]

    def mover(self, channel):
        """Return a function that moves one of them by this channel, by its number."""
        return lambda n, **options: channel.to_device(self.sealed[n % 2], out=self.out[n % 2], **options)


def require_same(what, gpu, pointer, expected, stream):
    """Raise `WrongResultError` unless the device holds the expected bytes."""
    staged = gpu.driver.host(min(_PIECE, max(expected.size, 1)))
    for start in range(0, expected.size, _PIECE):
        part = expected[start : start + _PIECE]
        here = staged[: part.size]
        gpu.download(here, pointer + start, stream)
        gpu.wait(stream)
        if not np.array_equal(here, part):
            raise WrongResultError(f"{what}: something else arrived than was sent, near byte {start}")
