"""Read JSON of other parties: every member by its name and type, every error with its place."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import NoReturn, Self

from fastrack._util.documents import unique
from fastrack.attest._errors import malformed
from fastrack.errors import FormatError

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_LIMIT = 1 << 16  # of integers
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")


class Node:
    """A value in a JSON document, with the path to it.

    Methods that read a member raise `FormatError` if it is absent or of another type.
    """

    __slots__ = ("document", "path", "value")

    def __init__(self, value: object, document: str, path: str = "") -> None:
        self.value = value
        self.document = document
        self.path = path

    @classmethod
    def parse(cls, text: bytes, document: str) -> Self:
        """Parse a document in UTF-8, in which no object has a member twice."""
        try:
            value = json.loads(text.decode(), object_pairs_hook=unique, parse_constant=_refuse_constant)
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
        if not _HEX.fullmatch(text) or size not in {None, len(text) // 2}:
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
        """Read the items of a list, one after the other."""
        node = self.member(name)
        if not isinstance(node.value, list):
            raise node.refusal("a list", type(node.value).__name__)
        for number, value in enumerate(node.value):
            yield type(self)(value, self.document, f"{node.path}[{number}]")

    def integers(self, name: str, of: str) -> tuple[int, ...]:
        """Read a list of objects, and of each the member `of`, an integer."""
        value = self.member(name).value
        if isinstance(value, list):
            found = tuple(item.get(of) if isinstance(item, dict) else None for item in value)
            if all(type(number) is int and 0 <= number < _LIMIT for number in found):
                return found  # type: ignore[return-value]
        return tuple(item.integer(of) for item in self.items(name))  # which names the one that is wrong

    def texts(self, name: str) -> tuple[str, ...]:
        """Read a list of strings; an absent one is empty."""
        if name not in self.names:
            return ()
        found = tuple(node.value for node in self.items(name))
        if not all(isinstance(value, str) for value in found):
            raise self.member(name).refusal("a list of strings", found)
        return found  # type: ignore[return-value]

    def expect(self, name: str, value: object) -> None:
        """Require that a member has the only value that is supported."""
        node = self.member(name)
        if type(node.value) is not type(value) or node.value != value:
            raise node.refusal(repr(value), repr(node.value))

    def _object(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.refusal("an object", type(self.value).__name__)
        return self.value

    def refusal(self, wanted: object, found: object) -> FormatError:
        """Make the error for this value."""
        return malformed(self.document, self.path or "content", None, wanted=wanted, found=found)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
