"""The engine for every other CPU: OpenSSL through pyca/cryptography, one chunk a call.

The one place where Python loops over chunks. Threads would not help: each call of 16 KiB takes the interpreter's lock
twice, and two threads are slower than one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto.base import Bytes, GatherPlan, check_buffers, check_plan, chunks_between
from fastrack._crypto.cobblestone import CHUNK_SIZE, NONCE_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, MessageKey, chunk_nonce
from fastrack.errors import ClosedError

_ZERO_CIPHER = AESGCM(bytes(32))


class OpenSSLEngine:
    """`Engine` on one thread."""

    name = "openssl"
    threads = 1

    def expand_key(self, key: MessageKey) -> OpenSSLSchedule:
        return OpenSSLSchedule(key)

    def open_run(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, first: int) -> int | None:
        check_buffers(source, target)
        count = chunks_between(source.size, target.size, first)
        held = np.empty(SEALED_CHUNK_SIZE, np.uint8)
        bad = None
        for index, plain, sealed in _slices(count, target.size):
            good = schedule.open(first + index, source[sealed], target[plain], held)
            bad = first + index if bad is None and not good else bad
        return bad

    def verify_run(self, schedule: OpenSSLSchedule, source: Bytes, first: int) -> int | None:
        check_buffers(source)
        count = -(-source.size // SEALED_CHUNK_SIZE)
        size = source.size - count * TAG_SIZE
        chunks_between(source.size, size, first)
        held, scratch = np.empty(SEALED_CHUNK_SIZE, np.uint8), np.empty(CHUNK_SIZE, np.uint8)
        bad = None
        for index, plain, sealed in _slices(count, size):
            good = schedule.open(first + index, source[sealed], scratch[: plain.stop - plain.start], held)
            bad = first + index if bad is None and not good else bad
        scratch.fill(0)
        return bad

    def seal_run(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, first: int) -> None:
        check_buffers(source, target)
        count = chunks_between(target.size, source.size, first)
        held = np.empty(SEALED_CHUNK_SIZE, np.uint8)
        for index, plain, sealed in _slices(count, source.size):
            schedule.seal(first + index, source[plain], target[sealed], held)

    def open_gather(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, pieces: GatherPlan) -> int | None:
        check_buffers(source, target)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        check_plan(pieces, source.size, size, target.size)
        held, scratch = np.empty(SEALED_CHUNK_SIZE, np.uint8), np.empty(CHUNK_SIZE, np.uint8)
        bad: int | None = None
        for place, number in enumerate(pieces.chunks.tolist()):
            length = min(CHUNK_SIZE, size - number * CHUNK_SIZE)
            here = source[number * SEALED_CHUNK_SIZE : number * SEALED_CHUNK_SIZE + length + TAG_SIZE]
            if not schedule.open(number, here, scratch[:length], held):
                bad = number if bad is None else min(bad, number)
            for offset, there, extent in pieces.table[pieces.starts[place] : pieces.starts[place + 1]].tolist():
                target[there : there + extent] = scratch[offset : offset + extent]
        scratch.fill(0)
        return bad


class OpenSSLSchedule:
    """A cipher object, its key and the base nonce. OpenSSL's own copies cannot be overwritten from here.

    The key is a copy that lives as long as the cipher: with OpenSSL before 3.2 pyca reads it anew for each chunk, and
    the caller may wipe the message key as soon as it is prepared.

    OpenSSL goes over ciphertext twice, and another process may write to the caller's buffers in between: what it hashed
    would not be what it deciphers. So ciphertext passes through `held`, STRIDE bytes that nobody else knows.
    """

    __slots__ = ("_cipher", "_key", "_nonce")

    def __init__(self, key: MessageKey) -> None:
        self._key = bytearray(key.key)  # `bytes` could not be overwritten
        self._cipher: AESGCM | None = AESGCM(self._key)
        self._nonce = bytes(key.nonce)

    def open(self, chunk: int, source: Bytes, target: Bytes, held: Bytes) -> bool:
        still = held[: source.size]
        still[:] = source
        try:
            self._ready().decrypt_into(chunk_nonce(self._nonce, chunk), still.data, None, target.data)
        except InvalidTag:
            # OpenSSL leaves what it deciphered in the target, and the end of it on its stack: the same call under a key
            # of zeros takes its place there.
            with suppress(InvalidTag):
                _ZERO_CIPHER.decrypt_into(bytes(NONCE_SIZE), still.data, None, target.data)
            target.fill(0)
            return False
        return True

    def seal(self, chunk: int, source: Bytes, target: Bytes, held: Bytes) -> None:
        still = held[: target.size]
        self._ready().encrypt_into(chunk_nonce(self._nonce, chunk), source.data, None, still.data)
        target[:] = still

    def _ready(self) -> AESGCM:
        if self._cipher is None:
            raise ClosedError("this key schedule was wiped; expand the message key again")
        return self._cipher

    def wipe(self) -> None:
        self._cipher = None
        self._nonce = b""
        self._key[:] = bytes(len(self._key))

    def __del__(self) -> None:
        if hasattr(self, "_key"):  # it may have failed to become one
            self.wipe()

    def __reduce__(self) -> str:
        raise TypeError("a key schedule holds a secret and cannot be pickled")


def _slices(count: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    for index in range(count):
        start, stop = index * CHUNK_SIZE, min((index + 1) * CHUNK_SIZE, size)
        yield (
            index,
            slice(start, stop),
            slice(index * SEALED_CHUNK_SIZE, index * SEALED_CHUNK_SIZE + stop - start + TAG_SIZE),
        )
