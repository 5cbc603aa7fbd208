"""Messages go both ways between every engine and pyca/cryptography's own Cobblestone."""

import os

from helpers import by_hand
from helpers.cases import each
from helpers.reference import CHUNK_SIZE, noise
from helpers.runs import Runs
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack._crypto import derivation as ours
from fastrack.format import HEADER_SIZE, SALT_SIZE

SECRETS = (st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32)).filter(any)
SIZES = [0, 1, 15, 16, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE, 1024**2, 5 * 1024**2 + 7]


def sealed_by_us(engine, key, context, plain):
    salt = os.urandom(SALT_SIZE)
    message_key = ours.derive(key, salt, context)
    return salt + message_key.commitment + Runs(engine, message_key.key, message_key.nonce).seal(plain)


def opened_by_us(engine, key, context, message):
    message_key = ours.open_header(message[:HEADER_SIZE], key, context)
    bad, plain = Runs(engine, message_key.key, message_key.nonce).open(message[HEADER_SIZE:])
    assert bad is None
    return plain


def assert_both_ways(engine, key, context, plain):
    assert by_hand.unseal(key, context, sealed_by_us(engine, key, context, plain)) == plain
    assert opened_by_us(engine, key, context, by_hand.seal(key, context, plain)) == plain


@each("size", SIZES)
def test_messages_at_the_edges_go_both_ways(engine_under_test, key, size):
    assert_both_ways(engine_under_test, key, b"where it belongs", noise(size).tobytes())


@settings(max_examples=25, deadline=None)
@given(data=st.data(), size=st.integers(0, 2100) | st.integers(0, 5 * CHUNK_SIZE), context=st.binary(max_size=80))
def test_any_message_goes_both_ways(engine_under_test, data, size, context):
    key = data.draw(SECRETS, label="key")
    assert_both_ways(engine_under_test, key, context, noise(size, seed=size).tobytes())
