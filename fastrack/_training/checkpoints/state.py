"""Skeletons of checkpoints: canonical JSON of a pytree, with numbers in place of arrays.

A skeleton holds the type of each value, and no part of it is run. Names of classes and functions are looked up among
those that the process has allowed, and are neither imported nor called.
"""

from __future__ import annotations

import json
import operator
import re
import struct
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fastrack._documents.canonical import encode
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework
from fastrack._tensors.sharded import is_sharded, local_part
from fastrack._tensors.storages import storage_key
from fastrack._training.allowed import encode_allowed, find_allowed, is_named_tuple, make_named_tuple, name_of
from fastrack._util.extras import require
from fastrack.errors import FormatError

_VERSION = 1
_MAX_DEPTH = 64
_MAX_BARE = 2**53  # larger integers are written in hexadecimal, since not every JSON parser keeps them exactly

_BARE = {bool, int, str}
_PLAIN = {type(None), bool, int, float, complex, str, bytes, bytearray}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter", defaultdict: "defaultdict"}
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(dict, list, set, frozenset, tuple, OrderedDict, Counter),
        *(int, float, complex, bool, str, bytes, bytearray),
    )
}
_CONSTANTS = ("dtype", "layout", "memory_format", "qscheme")  # types of torch whose values are attributes of torch
_KEYS = {"int", "float", "complex", "bytes", "size", "constant", "device", "path", "global", "member"}

Fetch = Callable[[int, Framework], Any]
_Strides = tuple[int, ...]


def encode_state(state: Any) -> tuple[bytes, list[Any]]:
    """Return the skeleton of a pytree, and the arrays that it refers to by number, each memory once."""
    encoder = _Encoder()
    document = {"checkpoint": _VERSION, "state": encoder.encode_value(state, "state", 0)}
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
    return _Decoder(fetch).decode(document["state"], 0)


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
        if kind in {set, frozenset}:  # sorted, since the order of a set differs between processes
            members = [self._encode_key(item, f"{path} (a member)", depth) for item in value]
            return [kind.__name__, sorted(members, key=encode)]
        if kind in _MAPPINGS:
            return self._encode_mapping(value, path, depth)
        if isinstance(value, np.generic) or arrays.framework_of(value) is not None:
            return self._encode_array(value, path)
        return self._encode_other(value, path, depth)

    def _encode_other(self, value: Any, path: str, depth: int) -> list[Any]:
        kind = type(value)
        if kind is Namespace and all(type(name) is str for name in vars(value)):
            return ["namespace", self._encode_items(vars(value).items(), path, depth)]
        if is_named_tuple(value):
            return ["namedtuple", name_of(kind), self._encode_items(zip(kind._fields, value, strict=True), path, depth)]
        if kind is type(Path()):  # another class may write its paths in another way
            return ["path", _encode_plain(str(value), path)]
        entry = _encode_constant(value) or encode_allowed(value)
        if entry is None:
            raise TypeError(
                f"{path}: expected an array, or a value that torch.load(weights_only=True) takes, got "
                f"{kind.__qualname__}. Convert it; a class, a function or an enum may be named in "
                "torch.serialization.add_safe_globals instead"
            )
        return entry

    def _encode_mapping(self, value: Any, path: str, depth: int) -> list[Any]:
        kind, items = type(value), self._encode_items(value.items(), path, depth)
        if kind is defaultdict:
            factory = value.default_factory
            if factory is not None and factory not in _FACTORIES.values():
                raise TypeError(f"{path}: expected a default factory such as list, got another. Convert it to a dict")
            return ["defaultdict", items, factory and factory.__name__]
        # Of a module's state dict, for `load_state_dict`.
        metadata = getattr(value, "_metadata", None) if kind is OrderedDict else None
        if metadata is None:
            return [_MAPPINGS[kind], items]
        return ["state_dict", items, self.encode_value(metadata, f"{path}._metadata", depth + 1)]

    def _encode_items(self, items: Iterable[tuple[Any, Any]], path: str, depth: int) -> list[list[Any]]:
        entries = []
        for key, value in items:
            is_short = type(key) in _PLAIN and (type(key) is not int or abs(key) <= _MAX_BARE)
            shown = f"{key!r:.40}" if is_short else type(key).__qualname__  # it may have tensors in it
            entry = self._encode_key(key, f"{path}[{shown}]", depth)
            entries.append([entry, self.encode_value(value, f"{path}[{shown}]", depth + 1)])
        return entries

    def _encode_key(self, key: Any, path: str, depth: int) -> Any:
        """Return the entry of a key of a dict, or of a member of a set."""
        entry = self.encode_value(key, path, depth + 1)
        if not _is_key(entry):
            raise TypeError(f"{path}: expected keys without arrays, such as str or int, got {type(key).__qualname__}")
        return entry

    def _encode_array(self, value: Any, path: str) -> list[Any]:
        framework = arrays.framework_of(value)
        is_scalar = isinstance(value, np.generic)
        if is_scalar:
            value = np.asarray(value)
        here = local_part(value) if is_sharded(value) else value
        if framework == "torch":
            _require_saveable(here, path)
        elif type(here) not in {np.ndarray, np.memmap}:
            raise TypeError(f"{path}: expected a plain array, got {type(value).__qualname__}. Convert it first")
        try:
            arrays.dtype_and_shape(here)
        except TypeError as error:
            raise TypeError(f"{path}: {error}") from None
        number = self._numbers.setdefault(_key_of(value, here), len(self.arrays))
        # A DTensor opens as a whole tensor, which has no strides of its own yet.
        stored, strides = arrays.in_memory_order(value) if here is value else (value, None)
        if number == len(self.arrays):
            self.arrays.append(stored)
        entry: list[Any] = ["torch", number]
        if framework != "torch":
            entry = ["scalar" if is_scalar else "numpy", number]
        elif isinstance(value, sys.modules["torch"].nn.Parameter):
            entry = ["parameter", number, value.requires_grad]
        elif value.requires_grad:
            entry = ["torch", number, True]
        return entry if strides is None else [*entry, list(strides)]


def _key_of(value: Any, here: Any) -> Hashable:
    """Return a key that equal views of one memory share. `here` is the local part of a DTensor."""
    if here is value:
        return storage_key(value)
    return (storage_key(here), value.placements, value.shape) if here.numel() else id(value)


def _require_saveable(tensor: Any, path: str) -> None:
    import torch

    if type(tensor) not in {torch.Tensor, torch.nn.Parameter} or tensor.layout != torch.strided:
        raise TypeError(
            f"{path}: expected a dense torch.Tensor, got {type(tensor).__qualname__} ({tensor.layout}). Store "
            "the dense tensors that it is made of, such as indices() and values()"
        )
    if tensor.is_quantized:
        raise TypeError(f"{path}: expected a torch.Tensor that is not quantised, got {tensor.dtype}. Store int_repr()")
    if tensor.device.type != "cpu":
        raise TypeError(f"{path}: expected a tensor in host memory, got one on {tensor.device}. Move it with .cpu()")


def _encode_plain(value: Any, path: str) -> Any:
    if isinstance(value, float):
        return ["float", struct.pack(">d", value).hex()]
    if isinstance(value, complex):
        return ["complex", struct.pack(">dd", value.real, value.imag).hex()]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, value.hex()]
    if isinstance(value, int):
        return value if abs(value) <= _MAX_BARE else ["int", format(value, "x")]
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(f"{path}: expected Unicode text, got lone surrogates in it") from None
    return value


def _encode_constant(value: Any) -> list[Any] | None:
    """Return the entry of a size, device or constant of torch, or None for another value. Imports nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if type(value) is torch.Size:
        return ["size", list(map(operator.index, value))]  # which may be integers of NumPy
    if type(value) is torch.device:
        return ["device", str(value)]
    name = str(value).removeprefix("torch.") if type(value).__name__ in _CONSTANTS else ""
    return ["constant", name] if name and vars(torch).get(name) is value else None


def _is_key(entry: Any, depth: int = 0) -> bool:
    """Return True for the entry of a value that can be hashed, and has no array in it."""
    if depth > _MAX_DEPTH:
        return False
    if entry is None or type(entry) in _BARE:
        return True
    match entry:
        case ["tuple" | "frozenset", list(items)]:
            return all(_is_key(item, depth + 1) for item in items)
        case ["namedtuple", _, list(items)]:
            return all(type(item) is list and all(_is_key(part, depth + 1) for part in item) for item in items)
        case [str(kind), *_]:
            return kind in _KEYS
    return False


class _Decoder:
    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._formed: dict[tuple[Framework, int, _Strides], Any] = {}
        self._leaves: dict[tuple[str, int, bool, _Strides | None], Any] = {}  # one parameter for all its places

    def decode(self, item: Any, depth: int) -> Any:
        """Return the value of an entry. All entries are checked, since any holder of the key may have written them."""
        if depth > _MAX_DEPTH:
            raise FormatError(f"skeleton of a checkpoint: expected at most {_MAX_DEPTH} levels, got more")
        if item is None or type(item) in _BARE:
            return item
        match item:
            case [str(kind), str(text), *texts] if kind in _TEXTS:
                return _decode_text(kind, [text, *texts])
            case [str(kind), list(items)] if kind in _SERIES:
                return self._decode_series(kind, items, depth)
            case [str(kind), list(items), *rest]:
                return self._decode_mapping([kind, *rest], self._decode_items(items, depth), depth)
            case ["namedtuple", str(name), list(items)]:
                return make_named_tuple(name, _require_named(self._decode_items(items, depth)))
            case [str(kind), int(number), *rest] if type(number) is int and number >= 0:
                return self._decode_array([kind, *rest], number)
        raise _unreadable(item)

    def _decode_series(self, kind: str, items: list[Any], depth: int) -> Any:
        if kind in {"set", "frozenset"} and not all(map(_is_key, items)):
            raise _unreadable(items)
        if kind == "size" and not all(type(item) is int and -(2**63) <= item < 2**63 for item in items):
            raise _unreadable(items)
        decode = self._decode_key if kind in {"set", "frozenset"} else self.decode
        decoded = _SERIES[kind]([decode(item, depth + 1) for item in items])
        if len(decoded) != len(items):  # a member of a set is there twice
            raise _unreadable(items)
        return decoded

    def _decode_mapping(self, kind: list[Any], items: dict[Any, Any], depth: int) -> Any:
        match kind:
            case ["dict" | "ordered_dict" | "counter" as name]:
                return items if name == "dict" else (OrderedDict if name == "ordered_dict" else Counter)(items)
            case ["state_dict", metadata]:
                decoded = OrderedDict(items)
                decoded._metadata = self.decode(metadata, depth + 1)  # type: ignore[attr-defined]  # noqa: SLF001
                return decoded
            case ["defaultdict", None]:
                return defaultdict(None, items)
            case ["defaultdict", str(name)] if name in _FACTORIES:
                return defaultdict(_FACTORIES[name], items)
            case ["namespace"]:
                namespace = Namespace()
                vars(namespace).update(_require_named(items))  # not Namespace(**items), as a name may be "self"
                return namespace
        raise _unreadable(kind)

    def _decode_items(self, entries: list[Any], depth: int) -> dict[Any, Any]:
        decoded: dict[Any, Any] = {}
        for entry in entries:
            if type(entry) is not list or len(entry) != 2 or not _is_key(entry[0]):
                raise _unreadable(entry)
            key = self._decode_key(entry[0], depth + 1)
            if key in decoded:
                raise _unreadable(entry[0])
            decoded[key] = self.decode(entry[1], depth + 1)
        return decoded

    def _decode_key(self, entry: Any, depth: int) -> Any:
        key = self.decode(entry, depth)
        try:
            hash(key)
        except TypeError:  # a member of an enum may have none
            raise _unreadable(entry) from None
        return key

    def _decode_array(self, kind: list[Any], number: int) -> Any:
        strides: _Strides | None = None
        if type(kind[-1]) is list:
            *kind, steps = kind
            if not all(type(step) is int and 0 <= step < 2**63 for step in steps):
                raise _unreadable(steps)
            strides = tuple(steps)
        match kind:
            case ["torch" | "numpy" as name]:
                return self._fetch_formed(number, name, strides)
            case ["scalar"] if strides is None:
                array = self._fetch(number, "numpy")
                if array.ndim:
                    shape = list(array.shape)
                    raise FormatError(f"array {number} of a checkpoint: expected a scalar, got shape {shape}")
                return array[()]
            case ["torch" | "parameter" as name, bool(gradient)]:
                place = name, number, gradient, strides
                if place not in self._leaves:
                    tensor = self._fetch_formed(number, "torch", strides).detach()
                    self._leaves[place] = _make_leaf(name, tensor, gradient)
                return self._leaves[place]
        raise _unreadable(kind)

    def _fetch_formed(self, number: int, framework: Framework, strides: _Strides | None) -> Any:
        """Return an array, with the strides of its entry if that has any: one array for all places that have both."""
        array = self._fetch(number, framework)
        if strides is None:
            return array
        place = framework, number, strides
        if place not in self._formed:
            try:
                self._formed[place] = arrays.with_strides(array, strides)
            except ValueError:
                raise _unreadable(strides) from None
        return self._formed[place]


def _make_leaf(kind: str, tensor: Any, gradient: bool) -> Any:
    """Return a parameter, or a tensor that requires a gradient, in the memory of a tensor."""
    try:
        return _torch().nn.Parameter(tensor, gradient) if kind == "parameter" else tensor.requires_grad_(gradient)
    except RuntimeError:  # whole numbers have no gradient
        raise _unreadable(kind) from None


def _require_named(items: dict[Any, Any]) -> dict[str, Any]:
    if not all(type(key) is str for key in items):
        raise _unreadable(items)
    return items


def _decode_text(kind: str, texts: list[Any]) -> Any:
    try:
        if all(type(text) is str for text in texts):
            return _TEXTS[kind](*texts)
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, RuntimeError, struct.error):  # TypeError: another number of texts
        pass
    raise _unreadable(kind)


def _decode_int(text: str) -> int:
    if not re.fullmatch("-?[0-9a-f]+", text):
        raise ValueError("expected hexadecimal digits, got others")
    return int(text, 16)


def _find_constant(name: str) -> Any:
    constant = vars(_torch())[name]  # not getattr, which may import
    if type(constant).__name__ not in _CONSTANTS:
        raise ValueError("expected a constant of torch, got another of its attributes")
    return constant


def _find_member(name: str, member: str) -> Any:
    kind = find_allowed(name)
    if not isinstance(kind, type) or not issubclass(kind, Enum):
        raise TypeError("expected an enum, got another class or a function")
    return kind.__members__[member]


def _torch() -> Any:
    require("torch", "a checkpoint with values of torch", "torch")
    return sys.modules["torch"]


_TEXTS: dict[str, Callable[..., Any]] = {
    "int": _decode_int,
    "float": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "complex": lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "path": lambda text: Path(str(text)),  # one part
    "device": lambda text: _torch().device(text),
    "constant": _find_constant,
    "global": find_allowed,
    "member": _find_member,
}
_SERIES: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": lambda items: _torch().Size(items),
}


def _unreadable(item: Any) -> FormatError:
    # The item itself is secret, and not in the message.
    return FormatError(
        f"skeleton of a checkpoint: expected entries of this version of fastrack, got another {type(item).__name__}. "
        "Update fastrack, or save the checkpoint again"
    )
