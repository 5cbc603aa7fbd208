"""Published vectors through the CUDA kernels: AES-GCM of NIST and of C2SP/wycheproof, and Cobblestone."""

from __future__ import annotations

import hashlib

import pytest
from helpers import reference
from helpers.gcm_vectors import nist, wycheproof
from helpers.kernel_suite import open_and_seal
from helpers.reference import CHUNK_SIZE
from helpers.vectors import is_a_run, published

from fastrack._crypto.cobblestone import HEADER_SIZE

GCM = {
    "nist-decrypt-128": nist("Decrypt", 128),
    "nist-decrypt-256": nist("Decrypt", 256),
    "nist-encrypt-128": nist("EncryptExtIV", 128),
    "nist-encrypt-256": nist("EncryptExtIV", 256),
    "wycheproof-128": wycheproof(128),
    "wycheproof-256": wycheproof(256),
}
BLOCKS = 3
LONG = 1 << 20  # bytes of a message that takes the host over a second
MESSAGES = [
    pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) if len(case.values[0].message) > LONG else case
    for case in published(is_a_run)
]


@pytest.mark.parametrize("chunk", [0, 2**33 + 5])
@pytest.mark.parametrize("cases", GCM.values(), ids=GCM)
def test_a_published_gcm_case_is_a_chunk(host, cases, chunk):
    open_and_seal(host, cases, chunk)


@pytest.mark.parametrize("vector", MESSAGES)
def test_a_published_message_opens_or_is_refused(host, vector):
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
