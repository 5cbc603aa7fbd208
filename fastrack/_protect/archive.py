"""The archive of `torch.save`, written in Python: the writer of torch ends the process where an interrupt meets it."""

from __future__ import annotations

import ctypes
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

# Records of zip files (PKWARE's APPNOTE, 4.3.7 to 4.3.16), with the versions and flags that torch's writer gives.
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END_64 = struct.Struct("<4sQ2H2I4Q4sIQI")  # with its locator
_END = struct.Struct("<4s4H2IH")
_MADE_BY, _UTF_8, _SIZED_BEHIND = 0x031E, 0x0800, 0x0008
_WIDE = 0xFFFFFFFF  # from this size or place on, 64 bits are in an extra field


class Archive:
    """Write what ``torch._C.PyTorchFileWriter`` does, byte for byte but for the digits of the serialization id.

    Torch's writer calls `write` from C++ and ends its archive in a destructor. Python runs handlers of signals, and
    raises what other threads send, where such a call begins and ends: no `try` in it can keep that from the destructor,
    which would abort the process. Here no code of C++ is between the caller and `write`.
    """

    def __init__(self, write: Callable[[Any], object], checked: bool, alignment: int) -> None:
        self._write, self._is_checked, self._alignment = write, checked, alignment
        self._place = 0
        self._directory: dict[str, bytes] = {}

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write text, bytes, or the content of a storage in host memory."""
        content = _bytes_of(data, size)
        path, place = f"archive/{name}".encode(), self._place
        wide = _wide(size, size, place)
        padding = -(place + _LOCAL.size + len(path) + len(wide) + 4) % self._alignment
        extra = _wide(size, 0, place) + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        flags = _UTF_8 | _SIZED_BEHIND if size else _UTF_8
        self._put(_LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)) + path + extra)
        check = zlib.crc32(content) if self._is_checked else 0
        if size:
            self._put(content)
            self._put(struct.pack("<4sI2Q" if wide else "<4s3I", b"PK\7\10", check, size, size))
        short = min(size, _WIDE)
        fields = 0, flags, 0, 0, 0, check, short, short, len(path), len(wide), 0, 0, 0, 0, min(place, _WIDE)
        self._directory[name] = _CENTRAL.pack(b"PK\1\2", 0, *fields) + path + wide

    def write_end_of_file(self) -> None:
        """Write the records that torch adds, and the directory."""
        self.write_record("version", "3\n", 2)
        if "byteorder" not in self._directory:
            self.write_record("byteorder", sys.byteorder, len(sys.byteorder))
        # Torch has hashes of names and contents here, to tell archives apart.
        self.write_record(".data/serialization_id", f"{zlib.crc32(b''.join(self._directory.values())):040}", 40)
        start, directory, count = self._place, b"".join(self._directory.values()), len(self._directory)
        self._put(directory)
        totals = count, count, len(directory), start
        locator = b"PK\6\7", 0, self._place, 1
        self._put(_END_64.pack(b"PK\6\6", 44, _MADE_BY, 45, 0, 0, *totals, *locator))
        few, short = min(count, 0xFFFF), (min(len(directory), _WIDE), min(start, _WIDE))
        self._put(_END.pack(b"PK\5\6", 0, 0, few, few, *short, 0))

    def _put(self, data: Any) -> None:
        self._write(data)
        self._place += len(data)


def _wide(size: int, stored: int, place: int) -> bytes:
    """Return the extra field of what 32 bits do not hold; ahead of a record it does not know yet how much is stored."""
    fields = [*((size, stored) if size >= _WIDE else ()), *((place,) if place >= _WIDE else ())]
    return struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _bytes_of(data: Any, size: int) -> Any:
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes):
        return data
    # Not `np.asarray`, which calls code in Python for what ctypes has, and drops what a signal's handler raises there.
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(data.data_ptr())), np.uint8) if size else b""
