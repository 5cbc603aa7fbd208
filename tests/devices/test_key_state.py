"""The expanded key that the CUDA kernels read."""

import hashlib

import numpy as np
import pytest
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.reference import X, hash_key, round_keys, times

from fastrack._crypto import native
from fastrack._crypto.cobblestone import CHUNK_SIZE, MessageKey
from fastrack._crypto.forms import narrow_form
from fastrack._devices.cuda.key_state import STATE_SIZE, write_state
from fastrack._devices.cuda.nvrtc import find_kernels
from fastrack.errors import ClosedError

NONCE = bytes(range(200, 212))
POWERS, LENGTH = 272, 256
# SHA-256 of states, key and nonce in front. A kernel on the tests' shim made them; it did what this module does now.
KNOWN = [
    (bytes(16), bytes(12), "3bff9cb99ddf3aeaff8425f4fe01ca3303a3bd7a73eac9001cb7bdd45e0191ad"),
    (bytes(range(16)), NONCE, "5bfb61b7bccbbfee6861a0cc2252ddef2e6cafa2ace462ff20161e189ffe46ac"),
    (b"\xff" * 16, b"\xff" * 12, "dd010854668972c7b51226f013c4f33b19df906578319e2e3f61608c8fa3d6d9"),
    (bytes(32), bytes(12), "a813d774256f330132e081e087b8c5d945c5d53ba7f7c1c9d49a2f74957797fe"),
    (bytes(range(32)), NONCE, "a5faf0300761489c1a6136c1f4f00f844754b230f6607cabe8bc92769cf123cf"),
    (b"\xff" * 32, b"\xff" * 12, "ea04ded8358d965fd513a4cec7156f06c4df4dfcdd478f008cd80512bdbe4f0d"),
]


pytestmark = pytest.mark.skipif(narrow_form() is None, reason="this CPU lacks AES-NI or PCLMULQDQ")


@pytest.fixture(scope="module")
def write():
    """The native function, from a key and a nonce to a state."""
    writer = native.functions(narrow_form()).write_state

    def written(key, nonce, before=0x55, offset=0):
        state = Fenced(STATE_SIZE, offset)
        state.data[:] = before
        writer(np.frombuffer(bytearray(key + nonce), np.uint8), len(key + nonce), state.data)
        assert state.stands
        return state.data.tobytes()

    return written


def fields(state, start, count):
    return [int.from_bytes(state[place : place + 16], "little") for place in range(start, start + 16 * count, 16)]


@each(("key", "nonce", "digest"), KNOWN)
def test_a_state_is_the_one_that_the_kernel_made(write, key, nonce, digest):
    assert hashlib.sha256(write(key, nonce)).hexdigest() == digest


@each("seed", range(20))
@each("size", [16, 32])
def test_a_state_has_the_schedule_the_nonce_and_the_powers(write, size, seed):
    random = np.random.default_rng((size, seed))
    key, nonce = random.bytes(size), random.bytes(12)
    state = write(key, nonce)
    assert state[:240] == b"".join(round_keys(key)).ljust(240, b"\0")
    assert state[240:256] == nonce + bytes(4)

    h = int.from_bytes(hash_key(key))
    assert fields(state, LENGTH, 1) == [times(8 * CHUNK_SIZE, h)]
    assert state[POWERS : POWERS + 16] == bytes(16)
    power = 1 << 127
    for kept in fields(state, POWERS + 16, 513):
        power = times(power, h)
        assert times(kept, X) == power  # kept divided by x
    assert state[POWERS + 16 * 514 :] == bytes(STATE_SIZE - POWERS - 16 * 514)


@pytest.mark.parametrize("size", [16, 32])
def test_what_the_memory_held_and_where_it_lies_changes_nothing(write, size):
    key = bytes(range(size))
    states = {write(key, NONCE, before, offset) for before in (0x00, 0xFF) for offset in (0, 8, 16, 40)}
    assert len(states) == 1


@pytest.mark.parametrize("size", [16, 32])
def test_a_message_key_is_written(write, size):
    key, state = bytes(range(size)), np.empty(STATE_SIZE, np.uint8)
    write_state(MessageKey.raw(key, NONCE), state)
    assert state.tobytes() == write(key, NONCE)


@each(
    "target",
    [
        np.zeros(STATE_SIZE - 1, np.uint8),
        np.zeros(STATE_SIZE + 1, np.uint8),
        np.zeros(2 * STATE_SIZE, np.uint8)[::2],
        np.zeros((2, STATE_SIZE // 2), np.uint8),
        np.zeros(STATE_SIZE, np.int8),
        np.frombuffer(bytes(STATE_SIZE), np.uint8),
    ],
)
def test_another_target_is_refused(target):
    before = target.copy()
    with pytest.raises(ValueError, match="writable"):
        write_state(MessageKey.raw(bytes(16), NONCE), target)
    assert np.array_equal(target, before)


def test_a_wiped_key_is_refused():
    key = MessageKey.raw(bytes(16), NONCE)
    key.wipe()
    state = np.zeros(STATE_SIZE, np.uint8)
    with pytest.raises(ClosedError):
        write_state(key, state)
    assert not state.any()


def test_the_kernels_know_the_same_size():
    assert find_kernels().constants["STATE_BYTES"] == STATE_SIZE
