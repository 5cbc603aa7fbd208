"""A CUDA device whose arrays are NumPy's and torch's: what tests do on the host's device, they do on its streams."""

import ctypes
import time
from collections import deque
from functools import partial

import numpy as np
import pytest

from fastrack import Channel
from fastrack._devices.cpu import CpuDevice
from fastrack._devices.cuda import buffers, device
from fastrack._devices.cuda.driver import View
from fastrack._tensors import arrays, dtypes
from fastrack.format import CHUNK_SIZE
from helpers.fake_cuda import FakeDriver, Space

_USERS = 1 << 47  # where addresses of a process end


def cuda_channel(mode="confidential", *, threads=None, **options):
    """Return a channel to such a device."""
    return Channel._from_device(HostArrayDevice(HostArrayDriver(mode), threads=threads), threads=threads, **options)


def in_confidential_mode(*marks):
    """Return parameters of a fixture: makers of such channels. With "held" a copy that waits keeps others waiting."""
    held = pytest.param(partial(cuda_channel, "held"), id="held", marks=pytest.mark.nightly)
    return [pytest.param(cuda_channel, id="confidential", marks=marks), held]


class HostArrayDevice(device.CudaDevice):
    """`meddle` of a `Gate` keeps the caller's stream busy until that is opened. `begun` has all operations."""

    max_slab_size = 32 * CHUNK_SIZE
    first_slab_size = 8 * CHUNK_SIZE
    framework = CpuDevice.framework

    def __init__(self, driver, **options):
        super().__init__(driver, **options)
        self.driver = driver
        self.begun, self.made = [], []
        self.closed = False

    @property
    def meddle(self):
        raise AttributeError

    @meddle.setter
    def meddle(self, gate):
        self.driver.later(lambda: gate(gate._kind, None))

    def begin(self, messages, note=None):
        self.begun.append(operation := super().begin(messages, note))
        return operation

    def staging_buffer(self, size):
        self.made.append(buffer := super().staging_buffer(size))
        return buffer

    def settle(self):
        """Wait until nothing is at work any more, and verdicts are due without being asked for."""
        self.driver.finish()
        time.sleep(2 * buffers._READ_EVERY)

    def close(self):
        assert not self.closed
        self.closed = True
        super().close()
        self.driver.stop()
        assert self.driver.violations == []


class HostArrayDriver(FakeDriver):
    """A driver that keeps the memory of an array until its stream has come to the end of its use, as allocators do."""

    def __init__(self, mode):
        super().__init__(mode)
        self.space = _HostSpace(self.violations)
        self._freed = deque()

    def empty(self, dtype, shape, framework):
        self._enter("empty")
        return arrays.empty(dtypes.nbytes(dtype, tuple(shape)), dtype, shape, framework)[0]

    def view(self, array, *, writable):
        self._enter("view")
        while self._freed:
            self.later(partial(id, self._freed.popleft()))
        if writable:
            address, size, owner = arrays.writable_memory(array)
        else:
            owner = arrays.bytes_of(array)
            address, size = owner.__array_interface__["data"][0], owner.size
        return View(address, size, self.user, _Lent(owner, self._freed))


class _Lent:
    def __init__(self, owner, freed):
        self._owner, self._freed = owner, freed

    def __del__(self):
        self._freed.append(self._owner)  # no call of the driver: the garbage collector runs anywhere


class _HostSpace(Space):
    """Addresses of the device, and those of the process, for its arrays."""

    def __init__(self, violations):
        super().__init__(violations)
        self._next = _USERS

    def at(self, pointer, size):
        if pointer >= _USERS or not size:
            return super().at(pointer, size)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
