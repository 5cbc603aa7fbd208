"""Message keys expanded by the CUDA kernel `prepare`, many in one launch, against the host's expansion of each."""

import numpy as np
from helpers import reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.kernel_host import SOURCE, State, constants, key_row, read_only
from helpers.reference import CHUNK_SIZE, noise

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
def test_each_key_gets_the_state_that_the_host_makes(host, blocks):
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
    assert (states[POWERS + 16 * 514 :] == 0xA5).all()


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
    host._launch("prepare", read_only(altered), states.data, 0, 0, 1, grid=1, seed=None)
    opened = host.open_nest(states.data, 256, [(0, 0, sealed)])
    # A size that is none means 256 bits.
    assert opened == ((0, [bytes(700)]) if byte < 44 else (None, [noise(700).tobytes()]))


def test_a_key_of_another_message_opens_nothing(host):
    (first, nonce), (second, other) = KEYS[1], KEYS[2]
    states = host.prepare_all([(second, other), (first, nonce)])
    sealed = reference.seal(first, nonce, noise(100).tobytes())
    assert host.open_nest(states, 256, [(0, 0, sealed), (1, 0, sealed)]) == (
        name_of(0, 0),
        [bytes(100), noise(100).tobytes()],
    )


def test_no_secret_stays_in_shared_memory(host, key, nonce):
    states = host.prepare_all([(key, nonce)])
    sizes = constants(SOURCE)
    assert not any(host.remains()[65536 : sizes["SHARED_BYTES"]])
    state = State(np.ascontiguousarray(states), 8 * len(key))
    sealed = reference.seal(key, nonce, noise(50).tobytes(), 3)
    assert host.open_run(state, sealed, 3) == (None, noise(50).tobytes())
