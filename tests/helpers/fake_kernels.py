"""What the kernels do, by pyca: for a device that is made of host memory."""

import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto.cobblestone import CHUNK_SIZE, MAX_CHUNKS, SEALED_CHUNK_SIZE, TAG_SIZE, MessageKey, chunk_nonce

STATE = 8704
_NONCE = 240  # where in a state the base nonce starts


def run_kernel(space, violations, kernel, arguments):
    name, bits = kernel.split("_")
    aligned = {"open": [0, 1, 6], "seal": [0, 2], "gather": [0, 1, 3, 4, 5, 10, 11]}[name]
    if any(arguments[place] % (8 if place >= 3 else 16) for place in aligned):
        violations.append(f"{kernel} takes aligned addresses, not {[hex(argument) for argument in arguments]}")
    {"open": _open, "seal": _seal, "gather": _gather}[name](space, int(bits) // 8, *arguments)


def _key(space, size, state):
    """Read the key and the base nonce out of a state. One that is not whole gives a key that fits nothing."""
    from fastrack._devices.cuda.key_state import write_state  # imports numba, a third of a second: when first used

    found = space.at(state, STATE)
    key, nonce = found[:size].tobytes(), found[_NONCE : _NONCE + 12].tobytes()  # a schedule starts with its key
    whole = np.empty(STATE, np.uint8)
    write_state(MessageKey.raw(key, nonce), whole)
    return AESGCM(key if np.array_equal(found, whole) else os.urandom(size)), nonce


def _open(space, key_size, state, sealed, target, first, count, size, verdict):
    key, nonce = _key(space, key_size, state)
    for index in range(count):
        length = min(CHUNK_SIZE, size - CHUNK_SIZE * index)
        plain = _open_chunk(space, key, nonce, first + index, sealed + SEALED_CHUNK_SIZE * index, length, verdict)
        space.at(target + CHUNK_SIZE * index, length)[:] = plain


def _gather(
    space, key_size, state, sealed, target, chunks, starts, table, count, pieces, total, limit, verdict, plan_verdict
):
    if space.at(plan_verdict, 8).view(np.uint64)[0] != 2**64 - 1:
        space.at(target, limit)[:] = 0
        return
    key, nonce = _key(space, key_size, state)
    numbers = space.at(chunks, 8 * count).view(np.uint64).tolist()
    bounds = space.at(starts, 8 * (count + 1)).view(np.uint64).tolist()
    rows = space.at(table, 24 * pieces).view(np.uint64).reshape(-1, 3).tolist()
    last = total // CHUNK_SIZE
    for index, number in enumerate(numbers):
        length = min(CHUNK_SIZE, total - CHUNK_SIZE * number) if number <= last else 0
        known = min(number, last)
        plain = _open_chunk(space, key, nonce, number, sealed + SEALED_CHUNK_SIZE * index, length, verdict, known)
        begin, end = bounds[index : index + 2]
        fits = begin <= end <= pieces
        for offset, place, extent in rows[begin:end] if fits else ():
            if offset + extent <= length and place + extent <= limit:
                space.at(target + place, extent)[:] = plain[offset : offset + extent]
            else:
                fits = False
        if not fits:
            _report(space, verdict, known)


def _seal(space, key_size, state, source, sealed, first, count, size):
    key, nonce = _key(space, key_size, state)
    for index in range(count):
        length = min(CHUNK_SIZE, size - CHUNK_SIZE * index)
        plain = space.at(source + CHUNK_SIZE * index, length).tobytes()
        whole = key.encrypt(chunk_nonce(nonce, first + index), plain, None)
        space.at(sealed + SEALED_CHUNK_SIZE * index, length + TAG_SIZE)[:] = np.frombuffer(whole, np.uint8)


def _open_chunk(space, key, nonce, number, place, length, verdict, known=None):
    assert 0 <= length <= CHUNK_SIZE, f"chunk {number} is none of this message"
    number = min(number, MAX_CHUNKS - 1)  # no message has more
    try:
        plain = key.decrypt(chunk_nonce(nonce, number), space.at(place, length + TAG_SIZE).tobytes(), None)
    except InvalidTag:
        _report(space, verdict, number if known is None else known)
        plain = bytes(length)
    return np.frombuffer(plain, np.uint8)


def _report(space, verdict, number):
    word = space.at(verdict, 8).view(np.uint64)
    word[0] = min(int(word[0]), number)
