"""Known-answer tests of engines. Every process runs the tests of an engine before its first use.

An engine may compute wrong results from correct source: a compiler or a CPU may be at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256

import numpy as np

from fastrack._crypto.base import Engine, HostMemory, Messages
from fastrack._crypto.cobblestone import DERIVED_SIZE, MessageKey
from fastrack._crypto.gather import GatherPlan
from fastrack._crypto.message_keys import MessageKeys
from fastrack.format import CHUNK_SIZE, COMMITMENT_SIZE, NONCE_SIZE, SALT_SIZE, TAG_SIZE

# A whole chunk, and a shorter chunk for every path of the code: groups of vectors, single blocks, part of a block.
_SIZE = CHUNK_SIZE + 1061
_FIRST = (1 << 32) + 5
_NONCE = bytes(range(100, 100 + NONCE_SIZE))

# SHA-256 of the two sealed chunks, computed with OpenSSL, by key size in bytes.
_ANSWERS = {
    16: "9f51acc5c48b5951a1e059200c51cb9120568c0110408df9d91b38910478a5ae",
    32: "d685f4ff13ce58bdb79a08a7bed8ebaa79b3df2c3e95f953abf5cca496c94152",
}

# Contexts of several lengths: their last words end, and their padding begins, at different places.
_CONTEXTS = [bytes(range(length)) for length in (0, 37, 38, 101, 102, 103, 119, 165, 166, 230)]

# SHA-256 of the keys, base nonces and commitments for these contexts, computed with OpenSSL, by key size in bytes.
_DERIVED = {
    16: "e49187407171e32d5d558d21b6316c3a4d4e8213ad704eed78ff028b947b417d",
    32: "02b4ef88bd64f8eeb17fa9436c0e53d9303d95a94d1c7bc256559ddf97ba090c",
}


def find_fault(engine: Engine) -> str | None:
    """Test that an engine seals and opens two chunks, and refuses a wrong tag; return its failure, or None."""
    return _first_fault("with a key", _ANSWERS, partial(_try, engine))


def _first_fault(what: str, answers: dict[int, str], attempt: Callable[[int, str], str | None]) -> str | None:
    """Return the first failure of a test with keys of several sizes."""
    for size, answer in answers.items():
        try:
            fault = attempt(size, answer)
        except Exception as error:  # noqa: BLE001 - an engine that cannot be compiled fails as well
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            return f"{what} of {8 * size} bits: {fault}"
    return None


def _try(engine: Engine, size: int, answer: str) -> str | None:
    plain = np.resize(np.arange(251, dtype=np.uint8), _SIZE)
    sealed, opened = np.empty(_SIZE + 2 * TAG_SIZE, np.uint8), np.empty(_SIZE, np.uint8)
    schedule = engine.expand_key(MessageKey.raw(bytes(range(size)), _NONCE))
    try:
        engine.seal_run(schedule, plain, sealed, _FIRST)
        digest = sha256(sealed.data).hexdigest()
        if digest != answer:
            return f"expected sealed chunks with the SHA-256 {answer}, got {digest}"
        bad = engine.open_run(schedule, sealed, opened, _FIRST)
        if bad is not None or not np.array_equal(opened, plain):
            return f"expected sealed chunks to open, got {_chunk_number(bad)}"
        sealed[-1] ^= 1
        plain[CHUNK_SIZE:] = 0
        bad = engine.open_run(schedule, sealed, opened, _FIRST)
        if bad != _FIRST + 1:
            return f"expected the second chunk's altered tag to be refused, got {_chunk_number(bad)}"
        if not np.array_equal(opened, plain):
            return "expected zeros in the place of the second chunk, got other bytes"
    finally:
        schedule.wipe()
    return None


def find_derivation_fault(engine: Engine) -> str | None:
    """Test that an engine derives one or several message keys in a call, and refuses a wrong commitment."""
    return _first_fault("of deriving keys", _DERIVED, partial(_try_derivation, engine))


def _try_derivation(engine: Engine, key_size: int, answer: str) -> str | None:
    secret = bytes(range(1, key_size + 1))
    count, size = len(_CONTEXTS), key_size + NONCE_SIZE + COMMITMENT_SIZE
    headers = [bytes([number]) * SALT_SIZE + bytes(COMMITMENT_SIZE) for number in range(count)]
    memory = memoryview(bytearray((count + 1) * DERIVED_SIZE))
    engine.derive_keys(secret, headers, _CONTEXTS, range(count), memory)
    keys = [memory[row * DERIVED_SIZE :][:size] for row in range(count + 1)]
    digest = sha256(b"".join(keys[:count])).hexdigest()
    if digest != answer:
        return f"expected keys with the SHA-256 {answer}, got {digest}"
    right = [header[:SALT_SIZE] + bytes(keys[row][-COMMITMENT_SIZE:]) for row, header in enumerate(headers)]
    ends = [header[:-1] + bytes([header[-1] ^ 1]) for header in right]
    last = count - 1
    # Headers of a call from number `first` on, and the number of the bad header among them.
    for first, tried, bad in (
        (0, right, None),
        (0, ends[:1] + right[1:], 0),
        (0, right[:last] + ends[last:], last),
        (last, right[last:], None),
        (last, ends[last:], 0),
    ):
        rows = range(count) if first == 0 else [count]
        refused = engine.derive_keys(secret, tried, _CONTEXTS[first:], rows, memory)
        if refused != bad:
            return f"expected of {len(tried)} commitments {_name(bad)} to be refused, got {_name(refused)}"
    return None if keys[count] == keys[last] else "expected the same key of a message alone, got another"


def _name(number: int | None) -> str:
    return "none" if number is None else f"number {number}"


def find_job_fault(engine: Engine) -> str | None:
    """Test that an engine opens many messages in one call, and refuses an altered chunk.

    The messages are a whole message, a gather and a plain tensor. The altered chunk is in the whole message and in the
    gather. The engine must have passed `find_fault`.
    """
    return _first_fault("of many messages with a key", _ANSWERS, partial(_try_jobs, engine))


def _try_jobs(engine: Engine, key_size: int, _: str) -> str | None:
    plain = np.resize(np.arange(251, dtype=np.uint8), _SIZE)
    # Parts of groups of vectors, several groups, a whole chunk, and the last bytes.
    starts, table = [0, 2, 3], [[1, 0, 3000], [16000, 3000, 384], [1000, 3384, 61]]
    plan = GatherPlan(np.array([0, 1]), np.array(starts), np.array(table))
    parts = np.concatenate([plain[1:3001], plain[16000:CHUNK_SIZE], plain[CHUNK_SIZE + 1000 :]])
    with_zeros = plain.copy(), parts.copy(), plain
    with_zeros[0][CHUNK_SIZE:] = with_zeros[1][3384:] = 0
    sealed = np.empty(_SIZE + 2 * TAG_SIZE, np.uint8)
    message_key = MessageKey.raw(bytes(range(key_size)), _NONCE)
    schedule = engine.expand_key(message_key)
    engine.seal_run(schedule, plain, sealed, 0)
    schedule.wipe()
    for bad, answers in ((None, (plain, parts, plain)), ((0, 1), with_zeros)):
        results = [np.full(answer.size, 0xA5, np.uint8) for answer in answers]
        sources = HostMemory.of(sealed), HostMemory.of(sealed), None
        keys = MessageKeys.of([message_key] * 3)
        targets = [HostMemory.of(result, writable=True) for result in results]
        given = sources, [None, None, HostMemory.of(plain)], [None, plan, None], [None] * 3
        jobs = Messages(keys, [_SIZE] * 3, targets, *given)
        refused = engine.open_jobs(jobs)
        if refused != bad or not all(map(np.array_equal, results, answers)):
            what = "sealed chunks to open" if bad is None else "an altered tag to be refused"
            return f"expected {what}, got other bytes"
        sealed[-1] ^= 1
    return None


def _chunk_number(bad: int | None) -> str:
    return "other bytes" if bad is None else f"chunk {bad - _FIRST} refused"
