"""Engine for CPUs without a supported instruction set: OpenSSL, by one call of pyca/cryptography per chunk.

This is the only Python loop over chunks. pyca has no call for several messages and cannot reset the nonce of a GCM
context; a new context for each chunk takes twice as long as `AESGCM`. More threads would be slower: each call of 16 KiB
takes the GIL twice.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from fastrack._crypto.base import Bytes, KeySchedule, Messages, Scaling, Secret, Texts, check_buffers, scaling_row
from fastrack._crypto.cobblestone import DERIVED_SIZE, PREFIXES, MessageKey, chunk_nonce, chunks_between
from fastrack._crypto.gather import GatherPlan
from fastrack._crypto.message_keys import check_rows
from fastrack._crypto.widening import widen
from fastrack.errors import ClosedError
from fastrack.format import CHUNK_SIZE, COMMITMENT_SIZE, NONCE_SIZE, SALT_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE

_SHA512 = SHA512()
_ZERO_CIPHER = AESGCM(bytes(32))


class OpenSSLEngine:
    """An `Engine` on one thread."""

    name = "openssl"
    threads = 1

    def derive_keys(
        self, secret: Secret, headers: Texts, contexts: Texts, rows: Sequence[int], target: memoryview
    ) -> int | None:
        check_rows(rows, target)
        prefix, end = PREFIXES[len(secret)], len(secret) + NONCE_SIZE
        size = end + COMMITMENT_SIZE
        bad = None
        for number, (header, context, row) in enumerate(zip(headers, contexts, rows, strict=True)):
            derived = target[row * DERIVED_SIZE : row * DERIVED_SIZE + size]
            information = b"".join((prefix, header[:SALT_SIZE], context))
            HKDFExpand(_SHA512, size, information).derive_into(secret, derived)
            if bad is None and not hmac.compare_digest(derived[end:], header[SALT_SIZE:]):
                bad = number
        _overwrite_freed()
        return bad

    def expand_key(self, key: MessageKey) -> OpenSSLSchedule:
        return OpenSSLSchedule(key)

    def open_run(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, first: int) -> int | None:
        check_buffers(source, target)
        return _open(schedule, source, target, first, target.size)

    def verify_run(self, schedule: OpenSSLSchedule, source: Bytes, first: int) -> int | None:
        check_buffers(source)
        return _open(schedule, source, None, first, source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE)

    def seal_run(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, first: int) -> None:
        check_buffers(source, target)
        count = chunks_between(target.size, source.size, first)
        plain_bytes, sealed_bytes, private = source.data, target.data, _new(SEALED_CHUNK_SIZE)
        for index, plain, sealed in _slices(count, source.size):
            schedule.seal(first + index, plain_bytes[plain], sealed_bytes[sealed], private)

    def open_gather(self, schedule: OpenSSLSchedule, source: Bytes, target: Bytes, plan: GatherPlan) -> int | None:
        check_buffers(source, target)
        size = source.size - -(-source.size // SEALED_CHUNK_SIZE) * TAG_SIZE
        plan.locate(source.size, size, target.size)
        sealed_bytes, result = source.data, target.data
        private, scratch = _new(SEALED_CHUNK_SIZE), _new(CHUNK_SIZE)
        bad = []
        for index, chunk in enumerate(plan.chunks.tolist()):
            length = min(CHUNK_SIZE, size - chunk * CHUNK_SIZE)
            start = chunk * SEALED_CHUNK_SIZE
            if not schedule.open(chunk, sealed_bytes[start : start + length + TAG_SIZE], scratch[:length], private):
                bad.append(chunk)
            for offset, result_offset, extent in plan.table[plan.starts[index] : plan.starts[index + 1]].tolist():
                result[result_offset : result_offset + extent] = scratch[offset : offset + extent]
        scratch[:] = bytes(CHUNK_SIZE)
        return min(bad, default=None)

    def open_jobs(self, jobs: Messages) -> tuple[int, int] | None:
        first: tuple[int, int] | None = None
        for number in range(len(jobs.nbytes)):
            key = jobs.keys.key(number)
            schedule = self.expand_key(key)
            try:
                bad = self._open_job(schedule, jobs, number)
            finally:
                schedule.wipe()
                key.wipe()
            if first is None and bad is not None:
                first = number, bad
        return first

    def _open_job(self, schedule: OpenSSLSchedule, jobs: Messages, number: int) -> int | None:
        source, plain, plan = jobs.sealed[number], jobs.plain[number], jobs.plans[number]
        target = jobs.memories[number].array
        if plain is not None:
            if not plain.size == target.size == jobs.nbytes[number]:
                raise ValueError(f"expected {jobs.nbytes[number]} bytes to seal, and a result of that size, got others")
            return _reencrypt(schedule, plain.array, target)
        assert source is not None
        scaling = jobs.scalings[number]
        if scaling is not None:
            return _open_widened(schedule, source.array, target, jobs.nbytes[number], scaling)
        if plan is not None:
            return self.open_gather(schedule, source.array, target, plan)
        return self.open_run(schedule, source.array, target, 0)


def _open(schedule: OpenSSLSchedule, source: Bytes, target: Bytes | None, first: int, size: int) -> int | None:
    """Open chunks with `size` bytes of plaintext into the target, or without a target into a scratch buffer."""
    count = chunks_between(source.size, size, first)
    sealed_bytes, private, scratch = source.data, _new(SEALED_CHUNK_SIZE), _new(CHUNK_SIZE if target is None else 0)
    bad = []
    for index, plain, sealed in _slices(count, size):
        result = scratch[: plain.stop - plain.start] if target is None else target.data[plain]
        if not schedule.open(first + index, sealed_bytes[sealed], result, private):
            bad.append(first + index)
    scratch[:] = bytes(len(scratch))
    return min(bad, default=None)


def _open_widened(schedule: OpenSSLSchedule, source: Bytes, target: Bytes, size: int, scaling: Scaling) -> int | None:
    """Open each chunk of values into a scratch buffer, and widen it from there into the target."""
    scaling_row(scaling, size)  # checks the scales
    if target.size != 2 * size:
        raise ValueError(f"expected a result of {2 * size} bytes, got {target.size}")
    count = chunks_between(source.size, size)
    sealed_bytes, private, scratch = source.data, _new(SEALED_CHUNK_SIZE), _new(CHUNK_SIZE)
    values, result = np.frombuffer(scratch, np.uint8), target.view(np.uint16)
    bad = []
    for index, plain, sealed in _slices(count, size):
        length = plain.stop - plain.start
        if schedule.open(index, sealed_bytes[sealed], scratch[:length], private):
            result[plain] = widen(values[:length], plain.start, scaling)
        else:
            result[plain] = 0
            bad.append(index)
    scratch[:] = bytes(CHUNK_SIZE)
    return min(bad, default=None)


def _reencrypt(schedule: OpenSSLSchedule, source: Bytes, target: Bytes) -> int | None:
    """Seal each chunk of plaintext into private memory, and open it from there into the target."""
    before, after = source.data, target.data
    private, sealed = _new(SEALED_CHUNK_SIZE), _new(SEALED_CHUNK_SIZE)
    bad = []
    for index, plain, _ in _slices(-(-source.size // CHUNK_SIZE), source.size):
        chunk = sealed[: plain.stop - plain.start + TAG_SIZE]
        schedule.seal(index, before[plain], chunk, private)
        if not schedule.open(index, chunk, after[plain], private):
            bad.append(index)
    return min(bad, default=None)


class OpenSSLSchedule(KeySchedule):
    """A cipher object, its key and the base nonce. OpenSSL's internal copies of the key cannot be overwritten.

    The key is copied: with OpenSSL before 3.2 pyca reads it again for each chunk, and the caller may wipe the message
    key after `expand_key`.

    OpenSSL reads ciphertext twice, to authenticate and to decrypt it, and another process may write to shared buffers
    in between. The ciphertext of a chunk is therefore processed in `private`, memory of `SEALED_CHUNK_SIZE` bytes that
    no other process can access.
    """

    _key = bytearray()  # if `__init__` raises

    def __init__(self, key: MessageKey) -> None:
        self._key = bytearray(key.key)  # `bytes` could not be overwritten
        self._cipher: AESGCM | None = AESGCM(self._key)
        self._nonce = bytes(key.nonce)

    def open(self, chunk: int, source: memoryview, target: memoryview, private: memoryview) -> bool:
        ciphertext = private[: source.nbytes]
        ciphertext[:] = source
        try:
            self._ready().decrypt_into(chunk_nonce(self._nonce, chunk), ciphertext, None, target)
        except InvalidTag:
            # OpenSSL leaves the plaintext in the target, and the end of the plaintext on its stack. A call under a key
            # of zeros overwrites both.
            with suppress(InvalidTag):
                _ZERO_CIPHER.decrypt_into(bytes(NONCE_SIZE), ciphertext, None, target)
            target[:] = bytes(target.nbytes)
            return False
        return True

    def seal(self, chunk: int, source: memoryview, target: memoryview, private: memoryview) -> None:
        ciphertext = private[: target.nbytes]
        self._ready().encrypt_into(chunk_nonce(self._nonce, chunk), source, None, ciphertext)
        target[:] = ciphertext

    def _ready(self) -> AESGCM:
        if self._cipher is None:
            raise ClosedError("expected a key schedule, got a wiped one; expand the message key again")
        return self._cipher

    def wipe(self) -> None:
        self._cipher = None
        self._nonce = b""
        self._key[:] = bytes(len(self._key))


def _overwrite_freed() -> None:
    """Overwrite secrets of derivations in freed memory, as far as Python allows.

    `cryptography` frees, but does not wipe, `bytes` with the blocks T(1) and T(2) of the expansion (RFC 5869, section
    2.3). New objects of equal size take that memory, unless other objects already did.
    """
    size = _SHA512.digest_size
    _covers = bytes(size), bytes(size), bytes(size), bytes(size)


def _new(size: int) -> memoryview:
    """Return private memory. A slice costs half as much as a slice of an array."""
    return memoryview(bytearray(size))


def _slices(count: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    for index in range(count):
        start, sealed = index * CHUNK_SIZE, index * SEALED_CHUNK_SIZE
        length = min(CHUNK_SIZE, size - start)
        yield index, slice(start, start + length), slice(sealed, sealed + length + TAG_SIZE)
