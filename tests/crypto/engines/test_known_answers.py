"""The test that every engine takes before its first use: that it passes those that are right, and no other."""

from hashlib import sha256

import numpy as np
import pytest
from helpers import reference
from helpers.cases import each
from helpers.engines import Wrong
from helpers.reference import CHUNK_SIZE

from fastrack._crypto import known_answers

FIRST = known_answers._FIRST


def test_every_engine_knows_the_answers(engine_under_test):
    assert known_answers.find_fault(engine_under_test) is None


@pytest.mark.parametrize("size", [16, 32])
def test_the_answers_are_those_of_openssl(size):
    plain = np.resize(np.arange(251, dtype=np.uint8), known_answers._SIZE).tobytes()
    sealed = reference.seal(bytes(range(size)), known_answers._NONCE, plain, FIRST)
    assert sha256(sealed).hexdigest() == known_answers._ANSWERS[size]


def alter_after_sealing(place):
    def seal_run(engine, schedule, source, target, first):
        engine.seal_run(schedule, source, target, first)
        target[place] ^= 1

    return seal_run


@each("place", [0, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 15, CHUNK_SIZE + 16, -17, -1])
def test_one_wrong_bit_of_what_is_sealed_is_found(place):
    told = known_answers.find_fault(Wrong(seal_run=alter_after_sealing(place)))
    assert "expected sealed chunks with the SHA-256" in told


def test_a_key_size_that_is_wrong_is_named():
    def expand_key(engine, key):
        if len(key.key) == 32:
            raise RuntimeError("no code for this size")
        return engine.expand_key(key)

    told = known_answers.find_fault(Wrong(expand_key=expand_key))
    assert told == "with a key of 256 bits: RuntimeError: no code for this size"


def open_and_alter(engine, schedule, source, target, first):
    bad = engine.open_run(schedule, source, target, first)
    target[-1] ^= 1
    return bad


def open_and_accept(engine, *args):
    engine.open_run(*args)


def open_and_leave_plaintext(engine, schedule, source, target, first):
    bad = engine.open_run(schedule, source, target, first)
    if bad is not None:
        target[-1] = 1
    return bad


def open_and_tell_of_another_chunk(engine, *args):
    bad = engine.open_run(*args)
    return None if bad is None else bad - 1


@each(
    ("open_run", "told"),
    [
        (lambda *_: FIRST, "expected sealed chunks to open, got chunk 0 refused"),
        (open_and_alter, "expected sealed chunks to open, got other bytes"),
        (open_and_accept, "altered tag to be refused, got other bytes"),
        (open_and_leave_plaintext, "expected zeros in the place of the second chunk"),
        (open_and_tell_of_another_chunk, "altered tag to be refused, got chunk 0 refused"),
    ],
)
def test_an_engine_that_opens_wrongly_is_found(open_run, told):
    assert told in known_answers.find_fault(Wrong(open_run=open_run))


# The native call for many messages, which is code of its own


@each("threads", [1, 2])
def test_every_engine_knows_the_answers_for_many_messages(make_engine, threads):
    assert known_answers.find_job_fault(make_engine(threads)) is None


@each("number", [0, 1, 2])
def test_a_result_of_a_message_that_is_wrong_is_found(number):
    def open_jobs(engine, jobs):
        bad = engine.open_jobs(jobs)
        jobs.memories[number].array[-1] ^= 1
        return bad

    told = known_answers.find_job_fault(Wrong(open_jobs=open_jobs))
    assert "of many messages with a key of 128 bits: expected sealed chunks to open" in told


@each("answer", [None, (0, 0), (1, 1)])
def test_an_altered_chunk_that_is_not_refused_is_found(answer):
    wrong = Wrong(open_jobs=lambda engine, jobs: answer if engine.open_jobs(jobs) else None)
    told = known_answers.find_job_fault(wrong)
    assert "an altered tag to be refused" in told


# The derivation of keys


def test_every_engine_derives_the_known_keys(engine_under_test):
    assert known_answers.find_derivation_fault(engine_under_test) is None


@pytest.mark.parametrize("size", [16, 32])
def test_the_derived_keys_are_those_of_openssl(size):
    secret, keys = bytes(range(1, size + 1)), b""
    for number, context in enumerate(known_answers._CONTEXTS):
        keys += reference.derive(secret, bytes([number]) * 24, context)
    assert sha256(keys).hexdigest() == known_answers._DERIVED[size]


@each("place", [0, 31, 32, 44, 63, 64, 75, 9 * 80 + 75])
def test_one_wrong_bit_of_a_derived_key_is_found(place):
    def derive_keys(engine, secret, headers, contexts, rows, target):
        bad = engine.derive_keys(secret, headers, contexts, rows, target)
        if place < len(rows) * 80:
            target[rows[0] * 80 + place] ^= 1
        return bad

    assert "of deriving keys of" in known_answers.find_derivation_fault(Wrong(derive_keys=derive_keys))


@each(
    ("change", "told"),
    [
        (lambda bad, rows: None, "of 10 commitments number 0 to be refused, got none"),
        (lambda bad, rows: bad and 0, "of 10 commitments number 9 to be refused, got number 0"),
        (lambda bad, rows: bad if len(rows) > 1 else None, "of 1 commitments number 0 to be refused, got none"),
        (lambda bad, rows: 0, "of 10 commitments none to be refused, got number 0"),
        (lambda bad, rows: bad if len(rows) > 1 else 0, "of 1 commitments none to be refused, got number 0"),
    ],
)
def test_commitments_that_are_compared_wrongly_are_found(change, told):
    def derive_keys(engine, secret, headers, contexts, rows, target):
        return change(engine.derive_keys(secret, headers, contexts, rows, target), rows)

    assert told in known_answers.find_derivation_fault(Wrong(derive_keys=derive_keys))
