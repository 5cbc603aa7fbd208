"""The shim itself: what it computes, and that it finds what it is there to find."""

from contextlib import nullcontext

import numpy as np
import pytest
from helpers.buffers import Fenced
from helpers.cases import each
from helpers.kernel_host import SHIM, LaunchError, Library

THREADS = 96
SEEDS = [0, 1, 2, 3]
DIVERGENT = r"a divergent wait in block 0: .* waits for {} at selftest.cu:\d+"


@pytest.fixture(scope="module")
def library(build):
    return Library.load(build(SHIM / "selftest.cu"))


def words(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)


def run(library, kernel, *arguments, threads=THREADS, **options):
    """Launch with every array in a buffer between fences; those after the first `out` come back."""
    buffers = [_fenced(argument) if isinstance(argument, np.ndarray) else argument for argument in arguments]
    plain = [b.data if isinstance(b, Fenced) else b for b in buffers]
    library.launch(kernel, *plain, threads=threads, **options)
    for argument, buffer in zip(arguments, buffers, strict=True):
        if isinstance(argument, np.ndarray):
            assert buffer.stands
            if argument.flags.writeable:
                argument[:] = buffer.data.view(argument.dtype)


def _fenced(array):
    fenced = Fenced.holding(array.tobytes(), 16)
    fenced.data.flags.writeable = array.flags.writeable
    return fenced


def given(array):
    array.flags.writeable = False
    return array


def out(count, dtype=np.uint32):
    return np.zeros(count, dtype)


# Arithmetic


@pytest.mark.slow
def test_a_byte_permutation_takes_the_bytes_that_its_selectors_name(library):
    x, y, selectors = words(999, 1), words(999, 2), words(999, 3)
    result = out(999)
    run(library, "permute", given(x), given(y), given(selectors), result, 999)
    for a, b, s, got in zip(x.tolist(), y.tolist(), selectors.tolist(), result.tolist(), strict=True):
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        # Bit 3 of a selector is not looked at.
        assert got == int.from_bytes([source[s >> 4 * place & 7] for place in range(4)], "little")


def test_a_funnel_shift_shifts_by_less_than_a_word(library):
    low, high, shifts = words(999, 4), words(999, 5), words(999, 6)
    shifts[:70] = np.arange(70)
    result = out(2 * 999)
    run(library, "funnel", given(low), given(high), given(shifts), result, 999)
    for i, (a, b, shift) in enumerate(zip(low.tolist(), high.tolist(), shifts.tolist(), strict=True)):
        both = b << 32 | a
        assert result[2 * i] == (both << (shift & 31) >> 32) & 0xFFFFFFFF
        assert result[2 * i + 1] == both >> (shift & 31) & 0xFFFFFFFF


def test_bits_are_reversed_counted_and_found(library):
    x = np.concatenate([words(200, 7), np.array([0, 1, 2**31, 2**32 - 1], np.uint32)])
    result = out(3 * x.size)
    run(library, "count_bits", given(x), result, x.size)
    for value, got in zip(x.tolist(), result.reshape(-1, 3).tolist(), strict=True):
        text = f"{value:032b}"
        assert got == [int(text[::-1], 2), text.count("1"), text[::-1].find("1") + 1]


def test_a_dot_product_sums_the_products_of_bytes(library):
    x, y, sums = words(999, 12), words(999, 13), words(999, 14)
    result = out(999)
    run(library, "dot", given(x), given(y), given(sums), result, 999)
    products = x.view(np.uint8).astype(np.uint64) * y.view(np.uint8)
    assert result.tolist() == ((products.reshape(-1, 4).sum(axis=1) + sums) & 0xFFFFFFFF).tolist()


# Warps


@each("seed", SEEDS)
@each("width", [2, 8, 32])
@each("lane", [0, 1, 5, 16, 31])
def test_a_shuffle_takes_the_value_of_the_lane_it_names(library, lane, width, seed):
    values = words(THREADS, 8)
    result = out(2 * THREADS)
    run(library, "shuffle", given(values), result, lane, width, seed=seed)
    for i, (named, crossed) in enumerate(result.reshape(-1, 2)):
        start = i // width * width
        assert named == values[start + lane % width]
        other = i // 32 * 32 + (i % 32 ^ lane)
        assert crossed == values[other if other < start + width else i]


def test_a_shuffle_moves_eight_bytes_too(library):
    values = np.random.default_rng(9).integers(0, 2**63, THREADS, dtype=np.uint64)
    result = out(THREADS, np.uint64)
    run(library, "shuffle_wide", given(values), result)
    assert result.tolist() == np.repeat(values[3::32], 32).tolist()


@each("seed", SEEDS)
def test_votes_count_every_lane_of_the_warp(library, seed):
    values = words(THREADS, 10)
    values[40] = 7
    result = out(3 * THREADS)
    run(library, "vote", given(values), result, seed=seed)
    for i, got in enumerate(result.reshape(-1, 3).tolist()):
        warp = values[i // 32 * 32 : i // 32 * 32 + 32]
        ballot = sum(int(value & 1) << lane for lane, value in enumerate(warp))
        assert got == [np.bitwise_xor.reduce(warp), ballot, int(32 <= i < 64)]


def test_halves_of_a_warp_vote_apart(library):
    values = words(THREADS, 11)
    result = out(THREADS)
    run(library, "vote_by_halves", given(values), result)
    assert result.tolist() == np.repeat(np.bitwise_xor.reduce(values.reshape(-1, 16), axis=1), 16).tolist()


@each(
    ("kernel", "complaint"),
    [
        *((kernel, DIVERGENT.format("lanes ffffffff")) for kernel in ("vote_without_lane_five", "vote_at_two_places")),
        *((kernel, "names the wrong lanes") for kernel in ("vote_for_others", "ask_a_lane_outside")),
    ],
)
def test_a_vote_that_a_lane_never_joins_or_that_names_the_wrong_lanes_is_an_error(library, kernel, complaint):
    with pytest.raises(LaunchError, match=complaint):
        run(library, kernel, out(THREADS))


# Barriers


@each("kernel", ["barrier_for_some", "barrier_at_two_places", "barrier_or_vote"])
def test_a_divergent_barrier_is_an_error(library, kernel):
    with pytest.raises(LaunchError, match=DIVERGENT.format("the block")):
        run(library, kernel)


@each("seed", SEEDS)
@each(("barrier", "step", "threads"), [(2, 40, THREADS), (1, 5, 32)])  # of the block, and of a warp that reads its own
def test_a_barrier_makes_every_write_visible(library, barrier, step, threads, seed):
    result = out(threads)
    run(library, "rotate", result, barrier, step, shared=4 * threads, threads=threads, seed=seed)
    assert result.tolist() == np.roll(np.arange(threads), -step).tolist()


@each("seed", SEEDS)
@each(("barrier", "step"), [(0, 1), (0, 40), (1, 40)])
def test_a_missing_barrier_is_found_in_any_order(library, barrier, step, seed):
    race = r"thread \d+ of block 0 (reads what another writes|writes what another reads)"
    with pytest.raises(LaunchError, match=race):
        run(library, "rotate", out(THREADS), barrier, step, shared=4 * THREADS, seed=seed)


@each("seed", SEEDS)
def test_overwriting_what_others_still_read_is_found_in_any_order(library, seed):
    run(library, "overwrite", out(THREADS), 1, shared=16, seed=seed)
    with pytest.raises(LaunchError, match=r"what another (reads|writes)"):
        run(library, "overwrite", out(THREADS), 0, shared=16, seed=seed)


def test_two_blocks_that_write_one_word_are_found(library):
    run(library, "write_one_word", out(1), grid=1)
    with pytest.raises(LaunchError, match="thread 0 of block 1 writes what another wrote"):
        run(library, "write_one_word", out(1), grid=2)


# Memory


def stopped(message):
    """Expect a launch that is stopped with this message, or a good one where it is None."""
    return nullcontext() if message is None else pytest.raises(LaunchError, match=message)


@each("writes", [0, 1])
@each(("offset", "fits"), [(0, True), (99, True), (100, False), (5000, False), (2**64 - 1, False)])
def test_shared_memory_ends_where_it_was_declared_to_end(library, offset, fits, writes):
    complaint = None if fits else r"thread 0 of block 0 (reads|writes) out of bounds: 1 bytes"
    with stopped(complaint):
        run(library, "touch_shared", out(1), offset, writes, shared=100)


@each("writes", [0, 1])
@each(("offset", "fits"), [(0, True), (12, True), (13, False), (2**64 - 1, False)])
def test_a_buffer_ends_where_it_ends(library, offset, fits, writes):
    with stopped(None if fits else "out of bounds"):
        run(library, "touch", out(13, np.uint8), out(1, np.uint8), offset, writes)


def test_what_is_only_to_be_read_is_not_written(library):
    run(library, "touch", given(out(13, np.uint8)), out(1, np.uint8), 5, 0)
    with pytest.raises(LaunchError, match="writes what is not its own: 1 bytes of buffer 0, offset 5"):
        run(library, "touch", given(out(13, np.uint8)), out(1, np.uint8), 5, 1)


@each("offset", [0, 16, 8, 1, 32, 48])
def test_sixteen_bytes_are_read_at_once_only_where_they_lie_aligned_and_whole(library, offset):
    outside = {32: "out of bounds|over the end", 48: "out of bounds"}.get(offset)
    with stopped("misaligned" if offset % 16 else outside):
        run(library, "load_sixteen", given(out(40, np.uint8)), out(1, np.uint8), offset)


def test_an_address_in_shared_memory_leads_there_and_no_further(library):
    result = out(1)
    run(library, "convert", result, 9, shared=10)
    assert result.tolist() == [77]
    with pytest.raises(LaunchError, match="out of bounds"):
        run(library, "convert", result, 10, shared=10)


def test_shared_memory_starts_with_other_noise_in_every_block_and_launch(library):
    first, second = out(2 * 1003, np.uint8), out(2 * 1003, np.uint8)
    run(library, "show_shared", first, 1003, grid=2, shared=1003, seed=1)
    run(library, "show_shared", second, 1003, grid=2, shared=1003, seed=2)
    noises = [*first.reshape(2, -1), *second.reshape(2, -1)]
    assert all((a != b).mean() > 0.95 for i, a in enumerate(noises) for b in noises[:i])


def test_atomics_count_every_thread_of_the_grid(library):
    result = np.array([2**64 - 1, 0, 0, 0], np.uint64)
    run(library, "count", result, grid=3)
    assert result.tolist() == [0, 3 * THREADS, 2**64 - 1, 9]


def test_the_seed_sets_the_order_of_the_threads(library):
    orders = {}
    for seed in (0, 1, 2, 3, 2):
        result = out(THREADS)
        run(library, "line_up", out(1), result, seed=seed)
        assert sorted(result) == list(range(THREADS))
        assert orders.setdefault(seed, result.tolist()) == result.tolist()
    assert orders[0] == list(range(THREADS))
    assert orders[1] == orders[0][::-1]
    assert len({tuple(order) for order in orders.values()}) == 4


# Named barriers


@each("seed", SEEDS)
def test_a_named_barrier_is_met_at_two_places_and_orders_memory(library, seed):
    result = out(THREADS)
    run(library, "meet_at_two_places", result, shared=4 * THREADS, seed=seed)
    assert result.tolist() == [(thread + 64) % THREADS for thread in range(THREADS)]


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [("meet_at_two_barriers", "divergent wait"), ("meet_with_some", "meets 64 threads at barrier 1")],
)
def test_a_named_barrier_that_some_threads_miss_is_found(library, kernel, complaint):
    with pytest.raises(LaunchError, match=complaint):
        run(library, kernel)
