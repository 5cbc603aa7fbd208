"""The CUDA device opens, seals and gathers as it should, whatever order events leave open."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import Message, Rig
from helpers.fake_cuda import MODES, FakeDriver
from helpers.runs import as_pieces, plan_of_rows

from fastrack import DeviceError
from fastrack._devices.base import BAD_PLAN, Segment
from fastrack._devices.cuda import device, gather_plan, link
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, ciphertext_size

SIZES = [0, 1, 16, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 4 * CHUNK_SIZE, 9 * CHUNK_SIZE + 77]
SEEDS = range(50)
ROWS = [140, 0, 3, 17, 99, 100, 16, 3]
LONG = Message(9 * CHUNK_SIZE + 77)
OTHER = Message(7 * CHUNK_SIZE + 5, seed=1)


def pieces_of(message, rows, row=1000):
    count = message.plain.size // row
    plan = plan_of_rows(np.asarray(rows), (count, row), count * row)
    expected = message.plain[: count * row].reshape(count, row)[rows].reshape(-1)
    return plan.ranges().pieces(), expected


# What comes out.


@each("mode", MODES)
@each("size", SIZES)
@pytest.mark.slow
@pytest.mark.parametrize("bits", [256, pytest.param(128, marks=pytest.mark.nightly)])
def test_a_message_is_opened_and_sealed(size, bits, mode):
    message = Message(size, bits)
    rig = Rig(mode)
    array = rig.array(size)
    assert rig.open(message, array).result() is None
    assert np.array_equal(rig.driver.read(array), message.plain)
    assert not rig.driver.holds(message.secret)
    rig.close(arrays=1)
    rig = Rig(mode)
    work, sealed = rig.seal(message, rig.driver.array(message.plain))
    assert work.result() is None
    assert np.array_equal(sealed, message.sealed)
    assert not rig.driver.holds(message.secret)
    rig.close()


@each("mode", MODES)
@each("bits", [128, 256])
def test_rows_are_gathered(bits, mode):
    message = Message(9 * CHUNK_SIZE + 77, bits)
    rig = Rig(mode)
    pieces, expected = pieces_of(message, ROWS)
    array = rig.array(expected.size)
    assert rig.gather(message, pieces, array).result() is None
    assert np.array_equal(rig.driver.read(array), expected)
    rig.close()


def test_the_short_last_chunk_is_gathered():
    rig = Rig()
    size = LONG.plain.size
    pieces = as_pieces([2, 9], [0, 1, 2], [[5, 70, 10], [7, 0, 70]])
    array = rig.array(80)
    assert rig.gather(LONG, pieces, array).result() is None
    expected = np.concatenate([LONG.plain[size - 70 :], LONG.plain[2 * CHUNK_SIZE + 5 :][:10]])
    assert np.array_equal(rig.driver.read(array), expected)


def test_a_gather_of_nothing_asks_for_nothing():
    rig = Rig()
    work = rig.begin(LONG, rig.array(0))
    slot = rig.take()
    work.open(Segment(0, 0, 0, LONG.plain.size, 0, 0, as_pieces([], [0], [])), slot.memory, slot)
    work.finish()
    assert work.result() is None
    assert [name for name, *_ in rig.driver.launches] == ["prepare"]  # of the link


# Order.


@each("seed", SEEDS)
def test_opening_keeps_its_order(seed):
    rig = Rig(seed=seed)
    array = rig.array(LONG.plain.size)
    before, after = [], []
    memory = rig.driver.space.at(array.pointer, array.nbytes)
    rig.driver.later(lambda: before.append(memory.copy()))
    work = rig.open(LONG, array)
    rig.driver.later(lambda: after.append(memory.copy()))
    rig.driver.finish()
    assert (before[0] == 0xA5).all(), "the array was written to while its owner was still at work on it"
    assert np.array_equal(after[0], LONG.plain), "the caller's stream went on before the result was there"
    assert work.done()
    assert work.result() is None
    assert not rig.driver.holds(LONG.secret)
    rig.close()


@each("seed", SEEDS)
def test_sealing_keeps_its_order(seed):
    rig = Rig(seed=seed)
    array = rig.array(LONG.plain.size)
    memory = rig.driver.space.at(array.pointer, array.nbytes)
    rig.driver.later(lambda: np.copyto(memory, LONG.plain))
    work = rig.begin(LONG, array, writable=False)
    out = np.zeros(LONG.sealed.size, np.uint8)
    for slab in list(rig.slabs(LONG)):
        slot = rig.take()
        work.seal(slab, slot.memory[: slab.sealed_size], slot)
        work.issue()
        if slab.stop == LONG.plain.size:  # the last one is under way when the work ends
            work.finish()
            rig.driver.later(lambda: memory.fill(0))
        slot.wait()
        out[slab.first_chunk * 16400 :][: slab.sealed_size] = slot.memory[: slab.sealed_size]
    assert np.array_equal(out, LONG.sealed)
    assert work.result() is None
    rig.close()


@each("seed", SEEDS)
def test_gathering_keeps_its_order(seed):
    rig = Rig(seed=seed)
    pieces, expected = pieces_of(LONG, list(range(0, 147, 5)))
    array = rig.array(expected.size)
    work = rig.gather(LONG, pieces, array)
    found = rig.driver.read(array)
    assert np.array_equal(found, expected)
    assert work.result() is None
    rig.close()


@each("seed", SEEDS)
def test_messages_in_both_directions_share_buffers_and_states(seed):
    rig = Rig(seed=seed)
    first, second, third = rig.array(LONG.plain.size), rig.driver.array(OTHER.plain), rig.array(OTHER.plain.size)
    opened = rig.open(LONG, first)
    sealed, bytes_ = rig.seal(OTHER, second)
    again = rig.open(OTHER, third)
    for work in (again, sealed, opened):
        assert work.result() is None
    assert np.array_equal(bytes_, OTHER.sealed)
    assert np.array_equal(rig.driver.read(first), LONG.plain)
    assert np.array_equal(rig.driver.read(third), OTHER.plain)
    last = rig.array(LONG.plain.size)
    assert rig.open(LONG, last).result() is None
    assert np.array_equal(rig.driver.read(last), LONG.plain)
    assert not rig.driver.holds(LONG.secret)
    assert not rig.driver.holds(OTHER.secret)
    rig.close()


@each("seed", SEEDS)
def test_clearing_waits_for_the_owner_and_is_done_when_it_returns(seed):
    rig = Rig(seed=seed)
    array = rig.array(100)
    memory = rig.driver.space.at(array.pointer, array.nbytes)
    rig.driver.later(lambda: memory.fill(7))
    rig.device.clear(rig.device.view(array, writable=True))
    assert not memory.any()
    rig.device.clear(rig.device.view(rig.array(0), writable=True))  # nothing to clear is no error
    rig.driver.finish()
    assert not memory.any()
    assert rig.driver.violations == []


@each("mode", MODES)
def test_messages_without_a_call_of_result_leave_nothing(mode):
    rig = Rig(mode)
    results = []
    for _ in range(12):
        results.append(rig.array(OTHER.plain.size))
        rig.open(OTHER, results[-1])
    for array in results:
        assert np.array_equal(rig.driver.read(array), OTHER.plain)
    rig.driver.finish()
    assert not rig.driver.holds(OTHER.secret)
    rig.close()


@each("mode", MODES)
@pytest.mark.slow
def test_threads_share_a_device(mode):
    rig = Rig(mode)
    messages = [Message((3 + n) * CHUNK_SIZE + n, seed=n) for n in range(4)]
    rigs = [rig.beside() for _ in messages]

    def transfer(own, message):
        for _ in range(4):
            array = own.array(message.plain.size)
            assert own.open(message, array).result() is None
            assert np.array_equal(own.driver.read(array), message.plain)
            work, sealed = own.seal(message, array)
            assert work.result() is None
            assert np.array_equal(sealed, message.sealed)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(transfer, rigs, messages, timeout=30))
    rigs.clear()
    rig.close()


# Chunks that are not what was sealed.


@each("mode", MODES)
@each(("size", "chunks"), [(0, (0,)), *((LONG.plain.size, chunks) for chunks in ((0,), (9,), (4, 3), (8, 5, 9)))])
def test_a_wrong_tag_gives_zeros_and_the_number_of_the_first(size, chunks, mode):
    message = Message(size).spoilt(*chunks)
    rig = Rig(mode)
    array = rig.array(message.plain.size)
    work = rig.open(message, array)
    assert work.result() == work.result() == min(chunks)
    assert np.array_equal(rig.driver.read(array), message.plain)
    assert rig.open(Message(size), array).result() is None
    assert np.array_equal(rig.driver.read(array), Message(size).plain)


def test_a_wrong_tag_of_a_gather_gives_zeros_and_its_number():
    message = Message(9 * CHUNK_SIZE + 77).spoilt(6, 9)
    rig = Rig()
    pieces, expected = pieces_of(message, list(range(0, 147, 5)))
    array = rig.array(expected.size)
    assert rig.gather(message, pieces, array).result() == 6
    assert np.array_equal(rig.driver.read(array), expected)


@each("place", [0, 16383, 16384, 16399, 16400, -1])
def test_a_byte_that_is_turned_over_on_the_bus_is_noticed(place):
    rig = Rig()
    slab = list(rig.slabs(LONG))[1]
    array = rig.array(LONG.plain.size)
    place %= slab.sealed_size  # its key follows
    rig.driver.flips = {rig.driver.calls["upload"] + 2: place}
    bad = slab.first_chunk + (place % slab.sealed_size) // 16400
    assert rig.open(LONG, array).result() == bad
    expected = LONG.plain.copy()
    expected[bad * CHUNK_SIZE : (bad + 1) * CHUNK_SIZE] = 0
    assert np.array_equal(rig.driver.read(array), expected)


# The upload of a gather is a slab with its wrapped key and its plan behind it.
@each("place", [0, 1, 7, 8, 100, 200, -17, -16, -1])
def test_a_plan_that_is_altered_on_the_bus_is_noticed_and_the_result_is_zeros(place):
    pieces, expected = pieces_of(LONG, ROWS)
    rig = Rig(chunks=16)
    array = rig.driver.array(np.full(expected.size, 0x5A, np.uint8))
    behind = SEALED_CHUNK_SIZE * len(pieces.chunks) + link.ROW_SIZE + TAG_SIZE
    rig.driver.flips = {rig.driver.calls["upload"] + 1: behind + place if place >= 0 else place}
    assert rig.gather(LONG, pieces, array).result() == BAD_PLAN
    assert not rig.driver.read(array).any()
    rig.driver.flips = {}
    assert rig.gather(LONG, pieces, array).result() is None
    assert np.array_equal(rig.driver.read(array), expected)
    rig.close()


def test_a_plan_of_many_chunks_is_noticed_whichever_is_altered_and_nothing_of_it_is_used():
    pieces, expected = pieces_of(LONG, np.random.default_rng(0).permutation(18441), row=8)
    size = pieces.chunks.nbytes + pieces.starts.nbytes + pieces.table.nbytes
    assert 27 * CHUNK_SIZE < size < 28 * CHUNK_SIZE
    for chunk in (0, 13, 27):
        rig = Rig(chunks=80)
        array = rig.driver.array(np.full(expected.size, 0x5A, np.uint8))
        behind = gather_plan.align(ciphertext_size(LONG.plain.size)) + link.ROW_SIZE + TAG_SIZE
        rig.driver.flips = {rig.driver.calls["upload"] + 1: behind + SEALED_CHUNK_SIZE * chunk + 50}
        assert rig.gather(LONG, pieces, array).result() == BAD_PLAN
        assert not rig.driver.read(array).any()
        rig.close()


def test_after_a_plan_was_altered_later_slabs_of_the_message_are_not_gathered_either():
    pieces, expected = pieces_of(LONG, ROWS)
    rig = Rig(chunks=2)
    array = rig.driver.array(np.full(expected.size, 0x5A, np.uint8))
    rig.driver.flips = {rig.driver.calls["upload"] + 1: -1}
    assert rig.gather(LONG, pieces, array).result() == BAD_PLAN
    assert len([name for name, *_ in rig.driver.launches if name == "pick_256"]) > 1
    assert not rig.driver.read(array).any()
    rig.close()


def test_plans_cross_the_bus_sealed_each_under_a_nonce_of_its_own(monkeypatch):
    pieces, expected = pieces_of(LONG, ROWS)
    rig = Rig(chunks=16)
    uploads = []
    upload = rig.driver.upload

    def recorded(pointer, source, size, stream):
        uploads.append(np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(source)).tobytes())
        upload(pointer, source, size, stream)

    monkeypatch.setattr(rig.driver, "upload", recorded)
    for _ in range(2):
        assert rig.gather(LONG, pieces, rig.array(expected.size)).result() is None
    first, second = uploads
    behind = SEALED_CHUNK_SIZE * len(pieces.chunks)
    plan = 8 * (2 * len(pieces.chunks) + 1 + 3 * len(pieces.table)) + TAG_SIZE
    assert first[:behind] == second[:behind]
    assert len(first) - behind == link.ROW_SIZE + TAG_SIZE + plan
    both = (np.frombuffer(each[behind:], np.uint8) for each in (first, second))
    different = np.bitwise_xor(*both).reshape(-1, 8).any(1)
    assert different.all()  # the wrapped key, which is the same twice but for its nonce, and the plan
    assert pieces.table.tobytes() not in first
    assert LONG.secret not in first
    rig.close()


def test_after_an_error_no_other_plan_is_sealed_under_the_same_nonce(monkeypatch):
    rig = Rig()
    key = rig.device._link.key_for(rig)
    pieces, _ = pieces_of(LONG, [140, 0, 3])
    first = gather_plan.seal_plan(key, pieces, 0)
    seal_run = key._engine.seal_run

    def seal_and_fail(*arguments):
        seal_run(*arguments)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(key._engine, "seal_run", seal_and_fail)
        with pytest.raises(MemoryError):
            gather_plan.seal_plan(key, pieces, 0)
    assert gather_plan.seal_plan(key, pieces, 0).first_chunk == first.first_chunk + 2 * first.count
    rig.close()


# What it is asked.


@each(
    ("share", "multiprocessors", "grids"),
    [(1.0, 4, {8}), (0.5, 4, {4}), (0.25, 132, {16}), (0.01, 4, {1}), (1.0, 132, {16}), (1.0, 1, {2})],
)
def test_a_share_of_the_multiprocessors_bounds_the_grid(share, multiprocessors, grids):
    message = Message(16 * CHUNK_SIZE - 1)
    rig = Rig(chunks=16, share=share, multiprocessors=multiprocessors)
    array = rig.array(message.plain.size)
    assert rig.open(message, array).result() is None
    assert {blocks for name, blocks, _ in rig.driver.launches if name not in {"prepare", "unwrap"}} == grids


@each(("asked", "cpus", "threads"), [(None, 4, 4), (None, 224, 16), (40, 224, 40), (40, 4, 40)])
def test_slabs_are_filled_by_as_many_threads_as_asked_for_or_some_of_the_cpus(monkeypatch, asked, cpus, threads):
    monkeypatch.setattr(device, "default_threads", lambda: cpus)
    assert device.CudaDevice(FakeDriver(), threads=asked).resources.threads == threads


@each("share", [0, -1, 1.01, float("nan")])
def test_a_share_is_above_0_and_at_most_1(share):
    with pytest.raises(ValueError, match="share="):
        device.CudaDevice(FakeDriver(), share=share)


def test_a_result_is_of_the_framework_that_is_asked_for_or_that_came_in_or_that_is_installed(hide):
    framework = Rig().device.framework
    assert (framework("torch", "numpy"), framework("cupy", "torch")) == ("torch", "cupy")
    assert (framework(None, "torch"), framework(None, "cupy"), framework(None, "numpy")) == ("torch", "cupy", "cupy")
    assert framework(None, None) == "torch"
    hide("torch")
    assert framework(None, None) == "cupy"
    with pytest.raises(DeviceError, match="framework="):
        framework("numpy", None)


@each(
    "slab",
    [
        Segment(0, 0, 0, 3 * CHUNK_SIZE, 3 * 16400),  # more than the slot holds
        Segment(0, 9, 9 * CHUNK_SIZE, 9 * CHUNK_SIZE + 78, 78 + 16),  # past the array
        Segment(0, 1, 0, 100, 116),  # at another chunk's place
        Segment(0, 0, 0, 100, 100),  # no tag
        Segment(0, 0, 0, 0, 0, 0, as_pieces([0], [0, 1], [[0, 0, 1]])),  # past the message
    ],
)
def test_what_reaches_outside_is_refused(slab):
    rig = Rig()
    work = rig.begin(LONG, rig.array(LONG.plain.size))
    slot = rig.take()
    for act in (work.open, work.seal) if slab.plan is None else (work.open,):
        with pytest.raises(ValueError, match=r"outside|run of"):
            act(slab, slot.memory[: slab.sealed_size], slot)
    work.finish()
    assert work.result() is None


@pytest.mark.parametrize(("sealed", "pieces"), [(16399, 1), (2 * 16400, 200)])
def test_a_gather_that_does_not_fit_its_slot_is_refused(sealed, pieces):
    rig = Rig()
    work = rig.begin(LONG, rig.array(1000))
    slot = rig.take()
    table = np.array([[n, n, 1] for n in range(pieces)])
    slab = Segment(0, 0, 0, LONG.plain.size, sealed, 0, as_pieces([0], [0, pieces], table))
    with pytest.raises(ValueError, match="fit"):
        work.open(slab, slot.memory[:sealed], slot)
    work.finish()


def test_slabs_are_whole_chunks_and_begin_small():
    assert device.CudaDevice.max_slab_size % CHUNK_SIZE == 0
    assert device.CudaDevice.first_slab_size % CHUNK_SIZE == 0
    assert not device.CudaDevice.in_place
