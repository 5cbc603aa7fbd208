"""The order of a stream: each sample once, mixed within windows of files, and no table of samples."""

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastrack._training.order import Order, permute

SIZES = np.array([70, 0, 120, 33, 1, 90, 64, 0, 5, 210, 17])
ENDS = np.cumsum(SIZES)
COUNT = int(ENDS[-1])
PINNED = [2, 9, 15, 12, 11, 3, 17, 0, 1, 14, 16, 10, 18, 4, 13, 19, 8, 5, 7, 6]


def order_of(ends=ENDS, seed=3, epoch=0, window=4):
    return Order(np.asarray(ends), seed, epoch, window)


def epoch_of(**options):
    return order_of(**options).samples(0, COUNT)


@given(st.integers(1, 3000), st.lists(st.integers(0, 2**64 - 1), min_size=8, max_size=8))
def test_a_permutation_maps_no_two_numbers_to_one(count, words):
    images = permute(np.arange(count), count, np.array(words, np.uint64))
    assert np.array_equal(np.sort(images), np.arange(count))


@pytest.mark.parametrize("window", [1, 2, 4, 11, 100])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_has_each_sample_once(window, epoch):
    assert np.array_equal(np.sort(epoch_of(window=window, epoch=epoch)), np.arange(COUNT))


@pytest.mark.parametrize("size", [1, 7, 64, COUNT - 1])
def test_pieces_of_any_size_make_the_same_order(size):
    order = order_of()
    pieces = [order.samples(start, min(start + size, COUNT)) for start in range(0, COUNT, size)]
    assert np.array_equal(np.concatenate(pieces), epoch_of())


def test_samples_are_mixed_within_windows_of_files_and_not_beyond():
    shards = np.searchsorted(ENDS, epoch_of(window=4), side="right")
    borders = [0]  # where all that came before are whole files
    borders += [stop for stop in range(1, COUNT + 1) if SIZES[list(set(shards[:stop]))].sum() == stop]
    windows = [shards[start:stop] for start, stop in pairwise(borders)]
    assert len(windows) <= 3
    assert all(len(set(window)) <= 4 for window in windows)
    assert all(np.count_nonzero(np.diff(window)) > len(window) / 3 for window in windows)


def test_epochs_seeds_and_places_are_not_correlated():
    ends = np.cumsum(np.full(50, 400))
    orders = [order_of(ends, seed, epoch, 50).samples(0, 20_000) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    compared = [np.arange(20_000), *orders]
    matrix = np.corrcoef(compared) - np.eye(len(compared))
    assert np.abs(matrix).max() < 4 / 20_000**0.5
    for order in orders:
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / 20_000**0.5
        assert np.count_nonzero(np.abs(np.diff(order)) == 1) < 10  # two are expected
        assert np.count_nonzero(order == np.arange(20_000)) < 10  # one is expected


@pytest.mark.parametrize("ends", [[10], np.arange(1, 11)], ids=["samples", "files"])
def test_each_sample_comes_at_each_place_equally_often(ends):
    runs = 400
    table = np.zeros((10, 10))
    for seed in range(runs):
        table[np.arange(10), order_of(ends, seed, 0, 1).samples(0, 10)] += 1
    chi_square = ((table - runs / 10) ** 2 / (runs / 10)).sum()
    assert chi_square < 81 + 4 * (2 * 81) ** 0.5  # 81 degrees of freedom


def test_windows_of_equal_sizes_are_permuted_differently():
    order = order_of(np.cumsum(np.full(6, 20)), 5, 0, 2).samples(0, 120).reshape(3, 40)
    shards = [tuple(row // 20) for row in order]
    assert len({tuple(np.argsort(row)) for row in order}) == 3
    assert all(len(set(row)) == 2 for row in shards)


def test_the_order_is_the_one_that_saved_states_mean():
    """A change of these numbers is a change of the meaning of every saved state."""
    assert order_of([5, 9, 20], 7, 1, 2).samples(0, 20).tolist() == PINNED
    assert Counter(PINNED) == Counter(range(20))


def test_memory_does_not_depend_on_the_number_of_samples():
    ends = np.cumsum(np.full(1000, 10**8))
    tracemalloc.start()
    order = order_of(ends, 1, 0, 16)
    order.samples(10**10, 10**10 + 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * 1000  # bytes a file
