"""Read JSON of other parties, and read and write the canonical documents of the exchange.

A document is an object in canonical JSON: ASCII, without spaces, with sorted members and a final newline. Bytes are
base64 with padding (RFC 4648, section 4). The members "kind" and "version" identify the document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn, Self, TypeVar

from fastrack._documents import canonical as documents
from fastrack._util import gate
from fastrack.attest._errors import malformed
from fastrack.errors import FormatError

T = TypeVar("T")

PART_LIMIT = gate.most_bytes("collateral")  # or of a manifest
REPORT_LIMIT = gate.most_bytes("report")
CHAIN_LIMIT = gate.most_bytes("certificates")

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_LIMIT = 1 << 16  # of integers
_HEX = re.compile(r"[0-9a-fA-F]*")  # not in pairs: the memory of a repeated group is 66 times the text


def encode(kind: str, version: int, members: Mapping[str, Any]) -> bytes:
    """Return the canonical document of a kind with these members."""
    return documents.encode({**members, "kind": kind, "version": version}, end=b"\n")


def decode(data: bytes, kind: str, version: int, members: Iterable[str], *, limit: int | None = None) -> Reader:
    """Parse a document with exactly these members, "kind" and "version".

    It must be in canonical form and have no more than its kind may have, and at most `limit` bytes.
    """
    name = kind.replace("/", " ")
    if limit is not None and len(data) > limit:
        raise malformed(name, "size", None, wanted=f"at most {limit} bytes", found=len(data))
    other = malformed(name, "form", None, wanted="canonical JSON and a newline", found="another way to write it")
    if not data.isascii() or b"\x7f" in data:  # which would be escaped, in up to six times the bytes
        raise other
    reader = Reader.parse(data, name)
    if documents.encode(reader.value, end=b"\n") != data:
        raise other
    reader.expect("kind", kind)
    reader.expect("version", version)
    reader.require_members({*members, "kind", "version"})
    return reader


def write_bytes(data: bytes | None) -> str | None:
    """Return bytes as base64; None for None."""
    return None if data is None else documents.encode_bytes(data)


class Reader:
    """A value in a JSON document, with the path to it.

    Methods that read a member raise `FormatError` if it is absent or of another type.
    """

    __slots__ = ("document", "path", "value")

    def __init__(self, value: object, document: str, path: str = "") -> None:
        self.value = value
        self.document = document
        self.path = path

    @classmethod
    def parse(cls, text: bytes, document: str, kind: str = "") -> Self:
        """Parse a document in UTF-8 of a `kind` that has limits, by default as it is named. Members stand once."""
        gate.admit(text, kind or document, name=document)
        try:
            value = json.loads(
                text.decode(),
                object_pairs_hook=documents.unique,
                parse_constant=_refuse_constant,
                parse_float=_parse_finite,
            )
        except (ValueError, RecursionError) as error:
            raise malformed(document, "text", None, wanted="JSON", found=str(error) or type(error).__name__) from None
        return cls(value, document)

    @property
    def names(self) -> set[str]:
        """The names of all members."""
        return set(self._object())

    def member(self, name: str) -> Self:
        """Read a member of any type."""
        members = self._object()
        if name not in members:
            raise self.refusal(f"a member {name!r}", "none")
        return type(self)(members[name], self.document, f"{self.path}.{name}" if self.path else name)

    def text(self, name: str) -> str:
        """Read a string."""
        node = self.member(name)
        if not isinstance(node.value, str):
            raise node.refusal("a string", type(node.value).__name__)
        return node.value

    def integer(self, name: str) -> int:
        """Read an integer from 0 to 65535."""
        node = self.member(name)
        if type(node.value) is not int or not 0 <= node.value < _LIMIT:
            raise node.refusal("an integer from 0 to 65535", node.value)
        return node.value

    def hexadecimal(self, name: str, size: int | None) -> bytes:
        """Read bytes in hexadecimal, `size` of them; None for any number."""
        node, text = self.member(name), self.text(name)
        if not _HEX.fullmatch(text) or len(text) % 2 or size not in {None, len(text) // 2}:
            raise node.refusal(f"{'' if size is None else f'{size} '}bytes in hexadecimal", text)
        return bytes.fromhex(text)

    def time(self, name: str) -> datetime:
        """Read a time in UTC, as ``2025-06-19T10:16:03Z``."""
        text = self.text(name)
        with suppress(ValueError):
            if _TIME.fullmatch(text):
                return datetime.fromisoformat(text)
        raise self.member(name).refusal("a time in UTC", text)

    def items(self, name: str) -> Iterator[Self]:
        """Read the items of a list, in order."""
        node = self.member(name)
        if not isinstance(node.value, list):
            raise node.refusal("a list", type(node.value).__name__)
        for number, value in enumerate(node.value):
            yield type(self)(value, self.document, f"{node.path}[{number}]")

    def integers(self, name: str, of: str) -> tuple[int, ...]:
        """Read the integer member `of` of each object in a list."""
        value = self.member(name).value
        if isinstance(value, list):
            numbers = tuple(item.get(of) if isinstance(item, dict) else None for item in value)
            if all(type(number) is int and 0 <= number < _LIMIT for number in numbers):
                return numbers  # type: ignore[return-value]
        return tuple(item.integer(of) for item in self.items(name))  # names the wrong item

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of strings; empty if absent."""
        if name not in self.names:
            return ()
        values = tuple(node.value for node in self.items(name))
        if not all(isinstance(value, str) for value in values):
            raise self.member(name).refusal("a list of strings", values)
        return values  # type: ignore[return-value]

    def expect(self, name: str, value: object) -> None:
        """Require that a member has the only supported value."""
        node = self.member(name)
        if type(node.value) is not type(value) or node.value != value:
            raise node.refusal(repr(value), repr(node.value))

    def require_members(self, names: set[str]) -> None:
        """Require these members and no others."""
        if self.names != names:
            actual = ", ".join(sorted(self.names)) or "none"
            raise self.refusal(f"the members {', '.join(sorted(names))}", actual)

    def child(self, name: str, members: Iterable[str]) -> Self:
        """Read an object with these members."""
        child = self.member(name)
        child.require_members(set(members))
        return child

    def or_none(self, name: str, read: Callable[[str], T]) -> T | None:
        """Read a member by a function, or null."""
        return None if self.member(name).value is None else read(name)

    def children(self, name: str, members: Iterable[str], *, limit: int) -> Iterator[Self]:
        """Read a list of up to `limit` objects with these members."""
        names = set(members)
        for child in self._items(name, limit):
            child.require_members(names)
            yield child

    def id(self, name: str) -> str:
        """Read an id: 32 hexadecimal digits."""
        text = self.text(name)
        if documents.ID.fullmatch(text) is None:
            raise self.member(name).refusal("an id of 32 hexadecimal digits", f"{text:.80}")
        return text

    def binary(self, name: str, *, limit: int, size: int | None = None) -> bytes:
        """Read bytes in base64: `size` of them, or from 1 to `limit`."""
        return _read_bytes(self.member(name), limit, size)

    def binaries(self, name: str, *, count: int, limit: int) -> tuple[bytes, ...]:
        """Read a list of up to `count` strings of base64, each of up to `limit` bytes."""
        return tuple(_read_bytes(node, limit, None) for node in self._items(name, count))

    def indexes(self, name: str, *, count: int, below: int) -> tuple[int, ...]:
        """Read a list of up to `count` different integers from 0, all below `below`."""
        values = [node.value for node in self._items(name, count)]
        numbers = tuple(value for value in values if type(value) is int and 0 <= value < below)
        if len(numbers) != len(values) or len(set(numbers)) != len(numbers):
            raise self.member(name).refusal(f"different integers below {below}", values)
        return numbers

    def _items(self, name: str, limit: int) -> list[Self]:
        nodes = list(self.items(name))
        if len(nodes) > limit:
            raise self.member(name).refusal(f"at most {limit} items", len(nodes))
        return nodes

    def _object(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.refusal("an object", type(self.value).__name__)
        return self.value

    def refusal(self, wanted: object, found: object) -> FormatError:
        """Make the error for this value."""
        return malformed(self.document, self.path or "content", None, wanted=wanted, found=found)


def _parse_finite(text: str) -> float:
    """Read a number that is no integer. None is larger than a float can be: ``1e999`` would read as infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is out of range")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _read_bytes(node: Reader, limit: int, size: int | None) -> bytes:
    form = f"{size} bytes in base64" if size is not None else f"1 to {limit} bytes in base64"
    text = node.value
    if not isinstance(text, str):
        raise node.refusal(form, type(text).__name__)
    try:
        data = documents.decode_bytes(text)
    except ValueError:
        raise node.refusal(form, f"{text:.40}") from None
    if not 1 <= len(data) <= limit or size not in {None, len(data)}:
        raise node.refusal(form, f"{len(data)} bytes")
    return data
