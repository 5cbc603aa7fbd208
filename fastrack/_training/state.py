"""The skeleton of a checkpoint: what is left of a nest when its arrays are taken out, as canonical JSON.

It says what each thing is and runs nothing: no class or function is named in it.
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
_MAX_BARE = 2**53  # a whole number past it is written in hexadecimal, since not every reader of JSON would keep it

_PLAIN = {type(None), bool, int, float, str, bytes}

Fetch = Callable[[int, Framework], Any]


def encode_state(state: Any) -> tuple[bytes, list[Any]]:
    """The skeleton of a nest, and the arrays it refers to by their number, each memory once.

    Raises
    ------
    TypeError
        If something in it cannot be kept: says where it stands.
    ValueError
        If it is nested too deep, as one that holds itself is.
    """
    encoder = _Encoder()
    document = {"checkpoint": _VERSION, "state": encoder.encode_value(state, "state", 0)}
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode(), encoder.arrays


def decode_state(skeleton: bytes, fetch: Fetch) -> Any:
    """The nest of a skeleton, with `fetch(number, framework)` in place of each array.

    Raises
    ------
    FormatError
        If it is no skeleton.
    """
    try:
        document = json.loads(skeleton, parse_constant=_refuse_number, parse_float=_refuse_number)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the skeleton of a checkpoint is JSON, and this is not: {error}") from None
    if type(document) is not dict or document.keys() != {"checkpoint", "state"}:
        raise FormatError("the skeleton of a checkpoint has the members checkpoint and state, and this has not")
    if type(document["checkpoint"]) is not int or document["checkpoint"] != _VERSION:
        raise FormatError(f"the checkpoint is not of version {_VERSION}, which this fastrack reads; update it")
    return _Decoder(fetch).decode_value(document["state"], 0)


def _refuse_number(_: str) -> NoReturn:
    raise ValueError("it has a number that is not whole")


class _Encoder:
    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def encode_value(self, value: Any, path: str, depth: int) -> Any:
        """What stands for `value` in the skeleton. None, booleans, text and most whole numbers stand for themselves."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"{path:.80}... is more than {_MAX_DEPTH} levels deep; does something hold itself?")
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
            raise TypeError(f"{path} has a key of type {type(key).__qualname__}, which is no text and no whole number")
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
                f"{path} is of type {type(value).__qualname__}, which a checkpoint does not keep; it keeps dicts with "
                "keys of text and whole numbers, lists, tuples, None, booleans, numbers, text, bytes, and arrays of "
                "torch and NumPy: make it one of these, and back when it was loaded"
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
        raise TypeError(f"{path} is a {type(tensor).__qualname__} ({tensor.layout}), and not a dense torch.Tensor")
    if tensor.device.type != "cpu":
        raise TypeError(f"{path} is on {tensor.device}, and a file is written from host memory; move it, with .cpu()")


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
            raise TypeError(f"{path} is no Unicode text: it holds lone surrogates") from None
    return value


class _Decoder:
    """Every value may be wrong: who has the key may have written anything."""

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
            raise FormatError(f"the skeleton of a checkpoint is more than {_MAX_DEPTH} levels deep")
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
            raise FormatError(f"array {number} of a checkpoint should be a scalar, and has shape {list(array.shape)}")
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
    # Never the item itself: it is what the checkpoint keeps secret.
    return FormatError(
        f"the skeleton of a checkpoint holds a {type(item).__name__} that this version of fastrack cannot read; update "
        "fastrack, or save the checkpoint again"
    )
