"""Skeletons of checkpoints: canonical JSON of a pytree, with numbers in place of arrays.

A skeleton holds the type of each value, and no names of classes or functions; no part of it is run.
"""

from __future__ import annotations

import json
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import numpy as np

from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework, storage_key
from fastrack._tensors.sharded import is_sharded, local_part
from fastrack._util.documents import encode
from fastrack.errors import FormatError

_VERSION = 1
_MAX_DEPTH = 64
_MAX_BARE = 2**53  # larger integers are written in hexadecimal, since not every JSON parser keeps them exactly

_PLAIN = {type(None), bool, int, float, str, bytes}

Fetch = Callable[[int, Framework], Any]


def encode_state(state: Any, path: str = "state") -> tuple[bytes, list[Any]]:
    """Return the skeleton of a pytree, and the arrays that it refers to by number, each memory once.

    Errors name an entry by its path below `path`.
    """
    encoder = _Encoder()
    document = {"checkpoint": _VERSION, "state": encoder.encode_value(state, path, 0)}
    return encode(document), encoder.arrays


def decode_state(skeleton: bytes, fetch: Fetch) -> Any:
    """Return the pytree of a skeleton, with the result of `fetch(number, framework)` for each array.

    Any malformed skeleton raises FormatError.
    """
    try:
        document = json.loads(skeleton, parse_constant=_refuse_number, parse_float=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"skeleton of a checkpoint: expected JSON: {error}. Save the checkpoint again") from None
    if type(document) is not dict or document.keys() != {"checkpoint", "state"}:
        raise FormatError("skeleton of a checkpoint: expected the members checkpoint and state, got others")
    if type(document["checkpoint"]) is not int or document["checkpoint"] != _VERSION:
        raise FormatError(f"skeleton of a checkpoint: expected version {_VERSION}, got another. Update fastrack")
    return _decode(document["state"], fetch, 0)


def _refuse_number(_: str) -> NoReturn:
    raise ValueError("expected integers, got another number")


class _Encoder:
    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def encode_value(self, value: Any, path: str, depth: int) -> Any:
        """Return the entry of a value in the skeleton. None, bool, str and most int values are their own entries."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"{path:.80}...: expected at most {_MAX_DEPTH} levels. Does a value contain itself?")
        kind = type(value)
        if kind in _PLAIN:
            return _encode_plain(value, path)
        if kind in {list, tuple}:
            items = [self.encode_value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
            return [kind.__name__, items]
        if kind in {dict, OrderedDict}:
            entries = [self._encode_entry(key, item, path, depth) for key, item in value.items()]
            metadata = getattr(value, "_metadata", None)  # of a module's state dict, for `load_state_dict`
            if metadata is None:
                return ["dict", entries]
            return ["state_dict", entries, self.encode_value(metadata, f"{path}._metadata", depth + 1)]
        return self._encode_array(value, path)

    def _encode_entry(self, key: Any, value: Any, path: str, depth: int) -> list[Any]:
        if type(key) not in {str, int}:
            raise TypeError(f"{path}: expected keys of type str or int, got {type(key).__qualname__}")
        item_path = f"{path}[{key!r:.40}]"
        return [self.encode_value(key, item_path, depth + 1), self.encode_value(value, item_path, depth + 1)]

    def _encode_array(self, value: Any, path: str) -> list[Any]:
        framework = arrays.framework_of(value)
        is_scalar = isinstance(value, np.generic)
        if is_scalar:
            value = np.asarray(value)
        here = local_part(value) if is_sharded(value) else value
        if framework == "torch":
            _require_saveable(here, path)
        elif type(here) not in {np.ndarray, np.memmap}:
            raise TypeError(
                f"{path}: expected a dict with str and int keys, list, tuple, None, bool, int, float, str, bytes, "
                f"torch tensor, NumPy array or NumPy scalar, got {type(value).__qualname__}. Convert it first"
            )
        try:
            arrays.dtype_and_shape(here)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None
        number = self._numbers.setdefault(_key_of(value, here), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(value)
        return ["scalar" if is_scalar else "torch" if framework == "torch" else "numpy", number]


def _key_of(value: Any, here: Any) -> Hashable:
    """Return a key that equal views of one memory share. `here` is the local part of a DTensor."""
    if here is value:
        return storage_key(value)
    return (storage_key(here), value.placements, value.shape) if here.numel() else id(value)


def _require_saveable(tensor: Any, path: str) -> None:
    import torch

    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
        raise TypeError(f"{path}: expected a dense torch.Tensor, got {type(tensor).__qualname__} ({tensor.layout})")
    if tensor.device.type != "cpu":
        raise TypeError(f"{path}: expected a tensor in host memory, got one on {tensor.device}. Move it with .cpu()")


def _encode_plain(value: Any, path: str) -> Any:
    if isinstance(value, float):
        return ["float", struct.pack(">d", value).hex()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, int):
        return value if abs(value) <= _MAX_BARE else ["int", format(value, "x")]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{path}: expected Unicode text, got lone surrogates in it") from None
    return value


def _decode(item: Any, fetch: Fetch, depth: int) -> Any:
    """Return the value of an entry. All entries are checked, since any holder of the key may have written them."""
    if depth > _MAX_DEPTH:
        raise FormatError(f"skeleton of a checkpoint: expected at most {_MAX_DEPTH} levels, got more")
    match item:
        case None | bool() | int() | str():
            return item
        case ["list" | "tuple" as kind, list(items)]:
            parts = [_decode(part, fetch, depth + 1) for part in items]
            return parts if kind == "list" else tuple(parts)
        case ["dict", list(entries)]:
            return _decode_dict(entries, fetch, depth)
        case ["state_dict", list(entries), metadata]:
            decoded = OrderedDict(_decode_dict(entries, fetch, depth))
            decoded._metadata = _decode(metadata, fetch, depth + 1)  # type: ignore[attr-defined]  # noqa: SLF001
            return decoded
        case ["torch" | "numpy" | "scalar" as kind, int(number)] if type(number) is int and number >= 0:
            return _decode_array(kind, number, fetch)
        case ["int" | "float" | "bytes" as kind, str(text)]:
            return _decode_plain(kind, text)
    raise _unreadable(item)


def _decode_dict(entries: list[Any], fetch: Fetch, depth: int) -> dict[Any, Any]:
    decoded: dict[Any, Any] = {}
    for entry in entries:
        if type(entry) is not list or len(entry) != 2:
            raise _unreadable(entry)
        key, value = (_decode(part, fetch, depth + 1) for part in entry)
        if type(key) not in {str, int} or key in decoded:
            raise _unreadable(entry[0])
        decoded[key] = value
    return decoded


def _decode_array(kind: str, number: int, fetch: Fetch) -> Any:
    array = fetch(number, "torch" if kind == "torch" else "numpy")
    if kind != "scalar":
        return array
    if array.ndim:
        raise FormatError(f"array {number} of a checkpoint: expected a scalar, got shape {list(array.shape)}")
    return array[()]


def _decode_plain(kind: str, text: str) -> Any:
    if kind == "int":
        if not re.fullmatch("-?[0-9a-f]+", text):
            raise _unreadable(text)
        return int(text, 16)
    try:
        data = bytes.fromhex(text)
        return data if kind == "bytes" else struct.unpack(">d", data)[0]
    except (ValueError, struct.error):
        raise _unreadable(text) from None


def _unreadable(item: Any) -> FormatError:
    # The item itself is secret, and not in the message.
    return FormatError(
        f"skeleton of a checkpoint: expected entries of this version of fastrack, got another {type(item).__name__}. "
        "Update fastrack, or save the checkpoint again"
    )
