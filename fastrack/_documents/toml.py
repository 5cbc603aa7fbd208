"""Read tables of TOML by their keys and fields. Unknown keys are refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from typing import Any, TypeVar

from fastrack._documents.fields import TEXT, Field, FieldError, Fields, checked, hexadecimal
from fastrack.errors import FormatError

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)


class Table:
    """A table whose keys are read one by one. `done` refuses unread keys.

    Methods that read a key raise `FormatError` if its field does not take the value.
    """

    __slots__ = ("_document", "_known", "_members", "_path")

    def __init__(self, members: dict[str, object], document: str, path: str = "") -> None:
        self._members = members
        self._document = document
        self._path = path
        self._known: set[str] = set()

    @classmethod
    def parse(cls, text: str | bytes, document: str) -> Table:
        """Parse a document, in UTF-8 if it is bytes."""
        try:
            return cls(tomllib.loads(text if isinstance(text, str) else text.decode()), document)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"reading the {document} failed: expected TOML, got {error}. Correct it.") from None

    def path(self, key: str) -> str:
        """Return the full key, such as ``cpu.tdx.mrtd``."""
        return f"{self._path}.{key}" if self._path else key

    def needed(self, key: str, field: Field[T]) -> T:
        """Read a key that must be there."""
        self._known.add(key)
        value = self._members.get(key)
        try:
            return field.read(value)
        except FieldError as error:
            place, found = error.under(key).path, "none" if value is None else repr(value)
            raise self.refusal(place, error.wanted, found) from None

    def read(self, key: str, field: Field[T]) -> T | None:
        """Read a key; None if it is absent."""
        self._known.add(key)
        return self.needed(key, field) if self.has(key) else None

    def read_all(self, fields: Fields) -> dict[str, Any]:
        """Read the keys that are there. Return their values by attributes."""
        self._known.update(fields)
        return {field.attribute or key: self.needed(key, field) for key, field in fields.items() if self.has(key)}

    def table(self, key: str) -> Table | None:
        """Read a table; None if it is absent."""
        members = self.read(key, _TABLE)
        return None if members is None else Table(members, self._document, self.path(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """Read an array of tables; an absent one is empty."""
        members = self.read(key, _TABLES) or []
        return tuple(Table(one, self._document, f"{self.path(key)}[{at}]") for at, one in enumerate(members))

    def section(self, key: str, fields: Fields) -> dict[str, Any]:
        """Read a table of these keys and no others; an absent one is empty."""
        if (table := self.table(key)) is None:
            return {}
        found = table.read_all(fields)
        table.done()
        return found

    def has(self, key: str) -> bool:
        """Return whether a key is set."""
        return key in self._members

    def names(self) -> tuple[str, ...]:
        """Return the keys that are set, known or not."""
        return tuple(self._members)

    def done(self) -> None:
        """Require that every key was read. The error names the known keys."""
        if unknown := sorted(set(self._members) - self._known):
            known = ", ".join(sorted(self._known))
            raise self.refusal(unknown[0], f"one of the keys {known}", "an unknown one")

    def refusal(self, key: str, wanted: object, found: object) -> FormatError:
        """Make the error for a key."""
        return FormatError(
            f"reading the {self._document} failed: expected {wanted} as {self.path(key)}, got {found}. Correct it."
        )


def filled(item: Field[T], wanted: str, make: Callable[[Iterable[T]], Any] = frozenset) -> Field[Any]:
    """Return a field of lists that are not empty, of items of a field."""

    def read(value: object) -> Any:
        if not isinstance(value, list):
            raise FieldError(wanted, type(value).__name__)
        with suppress(FieldError):
            if value:
                return make([item.read(each) for each in value])
        raise FieldError(f"{wanted}, not empty", "another one")

    return Field(read)


def digests(size: int) -> Field[frozenset[bytes]]:
    """Return a field of lists of values of `size` bytes in hexadecimal."""
    return filled(hexadecimal(size), f"a list of {size} bytes in hexadecimal each")


def word_of(kind: type[E]) -> Field[E]:
    """Return a field of the words of an enumeration."""

    def read(value: object) -> E:
        try:
            return kind(TEXT.read(value))
        except ValueError:
            raise FieldError(f"one of {', '.join(kind)}", type(value).__name__) from None

    return Field(read)


def words_of(kind: type[E]) -> Field[frozenset[E]]:
    """Return a field of lists of words of an enumeration."""
    return filled(word_of(kind), f"a list of some of {', '.join(kind)}")


TEXTS: Field[frozenset[str]] = filled(TEXT, "a list of strings")
_TABLE: Field[dict[str, Any]] = checked(lambda value: isinstance(value, dict), "a table")
_TABLES: Field[list[dict[str, Any]]] = checked(
    lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value), "an array of tables"
)
