"""Read binary structures field by field, with bounds checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from fastrack.attest._errors import malformed


def _integer(size: int) -> Callable[[Cursor, str], int]:
    def read(self: Cursor, field: str) -> int:
        """Read an unsigned little-endian integer; the method's name has its number of bits."""
        return int.from_bytes(self.take(size, field), "little")

    return read


class Cursor:
    """A position in a binary structure, for sequential reading.

    Every method takes the name of the field that it reads. A `FormatError` names the structure, the field and its
    offset in the whole evidence, where the structure begins at byte `start`. No byte past the structure is read.
    """

    __slots__ = ("_data", "_offset", "_start", "structure")

    def __init__(self, data: bytes, structure: str, *, start: int = 0) -> None:
        self._data = data
        self._offset = 0
        self._start = start
        self.structure = structure

    @property
    def offset(self) -> int:
        """The offset of the next byte, from the start of the whole evidence."""
        return self._start + self._offset

    @property
    def remaining(self) -> int:
        """The number of unread bytes."""
        return len(self._data) - self._offset

    def take(self, size: int, field: str) -> bytes:
        """Read exactly `size` bytes."""
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
        """Read fields in order, and return the values of named fields by name."""
        values = {}
        for name, field, read in layout:
            values[name] = self.take(read, field) if isinstance(read, int) else read(self, field)
        values.pop("", None)
        return values

    def expect(self, value: bytes, field: str) -> None:
        """Read bytes that must have this value."""
        data = self.take(len(value), field)
        if data != value:
            raise malformed(self.structure, field, self.offset - len(value), wanted=value, found=data)

    def zeros(self, size: int, field: str) -> None:
        """Read `size` reserved bytes, which must be zero."""
        data = self.take(size, field)
        if rest := data.lstrip(b"\0"):
            raise malformed(self.structure, field, self.offset - len(rest), wanted="zeros only", found=rest[:1])

    def part(self, size: int, structure: str) -> Cursor:
        """Read `size` bytes as a nested structure. Offsets continue from this structure."""
        offset = self.offset
        return Cursor(self.take(size, structure), structure, start=offset)

    def rest(self, field: str) -> bytes:
        """Read all remaining bytes."""
        return self.take(self.remaining, field)

    def done(self) -> None:
        """Require that all is read."""
        if self.remaining:
            raise malformed(self.structure, "end", self.offset, wanted="no byte", found=f"{self.remaining} more")


Layout: TypeAlias = Iterable[tuple[str, str, int | Callable[[Cursor, str], object]]]
"""Fields in order: the name of each in the result, or none; its name in errors; its bytes, or what reads it."""
