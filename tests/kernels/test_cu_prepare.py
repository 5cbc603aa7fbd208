"""Message keys expanded by the CUDA kernel `prepare`, many in one launch, against an expansion by the standards."""

import hashlib

import numpy as np
from helpers import reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.kernel_host import CALL, SOURCE, State, constants, key_row, read_only
from helpers.reference import CHUNK_SIZE, X, hash_key, kernel_state, noise, round_keys, times

from fastrack._devices.cuda.table import name_of

STATE = 8704
NONCE_END, LENGTH, POWERS = 252, 256, 272
KEYS = [(noise(size, seed).tobytes(), noise(12, seed).tobytes()) for seed, size in enumerate([16, 32, 32, 16, 32])]
KEYS += [(bytes(16), bytes(12)), (b"\xff" * 32, b"\xff" * 12)]


def parts(state, size, powers=513):
    """Return the parts of a state that a launch reads: schedule, nonce, block of lengths, and powers of H."""
    schedule = state[: 16 * (size // 4 + 7)]
    return [part.tobytes() for part in (schedule, state[240:NONCE_END], state[LENGTH:POWERS], used(state, powers))]


def used(state, powers):
    return state[POWERS + 16 : POWERS + 16 * (powers + 1)]


@each("blocks", [1, 2, 9])
def test_each_key_gets_the_state_of_the_standards(host, blocks):
    states = host.prepare_all(KEYS, blocks=blocks).reshape(-1, STATE)
    for (key, nonce), state in zip(KEYS, states, strict=False):
        assert parts(state, len(key)) == parts(host.prepare(key, nonce).data, len(key)), key


def test_keys_share_slots_in_turn_and_others_are_left_alone(host):
    states = host.prepare_all(KEYS, first=3, count=3, slots=4).reshape(-1, STATE)
    for slot, number in ((3, 3), (0, 4), (1, 5)):
        key, nonce = KEYS[number]
        assert parts(states[slot], len(key)) == parts(host.prepare(key, nonce).data, len(key))
    assert (states[2] == 0xA5).all()


@each("length", [0, 1, 16, 17, 100, 1000, 8175, 8176, 8177, 8192])
def test_a_message_needs_as_many_powers_as_its_chunks_have_blocks_and_one(host, key, nonce, length):
    plain = noise(length).tobytes()
    powers = -(-length // 16) + 1
    states = host.prepare_all([(key, nonce)], powers=powers)
    assert (states[POWERS + 16 * (powers + 1) : POWERS + 16 * 514] == 0xA5).all()
    sealed = reference.seal(key, nonce, plain)
    assert host.open_nest(states, 8 * len(key), [(0, 0, sealed)]) == (None, [plain])
    altered = bytes([*sealed[:-1], sealed[-1] ^ 1])
    assert host.open_nest(states, 8 * len(key), [(0, 0, altered)]) == (0, [bytes(length)])


@each("powers", [514, 0x7FFF, 0xFFFF])
def test_more_powers_than_there_are_do_not_leave_the_state(host, key, nonce, powers):
    states = host.prepare_all([(key, nonce)], powers=powers)
    assert parts(states, len(key)) == parts(host.prepare(key, nonce).data, len(key))
    assert (states[POWERS + 16 * 514 + 4 :] == 0xA5).all()


@each("powers", [0, 1, 5])
def test_with_too_few_powers_nothing_opens(host, key, nonce, powers):
    sealed = reference.seal(key, nonce, noise(CHUNK_SIZE + 5).tobytes())
    states = host.prepare_all([(key, nonce)], powers=powers)
    assert host.open_nest(states, 8 * len(key), [(0, 0, sealed)])[0] == 0


@each("byte", [0, 15, 31, 32, 43, 44, 45])
def test_a_row_whose_key_or_nonce_was_altered_opens_nothing(host, nonce, byte):
    key = bytes(range(32))
    sealed = reference.seal(key, nonce, noise(700).tobytes())
    row = bytearray(key_row(key, nonce, 513))
    row[byte] ^= 0x80 if byte < 44 else 0x81  # of the kind, another size of the key
    altered = Fenced.holding(bytes(row), 16)
    states = Fenced(STATE, 16)
    host.launch("prepare", read_only(altered), states.data, 0, 0, 1, CALL, grid=1)
    opened = host.open_nest(states.data, 256, [(0, 0, sealed)])
    # A size that is none means 256 bits.
    assert opened == ((0, [bytes(700)]) if byte < 44 else (None, [noise(700).tobytes()]))


def test_a_key_of_another_message_opens_nothing(host):
    (first, nonce), (second, other) = KEYS[1], KEYS[2]
    states = host.prepare_all([(second, other), (first, nonce)])
    sealed = reference.seal(first, nonce, noise(100).tobytes())
    found = host.open_nest(states, 256, [(0, 0, sealed), (1, 0, sealed)])
    assert found == (name_of(0, 0), [bytes(100), noise(100).tobytes()])


def test_no_secret_stays_in_shared_memory(host, key, nonce):
    states = host.prepare_all([(key, nonce)])
    sizes = constants(SOURCE)
    assert not any(host.remains()[65536 : sizes["SHARED_BYTES"]])
    state = State(np.ascontiguousarray(states), 8 * len(key))
    sealed = reference.seal(key, nonce, noise(50).tobytes(), 3)
    assert host.open_run(state, sealed, 3) == (None, noise(50).tobytes())


NONCE = bytes(range(200, 212))
# SHA-256 of states, key and nonce in front. An earlier kernel made them on the tests' shim, and wrote what is not used.
KNOWN = [
    (bytes(16), bytes(12), "3bff9cb99ddf3aeaff8425f4fe01ca3303a3bd7a73eac9001cb7bdd45e0191ad"),
    (bytes(range(16)), NONCE, "5bfb61b7bccbbfee6861a0cc2252ddef2e6cafa2ace462ff20161e189ffe46ac"),
    (b"\xff" * 16, b"\xff" * 12, "dd010854668972c7b51226f013c4f33b19df906578319e2e3f61608c8fa3d6d9"),
    (bytes(32), bytes(12), "a813d774256f330132e081e087b8c5d945c5d53ba7f7c1c9d49a2f74957797fe"),
    (bytes(range(32)), NONCE, "a5faf0300761489c1a6136c1f4f00f844754b230f6607cabe8bc92769cf123cf"),
    (b"\xff" * 32, b"\xff" * 12, "ea04ded8358d965fd513a4cec7156f06c4df4dfcdd478f008cd80512bdbe4f0d"),
]


@each(("key", "nonce", "digest"), KNOWN)
def test_the_expected_state_is_the_one_that_a_kernel_made(key, nonce, digest):
    assert hashlib.sha256(kernel_state(key, nonce)).hexdigest() == digest


@each("seed", range(5))
@each("size", [16, 32])
def test_the_expected_state_has_the_schedule_the_nonce_and_the_powers(size, seed):
    random = np.random.default_rng((size, seed))
    key, nonce = random.bytes(size), random.bytes(12)
    state = kernel_state(key, nonce)
    assert state[:240] == b"".join(round_keys(key)).ljust(240, b"\0")
    assert state[240:LENGTH] == nonce + bytes(4)

    h = int.from_bytes(hash_key(key))
    assert fields(state, LENGTH, 2) == [times(8 * CHUNK_SIZE, h), 0]
    power = 1 << 127
    for kept in fields(state, POWERS + 16, 513):
        power = times(power, h)
        assert times(kept, X) == power  # kept divided by x
    assert not any(state[POWERS + 16 * 514 :])


def fields(state, start, count):
    return [int.from_bytes(state[place : place + 16], "little") for place in range(start, start + 16 * count, 16)]
