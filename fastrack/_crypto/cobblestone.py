"""Nonces and keys of messages of the format, C2SP chunked encryption ("Cobblestone"), and segments of messages.

`fastrack.format` has the sizes. This module uses no array, file or device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Final, NoReturn, Self

from fastrack.errors import ClosedError, FormatError
from fastrack.format import CHUNK_SIZE, MAX_CHUNKS, NONCE_SIZE, TAG_SIZE

Bytes = bytes | bytearray | memoryview

MISMATCH: Final = (
    "the header does not match: another key sealed this message, or its context (name, dtype, shape or file) is not "
    "the one it was sealed with, or its first 56 bytes were altered; check the key first, then get the message again "
    "from its owner"
)
"""The text of the error for a commitment that differs."""

_AEADS = {16: b"AEAD_AES_128_GCM", 32: b"AEAD_AES_256_GCM"}
_LABEL = b"c2sp.org/chunked-encryption@v1+"
PREFIXES: Final = {size: b"".join((_LABEL, aead, b"\0")) for size, aead in _AEADS.items()}
"""Start of the HKDF information of a message key, by the size of the owner's key in bytes."""
PREFIX_SIZE: Final = 48  # bytes of each
DERIVED_SIZE: Final = 80  # bytes for an AES key, a base nonce and a commitment: 76 at most, and whole words


class MessageKey:
    """The secrets of one message: its AES key and its base nonce, overwritten when the object is deleted.

    `material` is the AES key (16 or 32 bytes), then the base nonce (12 bytes); it is owned from now on and wiped later,
    not copied. `commitment` is the 32 bytes in the header of the message, empty in raw mode.
    """

    # A slot: a wiped key is deleted without code in Python, in which what a signal's handler raises would be lost.
    __slots__ = ("__del__", "_material", "_wiped", "commitment")

    commitment: bytes
    __del__: Callable[[], object]

    def __init__(self, material: bytearray, commitment: bytes = b"") -> None:
        self.__del__ = partial(_overwrite, material)
        self._material = material
        self._wiped = False
        self.commitment = commitment
        if len(material) - NONCE_SIZE not in _AEADS:
            raise FormatError(f"expected a message key of 28 or 44 bytes (key and base nonce), got {len(material)}")

    @classmethod
    def raw(cls, key: Bytes, nonce: Bytes) -> Self:
        """Return the message key of raw mode, from a key (16 or 32 bytes) and a base nonce (12) that both sides share.

        A (key, nonce) pair must never seal two messages. Raise FormatError if either has another length.
        """
        if len(key) not in _AEADS or len(nonce) != NONCE_SIZE:
            raise FormatError(f"expected a key of 16 or 32 bytes and a nonce of 12, got {len(key)} and {len(nonce)}")
        material = bytearray(len(key) + NONCE_SIZE)
        # Through a view: assigning to a slice of a bytearray makes a copy that cannot be wiped.
        view = memoryview(material)
        view[:-NONCE_SIZE] = key
        view[-NONCE_SIZE:] = nonce
        return cls(material)

    @property
    def material(self) -> bytearray:
        """The AES key, then the base nonce: 28 or 44 bytes, the buffer itself. It must not be copied.

        Raise ClosedError if the key has been wiped.
        """
        if self._wiped:
            raise ClosedError("expected a message key, got a wiped one; derive it again from the header of its message")
        return self._material

    @property
    def key(self) -> memoryview:
        """The AES key: a read-only view of 16 or 32 bytes."""
        return memoryview(self.material).toreadonly()[:-NONCE_SIZE]

    @property
    def nonce(self) -> memoryview:
        """The base nonce: a read-only view of 12 bytes."""
        return memoryview(self.material).toreadonly()[-NONCE_SIZE:]

    def wipe(self) -> None:
        """Overwrite the secrets with zeros, in place; every view of them then holds zeros."""
        self._wiped = True
        _overwrite(self._material)
        self.__del__ = bool  # nothing

    def __reduce__(self) -> NoReturn:
        raise TypeError("a message key cannot be pickled: send the message and derive it there again")

    def __repr__(self) -> str:
        state = "wiped" if self._wiped else f"{8 * (len(self._material) - NONCE_SIZE)}-bit"
        return f"<MessageKey {state}>"


def _overwrite(material: bytearray) -> None:
    material[:] = bytes(len(material))


def chunk_nonce(base: Bytes, chunk: int) -> bytes:
    """Return the AES-GCM nonce of a chunk: the base nonce XOR the chunk number, big-endian in the last 38 bits.

    Raise FormatError if the base nonce has another length than 12 bytes, or the chunk number more than 38 bits.
    """
    if len(base) != NONCE_SIZE or not 0 <= chunk < MAX_CHUNKS:
        raise FormatError(
            f"expected a nonce of {NONCE_SIZE} bytes and a chunk number of 38 bits, got {len(base)} and {chunk}"
        )
    return (int.from_bytes(base) ^ chunk).to_bytes(NONCE_SIZE)


def iter_segments(plain_size: int, limit: int) -> Iterator[tuple[int, int]]:
    """Split a message into segments of up to `limit` bytes of plaintext, a multiple of 16384.

    Yield the number of the first chunk of each, and the size of its plaintext. The last segment ends the message, and
    is empty if the message is.
    """
    for start in range(0, plain_size + 1, limit):
        size = min(limit, plain_size - start)
        # An empty last chunk belongs to the segment before it.
        if start and not size:
            return
        yield start // CHUNK_SIZE, size


def segment_size(first: int, size: int, plain_size: int) -> int:
    """Return the sealed size of a segment of `size` bytes of plaintext; the last segment has one more chunk."""
    is_last = first * CHUNK_SIZE + size == plain_size
    return size + TAG_SIZE * (size // CHUNK_SIZE + is_last)


@lru_cache(maxsize=1024)
def chunks_between(sealed: int, plain: int, first: int = 0) -> int:
    """Return the number of chunks of a run of `sealed` bytes with tags and `plain` bytes without.

    Raise ValueError if no run of chunks from `first` on has these sizes. Native code relies on this check.
    """
    count, remainder = divmod(sealed - plain, TAG_SIZE)
    if remainder or count < 0 or not (count - 1) * CHUNK_SIZE <= plain <= count * CHUNK_SIZE:
        raise ValueError(f"no run of chunks has {sealed} bytes sealed and {plain} bytes plain")
    if not 0 <= first <= MAX_CHUNKS - count:
        raise ValueError(f"expected chunks below number 2^38, got {count} chunks from number {first} on")
    return count
