"""The kernels' work done by pyca, for a device that is made of host memory."""

import hashlib
import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.gpu.widened import FORMATS, places, scales_of, widened
from fastrack._crypto.cobblestone import chunk_nonce
from fastrack.format import CHUNK_SIZE, MAX_CHUNKS, SEALED_CHUNK_SIZE, TAG_SIZE

STATE, KEY = 8704, 48
SCALARS = {"prepare": 5, "open": 6, "seal": 6, "gather": 11, "widen": 6}  # arguments of a kernel before its table
TABLES = {"open": 500, "gather": 500, "widen": 504}  # words of a table
NUMBER_BITS = 38
NUMBERS = 2**NUMBER_BITS - 1
_NONCE = 240  # where in a state the base nonce starts


def run_kernel(space, violations, kernel, arguments):
    name, _, bits = kernel.partition("_")
    places_of = {"prepare": [0, 1], "open": [0, 2, 5], "seal": [0, 2], "gather": [0, 2, 5, 6, 7, 8, 10]}
    aligned = places_of.get(name, places_of["open"])
    if any(arguments[place] % (8 if place >= 3 else 16) for place in aligned):
        violations.append(f"{kernel} takes aligned addresses, not {[hex(arguments[place]) for place in aligned]}")
    count = SCALARS[name]
    if len(arguments) != count + TABLES.get(name, 0):
        violations.append(f"{kernel} takes {count} arguments and maybe a table, not {len(arguments)}")
    if name == "prepare":
        _prepare(space, *arguments)
    elif name == "seal":
        _seal(space, int(bits) // 8, *arguments)
    else:
        run = {"open": _open, "gather": _gather, "widen": _widen}[name]
        width = 12 if name == "widen" else 5
        run(space, int(bits) // 8, *arguments[:count], table_rows(arguments[count:], width))


def table_rows(words, width=5):
    """Return the rows of a table: target, name, size, limit, start and place, and what is to be widened how."""
    rows = (tuple(word % 2**64 for word in words[place : place + width]) for place in range(0, len(words), width))
    return [(*row[:4], row[4] & 0xFFFFFFFF, row[4] >> 32, *row[5:]) for row in rows]


def _expanded(key, nonce):
    """Return a stand-in for the state of a key: the key, the nonce, and bytes that follow from both."""
    state = np.frombuffer(bytearray(hashlib.shake_128(key + nonce).digest(STATE)), np.uint8)
    state[: len(key)] = np.frombuffer(key, np.uint8)
    state[_NONCE : _NONCE + len(nonce)] = np.frombuffer(nonce, np.uint8)
    return state


def _prepare(space, keys, states, mask, first, count):
    for number in range(first, first + count):
        row = space.at(keys + KEY * number, KEY)
        kind = int(row[44:].view(np.uint32)[0])
        size = 16 if kind & 0xFFFF == 128 else 32
        state = _expanded(row[:size].tobytes(), row[size : size + 12].tobytes())
        space.at(states + STATE * (number & mask), STATE)[:] = state


def _segments(table, segments, count):
    """Return, of each chunk of a launch, its segment and its number in it."""
    rows = table[:segments]
    assert rows[0][4] == 0, "a table does not begin with the first chunk"
    ends = [row[4] for row in rows[1:]] + [count]
    return [(row, index) for row, end in zip(rows, ends, strict=True) for index in range(end - row[4])]


def _key(space, size, state):
    """Read the key and the base nonce out of a state. One that is not whole gives a key that fits nothing."""
    found = space.at(state, STATE)
    key, nonce = found[:size].tobytes(), found[_NONCE : _NONCE + 12].tobytes()  # a schedule starts with its key
    return AESGCM(key if np.array_equal(found, _expanded(key, nonce)) else os.urandom(size)), nonce


def _keys(space, key_size, states, mask):
    known = {}

    def key_of(name):
        place = states + STATE * (name >> NUMBER_BITS & mask)
        if place not in known:
            known[place] = _key(space, key_size, place)
        return known[place]

    return key_of


def _open(space, key_size, states, mask, sealed, count, segments, verdict, table):
    key_of = _keys(space, key_size, states, mask)
    placed = _segments(table, segments, count)
    assert sum(row[3] for row in table[:segments]) == count, "segments have other chunks than their launch"
    for (target, name, size, _, _, place, *scaling), index in placed:
        length = min(CHUNK_SIZE, size - CHUNK_SIZE * index)
        key, nonce = key_of(name)
        chunk = sealed + 16 * place + SEALED_CHUNK_SIZE * index
        number = (name & NUMBERS) + index
        plain = _open_chunk(space, key, nonce, number, chunk, length, verdict, name + index)
        if scaling:
            result = space.at(target + 2 * CHUNK_SIZE * index, 2 * length)
            result[:] = 0 if plain is None else _widened(space, plain, number, *scaling)
        else:
            space.at(target + CHUNK_SIZE * index, length)[:] = 0 if plain is None else plain


_widen = _open


def _widened(space, plain, number, scales, *words):
    """Widen the values of a chunk, by divisions."""
    kind, scales_a_row, *divisors = np.array(words, np.uint64).view(np.uint32).tolist()
    columns, rows_a_scale, columns_a_scale = divisors[0:9:3]
    for value, times, shift in (divisors[start : start + 3] for start in (0, 3, 6)):
        for each in (0, 1, value - 1, value, 2**30 - 1, 2**31 - 1):
            assert each * times >> shift == each // value, "a divisor does not divide"
    assert scales_a_row == -(-columns // columns_a_scale)
    indices = places(plain.size, columns, rows_a_scale, columns_a_scale, CHUNK_SIZE * number)
    size = 2 if kind & 16 else 4
    if not plain.size:
        return plain
    memory = space.at(scales, size * (int(indices.max()) + 1)).tobytes()
    opened = scales_of(memory, "BF16" if kind & 16 else "F32")
    return np.frombuffer(widened(plain.tobytes(), FORMATS[kind & 15], opened, indices), np.uint8)


def _gather(
    space, key_size, states, mask, sealed, count, segments, verdict, chunks, starts, table, pieces, plan_verdict, rows
):
    if space.at(plan_verdict, 8).view(np.uint64)[0] != 2**64 - 1:
        for target, _, _, limit, _, _ in rows[:segments]:
            space.at(target, limit)[:] = 0
        return
    key_of = _keys(space, key_size, states, mask)
    numbers = space.at(chunks, 8 * count).view(np.uint64).tolist()
    bounds = space.at(starts, 8 * (count + 1)).view(np.uint64).tolist()
    ranges = space.at(table, 24 * pieces).view(np.uint64).reshape(-1, 3).tolist()
    placed = _segments(rows, segments, count)
    for index, (number, ((target, name, total, limit, _, start), turn)) in enumerate(zip(numbers, placed, strict=True)):
        last = total // CHUNK_SIZE
        length = min(CHUNK_SIZE, total - CHUNK_SIZE * number) if number <= last else 0
        known = name + min(number, last)
        key, nonce = key_of(name)
        chunk = sealed + 16 * start + SEALED_CHUNK_SIZE * turn
        plain = _open_chunk(space, key, nonce, number, chunk, length, verdict, known)
        plain = np.zeros(length, np.uint8) if plain is None else plain
        begin, end = bounds[index : index + 2]
        fits = begin <= end <= pieces
        for offset, place, extent in ranges[begin:end] if fits else ():
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


def _open_chunk(space, key, nonce, number, place, length, verdict, known):
    """Return the plaintext of a chunk, or None."""
    assert 0 <= length <= CHUNK_SIZE, f"chunk {number} is none of this message"
    number = min(number, MAX_CHUNKS - 1)  # no message has more
    try:
        plain = key.decrypt(chunk_nonce(nonce, number), space.at(place, length + TAG_SIZE).tobytes(), None)
    except InvalidTag:
        return _report(space, verdict, known)
    return np.frombuffer(plain, np.uint8)


def _report(space, verdict, number):
    word = space.at(verdict, 8).view(np.uint64)
    word[0] = min(int(word[0]), number)
