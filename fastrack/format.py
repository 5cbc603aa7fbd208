"""Sizes of the format, C2SP chunked encryption ("Cobblestone").

A message is a header and chunks. The header is a salt and a commitment. Every chunk holds 16 KiB of plaintext and a
tag, except for the last, which is always shorter and may hold only its tag::

    | salt 24 | commitment 32 | 16384 + tag 16 | 16384 + tag 16 | ... | 0 to 16383 + tag 16 |
    0         24              56               16456            32856

Raw mode is the same without the header, for two parties that already share a message key. The specification is
https://c2sp.org/chunked-encryption.
"""

from __future__ import annotations

from typing import Final

from fastrack.errors import FormatError

__all__ = [
    "CHUNK_SIZE",
    "COMMITMENT_SIZE",
    "FORMAT_VERSION",
    "HEADER_SIZE",
    "MAX_CHUNKS",
    "MAX_PLAIN_SIZE",
    "NONCE_SIZE",
    "SALT_SIZE",
    "SEALED_CHUNK_SIZE",
    "TAG_SIZE",
    "chunk_count",
    "chunk_offset",
    "ciphertext_size",
    "message_size",
    "plain_size",
    "raw_plain_size",
]

FORMAT_VERSION: Final = "1"  #: the version of the format, in the header of every sealed file
CHUNK_SIZE: Final = 16384  #: bytes of plaintext in every chunk except the last
TAG_SIZE: Final = 16  #: bytes of the AES-GCM tag that ends every chunk
SEALED_CHUNK_SIZE: Final = CHUNK_SIZE + TAG_SIZE  #: bytes from the start of one chunk to the start of the next
SALT_SIZE: Final = 24  #: bytes of the random salt at the start of a message
COMMITMENT_SIZE: Final = 32  #: bytes of the key commitment after the salt
HEADER_SIZE: Final = SALT_SIZE + COMMITMENT_SIZE  #: bytes before the first chunk
NONCE_SIZE: Final = 12  #: bytes of an AES-GCM nonce
MAX_CHUNKS: Final = 2**38  #: the largest number of chunks of a message: chunk numbers have 38 bits
MAX_PLAIN_SIZE: Final = MAX_CHUNKS * CHUNK_SIZE - 1  #: the largest plaintext of a message in bytes, one less than 4 PiB


def chunk_count(plain_size: int) -> int:
    """Return the number of chunks of a message: at least one, as the last is always shorter than 16 KiB.

    Raise FormatError if the plaintext is larger than `MAX_PLAIN_SIZE`, or its size negative.

    Examples
    --------
    >>> fastrack.format.chunk_count(100_000)
    7
    """
    if not 0 <= plain_size <= MAX_PLAIN_SIZE:
        raise FormatError(f"expected a message of 0 to {MAX_PLAIN_SIZE} bytes, got {plain_size}: split the tensor")
    return plain_size // CHUNK_SIZE + 1


def message_size(plain_size: int) -> int:
    """Return the size of the message of `plain_size` bytes of plaintext. Raises as `chunk_count` does.

    Examples
    --------
    >>> fastrack.format.message_size(100_000)
    100168
    """
    return HEADER_SIZE + plain_size + TAG_SIZE * chunk_count(plain_size)


def ciphertext_size(plain_size: int) -> int:
    """Return the size of the chunks alone of `plain_size` bytes of plaintext. Raises as `chunk_count` does.

    Examples
    --------
    >>> fastrack.format.ciphertext_size(100_000)
    100112
    """
    return plain_size + TAG_SIZE * chunk_count(plain_size)


def plain_size(message_size: int) -> int:
    """Return the size of the plaintext in a message of `message_size` bytes.

    Raise FormatError if no message has that size: it was cut short, or something follows it.

    Examples
    --------
    >>> fastrack.format.plain_size(100_168)
    100000
    """
    if message_size < HEADER_SIZE + TAG_SIZE:
        raise FormatError(
            f"expected a message of {HEADER_SIZE + TAG_SIZE} bytes or more, got {message_size}: it was cut short"
        )
    return raw_plain_size(message_size - HEADER_SIZE)


def raw_plain_size(ciphertext_size: int) -> int:
    """Return the size of the plaintext in `ciphertext_size` bytes of chunks, without a header.

    Raise FormatError if no run of chunks has that size: the last must have a tag, and be shorter than the others.

    Examples
    --------
    >>> fastrack.format.raw_plain_size(100_112)
    100000
    """
    full, last = divmod(ciphertext_size, SEALED_CHUNK_SIZE)
    if last < TAG_SIZE or not 0 <= full < MAX_CHUNKS:
        raise FormatError(
            f"expected chunks with a last chunk at the end, got {ciphertext_size} bytes: cut short, or data follows"
        )
    return full * CHUNK_SIZE + last - TAG_SIZE


def chunk_offset(chunk: int) -> int:
    """Return the offset of a chunk from the start of its message, header included.

    Examples
    --------
    >>> fastrack.format.chunk_offset(2)
    32856
    """
    return HEADER_SIZE + chunk * SEALED_CHUNK_SIZE
