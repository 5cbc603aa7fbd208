"""Test the code that numba makes of the kernels that run on several threads at once."""

import re

import numpy as np
import pytest
from helpers import engines, reference
from helpers.buffers import as_array
from helpers.runs import Runs, plan

from fastrack._crypto import jit, workers


@pytest.mark.skipif(not engines.VECTOR_NAMES, reason="no vector engine here")
def test_a_gather_keeps_its_scratch_on_the_stack():
    # numba frees an array after the last use of its name, even if its address is still in use.
    engine = engines.make(engines.VECTOR_NAMES[-1])
    fresh = jit.build_others(*engine._later[1].arguments)["open_gather"]
    runs = Runs(engine, bytes(32))
    pieces, size = plan([(10, 20)])
    source = as_array(reference.seal(bytes(32), bytes(12), bytes(range(100))))
    target, counters = np.empty(size, np.uint8), np.zeros(workers.COUNTER_WORDS, np.int64)
    counters[workers.BAD] = workers.NONE_BAD
    arrays = [array.ctypes.data for array in (pieces.chunks, pieces.starts, pieces.table)]
    where = (source.ctypes.data, target.ctypes.data, *arrays, pieces.chunks.size, 100, 1)
    fresh(runs.schedule.bits, runs.schedule.address, *where, counters.ctypes.data)
    assert counters[workers.BAD] == workers.NONE_BAD
    assert target.tolist() == list(range(10, 30))
    (code,) = fresh.inspect_llvm().values()
    assert re.search(r"alloca (\[16400 x i8\]|i8, i\d+ 16400)", code)
    assert not [line for line in code.splitlines() if "NRT_" in line and "alloc" in line.lower()]
