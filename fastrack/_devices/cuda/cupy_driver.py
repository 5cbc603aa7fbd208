"""`Driver` on CuPy, which allocates memory and compiles kernels, and on libcuda, which runs lists of commands."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.captures import BesideCaptures
from fastrack._devices.cuda.commands import NAMES, Commands, Function
from fastrack._devices.cuda.driver import RECLAIMERS, CopySpeeds, PageLockedMemoryError, View
from fastrack._devices.cuda.host_memory import measure_copies
from fastrack._devices.cuda.native import STOPPED, Native, find_functions
from fastrack._devices.cuda.nvrtc import Kernels, compile_kernels, find_kernels, load_kernels
from fastrack._devices.nvml import absence, read_confidential
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework
from fastrack._util.fork import after_fork
from fastrack.errors import DeviceError

_MIN_COMPUTE_CAPABILITY = (8, 0)  # enough shared memory for the kernels, and reductions over a warp
_MAJOR, _MINOR, _MULTIPROCESSORS = 75, 76, 16  # cudaDeviceAttr
_PORTABLE = 1  # cudaHostAllocPortable: page-locked for every device
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_TIMED, _BLOCKING_SYNC = 0, 1 | 2  # cudaEventDefault; cudaEventBlockingSync | cudaEventDisableTiming
_LOWEST, _HIGHEST = 0, -5  # stream priorities, which CUDA clamps to its range
_NO_MEMORY, _OLD_DRIVER, _NO_DEVICE, _NOT_READY = 2, 35, 100, 802  # cudaError


_INSTEAD = "or use device='cpu'"
_INSTALL = f"pip install 'fastrack-io[cu13]', or 'fastrack-io[cu12]' where the driver is for CUDA 12, {_INSTEAD}"


class CupyDriver:
    """`Driver` for the GPU of CUDA's number `index`.

    Raise DeviceError if the GPU cannot be used; the message names the missing part.
    """

    def __init__(self, index: int) -> None:
        self.name = f"cuda:{index}"
        self.index = index
        self._torch_is_usable = False  # until checked
        try:
            import cupy
        except ImportError as error:
            if absent := absence():
                raise DeviceError(
                    f"{self.name} needs a GPU of NVIDIA, got {absent}: install one, {_INSTEAD}"
                ) from error
            raise DeviceError(f"{self.name} needs CuPy, which cannot be imported ({error}): {_INSTALL}") from error
        self._cupy: Any = cupy
        self.runtime = self._cupy.cuda.runtime
        self._errors = (self.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError)
        self.errors = (*self._errors, MemoryError)
        self._require_device()
        with _Current(self):
            self.multiprocessors = int(self.runtime.deviceGetAttribute(_MULTIPROCESSORS, index))
        sources = find_kernels()
        with _Current(self):
            self.functions: Mapping[str, Function]
            self._module, self.functions = self._compile(sources)
            if spilled := max(function.local for function in self.functions.values()):
                self.compiled_by += f"; it spills up to {spilled} bytes of a thread to memory that nothing wipes"
            self._native = self._open_native()
        # Where that is not known transfers are correct too: it decides which thread makes blocking calls.
        self.confidential = read_confidential().encrypts_copies
        self._dropped = _dropped.setdefault(index, deque())
        if self.confidential and index not in _copy_speeds:
            _copy_speeds[index] = measure_copies(self)
        self.copy_speeds = _copy_speeds.get(index)

    # Memory, streams and events.

    def host(self, size: int) -> Bytes:
        try:
            pointer = self._allocate(lambda: self.runtime.hostAlloc(size, _PORTABLE))
        except _NoMemoryError as error:  # CUDA's words are those for a full GPU
            raise PageLockedMemoryError(
                f"allocating page-locked memory for {self.name} failed: expected some of the host's, got none. Raise "
                "its limits (`ulimit -l`, the memory of the control group), or close channels"
            ) from error
        # The ctypes array is the base of all views, and therefore owns the memory.
        memory = (ctypes.c_uint8 * size).from_address(pointer)
        self._when_dropped(memory, self.runtime.freeHost, pointer)
        return np.frombuffer(memoryview(memory), np.uint8)

    def memory(self, size: int) -> _Handle:
        return self._handle(self._allocate(lambda: self.runtime.malloc(size)), self.runtime.free)

    def stream(self, *, high_priority: bool) -> _Handle:
        self.reclaim()
        with _Current(self):
            stream = self.runtime.streamCreateWithPriority(_NON_BLOCKING, _HIGHEST if high_priority else _LOWEST)
        return self._handle(stream, self.runtime.streamDestroy)

    def event(self, *, timed: bool = False) -> _Handle:
        with _Current(self):
            event = self.runtime.eventCreateWithFlags(_TIMED if timed else _BLOCKING_SYNC)
        return self._handle(event, self.runtime.eventDestroy)

    def reclaim(self) -> None:
        """Free memory, streams and events without references.

        Not done when the last reference is dropped: a free waits for the whole device, and the garbage collector may
        run on a thread that the device waits for.
        """
        for reclaim in RECLAIMERS:
            reclaim(self.index)
        if not self._dropped:
            return
        # A failed device frees nothing, and another thread may empty the list first.
        with suppress(DeviceError, IndexError), _Current(self):
            while True:
                destroy, number = self._dropped.popleft()
                destroy(number)

    # Lists of commands.

    def issue(self, commands: Commands, *, threads: int = 1, hold: bool = False) -> None:
        status, position = self._native.run(commands, threads=threads, hold=hold)
        if status == STOPPED:
            status, position = self._native.run(commands, threads=threads, start=position)
        if status:
            call = NAMES.get(commands.code[position], "a call") if position < len(commands.code) else "cuCtxPopCurrent"
            raise _device_error(self.name, self._cupy.cuda.driver.CUDADriverError(status), call)

    def done(self, event: _Handle) -> bool:
        commands = Commands()
        commands.poll(event, 0, stop=True)
        status, _ = self._native.run(commands, hold=True)
        if status not in {0, STOPPED}:
            raise _device_error(self.name, self._cupy.cuda.driver.CUDADriverError(status), "cuEventQuery")
        return status == 0

    def elapsed(self, start: _Handle, stop: _Handle) -> float:
        with _Current(self):
            return float(self.runtime.eventElapsedTime(start.ptr, stop.ptr)) / 1e3

    # Arrays.

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> Any:
        if framework == "torch":
            self._refuse_capture(self._torch.cuda.current_stream(self.index).cuda_stream)
            size, torch_dtype = dtypes.torch_shape(dtype, shape), dtypes.to_torch(dtype)
            return self._allocate(lambda: self._empty_torch(size, torch_dtype))
        with _Current(self):
            self._refuse_capture(self._cupy.cuda.get_current_stream().ptr)
        try:
            return self._allocate(lambda: self._cupy.empty(tuple(shape), dtypes.to_numpy(dtype)))
        except (TypeError, ValueError) as error:
            raise TypeError(f"CuPy keeps no arrays of {dtype}; ask for framework='torch', or seal it as U8") from error

    def view(self, array: Any, *, writable: bool) -> View:
        framework = arrays.framework_of(array)
        if framework == "torch" and str(array.device) != self.name:
            arrays.flat_torch(array, self.name)  # raises an error that describes the difference
        if framework == "torch":
            stream = self._torch.cuda.current_stream(self.index)
            self._refuse_capture(stream.cuda_stream)
            with BesideCaptures():  # a contiguous copy may take new memory
                flat = arrays.flat_torch(array, self.name, writable=writable)
            return View(flat.data_ptr(), flat.numel(), _Handle(stream.cuda_stream), (flat, stream))
        if framework != "cupy" or array.device.id != self.index:
            location = "in host memory" if framework == "numpy" else f"on {getattr(array, 'device', 'no device')}"
            raise TypeError(f"expected an array on {self.name}, got a {type(array).__name__} {location}")
        if writable and not array.flags.c_contiguous:
            raise ValueError("an array to be filled must be contiguous; fill a fresh one")
        with _Current(self):
            stream = self._cupy.cuda.get_current_stream()
            self._refuse_capture(stream.ptr)
            flat = self._cupy.ascontiguousarray(array)
            return View(flat.data.ptr, flat.nbytes, _Handle(stream.ptr), (flat, stream))

    def _refuse_capture(self, stream: int) -> None:
        """Raise DeviceError if a CUDA graph captures a stream, before any work is put on it.

        A replay of the graph would copy one message again, from memory that has been freed.
        """
        commands = Commands()
        status = commands.capturing(_Handle(stream))
        self.issue(commands, hold=True)
        if commands.code[status]:
            raise DeviceError(
                f"cannot move to {self.name} on a stream that is captured into a CUDA graph: every transfer has a key "
                "of its own and cannot be repeated. Move tensors before the capture begins, into the arrays it reads"
            )

    def _allocate(self, allocate: Callable[[], Any]) -> Any:
        """Allocate memory, and if there is none, try again after the frameworks have freed their pools."""
        self.reclaim()
        try:
            with _Current(self):
                return allocate()
        except _NoMemoryError:
            with BesideCaptures():
                for reclaim in RECLAIMERS:
                    reclaim(self.index, wait=True)
                self._cupy.get_default_memory_pool().free_all_blocks()
                self._cupy.get_default_pinned_memory_pool().free_all_blocks()
                torch = sys.modules.get("torch")
                if torch is not None and torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
        with _Current(self):
            return allocate()

    def _empty_torch(self, shape: Sequence[int], dtype: Any) -> Any:
        try:
            return self._torch.empty(shape, dtype=dtype, device=self.name)
        except self._torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

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
            count = self.runtime.getDeviceCount()
        except self._errors as error:
            if error.status == _OLD_DRIVER:
                raise DeviceError(
                    f"{self.name} cannot be used: no NVIDIA driver, or one too old for this CuPy; "
                    f"install a new one, {_INSTEAD}"
                ) from None
            if error.status == _NOT_READY:
                raise _device_error(self.name, error) from error
            if error.status != _NO_DEVICE:
                raise DeviceError(
                    f"{self.name} cannot be used: {error}; see what the driver says, {_INSTEAD}"
                ) from error
            count = 0
        if not count:
            raise DeviceError(
                f"{self.name} cannot be used: CUDA finds no GPU on this machine; use another one, {_INSTEAD}"
            )
        if self.index >= count:
            have = "only cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
            raise DeviceError(f"no such device: {self.name!r}; this machine has {have}")
        with _Current(self):
            major, minor = (self.runtime.deviceGetAttribute(number, self.index) for number in (_MAJOR, _MINOR))
        if (major, minor) < _MIN_COMPUTE_CAPABILITY:
            raise DeviceError(
                f"{self.name} cannot be used: it has compute capability {major}.{minor}, and the kernels need "
                f"{'.'.join(map(str, _MIN_COMPUTE_CAPABILITY))} or more; use another GPU, {_INSTEAD}"
            )

    def _compile(self, sources: Kernels) -> tuple[Any, dict[str, Function]]:
        major, minor = (self.runtime.deviceGetAttribute(number, self.index) for number in (_MAJOR, _MINOR))
        built, self.compiled_by = load_kernels(self._cupy, sources, (major, minor))
        if built:
            return built
        why, nvrtc = self.compiled_by, "NVRTC"
        try:
            nvrtc = f"NVRTC {'.'.join(map(str, self._cupy.cuda.nvrtc.getVersion()))}"
            self.compiled_by = f"{nvrtc} on this machine; {why}"
            return compile_kernels(self._cupy, sources)
        except DeviceError:
            raise
        except Exception as error:
            if getattr(error, "status", None) in {_NO_MEMORY, _NOT_READY}:
                raise
            # The type varies: errors of the compiler, of the driver for its code, others if a library is missing.
            lines = "\n".join(str(error).splitlines()[:8])
            raise DeviceError(
                f"{self.name} cannot be used: expected kernels for its compute capability {major}.{minor}, got none: "
                f"{why}; {nvrtc} did not compile them for it. Install a later driver, or an NVRTC that knows this GPU "
                f"(from 10.0 on that is 12.8 or later): {_INSTALL}\n{lines}"
            ) from error

    def _open_native(self) -> Native:
        functions = find_functions()
        context = ctypes.c_void_p()
        self.runtime.free(0)  # makes the device's context current in this thread
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(functions["cuCtxGetCurrent"])(ctypes.byref(context))
        return Native(functions, context.value or 0)

    # How calls are made.

    def _handle(self, number: int, destroy: Callable[[int], None]) -> _Handle:
        handle = _Handle(number)
        self._when_dropped(handle, destroy, number)
        return handle

    def _when_dropped(self, owner: Any, destroy: Callable[[int], None], number: int) -> None:
        weakref.finalize(owner, self._dropped.append, (destroy, number)).atexit = False


class _Handle:
    """A CUDA handle of a stream or an event, or an address."""

    __slots__ = ("__weakref__", "ptr")

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    @property
    def pointer(self) -> int:
        return self.ptr


class _Current:
    """A context manager that makes a device current, and raises `DeviceError` for errors of CUDA.

    Calls inside the block do not disturb captures of other threads, like calls in `BesideCaptures`.
    """

    __slots__ = ("_before", "_captures", "_driver")

    def __init__(self, driver: CupyDriver) -> None:
        self._driver = driver
        self._before: int | None = None
        self._captures = BesideCaptures()

    def __enter__(self) -> None:
        driver = self._driver
        try:
            before = driver.runtime.getDevice()
            if before != driver.index:
                driver.runtime.setDevice(driver.index)
                self._before = before
        except driver.errors as error:
            raise _device_error(driver.name, error) from error
        self._captures.__enter__()  # last: if this method raises, nothing restores the mode of the thread

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver = self._driver
        self._captures.__exit__()
        if self._before is not None:
            with suppress(*driver.errors):  # the first error is the one to raise
                driver.runtime.setDevice(self._before)
        if isinstance(error, driver.errors):
            raise _device_error(driver.name, error) from error


class _NoMemoryError(DeviceError):
    """The device memory, or the host's page-locked memory, is full."""


def _device_error(name: str, error: BaseException, call: str = "") -> DeviceError:
    status = getattr(error, "status", _NO_MEMORY)
    if status == _NO_MEMORY:
        return _NoMemoryError(f"{name} has no memory left: {error}; free some, or move smaller tensors")
    if status == _NOT_READY:
        return DeviceError(
            f"{name} cannot be used: expected a system that is ready for CUDA, got {error}. In confidential mode set "
            "the GPU ready once the machine has proved itself: nvidia-smi conf-compute -srs 1. On a server with "
            "NVSwitch see that its fabric manager runs"
        )
    return DeviceError(f"{name} failed{f' in {call}' if call else ''}: {error}")


_copy_speeds: dict[int, CopySpeeds | None] = {}  # by device: what its first opening in confidential mode measured
_Dropped = deque[tuple[Callable[[int], None], int]]
_dropped: dict[int, _Dropped] = {}  # by device: destructors and handles that await `reclaim`
after_fork(_dropped.clear)  # the handles belong to the parent
