"""Write and read the documents of the exchange: canonical JSON, of which each content has one form only.

A document is an object in ASCII, without spaces, with its members in order, and a newline after it. Bytes are base64
with padding (RFC 4648, section 4). The members "kind" and "version" say what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from fastrack._util import documents
from fastrack.attest._errors import malformed
from fastrack.attest._formats.json import Node

T = TypeVar("T")

PART_LIMIT = 1 << 20  # bytes of a manifest or of a part of the collateral
REPORT_LIMIT = 16 << 10
CHAIN_LIMIT = 64 << 10


def encode(kind: str, version: int, members: Mapping[str, Any]) -> bytes:
    """Return the document of a kind with these members, in its one form."""
    return documents.encode({**members, "kind": kind, "version": version}, end=b"\n")


def decode(data: bytes, kind: str, version: int, members: Iterable[str], *, limit: int) -> Reader:
    """Parse a document, which has these members besides "kind" and "version", and no others.

    It must have `limit` bytes at most, and be in canonical form.
    """
    name = kind.replace("/", " ")
    if len(data) > limit:
        raise malformed(name, "size", None, wanted=f"at most {limit} bytes", found=len(data))
    reader = Reader.parse(data, name)
    if documents.encode(reader.value, end=b"\n") != data:
        raise malformed(name, "form", None, wanted="canonical JSON and a newline", found="another way to write it")
    reader.expect("kind", kind)
    reader.expect("version", version)
    reader.require_members({*members, "kind", "version"})
    return reader


def write_bytes(data: bytes | None) -> str | None:
    """Return bytes as base64; None as it is."""
    return None if data is None else documents.encode_bytes(data)


class Reader(Node):
    """An object in a document, read member by member. Every method raises `FormatError` with the path of a member."""

    __slots__ = ()

    def require_members(self, names: set[str]) -> None:
        """Require these members and no others."""
        if self.names != names:
            found = ", ".join(sorted(self.names)) or "none"
            raise self.refusal(f"the members {', '.join(sorted(names))}", found)

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
        wanted = set(members)
        for child in self._items(name, limit):
            child.require_members(wanted)
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
        """Read a list of up to `count` different integers from 0 that are below a bound."""
        found = [node.value for node in self._items(name, count)]
        numbers = tuple(value for value in found if type(value) is int and 0 <= value < below)
        if len(numbers) != len(found) or len(set(numbers)) != len(numbers):
            raise self.member(name).refusal(f"different integers below {below}", found)
        return numbers

    def _items(self, name: str, limit: int) -> list[Self]:
        nodes = list(self.items(name))
        if len(nodes) > limit:
            raise self.member(name).refusal(f"at most {limit} items", len(nodes))
        return nodes


def _read_bytes(node: Node, limit: int, size: int | None) -> bytes:
    wanted = f"{size} bytes in base64" if size is not None else f"1 to {limit} bytes in base64"
    text = node.value
    if not isinstance(text, str):
        raise node.refusal(wanted, type(text).__name__)
    try:
        data = documents.decode_bytes(text)
    except ValueError:
        raise node.refusal(wanted, f"{text:.40}") from None
    if not 1 <= len(data) <= limit or size not in {None, len(data)}:
        raise node.refusal(wanted, f"{len(data)} bytes")
    return data
