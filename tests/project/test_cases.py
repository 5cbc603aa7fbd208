"""Test that grids of cases fail where one of their cases does, and tell which."""

import inspect

import pytest
from helpers.cases import each


def test_a_grid_runs_every_case_with_the_fixtures_of_one_test():
    seen = []

    @each("x", [1, 2])
    @each(("y", "z"), [(3, 4), (5, 6)])
    def grid(fixture, x, y, z):
        seen.append((fixture, x, y, z))

    assert list(inspect.signature(grid).parameters) == ["fixture"]
    grid(fixture=0)
    assert seen == [(0, 1, 3, 4), (0, 1, 5, 6), (0, 2, 3, 4), (0, 2, 5, 6)]


def test_the_case_that_fails_is_told_and_ends_the_test():
    seen = []

    @each("size", [1, 2, 3])
    def grid(size):
        seen.append(size)
        assert size != 2

    with pytest.raises(AssertionError) as caught:
        grid()
    assert caught.value.__notes__ == ["in case 1: {'size': 2}"]
    assert seen == [1, 2]


def test_a_grid_without_cases_is_refused():
    with pytest.raises(ValueError, match="cases of size, got none"):
        each("size", [])
