"""`SideStream`: where a loader moves batches ahead of their time, so that no stream of its user waits for them."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from fastrack.arrays import framework_of
from fastrack.forks import after_fork
from fastrack.nest import map_leaves

__all__ = ["SideStream", "side_stream"]


def side_stream(device: str) -> SideStream | None:
    """Return the stream of a device, made when first asked for: one, so that memory never changes its owner.

    None for the host, and for a GPU that neither torch nor CuPy can use, as the device says when it is opened.
    """
    return None if device == "cpu" else _make(int(device.removeprefix("cuda:")), _torch(), _cupy())


@cache
def _make(index: int, torch: Any, cupy: Any) -> SideStream | None:
    return None if torch is None and cupy is None else SideStream(index, torch, cupy)


after_fork(_make.cache_clear)  # CUDA does not survive a fork


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
        self._retired: deque[tuple[Any, Any]] = deque()  # arrays that came back, and the streams that used them
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
        return map_leaves(self._hand_over, nest)

    def reclaim(self) -> None:
        """Let go of the memory that no stream uses any more."""
        for _ in range(len(self._leaving)):
            array, event = self._leaving.popleft()
            if not event.done:
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
        """Note when the memory that was let go of is free. On the thread of the stream it was handed over to."""
        while self._retired:
            array, stream = self._retired.popleft()
            with array.device:
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(stream)
            self._leaving.append((array, event))


class _Loan:
    """What keeps an array whose memory was handed over to a stream, until nothing refers to that memory any more."""

    __slots__ = ("_array", "_retired", "_stream")

    def __init__(self, array: Any, stream: Any, retired: deque[tuple[Any, Any]]) -> None:
        self._array = array
        self._stream = stream
        self._retired = retired

    def __del__(self) -> None:
        self._retired.append((self._array, self._stream))  # no call of CUDA: any thread may collect garbage


def _torch() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _cupy() -> Any:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return None
    return cupy
