"""Cobblestone with SHA-512 on every engine: as Wycheproof publishes it, and the same faults in messages of pyca's."""

import hashlib
from collections import Counter
from itertools import pairwise

import pytest
from helpers import by_hand, reference, wycheproof
from helpers.cases import each
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import Runs, flip

from fastrack._crypto import derivation
from fastrack.errors import AuthenticationError, FormatError
from fastrack.format import COMMITMENT_SIZE, HEADER_SIZE, SALT_SIZE, raw_plain_size

CONTEXT = b"where it belongs"

needs_files = pytest.mark.skipif(
    not wycheproof.FILES, reason="no folder of Wycheproof's vectors of Cobblestone; FASTRACK_VECTORS names it"
)


def vectors(wanted=lambda vector: True):
    return {vector.name: vector for path in wycheproof.FILES for vector in wycheproof.load(path) if wanted(vector)}


def opened(engine, key, context, message):
    """Open a message as a reader does: its commitment first, and nothing of it where a chunk is wrong."""
    message_key = derivation.open_header(message[:HEADER_SIZE], key, context)
    return opened_raw(engine, message_key.key, message_key.nonce, message[HEADER_SIZE:])


def opened_raw(engine, key, nonce, raw):
    raw_plain_size(len(raw))  # refuses sizes that no message has
    bad, plain = Runs(engine, key, nonce).open(raw)
    if bad is not None:
        raise AuthenticationError("refused", chunk=bad)
    return plain


def digest(plain):
    return hashlib.sha512(plain).digest()


@needs_files
@each("path", wycheproof.FILES)
def test_every_vector_of_wycheproof_is_loaded(path):
    found = wycheproof.load(path)
    assert len({vector.name for vector in found}) == len(found) == 35
    assert Counter(vector.valid for vector in found) == {True: 10, False: 25}
    assert {vector.bits for vector in found} == {int(path.name.split("_")[4])}


@pytest.mark.slow
@needs_files
@each("vector", vectors)
def test_a_message_of_wycheproof_opens_or_is_refused(engine_under_test, vector):
    try:
        plain = opened(engine_under_test, vector.key, vector.context, vector.message)
    except (AuthenticationError, FormatError):
        assert not vector.valid
    else:
        assert vector.valid
        assert (len(plain), digest(plain)) == (vector.size, vector.digest)
        salt = vector.message[:SALT_SIZE]
        message_key = derivation.derive(vector.key, salt, vector.context)
        assert (message_key.key, message_key.nonce) == (vector.aead_key, vector.base_nonce)
        sealed = Runs(engine_under_test, message_key.key, message_key.nonce).seal(plain)
        assert salt + message_key.commitment + sealed == vector.message


@pytest.mark.slow
@needs_files
@each("vector", lambda: vectors(lambda vector: "HeaderFailure" not in vector.flags))
def test_a_raw_message_of_wycheproof_opens_or_is_refused(engine_under_test, vector):
    raw = vector.message[HEADER_SIZE:]
    try:
        plain = opened_raw(engine_under_test, vector.aead_key, vector.base_nonce, raw)
    except (AuthenticationError, FormatError):
        assert not vector.valid
    else:
        assert vector.valid
        assert (len(plain), digest(plain)) == (vector.size, vector.digest)


@pytest.mark.slow
@needs_files
@each("vector", lambda: vectors(lambda vector: "PartialPlaintext" in vector.flags))
def test_the_valid_prefix_of_a_message_of_wycheproof_is_all_that_comes_out(engine_under_test, vector):
    whole = vector.size // CHUNK_SIZE
    runs = Runs(engine_under_test, vector.aead_key, vector.base_nonce)
    raw = vector.message[HEADER_SIZE:]
    bad, plain = runs.open(raw[: whole * SEALED_CHUNK_SIZE])
    assert (bad, len(plain), digest(plain)) == (None, vector.size, vector.digest)
    rest = raw[whole * SEALED_CHUNK_SIZE :][:SEALED_CHUNK_SIZE]
    if len(rest) >= reference.TAG_SIZE:
        bad, plain = runs.open(rest, whole)
        # A full chunk may be valid where none may follow it, or a last one be missing.
        assert bad == whole or len(raw) % SEALED_CHUNK_SIZE in range(reference.TAG_SIZE)
        assert bad is None or not any(plain)


def messages_with_faults(key):
    """Yield messages as pyca seals them with each kind of fault that Wycheproof lists: key, context and message."""
    two, three = (noise(count * CHUNK_SIZE + 7).tobytes() for count in (2, 3))
    message = by_hand.seal(key, CONTEXT, two)
    chunks = [HEADER_SIZE + index * SEALED_CHUNK_SIZE for index in range(3)] + [len(message)]
    head, first, second, last = message[:HEADER_SIZE], *(message[start:end] for start, end in pairwise(chunks))
    other = bytes(each ^ 0x55 for each in key)
    yield "another key", other, CONTEXT, message
    yield "a key of another size", key[:16] if len(key) > 16 else key * 2, CONTEXT, message
    yield "another context", key, CONTEXT + b"\0", message
    yield "no context", key, b"", message
    for place in (0, SALT_SIZE, HEADER_SIZE - 1, HEADER_SIZE, *(end - 1 for end in chunks[1:])):
        yield f"another byte {place}", key, CONTEXT, flip(message, 8 * place)
    yield "another commitment", key, CONTEXT, head[:SALT_SIZE] + bytes(COMMITMENT_SIZE) + message[HEADER_SIZE:]
    yield "swapped chunks", key, CONTEXT, head + second + first + last
    yield "a chunk twice", key, CONTEXT, head + first + first + second + last
    yield "a chunk left out", key, CONTEXT, head + first + last
    foreign = by_hand.seal(key, CONTEXT, three)[-len(last) :]
    yield "a last chunk of another message", key, CONTEXT, message[: chunks[2]] + foreign
    for end in (0, SALT_SIZE, HEADER_SIZE - 1, HEADER_SIZE, HEADER_SIZE + 15, chunks[1], chunks[2], len(message) - 1):
        yield f"cut to {end}", key, CONTEXT, message[:end]
    for more in (b"\0", bytes(16), last, first):
        yield f"{len(more)} bytes behind its end", key, CONTEXT, message + more


def test_each_fault_of_wycheproof_is_refused_in_a_message_of_another_implementation(engine_under_test, key):
    for size in (0, 7, CHUNK_SIZE, 2 * CHUNK_SIZE, 2 * CHUNK_SIZE + 1):
        plain = noise(size).tobytes()
        assert opened(engine_under_test, key, CONTEXT, by_hand.seal(key, CONTEXT, plain)) == plain
    for name, secret, context, message in messages_with_faults(key):
        try:
            opened(engine_under_test, secret, context, message)
        except (AuthenticationError, FormatError):
            continue
        pytest.fail(f"{name} was not noticed")
