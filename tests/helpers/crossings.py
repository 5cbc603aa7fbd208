"""Count what calls put on the bridge of a device that is in confidential mode: copies, launches, fills and bytes."""

from collections import Counter

import numpy as np

import fastrack
from fastrack import Channel, Key
from fastrack._devices.cuda import device
from helpers.cuda_rig import MULTIPROCESSORS
from helpers.fake_cuda import FakeArray, FakeDriver
from helpers.limits import limited

KEY = Key.from_bytes(bytes(range(32)))


class CountingDriver(FakeDriver):
    """A fake driver that adds up the bytes of its copies, too."""

    def __init__(self, mode="confidential"):
        super().__init__(mode, 0, MULTIPROCESSORS)
        self.moved = Counter()

    def upload(self, pointer, source, size, stream):
        self.moved["up"] += size
        super().upload(pointer, source, size, stream)

    def download(self, target, pointer, size, stream):
        self.moved["down"] += size
        super().download(target, pointer, size, stream)


def to_device(channel, driver, *shapes, rows=None, separately=False):
    """Return an action that moves sealed tensors of these shapes to the device, as a nest or without waiting."""
    sealed = [fastrack.seal(np.zeros(shape, np.uint8), KEY) for shape in shapes]
    sealed = sealed if rows is None else [each[rows] for each in sealed]
    targets = [FakeArray(driver, "u1", each.shape) for each in sealed]

    def move():
        if separately:
            for each, target in zip(sealed, targets, strict=True):
                channel.to_device(each, out=target, non_blocking=True)
            driver.finish()  # as if all were done before anybody asks
            channel.synchronize()
        elif len(sealed) == 1:
            channel.to_device(sealed[0], out=targets[0])
        else:
            channel.to_device(sealed, out=targets)

    return move


def to_host(channel, driver, size):
    """Return an action that seals an array of the device."""
    array = FakeArray(driver, "u1", (size,))
    return lambda: channel.to_host(array, key=KEY)


ACTIONS = {
    "to_device 4 KiB": lambda *at: to_device(*at, (4096,)),
    "to_device 1 MiB": lambda *at: to_device(*at, (1 << 20,)),
    "to_device 64 MiB": lambda *at: to_device(*at, (64 << 20,)),
    "nest, 200 x 8 KiB": lambda *at: to_device(*at, *[(8192,)] * 200),
    "batch of 32 rows": lambda *at: to_device(*at, *[(1000, 512)] * 2, rows=np.arange(0, 320, 10)),
    "16 calls of 4 KiB": lambda *at: to_device(*at, *[(4096,)] * 16, separately=True),
    "to_host 4 KiB": lambda *at: to_host(*at, 4096),
    "to_host 1 MiB": lambda *at: to_host(*at, 1 << 20),
}


def counted(name, mode="confidential"):
    """Return the calls of the driver, and the bytes that were moved, of the second of two equal calls."""
    driver = CountingDriver(mode)
    never = float("inf")  # else a verdict that is not asked for is due in time
    with limited(verdicts_read=never), Channel._from_device(device.CudaDevice(driver), keys=KEY) as channel:
        action = ACTIONS[name](channel, driver)
        action()
        driver.finish()
        calls, moved = driver.calls.copy(), driver.moved.copy()
        action()
        driver.finish()
        calls, moved = driver.calls - calls, driver.moved - moved
    driver.stop()
    assert driver.violations == []
    return calls, moved


def count(name, mode="confidential"):
    """Return copies in and out, launches, fills, and bytes in and out of a call whose memory is there already."""
    calls, moved = counted(name, mode)
    return calls["upload"], calls["download"], calls["launch"], calls["fill"], moved["up"], moved["down"]
