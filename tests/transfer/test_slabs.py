"""Slabs: how messages and gathers are cut into them, and what fills them."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fastrack._crypto.gather import EvenRanges, GatherPlan
from fastrack._devices.cuda.gather_plan import room_for
from fastrack._sealed.indexing import plan_rows
from fastrack._transfer import slabs as slabs_module
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, ciphertext_size


@st.composite
def sizes(draw, least=1):
    limit = draw(st.integers(least, 40))
    return slabs_module.Sizes(draw(st.integers(1, limit)) * CHUNK_SIZE, limit * CHUNK_SIZE)


# Whole messages.


def runs_of(nbytes, sizes):
    """The segments of one message, each of which has a slab."""
    slabs = list(slabs_module.slabs_of([nbytes], [None], sizes))
    assert all(len(slab.segments) == 1 and slab.sealed_size == slab.segments[0].sealed_size for slab in slabs)
    return [slab.segments[0] for slab in slabs]


def gathers_of(pieces, nbytes, sizes):
    slabs = list(slabs_module.slabs_of([nbytes], [pieces], sizes))
    assert all(len(slab.segments) == 1 and slab.sealed_size == slab.segments[0].sealed_size for slab in slabs)
    return [slab.segments[0] for slab in slabs]


@settings(deadline=None)
@given(st.integers(0, 200), st.sampled_from([0, 1, CHUNK_SIZE - 1]), sizes())
def test_slabs_are_the_message_in_order(chunks, rest, sizes):
    nbytes = chunks * CHUNK_SIZE + rest
    start = sealed = 0
    segments = runs_of(nbytes, sizes)
    for segment in segments:
        assert (segment.message, segment.offset, segment.plan) == (0, 0, None)
        assert (segment.start, segment.first_chunk * SEALED_CHUNK_SIZE) == (start, sealed)
        assert segment.start == segment.first_chunk * CHUNK_SIZE
        start, sealed = segment.stop, sealed + segment.sealed_size
    assert (start, sealed) == (nbytes, ciphertext_size(nbytes))
    assert all(segment.sealed_size <= ciphertext_size(sizes.largest) for segment in segments)
    assert all(segment.stop > segment.start for segment in segments) or nbytes == 0


@st.composite
def messages(draw):
    """Sizes of messages, some of them gathers of a few ranges."""
    nbytes, plans = [], []
    for _ in range(draw(st.integers(1, 30))):
        size = draw(
            st.sampled_from([0, 1, 100, CHUNK_SIZE - 1, CHUNK_SIZE, 3 * CHUNK_SIZE, 5 * CHUNK_SIZE + 7, 40_000])
        )
        nbytes.append(size)
        rows = np.array(draw(st.lists(st.integers(0, max(0, size - 1)), max_size=9)), np.int64)
        plans.append(EvenRanges(rows, 1, 1).pieces() if size and draw(st.booleans()) else None)
    return nbytes, plans


@settings(deadline=None)
@given(messages(), sizes(least=2), st.sampled_from([0, 8, 100]))
@pytest.mark.slow
def test_many_messages_share_slabs_in_order_and_fit_into_a_buffer(messages, sizes, room):
    nbytes, plans = messages
    sizes = slabs_module.Sizes(sizes.first, sizes.largest, room)
    done, last = [0] * len(nbytes), -1
    for slab in slabs_module.slabs_of(nbytes, plans, sizes):
        end, tables = 0, 0
        assert slab.segments
        for number, first, start, stop, size, offset, plan in slab.segments:
            assert number >= last
            assert offset % 16 == 0
            assert offset >= end
            last, end = number, offset + size
            tables += room
            if plan is None:
                assert start == done[number] == first * CHUNK_SIZE
                assert size == stop - start + 16 * ((stop - start) // CHUNK_SIZE + (stop == nbytes[number]))
                assert stop > start or nbytes[number] == 0
                done[number] = stop
            else:
                assert (first, start, stop) == (0, 0, nbytes[number])
                assert size > 0
                tables += room_for(plan, size) - size
                done[number] += plan.chunks.size
        assert slab.sealed_size == end
        assert end + tables <= sizes.buffer_size
    expected = [size if plan is None else plan.chunks.size for size, plan in zip(nbytes, plans, strict=True)]
    assert done == expected


def test_many_small_messages_are_one_slab():
    (slab,) = slabs_module.slabs_of(
        [8192] * 100, [None] * 100, slabs_module.Sizes(64 * CHUNK_SIZE, 64 * CHUNK_SIZE, 64)
    )
    assert [segment.message for segment in slab.segments] == list(range(100))


def test_slabs_grow_by_half_up_to_the_limit():
    slabs = runs_of(20 * CHUNK_SIZE + 5, slabs_module.Sizes(CHUNK_SIZE, 6 * CHUNK_SIZE))
    assert [(slab.stop - slab.start) / CHUNK_SIZE for slab in slabs] == pytest.approx([1, 2, 3, 4, 6, 4], abs=0.001)


def test_a_lead_as_large_as_the_limit_makes_them_all_alike():
    slabs = runs_of(10 * CHUNK_SIZE, slabs_module.Sizes(4 * CHUNK_SIZE, 4 * CHUNK_SIZE))
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
        assert room_for(part, slab.sealed_size) <= room <= ciphertext_size(sizes.largest)
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
def test_gathers_are_the_plan_in_order_and_fit_into_a_buffer(plan, sizes):
    check_gathers(*plan, sizes)


@settings(deadline=None)
@given(st.integers(1, 3000), st.lists(st.integers(0, 2**20), max_size=200), sizes(least=2))
@example(1, [0] * 200, slabs_module.Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE))
def test_gathers_of_rows_are_their_plan_in_order_and_fit_into_a_buffer(width, rows, sizes):
    count = max(1, 300_000 // width)
    plan = plan_rows(np.array(rows, np.int64) % count, (count, width), count * width)
    check_gathers(plan.ranges().pieces(), count * width, sizes)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_chunk_is_split_exactly_where_it_does_not_fit(spare):
    # A buffer for two chunks holds one, 33 bytes for its number and its start, 333 pieces of 49 bytes, and 64 bytes.
    assert (ciphertext_size(2 * CHUNK_SIZE) - SEALED_CHUNK_SIZE - 33 - 64) // 49 == 333
    pieces = GatherPlan(np.array([4]), np.array([0, 333 + spare]), np.zeros((333 + spare, 3), np.int64))
    slabs = check_gathers(pieces, 5 * CHUNK_SIZE, slabs_module.Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE))
    assert [len(slab.plan.table) for slab in slabs] == ([333, 1] if spare == 1 else [333 + spare])


def test_a_plan_starts_at_a_multiple_of_sixteen_bytes_behind_a_short_chunk():
    pieces = GatherPlan(np.array([5]), np.array([0, 667]), np.zeros((667, 3), np.int64))
    slabs = check_gathers(pieces, 5 * CHUNK_SIZE + 33, slabs_module.Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE))
    assert [len(slab.plan.table) for slab in slabs] == [666, 1]


def test_what_is_left_of_a_split_chunk_shares_a_slab_with_those_that_follow():
    pieces = GatherPlan(np.array([1, 2, 5]), np.array([0, 1000, 1001, 1002]), np.zeros((1002, 3), np.int64))
    slabs = check_gathers(pieces, 6 * CHUNK_SIZE, slabs_module.Sizes(4 * CHUNK_SIZE, 4 * CHUNK_SIZE))
    assert [slab.plan.chunks.tolist() for slab in slabs] == [[1], [2, 5]]
    slabs = check_gathers(pieces, 6 * CHUNK_SIZE, slabs_module.Sizes(3 * CHUNK_SIZE, 3 * CHUNK_SIZE))
    assert [slab.plan.chunks.tolist() for slab in slabs] == [[1], [1], [2, 5]]


def test_a_gather_of_nothing_has_no_slab():
    nothing = GatherPlan(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty((0, 3), np.int64))
    assert not list(gathers_of(nothing, 100, slabs_module.Sizes(CHUNK_SIZE, 2 * CHUNK_SIZE)))
