"""`SideStream`: where a loader moves batches ahead of their time, so that no stream of its user waits for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fastrack._tensors.arrays import framework_of
from fastrack._util.fork import after_fork
from fastrack._util.tree import tree_map

_PER_THREAD = 2  # cudaStreamPerThread
_Retired = tuple[Any, Any, int]  # an array that came back, the stream that used it, and the thread of that


def side_stream(device: str) -> SideStream | None:
    """Return the stream of a device, made when first asked for: one, so that memory never changes its owner.

    None for the host, and for a GPU that neither torch nor CuPy can use, as the device says when it is opened.
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
    """Let go of memory of batches that no stream uses any more; with `wait`, of all that was dropped."""
    stream = _streams.get(index)
    if stream is not None:
        stream.reclaim(wait=wait)


_streams: dict[int, SideStream] = {}  # by device
_lock = threading.Lock()
_kept: list[object] = []


def _start_over() -> None:
    """Find oneself in a forked child, where CUDA does not work: nothing may be touched, not even to give it back."""
    global _lock  # noqa: PLW0603
    _kept.append(dict(_streams))
    _streams.clear()
    _lock = threading.Lock()


after_fork(_start_over)


class SideStream:
    """A CUDA stream on which results are allocated and filled, to be handed over to another.

    Memory of a result is used again only when the stream it was handed over to is done with it: torch keeps account of
    that by `torch.Tensor.record_stream`, and for CuPy, which has no such thing, this does.

    Parameters
    ----------
    index : int
        Of the device.
    torch, cupy : module or None
        Those that can use it.
    """

    def __init__(self, index: int, torch: Any, cupy: Any) -> None:
        self._index = index
        self._torch, self._cupy = torch, cupy
        self._retired: deque[_Retired] = deque()
        self._leaving: deque[tuple[Any, Any]] = deque()  # arrays, and the events after which their memory is free
        self._torch_stream = None if torch is None else torch.cuda.Stream(index)
        self._cupy_stream = None
        if cupy is not None:
            with cupy.cuda.Device(index):
                self._cupy_stream = cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current stream of the block, on this thread, in both frameworks."""
        with ExitStack() as entered:
            if self._torch_stream is not None:
                entered.enter_context(self._torch.cuda.stream(self._torch_stream))
            if self._cupy_stream is not None:
                entered.enter_context(self._cupy.cuda.Device(self._index))
                entered.enter_context(self._cupy_stream)
            yield

    def hand_over(self, nest: Any) -> Any:
        """Give results that are complete to the caller's current stream. The same nest, perhaps with other arrays."""
        self._record_retired()
        return tree_map(self._hand_over, nest)

    def reclaim(self, *, wait: bool = False) -> None:
        """Let go of the memory that no stream uses any more; with `wait`, of all that was dropped."""
        self._record_retired()
        for _ in range(len(self._leaving)):
            try:
                array, event = self._leaving.popleft()
            except IndexError:  # another thread was quicker
                return
            if wait:
                event.synchronize()
            elif not event.done:
                self._leaving.append((array, event))

    def _hand_over(self, leaf: Any) -> Any:
        framework = framework_of(leaf)
        if framework == "torch" and leaf.is_cuda and self._torch is not None:
            leaf.record_stream(self._torch.cuda.current_stream(leaf.device))
        if framework == "cupy" and leaf.nbytes and self._cupy is not None:
            with leaf.device:
                loan = _Loan(leaf, self._cupy.cuda.get_current_stream(), self._retired)
                memory = self._cupy.cuda.UnownedMemory(leaf.data.ptr, leaf.nbytes, loan, leaf.device.id)
                return self._cupy.ndarray(leaf.shape, leaf.dtype, self._cupy.cuda.MemoryPointer(memory, 0))
        return leaf

    def _record_retired(self) -> None:
        """Note when the memory that was let go of is free."""
        for _ in range(len(self._retired)):
            try:
                array, stream, thread = retired = self._retired.popleft()
            except IndexError:  # another thread was quicker
                return
            if stream.ptr == _PER_THREAD and thread != threading.get_ident():  # the same handle is another stream here
                self._retired.append(retired)
                continue
            with array.device:
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(stream)
            self._leaving.append((array, event))


class _Loan:
    """Keep an array whose memory was handed over to a stream, until nothing refers to that memory any more."""

    __slots__ = ("_retired", "_what")

    def __init__(self, array: Any, stream: Any, retired: deque[_Retired]) -> None:
        self._what = array, stream, threading.get_ident()
        self._retired = retired

    def __del__(self) -> None:
        self._retired.append(self._what)  # no call of CUDA: any thread may collect garbage


def _torch() -> Any:
    try:
        import torch  # whose tensors results are where it is installed
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
