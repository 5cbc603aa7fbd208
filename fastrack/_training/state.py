"""Skeletons of checkpoints: canonical JSON of a pytree, with numbers in place of its arrays.

A skeleton holds the type of each value, and no names of classes or functions; nothing of it is run.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import numpy as np

from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework, storage_key
from fastrack.errors import FormatError

_VERSION = 1
_MAX_DEPTH = 64
_MAX_BARE = 2**53  # larger integers are written in hexadecimal, since not every JSON parser keeps them exactly

_PLAIN = {type(None), bool, int, float, str, bytes}

Fetch = Callable[[int, Framework], Any]


def encode_state(state: Any) -> tuple[bytes, list[Any]]:
    """Return the skeleton of a pytree, and the arrays that it refers to by number, each memory once.

    Raises
    ------
    TypeError
        If a value has another type than a checkpoint can hold. The message has its path in the pytree.
    ValueError
        If it is nested too deep, as one that contains itself is.
    """
    encoder = _Encoder()
    document = {"checkpoint": _VERSION, "state": encoder.encode_value(state, "state", 0)}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode(), encoder.arrays


def decode_state(skeleton: bytes, fetch: Fetch) -> Any:
    """Return the pytree of a skeleton, with the result of `fetch(number, framework)` for each array.

    Raises
    ------
    FormatError
        If `skeleton` is malformed.
    """
    try:
        document = json.loads(skeleton, parse_constant=_refuse_number, parse_float=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"skeleton of a checkpoint: expected JSON: {error}. Save the checkpoint again") from None
    if type(document) is not dict or document.keys() != {"checkpoint", "state"}:
        raise FormatError("skeleton of a checkpoint: expected the members checkpoint and state, got others")
    if type(document["checkpoint"]) is not int or document["checkpoint"] != _VERSION:
        raise FormatError(f"skeleton of a checkpoint: expected version {_VERSION}, got another. Update fastrack")
    return _Decoder(fetch).decode_value(document["state"], 0)


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
            return ["dict", [self._encode_entry(key, item, path, depth) for key, item in value.items()]]
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
        elif framework == "torch":
            _require_saveable(value, path)
        elif type(value) not in {np.ndarray, np.memmap}:
            raise TypeError(
                f"{path}: expected a dict with str and int keys, list, tuple, None, bool, int, float, str, bytes, "
                f"torch tensor, NumPy array or NumPy scalar, got {type(value).__qualname__}. Convert it first"
            )
        try:
            arrays.describe(value)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None
        number = self._numbers.setdefault(storage_key(value), len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(value)
        return ["scalar" if is_scalar else "torch" if framework == "torch" else "numpy", number]


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


class _Decoder:
    """Decoder of a skeleton. All values are checked, since any holder of the key may have written it."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._decoders: dict[str, Callable[[Any, int], Any]] = {
            "int": _int,
            "float": _float,
            "bytes": _bytes,
            "list": self._list,
            "tuple": lambda items, depth: tuple(self._list(items, depth)),
            "dict": self._dict,
            "torch": lambda number, _: fetch(_number(number), "torch"),
            "numpy": lambda number, _: fetch(_number(number), "numpy"),
            "scalar": self._scalar,
        }

    def decode_value(self, item: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise FormatError(f"skeleton of a checkpoint: expected at most {_MAX_DEPTH} levels, got more")
        if item is None or type(item) in {bool, int, str}:
            return item
        if type(item) is not list or len(item) != 2 or type(item[0]) is not str or item[0] not in self._decoders:
            raise _unreadable(item)
        return self._decoders[item[0]](item[1], depth)

    def _list(self, items: Any, depth: int) -> list[Any]:
        if type(items) is not list:
            raise _unreadable(items)
        return [self.decode_value(item, depth + 1) for item in items]

    def _dict(self, entries: Any, depth: int) -> dict[Any, Any]:
        if type(entries) is not list or not all(type(entry) is list and len(entry) == 2 for entry in entries):
            raise _unreadable(entries)
        decoded = {}
        for key, value in entries:
            decoded_key = self.decode_value(key, depth + 1)
            if type(decoded_key) not in {str, int} or decoded_key in decoded:
                raise _unreadable(key)
            decoded[decoded_key] = self.decode_value(value, depth + 1)
        return decoded

    def _scalar(self, number: Any, _: int) -> Any:
        array = self._fetch(_number(number), "numpy")
        if array.ndim:
            raise FormatError(f"array {number} of a checkpoint: expected a scalar, got shape {list(array.shape)}")
        return array[()]


def _int(text: Any, _: int) -> int:
    digits = text.removeprefix("-") if type(text) is str else ""
    if not digits or not set(digits) <= set("0123456789abcdef"):
        raise _unreadable(text)
    return int(text, 16)


def _float(text: Any, _: int) -> float:
    data = _bytes(text, 0)
    if len(data) != 8:
        raise _unreadable(text)
    value: float = struct.unpack(">d", data)[0]
    return value


def _bytes(text: Any, _: int) -> bytes:
    try:
        return bytes.fromhex(text)
    except (TypeError, ValueError):
        raise _unreadable(text) from None


def _number(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise _unreadable(number)
    return number


def _unreadable(item: Any) -> FormatError:
    # The item itself is secret, and not in the message.
    return FormatError(
        f"skeleton of a checkpoint: expected entries of this version of fastrack, got another {type(item).__name__}. "
        "Update fastrack, or save the checkpoint again"
    )
