"""Test that the OpenSSL engine keeps the caller's ciphertext away from OpenSSL, which reads it twice."""

import numpy as np
import pytest
from helpers import engines, reference
from helpers.buffers import as_array
from helpers.reference import CHUNK_SIZE, noise
from helpers.runs import Runs, plan

KEY = bytes(32)
PLAIN = noise(2 * CHUNK_SIZE + 100).tobytes()
SEALED = reference.seal(KEY, bytes(12), PLAIN)


class Spy:
    """Stands between the engine and its cipher, and looks at every buffer of ciphertext that passes."""

    def __init__(self, cipher, watched):
        self.cipher = cipher
        self.watched = watched
        self.calls = 0

    def decrypt_into(self, nonce, sealed, extra, plain):
        self._look(sealed)
        return self.cipher.decrypt_into(nonce, sealed, extra, plain)

    def encrypt_into(self, nonce, plain, extra, sealed):
        self._look(sealed)
        return self.cipher.encrypt_into(nonce, plain, extra, sealed)

    def _look(self, sealed):
        assert not np.shares_memory(np.asarray(sealed), self.watched)
        self.calls += 1


@pytest.fixture
def runs():
    return Runs(engines.make("openssl"), KEY)


def spy_on(schedule, watched):
    schedule._cipher = Spy(schedule._cipher, watched)
    return schedule._cipher


def test_openssl_reads_a_copy_of_what_it_opens(runs):
    source, out = as_array(SEALED).copy(), np.empty(len(PLAIN), np.uint8)
    spy = spy_on(runs.schedule, source)
    assert runs.engine.open_run(runs.schedule, source, out, 0) is None
    assert out.tobytes() == PLAIN
    assert runs.engine.verify_run(runs.schedule, source, 0) is None
    pieces, _ = plan([(5, 10), (CHUNK_SIZE, 30)])
    assert runs.engine.open_gather(runs.schedule, source, out, pieces) is None
    assert spy.calls == 3 + 3 + 2


def test_openssl_reads_back_none_of_what_was_handed_out_sealed(runs):
    target = np.empty(len(SEALED), np.uint8)
    spy = spy_on(runs.schedule, target)
    runs.engine.seal_run(runs.schedule, as_array(PLAIN), target, 0)
    assert target.tobytes() == SEALED
    assert spy.calls == 3
