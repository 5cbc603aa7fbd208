"""What numba makes of the kernels that run on several threads at once."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from helpers import engines, reference
from helpers.buffers import as_array
from helpers.runs import Runs, plan
from numba import njit

from fastrack._crypto import jit as kernels


@pytest.mark.skipif(not engines.VECTOR_NAMES, reason="no vector engine here")
def test_a_gather_keeps_its_scratch_on_the_stack():
    # numba frees an array as soon as its name is used no more, whoever still has its address.
    fresh = njit(nogil=True)(kernels.build(32, 16).open_gather.py_func)
    runs = Runs(engines.make("vaes-256-on-128"), bytes(32))
    pieces, size = plan([(10, 20)])
    source = as_array(reference.seal(bytes(32), bytes(12), bytes(range(100))))
    target, counters = np.empty(size, np.uint8), kernels.new_counters()
    where = (source.ctypes.data, target.ctypes.data, pieces.chunks, pieces.starts, pieces.table, 100, 1)
    fresh(runs.schedule.bits, runs.schedule.address, *where, counters.ctypes.data, True)
    assert (counters[kernels.DONE], counters[kernels.BAD]) == (1, kernels.NONE_BAD)
    assert target.tolist() == list(range(10, 30))
    (code,) = fresh.inspect_llvm().values()
    assert re.search(r"alloca (\[16384 x i8\]|i8, i\d+ 16384)", code)
    assert not [line for line in code.splitlines() if "NRT_" in line and "alloc" in line.lower()]


def test_a_new_board_has_all_tickets_and_nothing_bad():
    counters = kernels.new_counters()
    assert counters.size == kernels.COUNTER_WORDS
    assert (counters[kernels.NEXT], counters[kernels.BAD], counters[kernels.DONE]) == (0, kernels.NONE_BAD, 0)


def test_what_several_threads_count_lies_on_cache_lines_of_its_own():
    places = sorted([kernels.NEXT, kernels.BAD, kernels.DONE, kernels.COUNTER_WORDS])
    assert all(after - before >= 8 for before, after in pairwise(places))
