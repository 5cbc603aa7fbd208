import copy
import pickle

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from helpers import by_hand
from helpers.cases import each
from helpers.runs import flip
from helpers.vectors import derive_as_published, published  # noqa: F401 - a fixture
from hypothesis import given
from hypothesis import strategies as st

from fastrack._crypto import cobblestone, derivation
from fastrack.errors import AuthenticationError, ClosedError, FormatError
from fastrack.format import (
    CHUNK_SIZE,
    HEADER_SIZE,
    MAX_CHUNKS,
    MAX_PLAIN_SIZE,
    SALT_SIZE,
    SEALED_CHUNK_SIZE,
    TAG_SIZE,
    chunk_count,
    chunk_offset,
    ciphertext_size,
    message_size,
    plain_size,
    raw_plain_size,
)

SECRET = bytes(range(32))
SECRETS = (st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32)).filter(any)
PLAIN_SIZES = st.integers(0, 4 * CHUNK_SIZE) | st.integers(0, MAX_PLAIN_SIZE)
EDGES = [0, 1, TAG_SIZE, *(count * CHUNK_SIZE + more for count in (1, 2, 256, 257) for more in (-1, 0, 1))]
VECTORS = published()
each_key_size = pytest.mark.parametrize("size", [16, 32])


def opened_with(message_key, message):
    """Open a message chunk by chunk with nothing but this module's arithmetic and plain AES-GCM."""
    size = plain_size(len(message))
    plain = b""
    for chunk in range(chunk_count(size)):
        start = chunk_offset(chunk)
        nonce = cobblestone.chunk_nonce(message_key.nonce, chunk)
        plain += AESGCM(message_key.key).decrypt(nonce, message[start : start + SEALED_CHUNK_SIZE], None)
    return plain


# Published vectors


# Cases of a size that no message has. One that was cut within its second chunk is not among them: its last chunk is as
# short as a last chunk may be, so only its tag can tell.
IMPOSSIBLE = {
    "missing_tag",
    "short_chunk",
    "no_chunks",
    "empty_message",
    "short_header_no_commitment",
    "short_header_partial_commitment",
    "short_header_no_salt",
    "truncated_at_chunk_boundary",
    "trailing_garbage_short",
}


@pytest.mark.usefixtures("derive_as_published")
@each("vector", VECTORS)
def test_a_published_message_has_the_size_it_should_and_opens_chunk_by_chunk(vector):
    if vector.valid:
        assert plain_size(len(vector.message)) == vector.plain_size
        assert message_size(vector.plain_size) == len(vector.message)
        assert raw_plain_size(len(vector.message) - HEADER_SIZE) == vector.plain_size
        message_key = derivation.open_header(vector.message[:HEADER_SIZE], vector.key, vector.context)
        assert len(opened_with(message_key, vector.message)) == vector.plain_size
    elif vector.name.partition("_")[2] in IMPOSSIBLE:
        with pytest.raises(FormatError):
            plain_size(len(vector.message))


# Agreement with the reference implementation


@each_key_size
@given(data=st.data(), context=st.binary(max_size=200))
def test_the_reference_makes_headers_that_open_here(size, data, context):
    secret = data.draw(st.binary(min_size=size, max_size=size).filter(any))
    message = by_hand.seal(secret, context, b"")
    message_key = derivation.open_header(message[:HEADER_SIZE], secret, context)
    assert message_key.commitment == message[SALT_SIZE:HEADER_SIZE]
    assert len(message_key.material) == size + 12


@each_key_size
@each("plain_bytes", [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE, 258 * CHUNK_SIZE + 5])
def test_the_reference_makes_messages_that_open_here(size, plain_bytes):
    secret, plain = bytes(range(size)), bytes(i % 251 for i in range(plain_bytes))
    message = by_hand.seal(secret, b"context", plain)
    assert len(message) == message_size(plain_bytes)
    assert opened_with(derivation.open_header(message[:HEADER_SIZE], secret, b"context"), message) == plain


@each_key_size
def test_the_reference_opens_a_message_made_by_this_arithmetic(size):
    secret, salt = bytes(range(size)), bytes(range(SALT_SIZE))
    message_key = derivation.derive(secret, salt, b"context")
    chunks = [bytes(CHUNK_SIZE), bytes(CHUNK_SIZE), b"end"]
    message = salt + message_key.commitment
    for number, chunk in enumerate(chunks):
        message += AESGCM(message_key.key).encrypt(cobblestone.chunk_nonce(message_key.nonce, number), chunk, None)
    assert by_hand.unseal(secret, b"context", message) == b"".join(chunks)


def test_chunks_are_bound_to_their_place():
    message = by_hand.seal(SECRET, b"", bytes(2 * CHUNK_SIZE))
    first, second, last = map(chunk_offset, range(3))
    swapped = message[:first] + message[second:last] + message[first:second] + message[last:]
    with pytest.raises(InvalidTag):
        opened_with(derivation.open_header(swapped[:HEADER_SIZE], SECRET, b""), swapped)


# Headers


def test_every_flipped_bit_and_every_truncation_of_a_header_is_refused():
    header = by_hand.seal(SECRET, b"context", b"")[:HEADER_SIZE]
    for bit in range(8 * HEADER_SIZE):
        with pytest.raises(AuthenticationError):
            derivation.open_header(flip(header, bit), SECRET, b"context")
    for size in range(HEADER_SIZE):
        with pytest.raises(FormatError, match="cut short"):
            derivation.open_header(header[:size], SECRET, b"context")


@each(
    ("secret", "context"),
    [
        (b"\1" + bytes(31), b"context"),
        (bytes(range(16)), b"context"),
        *((SECRET, context) for context in (b"", b"context\0", b"Context")),
    ],
)
def test_another_key_or_context_is_refused_before_any_chunk(secret, context):
    header = by_hand.seal(SECRET, b"context", b"")[:HEADER_SIZE]
    with pytest.raises(AuthenticationError, match=r"key .* context") as caught:
        derivation.open_header(header, secret, context)
    assert caught.value.chunk is None


def test_a_header_may_be_a_view_of_a_mapped_file():
    message = memoryview(bytearray(by_hand.seal(SECRET, b"", b"abc")))
    message_key = derivation.open_header(message[:HEADER_SIZE], memoryview(SECRET), bytearray())
    assert opened_with(message_key, message) == b"abc"


@each(
    ("secret", "salt", "told"),
    [
        *((bytes(size), bytes(SALT_SIZE), f"got {size}") for size in (0, 1, 15, 17, 24, 31, 33, 64)),
        *((bytes(size), bytes(SALT_SIZE), "zeros") for size in (16, 32)),
        *((SECRET, bytes(size), f"got {size}") for size in (0, 23, 25, 32)),
    ],
)
def test_a_secret_of_zeros_and_other_lengths_of_secret_and_salt_are_refused(secret, salt, told):
    with pytest.raises(FormatError, match=told):
        derivation.derive(secret, salt, b"")


@given(secret=SECRETS, salt=st.binary(min_size=SALT_SIZE, max_size=SALT_SIZE), context=st.binary(max_size=50))
def test_every_input_changes_every_output(secret, salt, context):
    one = derivation.derive(secret, salt, context)
    flipped = bytes([salt[0] ^ 1]) + salt[1:]
    for other in (derivation.derive(secret, flipped, context), derivation.derive(secret, salt, context + b"\0")):
        assert bytes(one.key) != bytes(other.key)
        assert bytes(one.nonce) != bytes(other.nonce)
        assert one.commitment != other.commitment


# Message keys


def test_a_raw_message_key_joins_a_key_and_a_nonce():
    message_key = cobblestone.MessageKey.raw(b"k" * 16, bytearray(b"n" * 12))
    assert message_key.material == b"k" * 16 + b"n" * 12
    assert (message_key.key, message_key.nonce, message_key.commitment) == (b"k" * 16, b"n" * 12, b"")
    assert message_key.key.readonly
    assert message_key.nonce.readonly


def test_keys_nonces_and_material_of_another_size_are_refused():
    for key, nonce in ((15, 12), (28, 12), (44, 12), (0, 12), (16, 11), (32, 24), (32, 0)):
        with pytest.raises(FormatError, match=f"got {key} and {nonce}"):
            cobblestone.MessageKey.raw(bytes(key), bytes(nonce))
    for size in (0, 12, 27, 29, 43, 45, 76):
        with pytest.raises(FormatError, match=f"got {size}"):
            cobblestone.MessageKey(bytearray(size))


def test_wiping_a_message_key_overwrites_it_in_place_and_hands_out_no_zeros():
    message_key = derivation.derive(SECRET, bytes(SALT_SIZE), b"")
    material, key, nonce = message_key.material, message_key.key, message_key.nonce
    assert any(material)
    message_key.wipe()
    message_key.wipe()
    assert bytes(material) == bytes(44)
    assert bytes(key) + bytes(nonce) == bytes(44)
    for name in ("material", "key", "nonce"):
        with pytest.raises(ClosedError, match="wiped"):
            getattr(message_key, name)


def test_a_message_key_that_goes_away_wipes_itself():
    material = derivation.derive(SECRET, bytes(SALT_SIZE), b"").material
    assert bytes(material) == bytes(44)


def test_a_message_key_whose_header_was_refused_is_wiped(monkeypatch):
    wiped, original = [], cobblestone.MessageKey.wipe
    monkeypatch.setattr(cobblestone.MessageKey, "wipe", lambda key: wiped.append(bytes(key._material)) or original(key))
    with pytest.raises(AuthenticationError):
        derivation.open_header(bytes(HEADER_SIZE), SECRET, b"")
    assert any(wiped[0])


def test_a_repr_of_a_message_key_shows_no_secret():
    assert repr(cobblestone.MessageKey.raw(b"k" * 32, b"n" * 12)) == "<MessageKey 256-bit>"
    assert repr(cobblestone.MessageKey.raw(b"k" * 16, b"n" * 12)) == "<MessageKey 128-bit>"


@each("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_message_key_stays_in_its_process(duplicate):
    with pytest.raises(TypeError, match="pickled"):
        duplicate(cobblestone.MessageKey.raw(bytes(16), bytes(12)))


# Sizes


@given(PLAIN_SIZES)
def test_sizes_are_inverse_and_the_last_chunk_is_shorter_than_the_others(size):
    assert plain_size(message_size(size)) == size
    assert raw_plain_size(ciphertext_size(size)) == size
    assert message_size(size) == HEADER_SIZE + ciphertext_size(size)
    last = message_size(size) - chunk_offset(chunk_count(size) - 1)
    assert TAG_SIZE <= last < SEALED_CHUNK_SIZE


@given(st.integers(0, 4 * SEALED_CHUNK_SIZE) | st.integers(0, 2**60))
def test_a_size_is_either_that_of_one_plaintext_or_refused(size):
    try:
        inside = plain_size(size)
    except FormatError:
        chunks = size - HEADER_SIZE
        assert chunks < TAG_SIZE or chunks % SEALED_CHUNK_SIZE < TAG_SIZE or chunks // SEALED_CHUNK_SIZE >= MAX_CHUNKS
    else:
        assert message_size(inside) == size


@each("size", EDGES)
def test_edges_of_chunks_are_counted_right(size):
    full, last = divmod(size, CHUNK_SIZE)
    assert chunk_count(size) == full + 1
    assert ciphertext_size(size) == full * SEALED_CHUNK_SIZE + last + TAG_SIZE


CUT = [HEADER_SIZE + chunks * SEALED_CHUNK_SIZE + more for chunks in (1, 5) for more in (0, 1, 15)]


@each("size", [-1, 0, 55, 56, 71, *CUT])
def test_no_message_has_an_impossible_size(size):
    with pytest.raises(FormatError, match="cut short"):
        plain_size(size)
    with pytest.raises(FormatError, match="cut short"):
        raw_plain_size(size - HEADER_SIZE)


def test_the_shortest_and_longest_last_chunks_are_possible():
    for chunks in (TAG_SIZE, SEALED_CHUNK_SIZE - 1, SEALED_CHUNK_SIZE + TAG_SIZE):
        assert message_size(plain_size(HEADER_SIZE + chunks)) == HEADER_SIZE + chunks


def test_a_message_ends_where_its_chunk_numbers_do():
    assert chunk_count(MAX_PLAIN_SIZE) == MAX_CHUNKS
    assert plain_size(message_size(MAX_PLAIN_SIZE)) == MAX_PLAIN_SIZE
    with pytest.raises(FormatError, match=str(MAX_PLAIN_SIZE + 1)):
        chunk_count(MAX_PLAIN_SIZE + 1)
    with pytest.raises(FormatError):
        plain_size(message_size(MAX_PLAIN_SIZE) + TAG_SIZE + 1)


@each("measure", [chunk_count, message_size, ciphertext_size])
def test_a_negative_size_is_refused(measure):
    with pytest.raises(FormatError, match="-1"):
        measure(-1)


# Nonces


@given(st.binary(min_size=12, max_size=12), st.integers(0, MAX_CHUNKS - 1))
def test_a_chunk_number_changes_the_last_38_bits_alone(base, chunk):
    nonce = cobblestone.chunk_nonce(base, chunk)
    assert int.from_bytes(nonce, "big") ^ int.from_bytes(base, "big") == chunk
    assert nonce[:7] == base[:7]
    assert nonce[7] >> 6 == base[7] >> 6


def test_nonces_count_in_big_endian_from_the_base_nonce_itself():
    assert cobblestone.chunk_nonce(b"base nonce..", 0) == b"base nonce.."
    assert cobblestone.chunk_nonce(bytes(12), 0x0102) == bytes(10) + b"\1\2"
    assert cobblestone.chunk_nonce(b"\xff" * 12, MAX_CHUNKS - 1) == b"\xff" * 7 + b"\xc0\0\0\0\0"


def test_a_chunk_number_past_38_bits_or_a_base_nonce_of_another_length_has_no_nonce():
    for size, chunk, told in ((12, -1, "-1"), (12, MAX_CHUNKS, str(MAX_CHUNKS)), *((n, 0, n) for n in (0, 11, 13, 16))):
        with pytest.raises(FormatError, match=f"got {told}" if size != 12 else told):
            cobblestone.chunk_nonce(bytes(size), chunk)
