"""Launches that unwrap the keys of their messages, and verdicts that tell what was lost."""

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.kernel_host import (
    CALL,
    GOOD,
    LINK,
    LINK_NUMBER,
    PLAN,
    SOURCE,
    TICKET,
    constants,
    pack_nest,
    read_only,
    table_at,
    table_of,
    verdict_of,
    verdict_words,
    wrap,
    wrapped_row,
)
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import as_pieces, flip

from fastrack._devices.cuda.table import TableSegment, name_of

STATE, ROW, ROWS = 8704, 64, 256
MARKS = 63, 64 + 4 + 4 * 514  # the words of a state that name its call and its message
SIZES = [100, 0, CHUNK_SIZE, 1, 2 * CHUNK_SIZE + 777, CHUNK_SIZE - 1, 16, 8192]
PLAIN = [noise(size, seed).tobytes() for seed, size in enumerate(SIZES)]
FIRST = name_of(3, 0)
NUMBERS = [3, 4, 7, 8, 9, 130, 202, 203]  # of the messages in their call


class Case:
    """Messages whose keys are wrapped, behind so many other rows of a slab, and the kernels."""

    def __init__(self, host, key, before=0):
        self.host, self.bits, self.before = host, 8 * len(key), before
        self.pairs = [(noise(len(key), seed + 9).tobytes(), noise(12, seed + 50).tobytes()) for seed in range(8)]
        self.sealed = [reference.seal(*pair, plain) for pair, plain in zip(self.pairs, PLAIN, strict=True)]
        self.rows = [bytes(ROW)] * before
        self.rows += [wrapped_row(*pair, number) for pair, number in zip(self.pairs, NUMBERS, strict=True)]
        self.wrapped = wrap(self.rows)

    def keys(self, first=None):
        """Return the arguments that describe the rows: the link, the rows, their first chunk, their numbers."""
        first = self.before if first is None else first
        return [self.host.link, self.wrapped, LINK_NUMBER, len(self.rows) + (first << 32)]

    def alter(self, bit):
        self.wrapped = read_only(Fenced.holding(flip(self.wrapped.tobytes(), bit % (8 * self.wrapped.size)), 16))

    def expand(self, *, blocks=3):
        """Return states of the keys, by a launch of its own."""
        states = Fenced(16 * STATE, 16)
        states.data[:] = 0
        self.host.launch("unwrap", *self.keys(), states.data, 15, len(SIZES), CALL, grid=blocks)
        assert states.stands
        return states.data

    def open(self, sealed=None, *, blocks=1, states=None, words=None, ticket=TICKET, first=0):
        sealed = self.sealed if sealed is None else sealed
        places, packed = pack_nest(sealed)
        targets = [Fenced(size, index % 16) for index, size in enumerate(SIZES)]
        rows, start = [], 0
        for number, target, place, chunks in zip(NUMBERS, targets, places, sealed, strict=True):
            count = -(-len(chunks) // SEALED_CHUNK_SIZE)
            name = name_of(number, first)
            row = TableSegment(target.data.ctypes.data, name, target.data.size, count, start, place // 16)
            rows.append(row)
            start += count
        words = words or verdict_words()
        source, table = read_only(Fenced.holding(packed, 16)), table_of(*rows)
        kernel, keys = ("small", self.keys()) if states is None else ("open", [states, 15])
        arguments = (*keys, source, start, len(rows), words.data, ticket, table)
        self.host.launch(f"{kernel}_{self.bits}", *arguments, grid=blocks)
        assert all(each.stands for each in targets)
        self.words = words
        return verdict_of(words, ticket), [each.data.tobytes() for each in targets]

    def seal(self, plain, *, blocks=2, words=None, ticket=TICKET, name=FIRST, link=None):
        """Seal a message under its row, the first: what the device leaves, and what it tells."""
        target, told = Fenced(len(plain) + 16 * (len(plain) // CHUNK_SIZE + 1), 16), Fenced.holding(bytes(16), 16)
        words = words or verdict_words()
        arguments = (LINK_NUMBER, read_only(Fenced.holding(plain, 3)), target.data, name, len(plain) // CHUNK_SIZE + 1)
        arguments += (len(plain), words.data, ticket, told.data, self.wrapped)
        self.host.launch(f"seal_{self.bits}", self.host.link if link is None else link, *arguments, grid=blocks)
        assert target.stands
        assert told.stands
        return target.data.tobytes(), told.data.view(np.uint64).tolist()


@pytest.fixture
def case(host, key):
    return lambda before=0: Case(host, key, before)


@each("before", [0, 3, ROWS - 3, 2 * ROWS])
@each("bulk", [False, True])
def test_messages_open_under_wrapped_keys(case, before, bulk):
    found = case(before)
    states = found.expand() if bulk else None
    for blocks in (1, 4, 20):
        assert found.open(blocks=blocks, states=states) == (None, PLAIN)


def test_a_block_opens_messages_one_after_another(case):
    found = case()
    assert found.open(blocks=1) == (None, PLAIN)


@each("bulk", [False, True])
def test_a_bad_chunk_is_zeros(case, bulk):
    found = case()
    altered, plain = [*found.sealed], [*PLAIN]
    altered[4] = flip(altered[4], 8 * (SEALED_CHUNK_SIZE + 3))
    plain[4] = plain[4][:CHUNK_SIZE] + bytes(CHUNK_SIZE) + plain[4][2 * CHUNK_SIZE :]
    opened = found.open(altered, blocks=3, states=found.expand() if bulk else None)
    assert opened == (name_of(NUMBERS[4], 1), plain)


def forged(found):
    """The messages sealed under a key of zeros, which a state of zeros has, or a row that was cleared."""
    zeros = bytes(found.bits // 8), bytes(12)
    return [reference.seal(*zeros, plain) for plain in PLAIN]


@each("bulk", [False, True])
@each("place", [0, 44, 48, 70, -1])
def test_rows_that_were_altered_open_nothing_and_are_told(case, place, bulk):
    found = case()
    found.alter(8 * place)
    for sealed in (found.sealed, forged(found)):
        opened = found.open(sealed, blocks=3, states=found.expand() if bulk else None)
        assert opened == (name_of(NUMBERS[0], 0), [bytes(size) for size in SIZES])


def test_a_state_of_zeros_is_no_key(case, host):
    found = case()
    assert found.open(forged(found), states=Fenced.holding(bytes(16 * STATE), 16).data)[1] == [bytes(n) for n in SIZES]
    link = Fenced.holding(bytes(STATE), 16).data
    found.wrapped = Fenced.holding(
        reference.seal(bytes(32), bytes(12), b"".join(found.rows), LINK_NUMBER, ends=False), 16
    ).data
    arguments = link, found.wrapped, LINK_NUMBER, len(found.rows)
    states = Fenced.holding(bytes(16 * STATE), 16)
    host.launch("unwrap", *arguments, states.data, 15, len(SIZES), CALL, grid=2)
    assert not states.data.any()
    found.keys = lambda: arguments
    assert found.open()[1] == [bytes(size) for size in SIZES]
    assert found.seal(noise(100).tobytes(), link=link)[1][1] == FIRST


def forge(plain, bits, first=0, *, ends=True):
    """Seal chunks for a state of zeros: its round keys and H are zeros, so that a tag is the cipher of its counter."""
    starts, parts = range(0, len(plain) + 1 if ends else len(plain), CHUNK_SIZE), []
    for index, start in enumerate(starts):
        text = plain[start : start + CHUNK_SIZE]
        nonce, blocks = np.frombuffer(reference.nonce_of(bytes(12), first + index), np.uint8), -(-len(text) // 16) + 1
        counters = np.arange(1, blocks + 1, dtype=">u4").view(np.uint8).reshape(-1, 4)
        stream = np.hstack([np.tile(nonce, (blocks, 1)), counters])
        for rounds_left in range(bits // 32 + 5, -1, -1):
            stream = np.array(reference._S_BOX, np.uint8)[stream][:, [5 * i % 16 for i in range(16)]]
            if rounds_left:
                columns = stream.reshape(-1, 4, 4)
                after = np.roll(columns, -1, axis=2)
                doubled = (columns ^ after) << 1 ^ ((columns ^ after) >> 7) * 0x1B
                stream = (doubled ^ columns ^ np.bitwise_xor.reduce(columns, axis=2, keepdims=True)).reshape(-1, 16)
        keystream = stream[1:].reshape(-1)[: len(text)]
        parts += [(np.frombuffer(text, np.uint8) ^ keystream).tobytes(), stream[0].tobytes()]
    return b"".join(parts)


def test_what_is_sealed_for_a_state_of_zeros_opens_only_if_that_is_marked(case):
    found = case()
    nothing = [bytes(size) for size in SIZES]
    found.sealed = [forge(plain, found.bits) for plain in PLAIN]
    states = np.zeros((16, STATE // 4), np.uint32)
    assert found.open(states=Fenced.holding(states.tobytes(), 16).data) == (name_of(NUMBERS[0], 0), nothing)
    states[:, MARKS[0]] = CALL
    states[np.array(NUMBERS) % 16, MARKS[1]] = NUMBERS
    assert found.open(states=Fenced.holding(states.tobytes(), 16).data) == (None, PLAIN)


def test_rows_that_are_sealed_for_a_link_of_zeros_are_no_keys(case, host):
    found = case()
    link = np.zeros(STATE // 4, np.uint32)
    wrapped = read_only(Fenced.holding(forge(b"".join(found.rows), 256, LINK_NUMBER, ends=False), 16))
    for mark in (0, CALL, LINK):
        link[MARKS[0]] = mark
        keys = read_only(Fenced.holding(link.tobytes(), 16)), wrapped, LINK_NUMBER, len(found.rows)
        found.keys = lambda keys=keys: keys
        expected = (None, PLAIN) if mark == LINK else (name_of(NUMBERS[0], 0), [bytes(size) for size in SIZES])
        assert found.open() == expected
        states = Fenced.holding(bytes(16 * STATE), 16)
        host.launch("unwrap", *keys, states.data, 15, len(SIZES), CALL, grid=2)
        assert states.data.any() == (mark == LINK)


@each("mark", [0, 1])
def test_a_state_opens_nothing_unless_both_of_its_marks_are_right(case, mark):
    found = case()
    states = found.expand().copy()
    states.view(np.uint32).reshape(16, STATE // 4)[:, MARKS[mark]] ^= 1
    opened = found.open(states=read_only(Fenced.holding(states.tobytes(), 16)))
    assert opened == (name_of(NUMBERS[0], 0), [bytes(size) for size in SIZES])


def test_states_of_another_call_or_message_open_nothing(case):
    found = case()
    states = found.expand()
    assert found.open(states=states, ticket=TICKET + (1 << 32))[1] == [bytes(size) for size in SIZES]
    swapped = states.reshape(16, STATE).copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    verdict, plain = found.open(states=read_only(Fenced.holding(swapped.tobytes(), 16)))
    assert (verdict, plain[:2], plain[2:]) == (name_of(3, 0), [bytes(100), b""], PLAIN[2:])


def test_a_row_of_another_message_opens_nothing(case):
    found = case()
    found.rows[2], found.rows[4] = found.rows[4], found.rows[2]
    found.wrapped = wrap(found.rows)
    verdict, plain = found.open(blocks=2)
    assert verdict == name_of(NUMBERS[2], 0)
    assert [index for index, each in enumerate(plain) if each != PLAIN[index]] == [2, 4]


def test_a_row_opens_nothing_unless_the_number_of_its_message_is_right(case):
    found = case()
    found.rows[2] = wrapped_row(*found.pairs[2], NUMBERS[2] ^ 1 << 20)
    found.wrapped = wrap(found.rows)
    assert found.open(blocks=2) == (name_of(NUMBERS[2], 0), [*PLAIN[:2], bytes(SIZES[2]), *PLAIN[3:]])


def test_a_row_for_keys_of_another_size_opens_nothing(case):
    found = case()
    other = bytes(16 if found.bits == 256 else 32)
    found.rows[0] = wrapped_row(other, bytes(12), NUMBERS[0])
    found.wrapped = wrap(found.rows)
    assert found.open()[0] == name_of(NUMBERS[0], 0)


def test_a_row_is_read_only_as_the_kind_of_key_that_it_has(case):
    """The message is sealed under what the bytes of the row would be as a key of the other size."""
    found = case()
    row = wrapped_row(bytes(range(16)), bytes(range(60, 72)), NUMBERS[0])
    if found.bits == 128:
        row = wrapped_row(bytes(range(32)), bytes(range(60, 72)), NUMBERS[0])
    size = found.bits // 8
    found.rows[0], found.sealed[0] = row, reference.seal(row[:size], row[size : size + 12], PLAIN[0])
    found.wrapped = wrap(found.rows)
    assert found.open() == (name_of(NUMBERS[0], 0), [bytes(100), *PLAIN[1:]])


def test_no_key_stays_in_shared_memory(case):
    found = case()
    sizes = constants(SOURCE)
    found.open()
    assert not any(found.host.remains()[65536 : sizes["SMALL_SHARED_BYTES"]])
    found.expand(blocks=1)
    assert not any(found.host.remains()[65536 : sizes["SMALL_SHARED_BYTES"]])
    gather(found)
    assert not any(found.host.remains()[65536 : sizes["PICK_SHARED_BYTES"]])
    found.seal(PLAIN[4])
    assert not any(found.host.remains()[65536 : sizes["SMALL_SHARED_BYTES"]])


def gather(found, words=None, blocks=2):
    plan = as_pieces([0, 2], [0, 1, 2], [[5, 0, 100], [7, 100, 300]])
    memory = np.concatenate([plan.chunks, plan.starts, plan.table.reshape(-1)]).astype(np.int64)
    sealed = found.sealed[4]
    packed = sealed[:SEALED_CHUNK_SIZE] + sealed[2 * SEALED_CHUNK_SIZE :]
    target, words = Fenced(400, 3), words or verdict_words(ticket=TICKET, opened=TICKET)
    row = TableSegment(target.data.ctypes.data, name_of(NUMBERS[4], 0), SIZES[4], 400, 0, 0)
    arguments = found.keys(found.before + 4), read_only(Fenced.holding(packed, 16)), 2, 1, words.data, TICKET + 1
    opened = read_only(Fenced.holding(memory.tobytes(), 8))
    found.host.launch(f"pick_{found.bits}", *arguments[0], *arguments[1:], opened, 2, table_of(row), grid=blocks)
    assert target.stands
    return words.data.view(np.uint64).tolist(), target.data.tobytes()


@each("wrong", ["call", "message"])
def test_nothing_is_gathered_under_the_state_of_another_call_or_message(case, wrong):
    found = case()
    states = found.expand().copy()
    words = states.view(np.uint32).reshape(16, STATE // 4)
    words[NUMBERS[4] % 16, MARKS[wrong == "message"]] += 1
    plan = np.array([0, 0, 1, 5, 0, 100], np.int64)  # a chunk, the numbers of its pieces, and one piece
    target, verdict = Fenced(100, 3), verdict_words(ticket=TICKET, opened=TICKET)
    row = TableSegment(target.data.ctypes.data, name_of(NUMBERS[4], 0), SIZES[4], 100, 0, 0)
    memory, sealed = (read_only(Fenced.holding(each, 16)) for each in (states.tobytes(), found.sealed[4]))
    opened = read_only(Fenced.holding(plan.tobytes(), 8))
    arguments = memory, 15, sealed, 1, 1, verdict.data, TICKET + 1, opened, 1, table_of(row)
    found.host.launch(f"gather_{found.bits}", *arguments)
    assert verdict_of(verdict, TICKET + 1) == name_of(NUMBERS[4], 0)
    assert target.data.tobytes() == bytes(100)


@each("before", [0, ROWS - 2])
def test_pieces_are_gathered_under_a_wrapped_key(case, before):
    last = 2 * CHUNK_SIZE
    expected = PLAIN[4][5:105] + PLAIN[4][last + 7 : last + 307]
    assert gather(case(before)) == ([GOOD, GOOD, TICKET + 1, GOOD, TICKET], expected)


@each(("plan", "ticket"), [(0, TICKET), (GOOD, TICKET - 1), (GOOD, TICKET + 1), (GOOD, GOOD), (GOOD, 0)])
def test_a_plan_that_is_bad_or_was_not_opened_for_this_launch_is_not_read(case, plan, ticket):
    words, found = gather(case(), verdict_words(plan=plan, ticket=TICKET, opened=ticket))
    assert found == bytes(400)
    assert words[0] == name_of(NUMBERS[4], 0)


def test_a_launch_that_opens_a_plan_tells_so_of_the_plan(case, host):
    found = case()
    plan = noise(5000).tobytes()
    sealed = reference.seal(b"k" * 32, b"n" * 12, plan)
    state = reference.kernel_state(b"k" * 32, b"n" * 12, 2**32 - 1)
    for content, expected in ((sealed, GOOD), (flip(sealed, 5), 0)):
        target, words = Fenced(5000, 8), verdict_words()
        row = TableSegment(target.data.ctypes.data, 0, 5000, 1, 0, 0)
        source = read_only(Fenced.holding(content, 16))
        link = read_only(Fenced.holding(state, 16))
        host.launch("open_256", link, 0, source, 1, 1, words.data, TICKET | PLAN, table_of(row))
        assert words.data.view(np.uint64).tolist() == [GOOD, expected, TICKET, GOOD, TICKET]
        assert target.data.tobytes() == (plan if expected == GOOD else bytes(5000))
    assert found.bits in {128, 256}


@each("size", [0, 5, CHUNK_SIZE, 3 * CHUNK_SIZE + 5])
def test_a_message_is_sealed_under_a_wrapped_key(case, size):
    found, plain = case(), noise(size).tobytes()
    found.wrapped = wrap(found.rows[:1])
    assert found.seal(plain) == (reference.seal(*found.pairs[0], plain), [TICKET, GOOD])


def test_a_run_is_sealed_from_any_chunk_on(case):
    found, plain = case(), noise(CHUNK_SIZE + 9).tobytes()
    found.wrapped = wrap(found.rows[:1])
    sealed, told = found.seal(plain, name=name_of(3, 77))
    assert (sealed, told) == (reference.seal(*found.pairs[0], plain, 77), [TICKET, GOOD])


@each("place", [0, 47, 48, 79])
def test_without_its_row_nothing_is_sealed_and_that_is_told(case, place):
    found, plain = case(), noise(700).tobytes()
    found.wrapped = wrap(found.rows[:1])
    found.alter(8 * place)
    assert found.seal(plain) == (bytes([0xA5]) * 716, [TICKET, name_of(3, 0)])


def test_the_row_of_another_message_seals_nothing(case):
    found = case()
    found.wrapped = wrap(found.rows[:1])
    assert found.seal(noise(700).tobytes(), name=name_of(4, 0))[1] == [TICKET, name_of(4, 0)]


def test_each_launch_leaves_its_ticket_behind_that_of_the_launch_before(case):
    found = case()
    for number in range(3):
        words = verdict_words() if number == 0 else found.words
        assert found.open(blocks=4, words=words, ticket=TICKET + number)[0] is None


@each("blocks", [1, 5])
@each("lost", [0, 1])
def test_a_launch_that_was_lost_leaves_a_ticket_missing(case, lost, blocks):
    """All launches behind it run, and open what is theirs; none of them leaves a ticket."""
    found, words = case(), verdict_words()
    for number in {0, 1, 2} - {lost}:
        if number < lost:
            found.open(words=words, blocks=blocks, ticket=TICKET + number)
        else:
            with pytest.raises(AssertionError):
                found.open(words=words, blocks=blocks, ticket=TICKET + number)
    lowest, _, ticket, ended, _ = words.data.view(np.uint64).tolist()
    assert (lowest, ticket, ended) == (GOOD, TICKET if lost else GOOD, GOOD)


@each("blocks", [1, 2, 7])
def test_a_launch_without_one_of_its_blocks_leaves_no_ticket(case, host, blocks):
    found = case()
    words = verdict_words(ended=0)
    table = table_at(Fenced(100, 16).data, name_of(3, 0), 100, 1)
    source = read_only(Fenced.holding(found.sealed[0], 16))
    arguments = (*found.keys(), source, 1, 1, words.data, TICKET, table)
    host.launch(f"small_{found.bits}", *arguments, grid=blocks, first=min(1, blocks - 1))
    assert (words.data.view(np.uint64)[2] == TICKET) is np.bool_(blocks == 1)


def test_the_ticket_that_is_told_is_missing_if_a_launch_before_was_lost(case):
    found = case()
    found.wrapped = wrap(found.rows[:1])
    assert found.seal(PLAIN[0], ticket=TICKET + 1)[1] == [GOOD, GOOD]
    assert found.seal(PLAIN[0], ticket=TICKET + 1, words=verdict_words(ticket=TICKET))[1] == [TICKET + 1, GOOD]


@each("missing", [1, 2])
def test_nothing_is_told_before_all_blocks_have_ended(case, missing):
    """As if some blocks were still to come, whose chunks may be bad."""
    found = case()
    found.wrapped = wrap(found.rows[:1])
    assert found.seal(PLAIN[0], blocks=2, words=verdict_words(ended=-missing))[1] == [0, 0]


def test_a_message_goes_on_in_a_later_launch_under_a_wrapped_key(case):
    found = case()
    found.sealed = [reference.seal(*pair, plain, 5) for pair, plain in zip(found.pairs, PLAIN, strict=True)]
    assert found.open(blocks=3, first=5) == (None, PLAIN)
