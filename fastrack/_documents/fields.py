"""Fields of documents: each reads one value of JSON, or raises `FieldError`, and writes it. A `Form` has several.

Values are of strangers. A field looks at the type and the size of a value before it does any work on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import Any, Generic, Self, TypeVar

from fastrack._documents.canonical import NUMBER_LIMIT, decode, decode_bytes, encode, encode_bytes, encode_time

T = TypeVar("T")

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
_HEX = re.compile(r"[0-9a-fA-F]*")  # not in pairs: the memory of a repeated group is 66 times the text


class FieldError(ValueError):
    """A value that is none of its field. wanted, found : for errors; path : from the document to the value."""

    def __init__(self, wanted: object, found: object, path: str = "") -> None:
        super().__init__(wanted, found, path)
        self.wanted, self.found, self.path = wanted, found, path

    def under(self, place: str) -> FieldError:
        """Return this error for the value that has the present one at a place: a member, or an item such as ``[3]``."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        return FieldError(self.wanted, self.found, f"{place}{dot}{self.path}")

    def __str__(self) -> str:
        return f"expected {self.wanted} as its {self.path or 'content'}, got another value"


@dataclass(frozen=True, slots=True)
class Field(Generic[T]):
    """The functions that read a value and write it. attribute : of the object, where the member has another name."""

    read: Callable[[Any], T]
    write: Callable[[T], Any] = lambda value: value
    attribute: str = ""

    def takes(self, value: object) -> bool:
        """Return whether a value is one of this field."""
        try:
            self.read(value)
        except FieldError:
            return False
        return True

    def of(self, attribute: str) -> Self:
        """Return this field for an attribute of another name than the member."""
        return replace(self, attribute=attribute)


Fields = Mapping[str, Field[Any]]
"""The fields of an object, by the names of its members, in the order in which they are read."""


def read_members(value: object, fields: Fields, optional: Collection[str] = ()) -> dict[str, Any]:
    """Read an object of exactly these members, of which some may be absent. Return values by their attributes."""
    members = _of_type(dict, "an object", value)
    wanted = fields.keys() - (set(optional) - members.keys())
    if members.keys() != wanted:
        raise FieldError(f"the members {', '.join(sorted(wanted))}", ", ".join(sorted(members)) or "none")
    given = ((name, field) for name, field in fields.items() if name in wanted)
    return {field.attribute or name: read_at(name, field, members[name]) for name, field in given}


def read_at(place: str, field: Field[T], value: object) -> T:
    """Read a value that lies at a place of another."""
    try:
        return field.read(value)
    except FieldError as error:
        raise error.under(place) from None


def write_members(source: object, fields: Fields, optional: Collection[str] = ()) -> dict[str, Any]:
    """Write the attributes of an object as members, of which optional ones are absent where it has None."""
    values = ((name, field, getattr(source, field.attribute or name)) for name, field in fields.items())
    return {name: field.write(value) for name, field, value in values if value is not None or name not in optional}


@dataclass(frozen=True, slots=True)
class Form:
    """The one form of a document: canonical JSON of these fields, and of members that have one value each.

    limit : the most bytes, where nothing else has counted them; end : what follows the JSON
    """

    fields: Fields
    fixed: Mapping[str, int]
    limit: int | None = None
    end: bytes = b""

    def write(self, source: object) -> bytes:
        """Return the document of an object that has the fields as attributes."""
        return encode({**write_members(source, self.fields), **self.fixed}, end=self.end)

    def parse(self, content: bytes) -> dict[str, Any]:
        """Return the values of a document, by attributes. Raise ValueError or RecursionError if it has another form."""
        names = self.fields.keys() | self.fixed.keys()
        members = decode(content, names, self.fixed, limit=self.limit, end=self.end)
        return read_members({name: members[name] for name in self.fields}, self.fields)


def _of_type(kind: type[T], wanted: str, value: object) -> T:
    if not isinstance(value, kind):
        raise FieldError(wanted, type(value).__name__)
    return value


def checked(is_valid: Callable[[Any], object], wanted: str = "a valid one") -> Field[Any]:
    """Return a field of values that a function accepts, whatever their type."""

    def read(value: Any) -> Any:
        if not is_valid(value):
            raise FieldError(wanted, type(value).__name__)
        return value

    return Field(read)


def text(pattern: str = r".*", wanted: str = "a string") -> Field[str]:
    """Return a field of strings that match a pattern."""
    form = re.compile(pattern, re.DOTALL)

    def read(value: object) -> str:
        found = _of_type(str, "a string", value)
        if form.fullmatch(found) is None:
            raise FieldError(wanted, f"{found:.80}")
        return found

    return Field(read)


def integer(least: int, most: int | None = None) -> Field[int]:
    """Return a field of integers within bounds."""
    wanted = f"an integer from {least}" if most is None else f"an integer from {least} to {most}"

    def read(value: object) -> int:
        if type(value) is not int or value < least or (most is not None and value > most):
            raise FieldError(wanted, value)
        return value

    return Field(read)


def one_of(*values: Any) -> Field[Any]:
    """Return a field of these values of one type."""
    kind = type(values[0])
    return checked(lambda value: type(value) is kind and value in values, " or ".join(map(repr, values)))


def binary(limit: int, size: int | None = None, *, least: int = 1) -> Field[bytes]:
    """Return a field of bytes in base64: `size` of them, or from `least` to `limit`."""
    wanted = f"{f'{least} to {limit}' if size is None else size} bytes in base64"

    def read(value: object) -> bytes:
        encoded = _of_type(str, wanted, value)
        try:
            data = decode_bytes(encoded)
        except ValueError:
            raise FieldError(wanted, f"{encoded:.40}") from None
        if not least <= len(data) <= limit or size not in {None, len(data)}:
            raise FieldError(wanted, f"{len(data)} bytes")
        return data

    return Field(read, encode_bytes)


def hexadecimal(size: int | None) -> Field[bytes]:
    """Return a field of bytes in hexadecimal, `size` of them; None for any number."""
    wanted = f"{'' if size is None else f'{size} '}bytes in hexadecimal"

    def read(value: object) -> bytes:
        text = TEXT.read(value)
        if not _HEX.fullmatch(text) or len(text) % 2 or size not in {None, len(text) // 2}:
            raise FieldError(wanted, text)
        return bytes.fromhex(text)

    return Field(read, bytes.hex)


def _read_time(value: object) -> datetime:
    text = TEXT.read(value)
    with suppress(ValueError):
        if _TIME.fullmatch(text):
            return datetime.fromisoformat(text)  # a tenth of the time of `strptime`
    raise FieldError("a time in UTC", text)


def or_none(field: Field[T]) -> Field[T | None]:
    """Return a field that may be null."""
    return Field(
        lambda value: None if value is None else field.read(value),
        lambda value: None if value is None else field.write(value),
    )


def list_of(field: Field[T], limit: float = inf) -> Field[tuple[T, ...]]:
    """Return a field of lists of up to `limit` items."""

    def read(value: object) -> tuple[T, ...]:
        items = _of_type(list, "a list", value)
        if len(items) > limit:
            raise FieldError(f"at most {limit} items", len(items))
        found: list[T] = []
        try:
            for item in items:
                found.append(field.read(item))  # noqa: PERF401 - its length is the place of a wrong one
        except FieldError as error:
            raise error.under(f"[{len(found)}]") from None
        return tuple(found)

    return Field(read, lambda values: [field.write(value) for value in values])


def mapping(names: Field[str], field: Field[T], limit: float = inf) -> Field[Mapping[str, T]]:
    """Return a field of objects of up to `limit` members, whatever their names, which are strings of a field too."""

    def read(value: object) -> dict[str, T]:
        members = _of_type(dict, "an object", value)
        if len(members) > limit:
            raise FieldError(f"at most {limit} members", len(members))
        return {names.read(name): read_at(name, field, item) for name, item in members.items()}

    return Field(read, lambda values: {name: field.write(value) for name, value in values.items()})


def member_of(name: str, field: Field[T]) -> Field[T]:
    """Return a field of objects of which only one member is read."""

    def read(value: object) -> T:
        members = _of_type(dict, "an object", value)
        if name not in members:
            raise FieldError(f"a member {name!r}", "none")
        return read_at(name, field, members[name])

    return Field(read, lambda value: {name: field.write(value)})


def record(make: Callable[..., T], fields: Fields) -> Field[T]:
    """Return a field of objects of these fields, which are the arguments and the attributes of what `make` returns."""
    return Field(lambda value: make(**read_members(value, fields)), lambda value: write_members(value, fields))


TEXT = text()
BOOLEAN: Field[bool] = checked(lambda value: type(value) is bool, "true or false")
ID = text(r"[0-9a-f]{32}", "an id of 32 hexadecimal digits")
DIGEST = text(r"[0-9a-f]{64}", "a digest of 64 hexadecimal digits")
NUMBER = integer(0, NUMBER_LIMIT - 1)
SECONDS = checked(lambda value: type(value) in {int, float} and 0 < value < inf, "a number of seconds above 0")
INTEGER = integer(0, 65535)
BITS = one_of(128, 256)  # of a key
TIME = Field(_read_time, encode_time)
