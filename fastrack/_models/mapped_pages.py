"""Memory of a load: `open_once` gives back the mapped pages of sealed files whose tensors it has opened."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from fastrack._crypto.base import HostMemory
from fastrack._devices import canonical
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.storage import MappedFile
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework
from fastrack._transfer.api import to_device
from fastrack._transfer.timeline import span
from fastrack.errors import UnknownKeyError
from fastrack.format import CHUNK_SIZE

# Bytes that a load opens at once, before it gives their pages back: all of a small model, else a 32nd of it, within
# bounds, as each call costs as much as some hundred KiB. A larger tensor opens in pieces, of an eighth within these
# bounds
_WHOLE, _LEAST, _MOST = 128 << 20, 16 << 20, 64 << 20
_SMALL = 1 << 20  # bytes of rows that leave the pages of their tensor: such are read often, others of a model once
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_Item = TypeVar("_Item")


def open_once(sealed: Any, device: object = None, **options: Any) -> Any:
    """Open a sealed tensor, rows of one or a dict of these, like `to_device`, and give back the pages."""
    items = sealed if isinstance(sealed, Mapping) else {"": sealed}
    only = next(iter(items.values())) if len(items) == 1 else None
    if takes_pieces(only, device, **options):
        opened = open_in_pieces(only, **options)
        return dict.fromkeys(sealed, opened) if items is sealed else opened
    opened = to_device(sealed, device, **options)
    give_back(items.values())
    return opened


def takes_pieces(
    sealed: Any,
    device: object,
    *,
    dtype: object = None,
    out: Any = None,
    framework: Framework | None = None,
    keys: object = None,  # noqa: ARG001 - as for `to_device`
) -> TypeGuard[SealedTensor]:
    """Return True for a large tensor of a mapped file that opens in host memory as it is."""
    return (
        isinstance(sealed, SealedTensor)
        and sealed.nbytes > _LEAST
        and isinstance(sealed.location[0], MappedFile)
        and canonical(device) == "cpu"
        and framework != "cupy"
        and (dtype is None or (sealed.scale is None and sealed.dtype == dtype))
        and (out is None or _fits(out, sealed))
    )


def _fits(out: Any, sealed: SealedTensor) -> bool:
    """Return whether an array can be filled piece by piece. What does not fit, `to_device` refuses."""
    is_torch = arrays.framework_of(out) == "torch"
    if not is_torch and arrays.framework_of(out) != "numpy":
        return False
    is_contiguous = out.is_contiguous() and out.device.type == "cpu" if is_torch else out.flags.c_contiguous
    return bool(is_contiguous and tuple(out.shape) == sealed.shape and sealed.dtype == out.dtype)


def open_in_pieces(
    sealed: SealedTensor,
    *,
    keys: KeySource | None = None,
    out: Any = None,
    framework: Framework | None = None,
    dtype: object = None,  # noqa: ARG001 - that of the tensor
) -> Any:
    """Open a tensor like `to_device`, and give back the pages of each piece, which would all stay until the end."""
    step = min(max(sealed.nbytes // 8, _LEAST), _MOST) // CHUNK_SIZE
    memory = None if out is None else HostMemory(*arrays.writable_memory(out)).array
    try:
        with OpenMessage(sealed, KeyRing.resolve(keys)) as message, span(f"open {sealed.name}"):
            if memory is None:  # not before the header, which authenticates the size
                kind = framework or arrays.default_framework()
                out = arrays.empty(sealed.nbytes, sealed.dtype, sealed.shape, kind)[0]
                memory = HostMemory(*arrays.writable_memory(out)).array
            for first in range(0, -(-sealed.nbytes // CHUNK_SIZE), step):
                message.read(memory[first * CHUNK_SIZE : (first + step) * CHUNK_SIZE], first)
                give_back([sealed])
    except UnknownKeyError:
        raise
    except BaseException:
        if memory is not None:
            memory.fill(0)
        raise
    return out


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


def is_small(nbytes: int) -> bool:
    """Return whether a model of so many bytes opens at once: its pages go with its file, as to give them back costs."""
    return nbytes <= _WHOLE


def in_parts(items: Sequence[_Item], device: str, sealed_of: Callable[[_Item], Any]) -> Iterator[list[_Item]]:
    """Split what goes to host memory into parts, to be opened one after the other. A GPU takes all in one transfer."""
    sizes = [sealed_of(item).nbytes for item in items]
    total = sum(sizes)
    limit = total if device != "cpu" or is_small(total) else min(max(total // 32, _LEAST), _MOST)
    part, size = list[_Item](), 0
    for item, nbytes in zip(items, sizes, strict=True):
        if part and size + nbytes > limit:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    if part:
        yield part
