"""Read JSON of other parties, and read and write the canonical documents of the exchange.

A document is an object in canonical JSON: ASCII, without spaces, with sorted members and a final newline. Bytes are
base64 with padding (RFC 4648, section 4). The members "kind" and "version" identify the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, Self, TypeVar

from fastrack._documents import canonical
from fastrack._documents.fields import Field, FieldError, Fields
from fastrack._documents.strict import parse_finite, unique
from fastrack._util import gate
from fastrack.errors import FormatError

T = TypeVar("T")

PART_LIMIT = gate.most_bytes("collateral")  # or of a manifest
REPORT_LIMIT = gate.most_bytes("report")
CHAIN_LIMIT = gate.most_bytes("certificates")

_SHOWN = 160  # characters of a value shown in a message


def encode(kind: str, version: int, members: Mapping[str, Any]) -> bytes:
    """Return the canonical document of a kind with these members."""
    return canonical.encode({**members, "kind": kind, "version": version}, end=b"\n")


def decode(data: bytes, kind: str, version: int, members: Iterable[str]) -> Reader:
    """Parse a document with exactly these members, "kind" and "version".

    It must be in canonical form and have no more than its kind may have.
    """
    name = kind.replace("/", " ")
    other = malformed(name, "form", None, wanted="canonical JSON and a newline", found="another way to write it")
    if not data.isascii() or b"\x7f" in data:  # which would be escaped, in up to six times the bytes
        raise other
    reader = Reader.parse(data, name)
    if canonical.encode(reader.value, end=b"\n") != data:
        raise other
    reader.expect("kind", kind)
    reader.expect("version", version)
    wanted = {*members, "kind", "version"}
    if reader.names != wanted:
        raise reader.refusal(f"the members {', '.join(sorted(wanted))}", ", ".join(sorted(reader.names)))
    return reader


class Reader:
    """A value in a JSON document, with the path to it.

    Methods that read a member raise `FormatError` if it is absent, or if its field does not take it.
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
                object_pairs_hook=unique,
                parse_constant=_refuse_constant,
                parse_float=parse_finite,
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

    def read(self, name: str, field: Field[T]) -> T:
        """Read a member by its field."""
        node = self.member(name)
        try:
            return field.read(node.value)
        except FieldError as error:
            raise node.refusal(error.wanted, error.found, error.under(node.path).path) from None

    def read_all(self, fields: Fields) -> dict[str, Any]:
        """Read members, in the order of their fields. Return their values by attributes."""
        return {field.attribute or name: self.read(name, field) for name, field in fields.items()}

    def items(self, name: str) -> Iterator[Self]:
        """Read the items of a list, in order."""
        node = self.member(name)
        if not isinstance(node.value, list):
            raise node.refusal("a list", type(node.value).__name__)
        for number, value in enumerate(node.value):
            yield type(self)(value, self.document, f"{node.path}[{number}]")

    def expect(self, name: str, value: object) -> None:
        """Require that a member has the only supported value."""
        node = self.member(name)
        if type(node.value) is not type(value) or node.value != value:
            raise node.refusal(repr(value), repr(node.value))

    def _object(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.refusal("an object", type(self.value).__name__)
        return self.value

    def refusal(self, wanted: object, found: object, path: str = "") -> FormatError:
        """Make the error for this value, or for one at a path."""
        return malformed(self.document, path or self.path or "content", None, wanted=wanted, found=found)


def malformed(structure: str, field: str, offset: int | None, *, wanted: object, found: object) -> FormatError:
    """Make the error for bytes that do not form a structure.

    `offset` counts bytes from the start of the structure; None for text.
    """
    place = "" if offset is None else f" at offset {offset}"
    return FormatError(
        f"reading the {structure} failed: expected {shorten(wanted)} as its {field}{place}, got {shorten(found)}. "
        "It is damaged, cut short, or of another kind."
    )


def shorten(value: object) -> str:
    """Return a value for a message, bytes in hexadecimal."""
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
