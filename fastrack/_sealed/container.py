"""Read the headers of safetensors files: where which tensor lies, and the metadata. All of it is untrusted."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

from fastrack._sealed.storage import HEADER_LIMIT, HEADER_PREFIX
from fastrack._tensors import dtypes
from fastrack._util.locations import Location
from fastrack.errors import FormatError

_MEMBERS = {"dtype", "shape", "data_offsets"}
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**56  # without empty dimensions: more than a message holds, and within the limits of frameworks


class StoredTensor(NamedTuple):
    """Description of a tensor as it is stored: in bytes `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(head: bytes, size: int | None, path: Location) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata of a safetensors file of `size` bytes (None if not known), and its tensors in their order.

    They follow one another, each as large as its dtype and shape say, to the end. Others raise `FormatError`.
    """
    try:
        metadata, tensors = _parse(head, size)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    stop = len(head)
    for name, tensor in tensors.items():
        if tensor.start != stop:
            raise _damaged(path, f"{name!r:.80} begins at byte {tensor.start}, expected {stop}")
        stop = tensor.stop
    if size is not None and stop != size:
        raise FormatError(
            f"{path}: file size: expected {stop} bytes by its header, got {size}; it was cut short, or changed "
            "while it was read"
        )
    return metadata, tensors


@lru_cache
def _is_representable(shape: tuple[int, ...]) -> bool:
    """Return True if a framework could have an array of this shape. With a zero in it, its size is no bound."""
    return math.prod(max(extent, 1) for extent in shape) <= _MAX_ELEMENTS


def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a JSON object that has a member twice, since parsers differ in which one they take."""
    found = dict(members)
    if len(found) != len(members):
        raise ValueError("expected each member once")
    return found


def is_shape(value: Any) -> bool:
    """Return True if a value of JSON is a list of numbers that can be a shape."""
    if type(value) is not list or len(value) > _MAX_DIMENSIONS or not set(map(type, value)) <= {int}:
        return False
    return min(value, default=0) >= 0 and _is_representable(tuple(value))


def _parse(head: bytes, size: int | None) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    stop = HEADER_PREFIX + int.from_bytes(head[:HEADER_PREFIX], "little")
    if len(head) != stop or stop > HEADER_LIMIT:
        raise ValueError(f"a header of {stop - HEADER_PREFIX} bytes in a file of {len(head) if size is None else size}")
    text = str(head[HEADER_PREFIX:], "utf-8")
    header = json.loads(text, object_pairs_hook=unique)
    if type(header) is not dict:
        raise ValueError("the header is no JSON object")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("the metadata is no JSON object of texts")
    if "\\" in text:
        "".join((*metadata, *metadata.values(), *header)).encode()  # refuses lone surrogates, which escapes can write
    return metadata, {name: _read_tensor(name, entry, len(head)) for name, entry in header.items()}


def _read_tensor(name: str, entry: Any, body: int) -> StoredTensor:
    if type(entry) is not dict or entry.keys() != _MEMBERS:
        raise ValueError(f"entry of {name!r:.80}: expected a dtype, a shape and offsets, got {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not is_shape(shape):
        raise ValueError(f"shape of {name!r:.80}: expected one that an array can have, got {shape!r:.80}")
    if type(dtype) is not str:
        raise ValueError(f"entry of {name!r:.80}: expected a dtype, got {dtype!r:.80}")
    try:
        nbytes = dtypes.nbytes(dtype, shape)
    except FormatError as error:
        raise ValueError(f"entry of {name!r:.80}: {error}") from None
    if type(offsets) is not list or list(map(type, offsets)) != [int, int]:
        raise ValueError(f"entry of {name!r:.80}: expected two offsets, got {offsets!r:.80}")
    start, stop = offsets
    if start < 0 or stop - start != nbytes:
        raise ValueError(
            f"entry of {name!r:.80}: expected {nbytes} bytes, got those from {start!s:.40} to {stop!s:.40}"
        )
    return StoredTensor(dtype, tuple(shape), body + start, body + stop)


def _damaged(path: Location, reason: object) -> FormatError:
    return FormatError(f"{path}: expected a safetensors file, got another or a damaged one: {reason!s:.300}")
