"""Slabs: how messages and gathers are cut into them, and what fills them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import Key
from fastrack._crypto.base import GatherPlan
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE, MessageKey, ciphertext_size
from fastrack._crypto.engine import get_engine
from fastrack._devices.cuda.gather_plan import room_for
from fastrack._sealed.indexing import plan_rows
from fastrack._transfer.sources import PlainSource, RowSource, SealedSource, Sizes, gathers_of, slabs_of


@st.composite
def sizes(draw, least=1):
    limit = draw(st.integers(least, 40))
    return Sizes(draw(st.integers(1, limit)) * CHUNK_SIZE, limit * CHUNK_SIZE)


# Whole messages.


@settings(deadline=None)
@given(st.integers(0, 200), st.sampled_from([0, 1, CHUNK_SIZE - 1]), st.none() | sizes())
def test_slabs_are_the_message_in_order(chunks, rest, sizes):
    nbytes = chunks * CHUNK_SIZE + rest
    slabs = list(slabs_of(nbytes, sizes))
    start = sealed = 0
    for slab in slabs:
        assert (slab.start, slab.first_chunk * SEALED_CHUNK_SIZE) == (start, sealed)
        assert slab.start == slab.first_chunk * CHUNK_SIZE
        assert slab.plan is None
        start, sealed = slab.stop, sealed + slab.sealed_size
    assert (start, sealed) == (nbytes, ciphertext_size(nbytes))
    if sizes is None:
        assert len(slabs) == 1
    else:
        assert all(slab.sealed_size <= ciphertext_size(sizes.limit) for slab in slabs)
        assert all(slab.stop > slab.start for slab in slabs) or nbytes == 0


def test_slabs_grow_by_half_up_to_the_limit():
    slabs = slabs_of(20 * CHUNK_SIZE + 5, Sizes(CHUNK_SIZE, 6 * CHUNK_SIZE))
    assert [(slab.stop - slab.start) / CHUNK_SIZE for slab in slabs] == pytest.approx([1, 2, 3, 4, 6, 4], abs=0.001)


def test_a_lead_as_large_as_the_limit_makes_them_all_alike():
    slabs = slabs_of(10 * CHUNK_SIZE, Sizes(4 * CHUNK_SIZE, 4 * CHUNK_SIZE))
    assert [slab.stop - slab.start for slab in slabs] == [4 * CHUNK_SIZE, 4 * CHUNK_SIZE, 2 * CHUNK_SIZE]


# Gathers.


def entries(pieces):
    """A plan as (chunk, offset, target, length), in its order."""
    numbers = np.repeat(pieces.chunks, np.diff(pieces.starts))
    return np.column_stack([numbers, pieces.table])


def check_gathers(pieces, nbytes, sizes):
    slabs = list(gathers_of(pieces, nbytes, sizes))
    last = nbytes // CHUNK_SIZE
    for slab, size in zip(slabs, sizes, strict=False):
        part = slab.plan
        count = part.chunks.size
        assert count > 0
        assert (slab.first_chunk, slab.start, slab.stop) == (0, 0, nbytes)
        assert (np.diff(part.chunks) > 0).all()
        end = [ciphertext_size(nbytes) - last * SEALED_CHUNK_SIZE] if last in part.chunks else []
        assert slab.sealed_size == (count - len(end)) * SEALED_CHUNK_SIZE + sum(end)
        assert (part.starts[0], part.starts[-1], part.starts.size) == (0, len(part.table), count + 1)
        assert (np.diff(part.starts) > 0).all()
        arrays = (part.chunks, part.starts, part.table)
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        room = ciphertext_size(max(size, 2 * CHUNK_SIZE))
        assert room_for(part, slab.sealed_size) <= room <= ciphertext_size(sizes.limit)
    found = np.concatenate([entries(slab.plan) for slab in slabs]) if slabs else np.empty((0, 4), np.int64)
    assert np.array_equal(found, entries(pieces))
    return slabs


@st.composite
def plans(draw):
    """Any plan whose chunks ascend, for a message of some size; with few pieces a chunk, or with many."""
    count = draw(st.integers(1, 100))
    nbytes = (count - 1) * CHUNK_SIZE + draw(st.integers(1, CHUNK_SIZE - 1))
    chunks = draw(st.sets(st.integers(0, count - 1)).map(sorted))
    most = st.sampled_from([1, 3, 600, 700, 5000])
    counts = [draw(st.integers(1, draw(most))) for _ in chunks]
    starts = np.cumsum([0, *counts])
    table = np.arange(3 * starts[-1]).reshape(-1, 3)
    return GatherPlan(np.array(chunks, np.int64), starts.astype(np.int64), table.astype(np.int64)), nbytes


@settings(deadline=None, max_examples=200)
@given(plans(), sizes(least=2))
def test_gathers_are_the_plan_in_order_and_fit_into_a_slot(plan, sizes):
    check_gathers(*plan, sizes)


@settings(deadline=None)
@given(st.integers(1, 3000), st.lists(st.integers(0, 2**20), max_size=200), sizes(least=2))
@example(1, [0] * 200, Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE))
def test_gathers_of_rows_are_their_plan_in_order_and_fit_into_a_slot(width, rows, sizes):
    count = max(1, 300_000 // width)
    plan = plan_rows(np.array(rows, np.int64) % count, (count, width), count * width)
    check_gathers(plan.ranges().pieces(), count * width, sizes)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_chunk_is_split_exactly_where_it_does_not_fit(spare):
    # A buffer for two chunks holds one, 33 bytes for its number and its start, 333 pieces of 49 bytes, and 64 bytes.
    assert (ciphertext_size(2 * CHUNK_SIZE) - SEALED_CHUNK_SIZE - 33 - 64) // 49 == 333
    pieces = GatherPlan(np.array([4]), np.array([0, 333 + spare]), np.zeros((333 + spare, 3), np.int64))
    slabs = check_gathers(pieces, 5 * CHUNK_SIZE, Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE))
    assert [len(slab.plan.table) for slab in slabs] == ([333, 1] if spare == 1 else [333 + spare])


def test_a_plan_starts_at_a_multiple_of_sixteen_bytes_behind_a_short_chunk():
    pieces = GatherPlan(np.array([5]), np.array([0, 667]), np.zeros((667, 3), np.int64))
    slabs = check_gathers(pieces, 5 * CHUNK_SIZE + 33, Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE))
    assert [len(slab.plan.table) for slab in slabs] == [666, 1]


def test_what_is_left_of_a_split_chunk_shares_a_slab_with_those_that_follow():
    pieces = GatherPlan(np.array([1, 2, 5]), np.array([0, 1000, 1001, 1002]), np.zeros((1002, 3), np.int64))
    slabs = check_gathers(pieces, 6 * CHUNK_SIZE, Sizes(4 * CHUNK_SIZE, 4 * CHUNK_SIZE))
    assert [slab.plan.chunks.tolist() for slab in slabs] == [[1], [2, 5]]
    slabs = check_gathers(pieces, 6 * CHUNK_SIZE, Sizes(3 * CHUNK_SIZE, 3 * CHUNK_SIZE))
    assert [slab.plan.chunks.tolist() for slab in slabs] == [[1], [1], [2, 5]]


def test_a_gather_of_nothing_has_no_slab():
    nothing = GatherPlan(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty((0, 3), np.int64))
    assert not list(gathers_of(nothing, 100, Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE)))


# What fills them.


@pytest.fixture(scope="module")
def plain():
    return np.random.default_rng(0).integers(0, 256, 20 * CHUNK_SIZE + 5, dtype=np.uint8)


@pytest.fixture(scope="module")
def sealed(plain):
    return fastrack.seal(plain, Key.generate())


STAGED = Sizes(CHUNK_SIZE, 4 * CHUNK_SIZE)


def test_the_slabs_of_a_sealed_tensor_are_taken_where_they_lie(sealed):
    source = SealedSource(sealed)
    slabs = [source.fill(slab, None) for slab in source.slabs(STAGED)]
    assert len(slabs) > 3
    assert all(np.shares_memory(slab, sealed.chunks) for slab in slabs)
    assert np.array_equal(np.concatenate(slabs), sealed.chunks)


def test_a_message_that_is_not_staged_is_one_slab(sealed):
    for source in (SealedSource(sealed), RowSource(*sealed[:5].slices())):
        (slab,) = source.slabs(None)
        found = source.fill(slab, None)
        assert found.ctypes.data == sealed.chunks.ctypes.data
        assert found.size == slab.sealed_size == sealed.chunks.size


def test_rows_come_with_the_message_that_holds_them(sealed):
    rows = np.array([0, 3, 3, 9, 10, 11, 20]) * CHUNK_SIZE + [0, 0, 1, 0, 0, 0, 4]
    source = RowSource(*sealed[rows].slices())
    slabs = list(source.slabs(STAGED))
    assert all(source.fill(slab, None) is source.memory for slab in slabs)
    assert [number for slab in slabs for number in slab.plan.chunks.tolist()] == [0, 3, 9, 10, 11, 20]


def test_a_plain_tensor_is_sealed_on_the_way(plain):
    slot = np.zeros(ciphertext_size(4 * CHUNK_SIZE), np.uint8)
    key = MessageKey.raw(bytes(32), bytes(12))
    source = PlainSource(plain, key, get_engine())
    opener = get_engine().expand_key(key)
    opened = np.zeros_like(plain)
    for slab in source.slabs(STAGED):
        staged = source.fill(slab, slot)
        assert get_engine().open_run(opener, staged, opened[slab.start : slab.stop], slab.first_chunk) is None
    assert np.array_equal(opened, plain)
    source.finish()
    with pytest.raises(fastrack.ClosedError):
        source.fill(next(slabs_of(plain.size, STAGED)), slot)
