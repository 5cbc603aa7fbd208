"""The engine for every other CPU: OpenSSL through pyca/cryptography, one chunk a call.

The one place where Python loops over chunks. Threads would not help: each call of 16 KiB takes the interpreter's lock
twice, and two threads are slower than one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack.aead.base import Bytes, Pieces, check_pieces, chunks_between
from fastrack.cobblestone import CHUNK, STRIDE, TAG, MessageKey, chunk_nonce


class OpenSSLEngine:
    """`Engine` on one thread."""

    name = "openssl"
    threads = 1

    def prepare(self, key: MessageKey) -> OpenSSLSchedule:
        return OpenSSLSchedule(key)

    def open_run(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, first: int) -> int | None:
        count = chunks_between(source.size, target.size)
        bad = None
        for index, plain, sealed in _slices(count, target.size):
            good = schedule.open(first + index, source[sealed], target[plain])
            bad = first + index if bad is None and not good else bad
        return bad

    def verify_run(self, schedule: OpenSSLSchedule, source: Bytes, first: int) -> int | None:
        count = -(-source.size // STRIDE)
        size = source.size - count * TAG
        chunks_between(source.size, size)
        scratch = np.empty(CHUNK, np.uint8)
        bad = None
        for index, plain, sealed in _slices(count, size):
            good = schedule.open(first + index, source[sealed], scratch[: plain.stop - plain.start])
            bad = first + index if bad is None and not good else bad
        scratch.fill(0)
        return bad

    def seal_run(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, first: int) -> None:
        count = chunks_between(target.size, source.size)
        for index, plain, sealed in _slices(count, source.size):
            schedule.seal(first + index, source[plain], target[sealed])

    def open_pieces(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, pieces: Pieces) -> int | None:
        size = source.size - -(-source.size // STRIDE) * TAG
        check_pieces(pieces, source.size, size, target.size)
        scratch = np.empty(CHUNK, np.uint8)
        bad: int | None = None
        for place, number in enumerate(pieces.chunks.tolist()):
            length = min(CHUNK, size - number * CHUNK)
            here = source[number * STRIDE : number * STRIDE + length + TAG]
            if not schedule.open(number, here, scratch[:length]):
                bad = number if bad is None else min(bad, number)
            for offset, there, extent in pieces.table[pieces.starts[place] : pieces.starts[place + 1]].tolist():
                target[there : there + extent] = scratch[offset : offset + extent]
        scratch.fill(0)
        return bad


class OpenSSLSchedule:
    """A cipher object and the base nonce. pyca keeps a copy of the key that cannot be overwritten from here."""

    __slots__ = ("_cipher", "_nonce")

    def __init__(self, key: MessageKey) -> None:
        self._cipher: AESGCM | None = AESGCM(bytes(key.key))
        self._nonce = bytes(key.nonce)

    def open(self, chunk: int, source: Bytes, target: Bytes) -> bool:
        assert self._cipher is not None
        try:
            self._cipher.decrypt_into(chunk_nonce(self._nonce, chunk), memoryview(source), None, memoryview(target))
        except InvalidTag:
            target.fill(0)  # OpenSSL leaves what it deciphered
            return False
        return True

    def seal(self, chunk: int, source: Bytes, target: Bytes) -> None:
        assert self._cipher is not None
        self._cipher.encrypt_into(chunk_nonce(self._nonce, chunk), memoryview(source), None, memoryview(target))

    def wipe(self) -> None:
        self._cipher = None
        self._nonce = b""

    def __reduce__(self) -> str:
        raise TypeError("a key schedule holds a secret and cannot be pickled")


def _slices(count: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    for index in range(count):
        start, stop = index * CHUNK, min((index + 1) * CHUNK, size)
        yield index, slice(start, stop), slice(index * STRIDE, index * STRIDE + stop - start + TAG)
