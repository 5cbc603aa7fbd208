"""Keys of many messages in batches, and keys that are wiped while others are derived from them."""

import random

import pytest
from helpers import derivations
from helpers.cases import each
from helpers.engines import Wrong
from helpers.runs import flip

from fastrack._crypto import cobblestone, derivation, message_keys
from fastrack.errors import FormatError
from fastrack.format import COMMITMENT_SIZE, NONCE_SIZE

SECRET = bytes(range(1, 33))


@pytest.fixture
def messages(limited):
    """Headers with the right commitments, and contexts, of more messages than are derived in one call."""
    limited(derived_together=4)
    chance = random.Random(1)
    salts, contexts = ([chance.randbytes(24) for _ in range(11)] for _ in range(2))
    keys = [derivation.derive(SECRET, salt, context) for salt, context in zip(salts, contexts, strict=True)]
    return [salt + key.commitment for salt, key in zip(salts, keys, strict=True)], contexts, keys


def test_batches_give_every_key(messages):
    headers, contexts, keys = messages
    rows = list(reversed(range(len(keys))))
    target = message_keys.MessageKeys(len(keys))
    assert derivation.derive_rows(SECRET, headers, contexts, rows, target.reserve(rows, 256)) is None
    for row, key in zip(rows, keys, strict=True):
        assert target.material(row) == key.material
    assert target.bits == [256] * len(keys)


@each("bad", [0, 3, 4, 7, 8, 10])
def test_the_first_wrong_commitment_of_all_batches_is_found(messages, bad):
    headers, contexts = messages[0].copy(), messages[1]
    for number in {bad, 10}:
        headers[number] = flip(headers[number], 8 * 56 - 1)
    rows = message_keys.MessageKeys(11).reserve(range(11), 256)
    assert derivation.derive_rows(SECRET, headers, contexts, range(11), rows) == bad


@each("size", [0, 24, 55, 57])
def test_a_header_of_another_length_is_refused_before_a_key_is_derived(size):
    target = memoryview(bytearray(2 * cobblestone.DERIVED_SIZE))
    with pytest.raises(FormatError, match=f"got {size}"):
        derivation.derive_rows(SECRET, [bytes(56), bytes(size)], [b""] * 2, range(2), target)
    assert not any(target)


@pytest.mark.parametrize("size", [16, 32])
def test_a_secret_that_is_wiped_meanwhile_derives_no_key(monkeypatch, size):
    secret = bytearray(range(1, size + 1))

    def derive_keys(engine, *given):
        bad = engine.derive_keys(*given)
        secret[:] = bytes(size)
        return bad

    monkeypatch.setattr(derivation, "make_engine", lambda *_: Wrong(derive_keys=derive_keys))
    with pytest.raises(FormatError, match="zeros"):
        derivation.derive(secret, bytes(24), b"")


def test_a_new_header_has_no_commitment():
    assert derivation.new_header(bytes(range(24))) == bytes(range(24)) + bytes(32)


def test_what_was_derived_is_overwritten_where_it_was_written_first(monkeypatch):
    targets = []
    derivations.replace(monkeypatch, lambda derive_rows, *given: targets.append(given[-1]) or derive_rows(*given))
    key = derivation.derive(SECRET, bytes(24), b"")
    assert len(key.material) + len(key.commitment) == len(SECRET) + NONCE_SIZE + COMMITMENT_SIZE
    assert bytes(targets[0]) == bytes(cobblestone.DERIVED_SIZE)
