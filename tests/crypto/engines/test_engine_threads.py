"""Many threads, forks, a process that exits: an engine gives the same answers, and no thread waits forever."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import reference
from helpers.boxes import all_boxes
from helpers.buffers import as_array
from helpers.forking import in_forked_child
from helpers.processes import run_python
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import Runs, flip

from fastrack._crypto import workers


@pytest.mark.slow
def test_sixteen_threads_share_an_engine(make_engine):
    engine = make_engine(4)

    def work(number):
        key, first = bytes([number]) * (16 if number % 2 else 32), number * 2**33
        plain = noise(CHUNK_SIZE * (5 * number + 40) + number, seed=number).tobytes()
        runs = Runs(engine, key)
        sealed = runs.seal(plain, first)
        answers = [sealed == reference.seal(key, bytes(12), plain, first)]
        for turn in range(5):
            answers.append(runs.open(sealed, first) == (None, plain))
            bad, _ = runs.open(flip(sealed, 8 * SEALED_CHUNK_SIZE * turn), first)
            answers.append(bad == first + turn)
            answers.append(runs.open(sealed, first + 1) == (first + 1, bytes(len(plain))))
        return all(answers)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(16))) == [True] * 16


# Forks


def test_a_forked_child_starts_its_own_threads(make_engine):
    runs = Runs(make_engine(4), bytes(32))
    plain = noise(8 * 1024**2).tobytes()
    sealed = runs.seal(plain)
    assert runs.open(sealed) == (None, plain)
    altered = flip(sealed, 8 * SEALED_CHUNK_SIZE * 300)

    def work():
        alone = {box.state for box in all_boxes()} == {workers.NONE}
        right = runs.open(sealed) == (None, plain) and runs.open(altered)[0] == 300
        helped = {box.state for box in all_boxes()} == {workers.NONE, workers.FREE}
        return alone and right and helped == (runs.engine.threads > 1 < workers.default_threads())

    assert [in_forked_child(work) for _ in range(3)] == [True] * 3
    assert runs.open(sealed) == (None, plain)


@pytest.mark.slow
def test_a_child_forked_in_the_middle_of_a_run_is_right_too(make_engine):
    runs = Runs(make_engine(4), bytes(32))
    plain = noise(8 * 1024**2).tobytes()
    sealed = runs.seal(plain)
    over = threading.Event()

    def keep_opening():
        answers = [runs.open(sealed) == (None, plain)]
        while not over.is_set():
            answers.append(runs.open(sealed) == (None, plain))
        return all(answers)

    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(keep_opening)
        try:
            in_children = [in_forked_child(lambda: runs.open(sealed) == (None, plain)) for _ in range(5)]
        finally:
            over.set()
    assert in_children == [True] * 5
    assert here.result()


def test_a_run_while_the_interpreter_exits_is_done_by_the_caller_alone():
    code = """
import atexit
import numpy as np
from fastrack._crypto import cobblestone, engine as engines

opener = engines.get_engine(threads=4)
schedule = opener.expand_key(cobblestone.MessageKey.raw(bytes(32), bytes(12)))
plain = np.arange(8 * 1024**2, dtype=np.uint8)
sealed = np.empty(plain.size + 16 * 512, np.uint8)
opener.seal_run(schedule, plain, sealed, 0)

@atexit.register
def last():
    out = np.empty_like(plain)
    print(opener.open_run(schedule, sealed, out, 0), (out == plain).all())
"""
    assert run_python(code) == "None True\n"


def test_a_caller_waits_for_a_worker_that_is_still_at_work(make_engine):
    # More threads than CPUs, and a last grain that any of them may hold when the caller runs out of work.
    runs = Runs(make_engine(32), bytes(16))
    plain = noise(600 * CHUNK_SIZE).tobytes()
    sealed = as_array(runs.seal(plain))
    out = np.empty(len(plain), np.uint8)
    for _ in range(30):
        out.fill(0)
        assert runs.engine.open_run(runs.schedule, sealed, out, 0) is None
        assert out.tobytes() == plain
