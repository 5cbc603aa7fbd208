"""As much of the module `cupy` as fastrack and its suite for GPUs use, over host memory. Everything happens at once.

What is no plain integer where CUDA wants one is refused, as CuPy would.
"""

import ctypes
import itertools
import sys
import time
import types

import numpy as np

from helpers import stub_cuda
from helpers.stub_cuda import StubCuda

_PLACE = 256


class CudaError(RuntimeError):
    status = 999


def install(monkeypatch):
    """Have a fresh module imported, with one GPU of four multiprocessors, and libcuda with it.

    Its `violations` are what no program may do.
    """
    runtime = _Runtime()
    module = types.ModuleType("cupy")
    module.violations = runtime.violations
    module.libcuda = stub = StubCuda(runtime)
    stub.violations = runtime.violations
    stub.happened = lambda event: runtime.times.update({event: time.perf_counter()})
    module.ndarray = _Array
    module.empty = lambda shape, dtype: _Array(runtime, shape, dtype)
    module.ascontiguousarray = lambda array: array
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    module.get_default_memory_pool = module.get_default_pinned_memory_pool = lambda: pool
    module.RawModule = lambda *, code, options, backend: types.SimpleNamespace(
        get_function=lambda name: _Kernel(stub, name)
    )
    module.cuda = types.SimpleNamespace(
        runtime=runtime,
        driver=types.SimpleNamespace(CUDADriverError=CudaError),
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
        Device=_Device,
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    stub_cuda.install(monkeypatch, stub)
    return module


class _Runtime:
    """`cupy.cuda.runtime`, by CUDA's names."""

    CUDARuntimeError = CudaError

    def __init__(self):
        self.violations = []
        self.blocks, self.times = {}, {}
        self._numbers = itertools.count(1)
        properties = {"name": b"NVIDIA Host Memory", "totalGlobalMem": 1 << 30, "major": 9, "minor": 0}
        answers = {
            "getDeviceCount": lambda: 1,
            "getDevice": lambda: 0,
            "setDevice": lambda index: None,
            "deviceGetAttribute": lambda number, index: {75: 9, 76: 0, 16: 4}[number],
            "getDeviceProperties": lambda index: {**properties, "l2CacheSize": 1 << 20},
            "driverGetVersion": lambda: 13000,
            "runtimeGetVersion": lambda: 13000,
            "memGetInfo": lambda: (1 << 29, 1 << 30),
            "deviceSynchronize": lambda: None,
            "malloc": self._allocate,
            "hostAlloc": lambda size, flags: self._allocate(size),
            "free": lambda place: self.blocks.pop(place, None),
            "freeHost": self.blocks.pop,
            "streamCreateWithPriority": lambda flags, priority: next(self._numbers),
            "streamDestroy": lambda stream: None,
            "eventCreateWithFlags": lambda flags: next(self._numbers),
            "eventDestroy": lambda event: None,
            "eventElapsedTime": lambda before, after: 1e3 * (self.times[after] - self.times[before]),
            "memcpyAsync": lambda target, source, size, kind, stream: ctypes.memmove(target, source, size),
        }
        for name, answer in answers.items():
            setattr(self, name, _strict(name, answer))

    def at(self, place, size):
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(place)) if size else np.empty(0, np.uint8)

    def _allocate(self, size):
        block = np.full(size + _PLACE, 0xA5, np.uint8)
        place = block.ctypes.data + -block.ctypes.data % _PLACE
        self.blocks[place] = block
        return place


def _strict(name, answer):
    def call(*arguments):
        assert all(type(argument) is int for argument in arguments), f"{name}{arguments}"
        return answer(*arguments)

    return call


class _Device:
    def __init__(self, index):
        self.id = index

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class _Array:
    def __init__(self, runtime, shape, dtype):
        self.dtype, self.shape, self.device = np.dtype(dtype), tuple(shape), _Device(0)
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape))
        self._block = np.full(self.nbytes + 1, 0xA5, np.uint8)
        self.data = types.SimpleNamespace(ptr=self._block.ctypes.data)
        self.flags = types.SimpleNamespace(c_contiguous=True)


class _Kernel:
    def __init__(self, libcuda, name):
        self.kernel = self
        self.ptr = len(libcuda.kernels) + 1
        libcuda.kernels[self.ptr] = name
        self.max_dynamic_shared_size_bytes = self.preferred_shared_memory_carveout = 0
