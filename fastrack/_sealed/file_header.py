"""Read and write headers of safetensors files: the extent of each tensor, and the metadata. Input is untrusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from fastrack._documents.strict import parse_strict, unique
from fastrack._sealed.scales import Scale
from fastrack._sealed.storage import HEADER_LIMIT, HEADER_PREFIX
from fastrack._tensors import dtypes
from fastrack._util.locations import Location
from fastrack.errors import FormatError

_MEMBERS = {"dtype", "shape", "data_offsets"}
_ALIGNMENT = 8  # bytes, of the first tensor in the file
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**56  # without empty dimensions: more than a message holds, and within the limits of frameworks

ABOUT = "fastrack.about"
"""Name of the sealed tensor of a shard of a dataset that says its place there. No column: it counts no samples."""

# An entry of no bytes beside sealed tensors. Other readers of safetensors do not know its dtype: they refuse the file,
# and print the dtype. Without it they would read vectors of bytes, which some loaders replace by random weights.
GUARD = "fastrack.guard"
_GUARD_ENTRY = {
    "dtype": "sealed by fastrack: open it with fastrack.load_model, fastrack.safe_open or fastrack.mount_folder",
    "shape": [0],
    "data_offsets": [0, 0],
}
_GUARD_TEXT = json.dumps(_GUARD_ENTRY, separators=(",", ":"))
_SORTED_GUARD = json.dumps(_GUARD_ENTRY, sort_keys=True)

# JSON as fastrack and safetensors write it: without spaces, without escapes in names, and with members in this order.
_METADATA = '{"__metadata__":{'
_LAYOUT = r'"([^"\\\x00-\x1f]*)":\{"dtype":"([A-Z0-9_]+)","shape":\[([0-9,]{0,1300})\]'
_ENTRIES = re.compile(_LAYOUT + r',"data_offsets":\[([0-9]+),([0-9]+)\]\}')
_LAYOUTS = re.compile(_LAYOUT + r"\}")


class Layout(NamedTuple):
    """Description of a tensor: its dtype, its shape, and its size in bytes, which follows from them."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    scale: Scale | None = None  # of values that it quantises


class StoredTensor(NamedTuple):
    """Description of a stored tensor: in bytes `start` to `stop` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(head: bytes, size: int | None, path: Location) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    """Return the metadata of a safetensors file of `size` bytes (None if not known), and its tensors in their order.

    Unless the tensors fill the file, each with the size of its dtype and shape, raise `FormatError`.
    """
    try:
        text = _decode(head, size)
        metadata, tensors = _parse_compact(text, len(head)) or _parse(text, len(head))
    except (ValueError, RecursionError) as error:
        reason = str(_kind_of(head) or error)
        raise FormatError(f"{path}: expected a safetensors file, got another or a damaged one: {reason:.300}") from None
    stop = next(reversed(tensors.values())).stop if tensors else len(head)
    if size is not None and stop != size:
        raise FormatError(
            f"{path}: file size: expected {stop} bytes by its header, got {size}; it was cut short, or changed "
            "while it was read"
        )
    return metadata, tensors


@lru_cache
def _is_representable(shape: tuple[int, ...]) -> bool:
    """Return True if a framework could have an array of this shape, counting empty dimensions as 1."""
    return math.prod(max(extent, 1) for extent in shape) <= _MAX_ELEMENTS


_DECODER = json.JSONDecoder(object_pairs_hook=unique)


def is_shape(value: Any) -> bool:
    """Return True if a value of JSON is a list of numbers that can be a shape."""
    if type(value) is not list or len(value) > _MAX_DIMENSIONS or not set(map(type, value)) <= {int}:
        return False
    return min(value, default=0) >= 0 and _is_representable(tuple(value))


def parse_layouts(text: str) -> dict[str, Layout] | None:
    """Return the tensors in JSON that fastrack wrote, or None if `text` is other JSON, or invalid."""
    parts = _LAYOUTS.split(text)
    if parts[0] != "{" or parts[-1] != "}" or not set(parts[4:-1:4]) <= {","}:
        return None
    layouts = _layouts(parts[1::4], parts[2::4], parts[3::4])
    return None if layouts is None or len(layouts) != len(parts) // 4 else layouts


def _layouts(names: list[str], types: list[str], shapes: list[str]) -> dict[str, Layout] | None:
    layouts = list(map(_layout, types, shapes))
    return None if None in layouts else dict(zip(names, layouts, strict=True))  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _layout(dtype: str, text: str) -> Layout | None:
    """Return the layout of a dtype and of a shape in JSON, or None if either is invalid or not canonical."""
    with suppress(ValueError):
        shape = [int(extent) for extent in text.split(",")] if text else []
        if is_shape(shape) and ",".join(map(str, shape)) == text:
            return Layout(dtype, tuple(shape), dtypes.nbytes(dtype, tuple(shape)))
    return None


def _kind_of(head: bytes) -> str | None:
    """Return the kind of another file by its first bytes, with advice, or None if it may be a safetensors file."""
    is_header = len(head) >= HEADER_PREFIX and int.from_bytes(head[:HEADER_PREFIX], "little") <= HEADER_LIMIT
    if len(head) < 2 or (is_header and not head.startswith(b"PK\x03\x04")):
        return None
    return next(kind for beginning, kind in _KINDS if beginning.match(head[:HEADER_PREFIX]))


_LOAD = "load it with torch.load(weights_only=True), and seal that with save_file or save_checkpoint"
_WHOLE = "seal it whole, as bytes, with `fastrack seal`"
_KINDS = (
    (
        re.compile(rb"PK\x03\x04"),
        f"it is a zip archive, as of torch.save and numpy.savez. `fastrack seal` seals one of NumPy; of torch, {_LOAD}",
    ),
    (re.compile(rb"\x80[\x02-\x05]"), f"it is a pickle, which can run code. If it is of torch, {_LOAD}"),
    (re.compile(rb"\x93NUMPY"), "it is an array of NumPy. `fastrack seal` seals it"),
    (re.compile(rb"\x89PNG|\xff\xd8\xff|GIF8"), "it is an image. `fastrack import` makes a dataset of images"),
    (re.compile(rb"PAR1|ARROW1"), "it is a table. `fastrack import` makes a dataset of its rows"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"), f"it is compressed. Decompress it first, or {_WHOLE}"),
    (re.compile(rb"\xff\xfe|\xfe\xff"), f"it is text in UTF-16. Convert it to UTF-8, or {_WHOLE}"),
    (
        re.compile(rb"(?:[\t\n\r -~]|[\xc3-\xf4][\x80-\xbf]{1,3}){3,8}[\xc3-\xf4]?[\x80-\xbf]{0,2}\Z"),
        f"it is text, such as CSV or JSON. `fastrack import` makes a dataset of its rows or lines; or {_WHOLE}",
    ),
    (re.compile(b""), f"its first bytes are of another format. {_WHOLE.capitalize()}"),
)


def _decode(head: bytes, size: int | None) -> str:
    stop = HEADER_PREFIX + int.from_bytes(head[:HEADER_PREFIX], "little")
    if not head:
        raise ValueError("it is empty")
    if stop == HEADER_PREFIX:
        raise ValueError("it begins with zeros, as a file that was not written whole. Get it again")
    if len(head) != stop or stop > HEADER_LIMIT:
        raise ValueError(
            f"its beginning stands for a header of {stop - HEADER_PREFIX} bytes, in a file of "
            f"{len(head) if size is None else size}"
        )
    return str(head[HEADER_PREFIX:], "utf-8")


def _parse_compact(text: str, body: int) -> tuple[dict[str, str], dict[str, StoredTensor]] | None:
    """Parse a header that fastrack or safetensors wrote, like `_parse` but several times as fast; else return None.

    An invalid header also returns None: `_parse` names the problem.
    """
    metadata, rest = None, text
    if text.startswith(_METADATA):
        metadata, end = _DECODER.raw_decode(text, len(_METADATA) - 1)
        rest = text[end:].removeprefix(f',"{GUARD}":{_GUARD_TEXT}')
    parts = _ENTRIES.split(rest)
    if parts[0] != ("{" if rest is text else ",") or parts[-1].rstrip(" ") != "}" or not set(parts[6:-1:6]) <= {","}:
        return None
    names = parts[1::6]
    layouts = _layouts(names, parts[2::6], parts[3::6])
    if layouts is None or len(layouts) != len(names) or "__metadata__" in layouts:  # a name twice, or a reserved one
        return None
    kinds, shapes, sizes, _ = zip(*layouts.values(), strict=True)
    offsets = list(map(str, accumulate(sizes, initial=0)))
    if parts[4::6] != offsets[:-1] or parts[5::6] != offsets[1:]:  # a gap, or bytes of two tensors
        return None
    edges = list(accumulate(sizes, initial=body))
    stored = map(StoredTensor._make, zip(kinds, shapes, edges, edges[1:], strict=False))
    return _check_metadata(metadata, escaped="\\" in text), dict(zip(names, stored, strict=True))


def _parse(text: str, body: int) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    header = parse_strict(text)
    if type(header) is not dict or text[0] != "{":
        raise ValueError("the header is no JSON object, or does not begin with it")
    escaped = "\\" in text
    metadata = _check_metadata(header.pop("__metadata__", None), escaped=escaped)
    if escaped:
        "".join(header).encode()  # refuses lone surrogates, which escapes can write
    # As text, since [0] == [False]. Another entry of this name is read as a tensor, of which that dtype is none.
    if GUARD in header and json.dumps(header[GUARD], sort_keys=True) == _SORTED_GUARD:
        del header[GUARD]
    tensors = {name: _read_tensor(name, entry, body) for name, entry in header.items()}
    tensors = dict(sorted(tensors.items(), key=lambda item: item[1][2:]))
    stop = body
    for name, tensor in tensors.items():
        if tensor.start != stop:
            raise ValueError(f"{name!r:.80} begins at byte {tensor.start}, expected {stop}")
        stop = tensor.stop
    return metadata, tensors


def _check_metadata(metadata: Any, *, escaped: bool) -> dict[str, str]:
    if metadata is None:
        return {}
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("the metadata is no JSON object of texts")
    if escaped:
        "".join((*metadata, *metadata.values())).encode()  # as in `_parse`
    return metadata


def _read_tensor(name: str, entry: Any, body: int) -> StoredTensor:
    if type(entry) is not dict or entry.keys() != _MEMBERS:
        raise ValueError(f"entry of {name!r:.80}: expected a dtype, a shape and offsets, got {entry!r:.80}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not is_shape(shape):
        raise ValueError(f"shape of {name!r:.80}: expected one that an array can have, got {shape!r:.80}")
    if type(dtype) is not str:
        raise ValueError(f"entry of {name!r:.80}: expected a dtype, got {dtype!r:.80}")
    try:
        nbytes = dtypes.nbytes(dtype, tuple(shape))
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


def encode_header(
    entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], *, guarded: bool = False
) -> bytes:
    """Return a safetensors header: the size of the JSON (8 bytes, little-endian), and the JSON padded with spaces."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    if guarded:
        described[GUARD] = _GUARD_ENTRY
    start = 0
    for name, (dtype, shape) in entries.items():
        if name in {"__metadata__", GUARD}:
            raise FormatError(f"name of a tensor: expected another than {name!r}, which is reserved. Rename the tensor")
        stop = start + dtypes.nbytes(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    try:
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        wrong = error.object[error.start : error.end]
        raise FormatError(f"names and metadata: expected Unicode text, got {wrong!r:.80} in it") from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise FormatError(
            f"safetensors header: expected at most {HEADER_LIMIT} bytes, got {len(text)}. Put fewer tensors into it"
        )
    return len(text).to_bytes(8, "little") + text
