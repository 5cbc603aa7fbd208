"""Check transfers with every framework that is there: what arrives is what was sent, a forgery is refused."""

import numpy as np

from bench.gpu import needs
from bench.gpu.channels import channel_on
from bench.gpu.gpu import WrongResultError
from bench.gpu.host_data import noise
from bench.gpu.plan import MIB, size_of
from fastrack import AuthenticationError, Key, seal, unseal
from fastrack._sealed.tensor import SealedTensor

SIZES = (1, 4096, MIB + 7, 64 * MIB + 7)
_ROWS, _WIDTH = 20_000, 100


def check(gpu, sizes=SIZES):
    """Return how many tensors moved as they should, by framework; raise at the first that did not."""
    key, found = Key.generate(), {}
    with channel_on(gpu.driver, key) as channel:
        for framework in _frameworks():
            for size in sizes:
                _move(gpu, channel, key, framework, size)
            _move_rows(gpu, channel, key, framework)
            found[framework] = len(sizes) + 1
    return found


def _frameworks():
    """Name the frameworks that have arrays on a GPU here."""
    if needs.lacks("torch") is None:
        import torch

        if torch.cuda.is_available():
            return ["cupy", "torch"]
    return ["cupy"]


def _move(gpu, channel, key, framework, size):
    plain = noise(size)
    sealed = seal(plain, key)
    arrived = channel.to_device(sealed, framework=framework)
    _expect(f"{framework}, {size_of(size)}, sealed", gpu.read(arrived), plain)
    moved = channel.to_device(plain, framework=framework)
    _expect(f"{framework}, {size_of(size)}, plain", gpu.read(moved), plain)
    back = unseal(channel.to_host(moved, key=key), key, framework="numpy")
    _expect(f"{framework}, {size_of(size)}, to_host", back, plain)
    later = channel.to_device(sealed, framework=framework, non_blocking=True)
    channel.synchronize()
    _expect(f"{framework}, {size_of(size)}, non_blocking", gpu.read(later), plain)
    forged = np.frombuffer(bytes(sealed.message), np.uint8).copy()
    forged[-1] ^= 1
    try:
        channel.to_device(SealedTensor(sealed.context, forged, sealed.key_id), framework=framework)
    except AuthenticationError:
        return
    raise WrongResultError(f"{framework}, {size_of(size)}: a forged tensor was opened")


def _move_rows(gpu, channel, key, framework):
    table = noise(_ROWS * _WIDTH).reshape(_ROWS, _WIDTH)
    rows = np.random.default_rng().integers(0, _ROWS, _ROWS // 7)
    moved = channel.to_device(seal(table, key)[rows], framework=framework)
    _expect(f"{framework}, rows", gpu.read(moved), table[rows])


def _expect(what, found, expected):
    if not np.array_equal(found, expected):
        raise WrongResultError(f"{what}: something else arrived than was sent")
