"""The CUDA stream that prefetches batches of a loader, so that the caller's streams do not wait for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastrack._devices.cuda.captures import BesideCaptures
from fastrack._devices.cuda.driver import RECLAIMERS
from fastrack._tensors.arrays import framework_of
from fastrack._util.fork import after_fork
from fastrack._util.tree import tree_map

_PER_THREAD = 2  # cudaStreamPerThread
_Returned = tuple[Any, Any, int]  # an array, the stream that used it, and the thread of the stream


def side_stream(device: str) -> SideStream | None:
    """Return the side stream of a device. Each device has one, so that memory stays in one pool.

    Return None for the host, and for a GPU that neither torch nor CuPy can use; `open_device` reports the reason.
    """
    if device == "cpu":
        return None
    index = int(device.removeprefix("cuda:"))
    with _lock:
        if index not in _streams:
            torch, cupy = _torch(), _cupy()
            if torch is None and cupy is None:
                return None
            _streams[index] = SideStream(index, torch, cupy)
        return _streams[index]


def reclaim(index: int, *, wait: bool = False) -> None:
    """Free the memory of batches that no stream uses, or with `wait` of all batches without references."""
    stream = _streams.get(index)
    if stream is not None:
        stream.reclaim(wait=wait)


_streams: dict[int, SideStream] = {}  # by device
_lock = threading.Lock()
_keepalive: list[object] = []


def _reset_after_fork() -> None:
    """Forget the streams in a forked child, but keep them alive: CUDA does not work there, not even to free memory."""
    global _lock  # noqa: PLW0603
    _keepalive.append(dict(_streams))
    _streams.clear()
    _lock = threading.Lock()


after_fork(_reset_after_fork)
RECLAIMERS.append(reclaim)


class SideStream:
    """A CUDA stream of device `index` that allocates and fills results before another stream uses them.

    The memory of a result is reused only after the other stream has finished with it. For torch,
    `torch.Tensor.record_stream` ensures that; for CuPy, which has no equivalent, this class does. `torch` and `cupy`
    are the modules, or None for a module that cannot use the device.
    """

    def __init__(self, index: int, torch: Any, cupy: Any) -> None:
        self._index = index
        self._torch, self._cupy = torch, cupy
        self._returned: deque[_Returned] = deque()
        self._in_use: deque[tuple[Any, Any]] = deque()  # arrays, and the events after which their memory is free
        self._cupy_stream = None
        with BesideCaptures():
            self._torch_stream = None if torch is None else torch.cuda.Stream(index)
            if cupy is not None:
                with cupy.cuda.Device(index):
                    self._cupy_stream = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current stream of both frameworks, in this thread, for the block."""
        with ExitStack() as entered:
            if self._torch_stream is not None:
                entered.enter_context(self._torch.cuda.stream(self._torch_stream))
            if self._cupy_stream is not None:
                entered.enter_context(self._cupy.cuda.Device(self._index))
                entered.enter_context(self._cupy_stream)
            yield

    def hand_over(self, nest: Any) -> Any:
        """Hand complete results over to the caller's current stream. Return the tree, perhaps with new arrays."""
        with BesideCaptures():
            self._record_events()
            return tree_map(self._hand_over, nest)

    def reclaim(self, *, wait: bool = False) -> None:
        """Free the memory that no stream uses, or with `wait` all memory without references."""
        with BesideCaptures():
            self._record_events()
            for _ in range(len(self._in_use)):
                try:
                    array, event = self._in_use.popleft()
                except IndexError:  # another thread was faster
                    return
                if wait:
                    event.synchronize()
                elif not event.done:
                    self._in_use.append((array, event))

    def _hand_over(self, leaf: Any) -> Any:
        framework = framework_of(leaf)
        if framework == "torch" and leaf.is_cuda and self._torch is not None:
            leaf.record_stream(self._torch.cuda.current_stream(leaf.device))
        if framework == "cupy" and leaf.nbytes and self._cupy is not None:
            with leaf.device:
                owner = _Owner(leaf, self._cupy.cuda.get_current_stream(), self._returned)
                memory = self._cupy.cuda.UnownedMemory(leaf.data.ptr, leaf.nbytes, owner, leaf.device.id)
                return self._cupy.ndarray(leaf.shape, leaf.dtype, self._cupy.cuda.MemoryPointer(memory, 0))
        return leaf

    def _record_events(self) -> None:
        """Record an event for each returned array. Its memory is free after the event."""
        for _ in range(len(self._returned)):
            try:
                array, stream, thread = returned = self._returned.popleft()
            except IndexError:  # another thread was faster
                return
            if stream.ptr == _PER_THREAD and thread != threading.get_ident():  # here the handle means another stream
                self._returned.append(returned)
                continue
            with array.device:
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(stream)
            self._in_use.append((array, event))


class _Owner:
    """The owner of memory that was handed over to a stream. Its deletion returns the array."""

    __slots__ = ("_item", "_returned")

    def __init__(self, array: Any, stream: Any, returned: deque[_Returned]) -> None:
        self._item = array, stream, threading.get_ident()
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._item)  # no call of CUDA, as the garbage collector may run on any thread


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _cupy() -> Any:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return None
    return cupy
