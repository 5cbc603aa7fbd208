"""Read binary structures field by field, with every access checked against their end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from fastrack.attest._errors import malformed


def _integer(size: int) -> Callable[[Cursor, str], int]:
    def read(self: Cursor, field: str) -> int:
        """Read an unsigned integer, little-endian, of as many bits as the name of the method says."""
        return int.from_bytes(self.take(size, field), "little")

    return read


class Cursor:
    """A position in a binary structure that is read from its start to its end.

    Every method takes the name of the field that it reads. A `FormatError` names the structure, the field and its
    offset, which counts from the whole evidence: the structure begins at its byte `start`. No byte past it is read.
    """

    __slots__ = ("_data", "_offset", "_start", "structure")

    def __init__(self, data: bytes, structure: str, *, start: int = 0) -> None:
        self._data = data
        self._offset = 0
        self._start = start
        self.structure = structure

    @property
    def offset(self) -> int:
        """The number of bytes before the next one, from the start of the whole evidence."""
        return self._start + self._offset

    @property
    def remaining(self) -> int:
        """The number of bytes that are left."""
        return len(self._data) - self._offset

    def take(self, size: int, field: str) -> bytes:
        """Read `size` bytes, which must be there."""
        start = self._offset
        end = start + size
        if size < 0 or end > len(self._data):
            raise malformed(
                self.structure, field, self.offset, wanted=f"{size} bytes", found=f"{self.remaining} that are left"
            )
        self._offset = end
        return self._data[start:end]

    u8, u16, u24, u32, u64 = (_integer(size) for size in (1, 2, 3, 4, 8))

    def fields(self, layout: Layout) -> dict[str, Any]:
        """Read fields one after the other, and return the values of those that have a name, by these names."""
        values = {}
        for name, field, read in layout:
            values[name] = self.take(read, field) if isinstance(read, int) else read(self, field)
        values.pop("", None)
        return values

    def expect(self, value: bytes, field: str) -> None:
        """Read bytes that have only one valid value."""
        offset = self.offset
        found = self.take(len(value), field)
        if found != value:
            raise malformed(self.structure, field, offset, wanted=value, found=found)

    def zeros(self, size: int, field: str) -> None:
        """Read `size` reserved bytes, all of which must be zero."""
        offset = self.offset
        found = self.take(size, field)
        if rest := found.lstrip(b"\0"):
            raise malformed(self.structure, field, offset + size - len(rest), wanted="zeros only", found=rest[:1])

    def part(self, size: int, structure: str) -> Cursor:
        """Read `size` bytes as a structure of its own. Its offsets go on from those of this one."""
        offset = self.offset
        return Cursor(self.take(size, structure), structure, start=offset)

    def rest(self, field: str) -> bytes:
        """Read all bytes that are left."""
        return self.take(self.remaining, field)

    def done(self) -> None:
        """Require that no byte is left."""
        if self.remaining:
            raise malformed(self.structure, "end", self.offset, wanted="no byte", found=f"{self.remaining} more")


Layout: TypeAlias = Iterable[tuple[str, str, int | Callable[[Cursor, str], object]]]
"""Fields in order: the name of each in the result, or none; its name in errors; its bytes, or what reads it."""
