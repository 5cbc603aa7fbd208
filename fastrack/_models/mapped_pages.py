"""Memory of a load: `open_once` gives back the mapped pages of sealed files whose tensors it has opened."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from fastrack._sealed.storage import MappedFile
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._transfer.api import to_device

# Bytes that a load opens at once, before it gives their pages back: all of a small model, else a 32nd of it, within
# bounds, as each call costs as much as some hundred KiB; or one tensor, if that is larger
_WHOLE, _LEAST, _MOST = 128 << 20, 16 << 20, 64 << 20
_SMALL = 1 << 20  # bytes of rows that leave the pages of their tensor: such are read often, others of a model once
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_Item = TypeVar("_Item")


def open_once(sealed: Any, device: object = None, **options: Any) -> Any:
    """Open a sealed tensor, rows of one or a dict of these, like `to_device`, and give back the pages."""
    opened = to_device(sealed, device, **options)
    give_back(sealed.values() if isinstance(sealed, Mapping) else (sealed,))
    return opened


def give_back(parts: Iterable[SealedTensor | SealedRows]) -> None:
    """Unmap the pages of tensors that were opened: they counted as memory of the process, as much again as the model.

    The map stays, and the system keeps the file cached: a page is mapped again when it is read.
    """
    for part in parts:
        if isinstance(part, SealedTensor):
            tensors = [part]
        else:
            tensors = [each.tensor for each in part.slices()] if part.nbytes >= _SMALL else []
        for tensor in tensors:
            if isinstance(tensor.location[0], MappedFile):  # what is in memory otherwise would be lost
                memory = tensor.memory
                start = memory.address & -mmap.PAGESIZE
                _LIBC.madvise(start, memory.address + memory.size - start, mmap.MADV_DONTNEED)  # may fail, as advice


def in_parts(items: Sequence[_Item], device: str, sealed_of: Callable[[_Item], Any]) -> Iterator[list[_Item]]:
    """Split what goes to host memory into parts, to be opened one after the other. A GPU takes all in one transfer."""
    sizes = [sealed_of(item).nbytes for item in items]
    total = sum(sizes)
    limit = total if device != "cpu" or total <= _WHOLE else min(max(total // 32, _LEAST), _MOST)
    part, size = list[_Item](), 0
    for item, nbytes in zip(items, sizes, strict=True):
        if part and size + nbytes > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    if part:
        yield part
