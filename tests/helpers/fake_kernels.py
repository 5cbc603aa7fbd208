"""The kernels' work done by pyca, for a device that is made of host memory."""

import functools
import hashlib
import os
import struct
from contextlib import suppress

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.gpu.widened import FORMATS, places, scales_of, widened
from fastrack._crypto.cobblestone import chunk_nonce
from fastrack.format import CHUNK_SIZE, MAX_CHUNKS, SEALED_CHUNK_SIZE, TAG_SIZE

STATE, KEY, ROW, ROWS = 8704, 48, 64, CHUNK_SIZE // 64
# Arguments of a kernel before its table or wrapped row, how those that are addresses are aligned, and the words that
# come last.
SCALARS = {"prepare": 6, "unwrap": 8, "open": 7, "seal": 10, "gather": 9, "widen": 7, "small": 9, "pick": 11}
SCALARS |= {"keep": 7, "restore": 7}
_OPENING, _OWN_KEYS = {0: 16, 2: 16, 5: 8}, {0: 16, 1: 16, 4: 16, 7: 8}
PLACES = {
    "prepare": {0: 16, 1: 16},
    "unwrap": {0: 16, 1: 16, 4: 16},
    "open": _OPENING,
    "widen": _OPENING,
    "gather": _OPENING | {7: 8},
    "small": _OWN_KEYS,
    "pick": _OWN_KEYS | {9: 8},
    "seal": {0: 16, 3: 16, 7: 8, 9: 8},
    "keep": {0: 16, 2: 16, 4: 8, 6: 8},
    "restore": {0: 16, 2: 16, 4: 8, 6: 4},
}
TABLES = {
    **dict.fromkeys(("open", "gather", "small", "pick"), 500),
    "widen": 504,
    "seal": 10,
    "keep": 477,
    "restore": 477,
}
NUMBER_BITS = 38
NUMBERS = 2**NUMBER_BITS - 1
GOOD, PLAN, LINK = 2**64 - 1, 1 << 63, 2**32 - 1
_NONCE = 240  # where in a state the base nonce starts, with the number of the call behind it
_MESSAGE = 272 + 514 * 16  # where that of the message is


def run_kernel(space, violations, kernel, arguments):
    name, _, bits = kernel.partition("_")
    if any(arguments[place] % alignment for place, alignment in PLACES[name].items()):
        violations.append(f"{kernel} takes aligned addresses, not {[hex(arguments[place]) for place in PLACES[name]]}")
    count, size = SCALARS[name], int(bits or 0) // 8
    if len(arguments) != count + TABLES.get(name, 0):
        violations.append(f"{kernel} takes {count} arguments and maybe a table, not {len(arguments)}")
    scalars, words = arguments[:count], arguments[count:]
    if name == "prepare":
        _prepare(space, *scalars)
    elif name == "unwrap":
        _unwrap(space, *scalars)
    elif name == "seal":
        _seal(space, size, *scalars, np.array(words, np.int64).tobytes())
    elif name in {"keep", "restore"}:
        work = _keep if name == "keep" else _restore
        work(space, size, *scalars, np.array(words, np.int64).tobytes())
    else:
        keys = 4 if name in {"small", "pick"} else 2
        sealed, chunks, segments, verdict, ticket, *plan = scalars[keys:]
        report = Report(space, verdict, ticket)
        key_of = _states(space, size, report.call, *scalars[:2]) if keys == 2 else _rows(space, size, *scalars[:4])
        table = table_rows(words, 12 if name == "widen" else 5)
        run = _gather if plan else _open
        run(space, key_of, report, sealed, chunks, segments, *plan, table)
        report.end()


class Report:
    """Report of a launch in the words of a verdict."""

    def __init__(self, space, verdict, ticket):
        self._words = space.at(verdict, 40).view(np.uint64)
        self._ticket, self._plan = ticket % PLAN, ticket % 2**64 >= PLAN
        self.call = LINK if self._plan else self._ticket >> 32

    def bad(self, name):
        place = int(self._plan)
        self._words[place] = min(int(self._words[place]), name)

    def has_plan(self):
        return int(self._words[4]) == self._ticket - 1 and int(self._words[1]) == GOOD

    def end(self):
        assert int(self._words[3]) == GOOD, "blocks of an earlier launch were counted"
        if self._plan:
            self._words[4] = self._ticket
        if self._ticket % 2**32 == 0 or int(self._words[2]) == self._ticket - 1:
            self._words[2] = self._ticket
        return int(self._words[2]), int(self._words[0])


def table_rows(words, width=5):
    """Return the rows of a table: target, name, size, limit, start and place, and what is to be widened how."""
    rows = (tuple(word % 2**64 for word in words[place : place + width]) for place in range(0, len(words), width))
    return [(*row[:4], row[4] & 0xFFFFFFFF, row[4] >> 32, *row[5:]) for row in rows]


def _expanded(key, nonce, call, message):
    """Return a stand-in for the state of a key: the key, the nonce, and bytes that follow from both."""
    state = np.frombuffer(bytearray(hashlib.shake_128(key + nonce).digest(STATE)), np.uint8)
    state[: len(key)] = np.frombuffer(key, np.uint8)
    state[_NONCE : _NONCE + len(nonce)] = np.frombuffer(nonce, np.uint8)
    state[_NONCE + 12 : _NONCE + 16].view(np.uint32)[0] = call
    state[_MESSAGE : _MESSAGE + 4].view(np.uint32)[0] = message
    return state


def _key_in(row):
    """Return the key and the base nonce in a row for `prepare`, or in one that was wrapped."""
    size = 16 if int(row[44:48].view(np.uint32)[0]) & 0xFFFF == 128 else 32
    return row[:size].tobytes(), row[size : size + 12].tobytes()


def _prepare(space, keys, states, mask, first, count, call):
    for number in range(first, first + count):
        state = _expanded(*_key_in(space.at(keys + KEY * number, KEY)), call, number)
        space.at(states + STATE * (number & mask), STATE)[:] = state


def _row(space, link, read, number, total, index):
    """Return the row that was wrapped, or None if its chunk was altered or there is no key of the link."""
    found = _key(space, 32, link, LINK, 0)
    if found is None:
        return None
    chunk = index // ROWS
    length = ROW * min(ROWS, total - ROWS * chunk) + TAG_SIZE
    try:
        rows = found[0].decrypt(chunk_nonce(found[1], number + chunk), read(chunk, length), None)
    except InvalidTag:
        return None
    return np.frombuffer(rows, np.uint8)[ROW * (index % ROWS) :][:ROW]


def _reader(space, wrapped):
    return lambda chunk, length: space.at(wrapped + SEALED_CHUNK_SIZE * chunk, length).tobytes()


def _unwrap(space, link, wrapped, number, rows, states, mask, count, call):
    first, total = rows >> 32, rows & 0xFFFFFFFF
    for index in range(first, first + count):
        row = _row(space, link, _reader(space, wrapped), number, total, index)
        if row is not None:
            message = int(row[48:52].view(np.uint32)[0])
            space.at(states + STATE * (message & mask), STATE)[:] = _expanded(*_key_in(row), call, message)


def _own_key(row, key_size, message):
    """Return the key of a message out of a row, or None unless the row is of that message and a key of that size."""
    if row is None or int(row[48:52].view(np.uint32)[0]) != message or len(_key_in(row)[0]) != key_size:
        return None
    key, nonce = _key_in(row)
    return AESGCM(key), nonce


def _rows(space, key_size, link, wrapped, number, rows):
    """Return the keys for segments that no memory of the device has."""

    def key_of(name, segment):
        row = _row(space, link, _reader(space, wrapped), number, rows & 0xFFFFFFFF, (rows >> 32) + segment)
        return _own_key(row, key_size, name >> NUMBER_BITS)

    return functools.cache(key_of)


def _states(space, key_size, call, states, mask):
    """Return the keys for segments from expanded states."""

    def key_of(name, _):
        message = name >> NUMBER_BITS
        return _key(space, key_size, states + STATE * (message & mask), call, message % 2**32)

    return functools.cache(key_of)


def _key(space, size, state, call, message):
    """Return the key and the base nonce in a state, or None if it is none of that call and message.

    One that is not whole gives a key that fits nothing.
    """
    found = space.at(state, STATE)
    key, nonce = found[:size].tobytes(), found[_NONCE : _NONCE + 12].tobytes()  # a schedule starts with its key
    marks = [int(found[place : place + 4].view(np.uint32)[0]) for place in (_NONCE + 12, _MESSAGE)]
    if marks != [call, message]:
        return None
    return AESGCM(key if np.array_equal(found, _expanded(key, nonce, call, message)) else os.urandom(size)), nonce


def _segments(table, segments, count):
    """Return, of each chunk of a launch, its segment, the number of that, and its own number in it."""
    rows = table[:segments]
    assert rows[0][4] == 0, "a table does not begin with the first chunk"
    ends = [row[4] for row in rows[1:]] + [count]
    return [
        (row, number, index)
        for number, (row, end) in enumerate(zip(rows, ends, strict=True))
        for index in range(end - row[4])
    ]


def _open(space, key_of, report, sealed, count, segments, table):
    placed = _segments(table, segments, count)
    assert sum(row[3] for row in table[:segments]) == count, "segments have other chunks than their launch"
    for (target, name, size, _, _, place, *scaling), segment, index in placed:
        length = min(CHUNK_SIZE, size - CHUNK_SIZE * index)
        chunk = sealed + 16 * place + SEALED_CHUNK_SIZE * index
        number = (name & NUMBERS) + index
        plain = _open_chunk(space, key_of(name, segment), number, chunk, length, report, name + index)
        if scaling:
            result = space.at(target + 2 * CHUNK_SIZE * index, 2 * length)
            result[:] = 0 if plain is None else _widened(space, plain, number, *scaling)
        else:
            space.at(target + CHUNK_SIZE * index, length)[:] = 0 if plain is None else plain


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


def _gather(space, key_of, report, sealed, count, segments, plan, pieces, rows):
    if not report.has_plan():
        for target, _, _, limit, _, _ in rows[:segments]:
            space.at(target, limit)[:] = 0
        report.bad(rows[0][1])
        return
    words = space.at(plan, 8 * (2 * count + 1 + 3 * pieces)).view(np.uint64)
    numbers, bounds = words[:count].tolist(), words[count : 2 * count + 1].tolist()
    ranges = words[2 * count + 1 :].reshape(-1, 3).tolist()
    placed = _segments(rows, segments, count)
    for index, (number, ((target, name, total, limit, _, start), segment, turn)) in enumerate(
        zip(numbers, placed, strict=True)
    ):
        last = total // CHUNK_SIZE
        length = min(CHUNK_SIZE, total - CHUNK_SIZE * number) if number <= last else 0
        known = name + min(number, last)
        chunk = sealed + 16 * start + SEALED_CHUNK_SIZE * turn
        plain = _open_chunk(space, key_of(name, segment), number, chunk, length, report, known)
        plain = np.zeros(length, np.uint8) if plain is None else plain
        begin, end = bounds[index : index + 2]
        fits = begin <= end <= pieces
        for offset, place, extent in ranges[begin:end] if fits else ():
            if offset + extent <= length and place + extent <= limit:
                space.at(target + place, extent)[:] = plain[offset : offset + extent]
            else:
                fits = False
        if not fits:
            report.bad(known)


def _seal(space, key_size, link, number, source, sealed, name, count, size, verdict, ticket, told, wrapped):
    report = Report(space, verdict, ticket)
    row = _row(space, link, lambda _, length: wrapped[:length], number, 1, 0)
    key = _own_key(row, key_size, name >> NUMBER_BITS)
    if key is None:
        report.bad(name)
    for index in range(count if key else 0):
        length = min(CHUNK_SIZE, size - CHUNK_SIZE * index)
        plain = space.at(source + CHUNK_SIZE * index, length).tobytes()
        whole = key[0].encrypt(chunk_nonce(key[1], (name & NUMBERS) + index), plain, None)
        space.at(sealed + SEALED_CHUNK_SIZE * index, length + TAG_SIZE)[:] = np.frombuffer(whole, np.uint8)
    space.at(told, 16).view(np.uint64)[:] = report.end()


def paged_chunks(table, count):
    """Yield each chunk of a table of paged memory: its message and number, its place among the sealed ones, and the
    addresses and sizes of the pieces that have it.
    """
    pieces, blocks, parts = (
        list(struct.iter_unpack(row, table[start:end]))
        for row, start, end in (("<QII", 0, 2048), ("<4I", 2048, 3648), ("<5I", 3648, 3808))
    )
    (number_of_blocks,) = struct.unpack("<I4x", table[3808:])
    total = 0
    for block, before, place, message_and_part in blocks[:number_of_blocks]:
        assert before == total, "blocks have other chunks than their launch"
        message, (first, number, chunk, chunks, size) = message_and_part >> 3, parts[message_and_part & 7]
        touched = pieces[first : first + number]
        ends = [16 * row[2] for row in touched[1:]] + [16 * size]
        for index in range(chunks):
            low, ranges = CHUNK_SIZE * (chunk + index), []
            high = min(low + CHUNK_SIZE, 16 * size)
            for (base, stride, begin), end in zip(touched, ends, strict=True):
                start, stop = max(low, 16 * begin), min(high, end)
                if start < stop:
                    ranges.append((base + 16 * (block * stride - begin) + start, stop - start))
            assert sum(each for _, each in ranges) == high - low, "a chunk is not in the pieces of its part"
            yield message, chunk + index, 16 * place + SEALED_CHUNK_SIZE * index, ranges
        total += chunks
    assert total == count, "blocks have other chunks than their launch"


def _keep(space, key_size, states, mask, sealed, count, verdict, ticket, told, table):
    report = Report(space, verdict, ticket)
    key_of = _states(space, key_size, report.call, states, mask)
    for message, number, place, ranges in paged_chunks(table, count):
        key = key_of(message << NUMBER_BITS, None)
        if key is None:
            report.bad(message << NUMBER_BITS | number)
            continue
        plain = b"".join(space.at(*each).tobytes() for each in ranges)
        whole = key[0].encrypt(chunk_nonce(key[1], number), plain, None)
        space.at(sealed + place, len(whole))[:] = np.frombuffer(whole, np.uint8)
    space.at(told, 16).view(np.uint64)[:] = report.end()


def _restore(space, key_size, states, mask, sealed, count, verdict, ticket, good, table):
    report = Report(space, verdict, ticket)
    key_of = _states(space, key_size, report.call, states, mask)
    for message, number, place, ranges in paged_chunks(table, count):
        name, length = message << NUMBER_BITS | number, sum(size for _, size in ranges)
        plain = _open_chunk(space, key_of(name, None), number, sealed + place, length, report, name)
        if plain is None:
            space.at(good + message // 32 * 4, 4).view(np.uint32)[0] &= ~(1 << message % 32) % 2**32
        start = 0
        for address, size in ranges:
            space.at(address, size)[:] = 0 if plain is None else plain[start : start + size]
            start += size
    report.end()


def _open_chunk(space, key, number, place, length, report, known):
    """Return the plaintext of a chunk, or None."""
    assert 0 <= length <= CHUNK_SIZE, f"chunk {number} is none of this message"
    number = min(number, MAX_CHUNKS - 1)  # no message has more
    sealed = space.at(place, length + TAG_SIZE).tobytes()
    with suppress(InvalidTag):
        if key is not None:
            return np.frombuffer(key[0].decrypt(chunk_nonce(key[1], number), sealed, None), np.uint8)
    report.bad(known)
    return None
