"""Published vectors on every engine: Cobblestone with both sizes of key, AES-GCM of NIST and of C2SP/wycheproof."""

import hashlib
from collections import Counter

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import as_array
from helpers.cases import each
from helpers.gcm_vectors import load_all
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE
from helpers.runs import Runs, plain_size_of
from helpers.vectors import derive_as_published, load_vectors, published  # noqa: F401 - a fixture

from fastrack._crypto import derivation
from fastrack.errors import AuthenticationError, FormatError
from fastrack.format import HEADER_SIZE, SALT_SIZE, raw_plain_size

# How many cases each file has, and how many of those are wrong.
COUNTS = {
    "nist-decrypt-128": (75, 41),
    "nist-decrypt-256": (75, 33),
    "nist-encryptextiv-128": (75, 0),
    "nist-encryptextiv-256": (75, 0),
    "wycheproof-128": (49, 27),
    "wycheproof-256": (48, 27),
}
VECTORS = published()
RAW = published(lambda vector: vector.has_good_header)
VALID = published(lambda vector: vector.valid)
PARTIAL = published(lambda vector: vector.has_valid_prefix)

# Cases that are not valid, and whose last chunk is.
VALID_END = {"bad_tag_second_chunk_full", "bad_tag_first_chunk", "swapped_chunks", "duplicated_chunk"}


def digest(plain):
    return hashlib.sha256(plain).digest()


def open_whole(engine, message_key, raw):
    """Open a whole message as a reader would, with nothing released unless every chunk was good."""
    target = np.full(raw_plain_size(len(raw)), 0xA5, np.uint8)
    bad = engine.open_run(engine.expand_key(message_key), as_array(raw), target, 0)
    if bad is not None:
        raise AuthenticationError("refused", chunk=bad)
    return target.tobytes()


# Cobblestone


@pytest.mark.parametrize("bits", [128, 256])
def test_every_published_message_is_loaded(bits):
    vectors = [vector for vector in load_vectors() if vector.bits == bits]
    assert len({vector.name for vector in vectors}) == len(vectors) == 34
    assert Counter(vector.valid for vector in vectors) == {True: 9, False: 25}
    assert sum(not vector.has_good_header for vector in vectors) == 10
    assert sum(vector.has_valid_prefix for vector in vectors) == 9
    assert all(len(vector.aead_key) * 8 == bits for vector in vectors if vector.has_good_header)


@pytest.mark.usefixtures("derive_as_published")
@each("vector", VECTORS)
def test_a_published_message_opens_or_is_refused(engine_under_test, vector):
    def read():
        message_key = derivation.open_header(vector.message[:HEADER_SIZE], vector.key, vector.context)
        assert (message_key.key, message_key.nonce) == (vector.aead_key, vector.base_nonce)
        return open_whole(engine_under_test, message_key, vector.message[HEADER_SIZE:])

    if vector.valid:
        plain = read()
        assert len(plain) == vector.plain_size
        assert digest(plain) == vector.plain_sha256
    else:
        with pytest.raises((AuthenticationError, FormatError)):
            read()


@each("vector", PARTIAL)
def test_nothing_past_the_valid_prefix_of_a_published_message_comes_out(engine_under_test, vector):
    raw = vector.message[HEADER_SIZE:]
    whole = len(raw) // SEALED_CHUNK_SIZE * SEALED_CHUNK_SIZE
    sealed = raw if len(raw) - whole >= TAG_SIZE else raw[:whole]  # an end that no chunk can have is left out
    runs = Runs(engine_under_test, vector.aead_key, vector.base_nonce)
    bad, plain = runs.open(sealed)
    assert bad == (None if sealed is not raw or len(raw) == whole else vector.plain_size // CHUNK_SIZE)
    assert digest(plain[: vector.plain_size]) == vector.plain_sha256
    if bad is not None:
        assert not any(plain[bad * CHUNK_SIZE : (bad + 1) * CHUNK_SIZE])


@each("vector", RAW)
def test_slices_of_a_published_message_are_read_where_its_chunks_are_valid(engine_under_test, vector):
    raw = vector.message[HEADER_SIZE:]
    try:
        size = raw_plain_size(len(raw))
    except FormatError:
        assert not vector.valid
        return
    chunks = reference.open_each(vector.aead_key, vector.base_nonce, raw)
    assert (vector.name.partition("_")[2] in VALID_END) == (not vector.valid and chunks[-1] is not None)
    sizes = (min(CHUNK_SIZE, size - index * CHUNK_SIZE) for index in range(len(chunks)))
    zeroed = b"".join(bytes(size) if chunk is None else chunk for size, chunk in zip(sizes, chunks, strict=True))
    runs = Runs(engine_under_test, vector.aead_key, vector.base_nonce)
    places = [k * CHUNK_SIZE + more for k in range(4) for more in (-1, 0, 9)]
    edges = {min(size, max(0, place)) for place in (*places, size // 2, size - 1, size)}
    lengths = [0, 1, 17, CHUNK_SIZE, CHUNK_SIZE + 2, 3 * CHUNK_SIZE]
    for start, length in {(start, min(length, size - start)) for start in edges for length in lengths}:
        touched = range(start // CHUNK_SIZE, (start + length - 1) // CHUNK_SIZE + 1) if length else ()
        bad = next((chunk for chunk in touched if chunks[chunk] is None), None)
        assert runs.gather(raw, [(start, length)]) == (bad, [zeroed[start : start + length]])


@pytest.mark.usefixtures("derive_as_published")
@each("vector", VALID)
def test_sealing_with_a_published_key_and_salt_gives_the_published_bytes(engine_under_test, vector):
    raw = vector.message[HEADER_SIZE:]
    plain = b"".join(reference.open_each(vector.aead_key, vector.base_nonce, raw))
    assert Runs(engine_under_test, vector.aead_key, vector.base_nonce).seal(plain) == raw

    salt = vector.message[:SALT_SIZE]
    message_key = derivation.derive(vector.key, salt, vector.context)
    sealed = Runs(engine_under_test, message_key.key, message_key.nonce).seal(plain)
    assert salt + message_key.commitment + sealed == vector.message


# AES-GCM


def test_every_published_gcm_case_that_a_chunk_can_have_is_loaded():
    found = {name: (len(cases), sum(case.plain is None for case in cases)) for name, cases in load_all().items()}
    assert found == COUNTS
    for cases in load_all().values():
        assert len({case.name for case in cases}) == len(cases)
        assert max(len(case.sealed) for case in cases) < SEALED_CHUNK_SIZE


@each("chunk", [0, 1, 2**32 - 1, 2**33 + 5, 2**38 - 1])
@each("cases", load_all().values())
def test_a_published_gcm_case_is_a_chunk(engine_under_test, cases, chunk):
    for case in cases:
        # The published nonce is the one of that chunk.
        runs = Runs(engine_under_test, case.key, reference.nonce_of(case.nonce, chunk))
        bad, plain = runs.open(case.sealed, chunk)
        if case.plain is None:
            assert (case.name, bad, plain) == (case.name, chunk, bytes(plain_size_of(len(case.sealed))))
        else:
            assert (case.name, bad, plain) == (case.name, None, case.plain)
            assert (case.name, runs.seal(case.plain, chunk)) == (case.name, case.sealed)
