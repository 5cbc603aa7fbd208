"""Many messages in one call: each comes out as if it were alone, and one verdict names the first that was altered."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import reference
from helpers.buffers import Fenced, as_array
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.messages import messages_of, raw_key
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE
from helpers.runs import plan, zeroed

from fastrack._crypto import gather, message_keys
from fastrack.errors import ClosedError

SIZES = [0, 1, 100, CHUNK_SIZE - 1, CHUNK_SIZE, 5 * CHUNK_SIZE + 7, 0, 300 * CHUNK_SIZE, 8192]
RANGES = [(5 * CHUNK_SIZE - 50, 57), (3, 200), (CHUNK_SIZE, CHUNK_SIZE), (CHUNK_SIZE - 5, 10)]


class Call:
    """Messages under keys of both sizes: whole ones, gathers, and plain ones."""

    def __init__(self):
        self.given = []  # key, sealed or plain bytes, result expected, target, plan
        for number, size in enumerate(SIZES):
            self.add(number, size)
        for number in (5, 7):
            self.add(number, SIZES[number], RANGES)
        self.add(5, SIZES[5], [])
        for number, size in enumerate(SIZES[:6]):
            self.add(number, size, plain=True)

    def add(self, number, size, ranges=None, *, plain=False):
        key, text = bytes(reference.noise(16 + 16 * (number % 2), number)), bytes(reference.noise(size, number))
        source = Fenced.holding(text if plain else reference.seal(key, bytes(12), text), number)
        gathered, extent = (None, size) if ranges is None else plan(ranges)
        if ranges is not None:
            text = b"".join(text[start : start + length] for start, length in ranges)
        self.given.append((key, source, text, Fenced(extent, 3 * number), gathered, size, plain))

    def open(self, engine):
        jobs = messages_of(
            [raw_key(key) for key, *_ in self.given],
            [size for *_, size, _ in self.given],
            [target.data for _, _, _, target, *_ in self.given],
            sealed=[None if plain else source.data for _, source, *_, plain in self.given],
            plain=[source.data if plain else None for _, source, *_, plain in self.given],
            plans=[gathered for *_, gathered, _, _ in self.given],
        )
        bad = engine.open_jobs(jobs)
        assert all(target.stands for _, _, _, target, *_ in self.given)
        return bad

    def wrong(self):
        """The messages that hold something else than they should."""
        held = ((bytes(text), target.data.tobytes()) for _, _, text, target, *_ in self.given)
        return {number for number, (text, found) in enumerate(held) if found != text}


def test_messages_of_all_kinds_come_out_as_they_went_in(make_engine):
    for threads in (1, 4):
        call = Call()
        assert call.open(make_engine(threads)) is None
        assert call.wrong() == set()


def test_each_altered_chunk_is_named_and_its_place_holds_zeros(engine_under_test):
    call = Call()
    for number, (_, source, text, target, gathered, size, plain) in enumerate(call.given):
        if plain:
            continue
        for chunk in {0, size // CHUNK_SIZE // 2, size // CHUNK_SIZE}:
            end = min((chunk + 1) * SEALED_CHUNK_SIZE, source.data.size) - 1
            source.data[end] ^= 1
            bad = call.open(engine_under_test)
            source.data[end] ^= 1
            if gathered is None:
                assert bad == (number, chunk)
                assert target.data.tobytes() == zeroed(text, {chunk})
                assert call.wrong() <= {number}
            else:
                assert bad == ((number, chunk) if chunk in gathered.chunks else None)


def test_the_first_of_several_is_named(engine_under_test):
    call = Call()
    for number, chunk in ((9, 1), (7, 255), (7, 254), (5, 3)):
        call.given[number][1].data[chunk * SEALED_CHUNK_SIZE] ^= 1
        assert call.open(engine_under_test) == (number, chunk)


def test_another_key_opens_nothing(engine_under_test):
    call = Call()
    key, *others = call.given[5]
    call.given[5] = (bytes(len(key)), *others)
    assert call.open(engine_under_test) == (5, 0)
    assert not call.given[5][3].data.any()
    assert call.wrong() == {5}


@each(
    ("size", "sealed", "target", "gathered"),
    [
        (100, 116, 99, None),
        (100, 116, 101, None),
        (100, 115, 100, None),
        (100, 132, 100, None),
        (CHUNK_SIZE, SEALED_CHUNK_SIZE - 1, CHUNK_SIZE, None),
        (100, 116, 10, [[0, [[0, 0, 11]]]]),
        (100, 116, 10, [[0, [[95, 0, 6]]]]),
        (100, 116, 10, [[1, [[0, 0, 1]]]]),
        (100, 116, 10, [[-1, [[0, 0, 1]]]]),
        (100, 116, 10, [[0, [[-1, 0, 1]]]]),
        (100, 116, 10, [[0, [[0, -1, 1]]]]),
    ],
)
def test_what_reaches_outside_is_refused_before_anything_is_opened(engine_under_test, size, sealed, target, gathered):
    if gathered is not None:
        chunks, tables = zip(*gathered, strict=True)
        starts = np.cumsum([0, *map(len, tables)])
        gathered = gather.GatherPlan(np.array(chunks), starts, np.concatenate([np.array(table) for table in tables]))
    good, out = Fenced(116), Fenced(target)
    keys, sizes, targets = [raw_key(bytes(32))] * 2, [100, size], [good.data[:100], out.data]
    memory = [Fenced(116).data, Fenced(sealed).data]
    messages = messages_of(keys, sizes, targets, sealed=memory, plans=[None, gathered])
    with pytest.raises(ValueError, match=r"expected|no run"):
        engine_under_test.open_jobs(messages)
    assert out.stands
    messages = messages_of(keys, sizes, targets, sealed=[memory[0], None], plain=[None, Fenced(size + 1).data])
    with pytest.raises(ValueError, match=r"expected|no run"):
        engine_under_test.open_jobs(messages)


def test_a_plan_with_gaps_in_memory_is_refused(engine_under_test):
    table = np.zeros((2, 6), np.int64)[:, ::2]
    gathered = gather.GatherPlan(np.array([0]), np.array([0, 2]), table)
    target, memory = np.zeros(10, np.uint8), as_array(bytes(116))
    messages = messages_of([raw_key(bytes(32))], [100], [target], sealed=[memory], plans=[gathered])
    with pytest.raises(ValueError, match="plan"):
        engine_under_test.open_jobs(messages)


def test_many_threads_open_many_small_messages_at_once(make_engine):
    engine, text = make_engine(4), [reference.noise(3000, seed) for seed in range(300)]
    key = bytes(range(32))
    sealed = [as_array(reference.seal(key, number.to_bytes(12), each)) for number, each in enumerate(text)]

    def work(_):
        keys = [raw_key(key, number.to_bytes(12)) for number in range(len(text))]
        targets = [np.zeros(3000, np.uint8) for _ in text]
        assert engine.open_jobs(messages_of(keys, [3000] * len(text), targets, sealed=sealed)) is None
        return all(target.tobytes() == bytes(each) for target, each in zip(targets, text, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_wiped_keys_and_those_of_another_process_open_and_seal_nothing(engine_under_test):
    forged = as_array(reference.seal(bytes(32), bytes(12), bytes(100)))  # under the key that wiping leaves

    def job(keys):
        target, plain = np.ones(100, np.uint8), np.ones(100, np.uint8)
        for source in ({"sealed": [forged]}, {"plain": [plain]}):
            with pytest.raises(ClosedError):
                engine_under_test.open_jobs(messages_of(keys, [100], [target], **source))
        return bool(target.all())

    keys = message_keys.MessageKeys.of([raw_key(bytes(range(32)))])
    assert in_forked_child(lambda: job(keys))
    keys.wipe()
    assert job(keys)
    with pytest.raises(ClosedError):
        keys.key(0)
