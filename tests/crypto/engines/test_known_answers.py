"""The test that every engine takes before its first use: that it passes those that are right, and no other."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from helpers import reference
from helpers.reference import CHUNK_SIZE

from fastrack._crypto import known_answers
from fastrack._crypto.engine import get_engine
from fastrack._crypto.known_answers import find_fault

FIRST = known_answers._FIRST


class Wrong:
    """An engine that goes wrong in one way."""

    def __init__(self, **wrong):
        self._engine = get_engine("openssl")
        self.__dict__.update({name: lambda *args, do=do: do(self._engine, *args) for name, do in wrong.items()})

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_every_engine_knows_the_answers(engine_under_test):
    assert find_fault(engine_under_test) is None


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


@pytest.mark.parametrize("place", [0, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 15, CHUNK_SIZE + 16, -17, -1])
def test_one_wrong_bit_of_what_is_sealed_is_found(place):
    assert "expected sealed chunks with the SHA-256" in find_fault(Wrong(seal_run=alter_after_sealing(place)))


def test_a_key_size_that_is_wrong_is_named():
    def expand_key(engine, key):
        if len(key.key) == 32:
            raise RuntimeError("no code for this size")
        return engine.expand_key(key)

    assert find_fault(Wrong(expand_key=expand_key)) == "with a key of 256 bits: RuntimeError: no code for this size"


def test_chunks_that_do_not_open_are_found():
    assert "expected sealed chunks to open, got chunk 0 refused" in find_fault(Wrong(open_run=lambda *_: FIRST))


def test_chunks_that_open_to_something_else_are_found():
    def open_run(engine, schedule, source, target, first):
        bad = engine.open_run(schedule, source, target, first)
        target[-1] ^= 1
        return bad

    assert "expected sealed chunks to open, got other bytes" in find_fault(Wrong(open_run=open_run))


def test_a_wrong_tag_that_is_accepted_is_found():
    def open_run(engine, *args):
        engine.open_run(*args)

    assert "altered tag to be refused, got other bytes" in find_fault(Wrong(open_run=open_run))


def test_a_wrong_tag_of_which_plaintext_is_left_is_found():
    def open_run(engine, schedule, source, target, first):
        bad = engine.open_run(schedule, source, target, first)
        if bad is not None:
            target[-1] = 1
        return bad

    assert "expected zeros in the place of the second chunk" in find_fault(Wrong(open_run=open_run))


def test_a_wrong_tag_that_is_told_of_another_chunk_is_found():
    def open_run(engine, *args):
        bad = engine.open_run(*args)
        return None if bad is None else bad - 1

    assert "altered tag to be refused, got chunk 0 refused" in find_fault(Wrong(open_run=open_run))
