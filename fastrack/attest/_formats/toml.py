"""Read tables of TOML by key and type. Unknown keys are refused."""

from __future__ import annotations

import re
import tomllib
from typing import TypeVar

from fastrack.errors import FormatError

T = TypeVar("T")

_ANY = re.compile(r".*", re.DOTALL)


class Table:
    """A table whose keys are read one by one. `done` refuses unread keys.

    Methods that read a key raise `FormatError` for another type.
    """

    __slots__ = ("_document", "_known", "_members", "_path")

    def __init__(self, members: dict[str, object], document: str, path: str = "") -> None:
        self._members = members
        self._document = document
        self._path = path
        self._known: set[str] = set()

    @classmethod
    def parse(cls, text: str, document: str) -> Table:
        """Parse a document."""
        try:
            return cls(tomllib.loads(text), document)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"reading the {document} failed: expected TOML, got {error}. Correct it.") from None

    def path(self, key: str) -> str:
        """Return the full key, such as ``cpu.tdx.mrtd``."""
        return f"{self._path}.{key}" if self._path else key

    def table(self, key: str) -> Table | None:
        """Read a table; None if it is absent."""
        members = self._get(key, dict, "a table")
        return None if members is None else Table(members, self._document, self.path(key))

    def tables(self, key: str) -> tuple[Table, ...]:
        """Read an array of tables; an absent one is empty."""
        members = self._get(key, list, "an array of tables") or []
        if not all(isinstance(one, dict) for one in members):
            raise self.refusal(key, "an array of tables", "another")
        return tuple(Table(one, self._document, f"{self.path(key)}[{at}]") for at, one in enumerate(members))

    def boolean(self, key: str, *, default: bool) -> bool:
        """Read true or false."""
        value = self._get(key, bool, "true or false")
        return default if value is None else value

    def integer(self, key: str) -> int | None:
        """Read an integer from 0; None if it is absent."""
        value = self._get(key, int, "an integer from 0")
        if value is not None and value < 0:
            raise self.refusal(key, "an integer from 0", value)
        return value

    def text(self, key: str) -> str | None:
        """Read a string; None if it is absent."""
        return self._get(key, str, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """Read a list of strings; empty if absent."""
        return self._list(key, "a list of strings")

    def digests(self, key: str, size: int) -> frozenset[bytes]:
        """Read a list of values of `size` bytes in hexadecimal; empty if absent."""
        wanted, form = f"a list of {size} bytes in hexadecimal each", re.compile(rf"[0-9a-fA-F]{{{2 * size}}}")
        return frozenset(map(bytes.fromhex, self._list(key, wanted, form)))

    def is_word(self, key: str, word: str) -> bool:
        """Return whether a key of any type equals a word."""
        self._known.add(key)
        return self._members.get(key) == word

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

    def _get(self, key: str, kind: type[T], wanted: str) -> T | None:
        self._known.add(key)
        value = self._members.get(key)
        if value is None or type(value) is kind:
            return value
        raise self.refusal(key, wanted, repr(value))

    def _list(self, key: str, wanted: str, form: re.Pattern[str] = _ANY) -> tuple[str, ...]:
        values = self._get(key, list, wanted)
        if values is None:
            return ()
        if not values or not all(isinstance(value, str) and form.fullmatch(value) for value in values):
            raise self.refusal(key, f"{wanted}, not empty", repr(values))
        return tuple(values)
