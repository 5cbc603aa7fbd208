"""Message keys and commitments of every engine, beside the HKDF of `cryptography`."""

import random
from array import array

import numpy as np
import pytest
from helpers import engines, reference
from helpers.buffers import Guarded
from helpers.cases import each
from helpers.runs import flip

from fastrack._crypto.cobblestone import DERIVED_SIZE
from fastrack.format import COMMITMENT_SIZE, HEADER_SIZE, SALT_SIZE

MOST = 17  # more than two vectors of eight lanes
# Around the end of a block in each of the two blocks of output.
LENGTHS = sorted({*range(3), *(128 * block + more for block in range(1, 6) for more in (-91, -90, -89, -27, -26, -25))})


class Batch:
    """Messages of a call under one owner's key, with the right commitments unless they are altered."""

    def __init__(self, secret, contexts, chance):
        self.secret = secret
        self.contexts = contexts
        salts = [chance.randbytes(SALT_SIZE) for _ in contexts]
        self.expected = [reference.derive(secret, *each) for each in zip(salts, contexts, strict=True)]
        ends = (answer[-COMMITMENT_SIZE:] for answer in self.expected)
        self.headers = list(map(bytes.__add__, salts, ends))
        self.rows = list(range(len(contexts)))

    def run(self, engine):
        """Derive, check every row, and return the first message that was found to differ."""
        target = bytearray(b"\xa5" * DERIVED_SIZE * (max(self.rows, default=0) + 2))
        bad = engine.derive_keys(self.secret, self.headers, self.contexts, self.rows, memoryview(target))
        for row, answer in zip(self.rows, self.expected, strict=True):
            start = row * DERIVED_SIZE
            assert target[start : start + len(answer)] == answer, (row, self.rows, list(map(len, self.contexts)))
        for row in set(range(len(target) // DERIVED_SIZE)) - set(self.rows):
            start = row * DERIVED_SIZE
            assert target[start : start + DERIVED_SIZE] == b"\xa5" * DERIVED_SIZE
        return bad


@each("size", [16, 32])
def test_keys_are_those_of_another_implementation(engine_under_test, size):
    chance = random.Random(size)
    for length in LENGTHS:
        for count in (1, 2):
            batch = Batch(chance.randbytes(size), [chance.randbytes(length) for _ in range(count)], chance)
            assert batch.run(engine_under_test) is None
    lengths = list(range(1001))
    chance.shuffle(lengths)
    while lengths:  # mixed in one call, as they come
        some = [lengths.pop() for _ in range(min(chance.randint(1, MOST), len(lengths)))]
        batch = Batch(chance.randbytes(size), list(map(chance.randbytes, some)), chance)
        chance.shuffle(batch.rows)
        assert batch.run(engine_under_test) is None


@each("size", [16, 32])
def test_a_wrong_commitment_is_found_in_every_lane(engine_under_test, size):
    chance = random.Random(size)
    for count in (1, 2, 7, 8, 9, MOST):
        for bad in range(count):
            contexts = [chance.randbytes(chance.randrange(300)) for _ in range(count)]
            batch = Batch(chance.randbytes(size), contexts, chance)
            bit = 8 * SALT_SIZE + chance.randrange(8 * COMMITMENT_SIZE)
            batch.headers[bad] = flip(batch.headers[bad], bit)
            assert (count, bad, batch.run(engine_under_test)) == (count, bad, bad)
            batch.headers[-1] = flip(batch.headers[-1], 8 * SALT_SIZE)  # the first is told of, or both bits
            if bad < count - 1:
                assert batch.run(engine_under_test) == bad


@each("size", [16, 32])
def test_no_bit_of_a_commitment_may_differ(engine_under_test, size):
    batch = Batch(bytes(range(1, size + 1)), [b"context"] * 2, random.Random(1))
    right = batch.headers[1]
    for bit in range(8 * SALT_SIZE, 8 * HEADER_SIZE):
        batch.headers[1] = flip(right, bit)
        assert (bit, batch.run(engine_under_test)) == (bit, 1)


def test_no_message_is_no_work(engine_under_test):
    assert engine_under_test.derive_keys(bytes(range(32)), [], [], [], memoryview(bytearray())) is None


@each("rows", [[0, 2], [-1, 0], [2**60, 0]])
def test_a_row_outside_of_the_memory_is_refused(engine_under_test, rows):
    target = bytearray(2 * DERIVED_SIZE)
    with pytest.raises(ValueError, match="expected rows in 160 bytes"):
        engine_under_test.derive_keys(bytes(range(32)), [bytes(56)] * 2, [b""] * 2, rows, memoryview(target))
    assert not any(target)
    with pytest.raises(ValueError, match="written to"):
        engine_under_test.derive_keys(bytes(range(32)), [bytes(56)], [b""], [0], memoryview(bytes(160)))


@each("given", [{"headers": 1}, {"contexts": 1}, {"contexts": 3}])
def test_sequences_of_different_lengths_are_refused(engine_under_test, given):
    headers, contexts = [bytes(56)] * given.get("headers", 2), [b""] * given.get("contexts", 2)
    with pytest.raises(ValueError, match="zip"):
        engine_under_test.derive_keys(bytes(range(32)), headers, contexts, [0, 1], memoryview(bytearray(160)))


@pytest.mark.parametrize("name", engines.VECTOR_NAMES)
@each("size", [16, 32])
def test_native_code_stays_in_its_buffers(name, size):
    """Every buffer ends, and then begins, at an inaccessible page."""
    native, chance = engines.make(name)._functions, random.Random(2)
    guards = [Guarded(4 << 10) for _ in range(4)]
    for count in (1, 2, 8, 9):
        for at_end in (True, False):
            contexts = [chance.randbytes(chance.randrange(200)) for _ in range(count)]
            batch = Batch(chance.randbytes(size), contexts, chance)
            text = reference.PREFIXES[size]
            for header, context in zip(batch.headers, contexts, strict=True):
                text += header + context + b"\0\x80" + bytes(-(len(context) + 2) % 8)
            table = array("q", [word for row, context in enumerate(contexts) for word in (len(context), row)])
            given = [
                guard.take(len(content), at_end=at_end)
                for guard, content in zip(guards, (batch.secret, text, table.tobytes(), bytes(80 * count)), strict=True)
            ]
            for buffer, content in zip(given, (batch.secret, text, table.tobytes()), strict=False):
                buffer[:] = np.frombuffer(content, np.uint8)
            secret, text, table, target = given
            assert native.derive_keys(secret, size, text, table, count, target) == count
            for row, answer in enumerate(batch.expected):
                assert target[80 * row :][: len(answer)].tobytes() == answer
