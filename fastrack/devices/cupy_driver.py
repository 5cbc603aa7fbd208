"""`Driver` by way of CuPy: raw CUDA calls, and kernels that are compiled when a device is opened."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from fastrack import arrays, dtypes
from fastrack.aead import Bytes
from fastrack.arrays import Framework
from fastrack.devices.driver import View
from fastrack.devices.kernels import KERNELS, Kernels, find_kernels
from fastrack.errors import DeviceError

__all__ = ["CupyDriver"]

_OLDEST = (8, 0)  # compute capability: shared memory enough for the kernels, and reductions over a warp
_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16  # as cudaDeviceGetAttribute counts them
_PORTABLE = 1  # cudaHostAllocPortable: page-locked for every device
_TO_DEVICE, _TO_HOST = 1, 2  # cudaMemcpyKind
_NON_BLOCKING = 1  # cudaStreamNonBlocking: does not wait for the default stream
_TIMING, _NO_TIMING = 0, 2  # cudaEventDefault, cudaEventDisableTiming
_LOWEST, _HIGHEST = 0, -5  # stream priorities; out of range they are clamped
_NOT_READY, _NO_MEMORY, _OLD_DRIVER, _NO_DEVICE = 600, 2, 35, 100  # cudaError

_INSTEAD = "or use device='cpu'"
_INSTALL = f"pip install 'fastrack[cu13]', or 'fastrack[cu12]' where the driver is for CUDA 12, {_INSTEAD}"


class CupyDriver:
    """`Driver` for one GPU.

    Parameters
    ----------
    index : int
        Its number, as CUDA counts.

    Raises
    ------
    DeviceError
        If it cannot be used; says what is missing.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._torch_is_usable = False  # as far as is known
        self._cupy = _import_cupy(self.name)
        self._runtime = self._cupy.cuda.runtime
        self._errors = (self._runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        self._calls = _Calls(self.name, index, self._runtime, (*self._errors, self._cupy.cuda.memory.OutOfMemoryError))
        self._require_device()
        with self._current():
            self.multiprocessors = int(self._runtime.deviceGetAttribute(_MULTIPROCESSORS, index))
        sources = find_kernels()
        self.state = sources.state
        self._threads = sources.threads
        with self._current():
            self._kernels = self._compile(sources)

    # Memory, streams and events.

    def adopt(self) -> None:
        self._runtime.setDevice(self._index)

    def host(self, size: int) -> Bytes:
        with self._current():
            pointer = self._runtime.hostAlloc(size, _PORTABLE)
        # What keeps the memory is the ctypes array at the root of all views of it.
        memory = (ctypes.c_uint8 * size).from_address(pointer)
        self._when_dropped(memory, self._runtime.freeHost, pointer)
        return np.frombuffer(memoryview(memory), np.uint8)

    def memory(self, size: int) -> _Handle:
        with self._current():
            return self._handle(self._runtime.malloc(size), self._runtime.free)

    def stream(self, *, urgent: bool) -> _Handle:
        with self._current():
            stream = self._runtime.streamCreateWithPriority(_NON_BLOCKING, _HIGHEST if urgent else _LOWEST)
        return self._handle(stream, self._runtime.streamDestroy)

    def event(self) -> _Handle:
        with self._current():
            return self._handle(self._runtime.eventCreateWithFlags(_NO_TIMING), self._runtime.eventDestroy)

    # What is put on streams.

    def upload(self, pointer: int, source: Bytes, stream: _Handle) -> None:
        with self._current():
            self._runtime.memcpyAsync(pointer, source.ctypes.data, source.size, _TO_DEVICE, stream.ptr)

    def download(self, target: Bytes, pointer: int, stream: _Handle) -> None:
        with self._current():
            self._runtime.memcpyAsync(target.ctypes.data, pointer, target.size, _TO_HOST, stream.ptr)

    def fill(self, pointer: int, value: int, size: int, stream: _Handle) -> None:
        with self._current():
            self._runtime.memsetAsync(pointer, value, size, stream.ptr)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[int], stream: _Handle) -> None:
        function, shared = self._kernels[kernel]
        with self._current():
            # CuPy takes an integer of Python for one of 64 bits, and asks a stream for its `ptr`.
            function((blocks,), (self._threads,), tuple(arguments), shared_mem=shared, stream=stream)

    def record(self, event: _Handle, stream: _Handle) -> None:
        with self._current():
            self._runtime.eventRecord(event.ptr, stream.ptr)

    def wait(self, stream: _Handle, event: _Handle) -> None:
        with self._current():
            self._runtime.streamWaitEvent(stream.ptr, event.ptr)

    def done(self, event: _Handle) -> bool:
        with self._current():
            status = self._runtime.eventQuery(event.ptr)
            if status not in {0, _NOT_READY}:
                raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def synchronize(self, event: _Handle) -> None:
        with self._current():
            self._runtime.eventSynchronize(event.ptr)

    def stamp(self, stream: _Handle) -> _Handle:
        with self._current():
            event = self._handle(self._runtime.eventCreateWithFlags(_TIMING), self._runtime.eventDestroy)
            self._runtime.eventRecord(event.ptr, stream.ptr)
        return event

    def elapsed(self, start: _Handle, stop: _Handle) -> float:
        with self._current():
            return float(self._runtime.eventElapsedTime(start.ptr, stop.ptr)) / 1e3

    # Arrays.

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
        if framework == "torch":
            return self._empty_torch(dtype, shape)
        try:
            with self._current():
                return self._cupy.empty(tuple(shape), dtypes.to_numpy(dtype))
        except (TypeError, ValueError) as error:
            raise TypeError(f"CuPy keeps no arrays of {dtype}; ask for framework='torch', or seal it as U8") from error

    def view(self, array: Any, *, writable: bool) -> View:
        framework = arrays.framework_of(array)
        if framework == "torch":
            return self._view_torch(array, writable=writable)
        if framework != "cupy" or array.device.id != self._index:
            where = "in host memory" if framework == "numpy" else f"on {getattr(array, 'device', 'no device')}"
            raise TypeError(f"expected an array on {self.name}, not a {type(array).__name__} {where}")
        if writable and not array.flags.c_contiguous:
            raise ValueError("an array to be filled must be contiguous; fill a fresh one")
        with self._current():
            flat = self._cupy.ascontiguousarray(array)
            stream = self._cupy.cuda.get_current_stream()
            return View(flat.data.ptr, flat.nbytes, _Handle(stream.ptr), (flat, stream))

    def _empty_torch(self, dtype: str, shape: Sequence[int]) -> Any:
        torch = self._torch
        wanted = dtypes.to_torch(dtype)
        try:
            return torch.empty(dtypes.torch_shape(dtype, shape), dtype=wanted, device=self.name)
        except torch.cuda.OutOfMemoryError as error:
            raise DeviceError(f"{self.name} has no memory left for the result: {error}") from error

    def _view_torch(self, tensor: Any, *, writable: bool) -> View:
        flat = arrays.flat_torch(tensor, self.name, writable=writable)
        stream = self._torch.cuda.current_stream(self._index)
        return View(flat.data_ptr(), flat.numel(), _Handle(stream.cuda_stream), (flat, stream))

    @property
    def _torch(self) -> Any:
        import torch

        if not (self._torch_is_usable or torch.cuda.is_available()):
            raise DeviceError(
                f"this torch ({torch.__version__}) cannot use {self.name}; install one that is built for its CUDA, "
                "ask for framework='cupy', or use device='cpu'"
            )
        self._torch_is_usable = True
        return torch

    # Opening.

    def _require_device(self) -> None:
        try:
            count = self._runtime.getDeviceCount()
        except self._errors as error:
            if error.status == _OLD_DRIVER:
                raise DeviceError(
                    f"{self.name} cannot be used: no NVIDIA driver, or one too old for this CuPy; "
                    f"install a new one, {_INSTEAD}"
                ) from None
            if error.status != _NO_DEVICE:
                raise DeviceError(
                    f"{self.name} cannot be used: {error}; see what the driver says, {_INSTEAD}"
                ) from error
            count = 0
        if not count:
            raise DeviceError(
                f"{self.name} cannot be used: CUDA finds no GPU on this machine; use another one, {_INSTEAD}"
            )
        if self._index >= count:
            have = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise DeviceError(f"no such device: {self.name!r}; this machine has {have}")
        with self._current():
            found = tuple(self._runtime.deviceGetAttribute(number, self._index) for number in (_MAJOR, _MINOR))
        if found < _OLDEST:
            raise DeviceError(
                f"{self.name} cannot be used: it has compute capability {found[0]}.{found[1]}, and the kernels need "
                f"{_OLDEST[0]}.{_OLDEST[1]} or more; use another GPU, {_INSTEAD}"
            )

    def _compile(self, sources: Kernels) -> dict[str, tuple[Any, int]]:
        """Each kernel, and the shared memory it takes. Compiled once; CuPy keeps the result on disk."""
        kernels = {}
        try:
            module = self._cupy.RawModule(code=sources.code, options=sources.options, backend="nvrtc")
            for name in KERNELS:
                kernel = module.get_function(name)
                kernel.max_dynamic_shared_size_bytes = shared = sources.shared(name)
                kernels[name] = (kernel.kernel, shared)
        except (*self._errors, DeviceError):
            raise
        except Exception as error:
            # Of several kinds: the compiler's own, and those for its library when that is missing.
            lines = "\n".join(str(error).splitlines()[:8])
            raise DeviceError(
                f"{self.name} cannot be used: its kernels do not compile; "
                f"if the compiler is missing, {_INSTALL}\n{lines}"
            ) from error
        return kernels

    # How calls are made.

    def _current(self) -> _Current:
        return _Current(self._calls)

    def _handle(self, number: int, destroy: Callable[[int], None]) -> _Handle:
        handle = _Handle(number)
        self._when_dropped(handle, destroy, number)
        return handle

    def _when_dropped(self, owner: Any, destroy: Callable[[int], None], number: int) -> None:
        weakref.finalize(owner, _destroy, self._runtime, self._index, destroy, number, os.getpid()).atexit = False


class _Handle:
    """A number that CUDA knows a thing by: a stream, an event, or an address."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @property
    def pointer(self) -> int:
        return self.ptr


@dataclass(frozen=True, slots=True)
class _Calls:
    """Which device calls are for, by what they are made, and how they fail."""

    name: str
    index: int
    runtime: Any
    failures: tuple[type[BaseException], ...]


class _Current:
    """Makes a device the current one for some calls, and says what CUDA says in the words of this package."""

    __slots__ = ("_before", "_calls")

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._before: int | None = None

    def __enter__(self) -> None:
        calls = self._calls
        try:
            before = calls.runtime.getDevice()
            if before != calls.index:
                calls.runtime.setDevice(calls.index)
                self._before = before
        except calls.failures as error:
            raise _told(calls.name, error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        calls = self._calls
        if self._before is not None:
            with suppress(*calls.failures):  # what failed before it is the one to tell
                calls.runtime.setDevice(self._before)
        if isinstance(error, calls.failures):
            raise _told(calls.name, error) from error


def _told(name: str, error: BaseException) -> DeviceError:
    status = getattr(error, "status", _NO_MEMORY)
    if status == _NO_MEMORY:
        return DeviceError(f"{name} has no memory left: {error}; free some, or move smaller tensors")
    return DeviceError(f"{name} failed: {error}")


def _destroy(runtime: Any, index: int, destroy: Callable[[int], None], number: int, process: int) -> None:
    """Give something back. A forked child has no say over what is its parent's."""
    if os.getpid() != process:
        return
    with suppress(RuntimeError):  # a device that failed takes nothing back
        before = runtime.getDevice()
        runtime.setDevice(index)
        try:
            destroy(number)
        finally:
            runtime.setDevice(before)


def _import_cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(f"{name} needs CuPy, which cannot be imported ({error}): {_INSTALL}") from error
    return cupy
