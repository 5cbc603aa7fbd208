"""Key schedules: secrets that leave no trace, and that are of no use once wiped."""

import copy
import ctypes
import gc
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from helpers import engines, reference
from helpers.cases import each
from helpers.messages import raw_key
from helpers.native_code import needs_compiler
from helpers.runs import Runs, plan

from fastrack._crypto import known_answers, openssl, vector
from fastrack.errors import ClosedError

NONCE = bytes.fromhex("f0e1d2c3b4a5968778695a4b")


@pytest.fixture
def schedule(engine_under_test, key):
    return engine_under_test.expand_key(raw_key(key, NONCE))


@pytest.fixture(params=engines.VECTOR_NAMES)
def vector_engine(request):
    return engines.make(request.param)


@pytest.fixture
def vector_schedule(vector_engine, key):
    return vector_engine.expand_key(raw_key(key, NONCE))


def test_a_schedule_outlives_the_message_key_it_was_made_from(engine_under_test, key):
    message_key = raw_key(key, NONCE)
    runs = Runs(engine_under_test, key, NONCE)
    sealed = runs.seal(b"a secret")
    runs.schedule = engine_under_test.expand_key(message_key)
    message_key.wipe()
    assert runs.open(sealed) == (None, b"a secret")


class LazyCipher:
    """The cipher of pyca over OpenSSL before 3.2: it keeps the object that holds the key, and reads it each time."""

    def __init__(self, key):
        self.key = key

    def __getattr__(self, name):
        return getattr(AESGCM(self.key), name)


def test_an_openssl_schedule_outlives_the_message_key_whenever_that_is_read(key, monkeypatch):
    monkeypatch.setattr(openssl, "AESGCM", LazyCipher)
    engine = engines.make("openssl")
    assert known_answers.find_fault(engine) is None
    message_key = raw_key(key, NONCE)
    schedule = engine.expand_key(message_key)
    message_key.wipe()
    sealed = np.empty(116, np.uint8)
    engine.seal_run(schedule, np.ones(100, np.uint8), sealed, 0)
    assert sealed.tobytes() == reference.seal(key, NONCE, bytes([1] * 100), 0)
    kept = schedule._key
    del schedule
    gc.collect()
    assert not any(kept)


def test_a_wiped_message_key_is_not_prepared(engine_under_test, key):
    message_key = raw_key(key, NONCE)
    message_key.wipe()
    with pytest.raises(ClosedError, match="wiped"):
        engine_under_test.expand_key(message_key)


@each("wiped", [True, False])
def test_a_schedule_that_is_wiped_or_goes_away_leaves_zeros(vector_engine, key, wiped):
    schedule = vector_engine.expand_key(raw_key(key, NONCE))
    memory = schedule._memory
    assert key in memory.tobytes()
    if wiped:
        schedule.wipe()
        assert not memory.any()
        schedule.wipe()
    del schedule
    gc.collect()
    assert not memory.any()


def test_a_wiped_openssl_schedule_drops_its_cipher_and_nonce(key):
    schedule = engines.make("openssl").expand_key(raw_key(key, NONCE))
    schedule.wipe()
    assert (schedule._cipher, schedule._nonce) == (None, b"")


def test_a_wiped_schedule_works_nothing(engine_under_test, schedule):
    engine = engine_under_test
    plain, sealed, out = np.ones(100, np.uint8), np.ones(116, np.uint8), np.full(116, 0xA5, np.uint8)
    schedule.wipe()
    for attempt in (
        lambda: engine.seal_run(schedule, plain, out, 0),
        lambda: engine.open_run(schedule, sealed, out[:100], 0),
        lambda: engine.verify_run(schedule, sealed, 0),
        lambda: engine.open_gather(schedule, sealed, out, plan([(0, 10)])[0]),
    ):
        with pytest.raises(ClosedError, match="wiped"):
            attempt()
    assert (out == 0xA5).all()


def test_wiping_one_schedule_leaves_another_of_the_same_key_alone(engine_under_test, schedule, key):
    runs = Runs(engine_under_test, key, NONCE)
    sealed = runs.seal(b"a secret")
    schedule.wipe()
    assert runs.open(sealed) == (None, b"a secret")


@each("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_schedule_is_neither_pickled_nor_copied(schedule, duplicate):
    with pytest.raises(TypeError, match="pickle"):
        duplicate(schedule)


def test_no_secret_is_in_what_a_schedule_shows(schedule, key):
    for secret in (key, NONCE):
        for form in (secret.hex(), repr(secret)[2:-1], str(list(secret))[1:-1]):
            assert form not in f"{schedule!r} {schedule}"


def test_a_vector_schedule_lies_on_a_cache_line_and_within_its_memory(vector_schedule):
    memory = vector_schedule._memory
    assert vector_schedule.address % 64 == 0
    assert memory.ctypes.data <= vector_schedule.address
    needs_compiler()
    from fastrack_native import gcm_ir

    assert gcm_ir._NONCE + 16 <= vector.SCHEDULE_SIZE
    used = vector_schedule.address - memory.ctypes.data + vector.SCHEDULE_SIZE
    assert used <= memory.size
    assert not memory[used:].any()


def test_a_vector_schedule_holds_the_round_keys_of_fips_197(vector_engine):
    # FIPS 197 appendices A.1 and A.3: the key, and the last round key of its expansion.
    for text, last in (
        ("2b7e151628aed2a6abf7158809cf4f3c", "d014f9a8c9ee2589e13f0cc8b6630ca6"),
        ("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4", "fe4890d1e6188d0b046df344706c631e"),
    ):
        schedule = vector_engine.expand_key(raw_key(bytes.fromhex(text), NONCE))
        rounds = {32: 10, 64: 14}[len(text)]
        for lane in range(4):
            assert ctypes.string_at(schedule.address + 64 * rounds + 16 * lane, 16).hex() == last
            assert ctypes.string_at(schedule.address + 16 * lane, 16).hex() == text[:32]
