"""Another process writes to the ciphertext while it is opened or sealed: what was verified is what comes out."""

import time
from collections import Counter

import numpy as np
import pytest
from helpers import reference
from helpers.meddler import shared_with_a_meddler
from helpers.messages import messages_of, raw_key
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE, noise
from helpers.runs import Runs, plan

KEY = bytes(range(32))
# Whole groups, whole blocks and a part of one: every way in which an engine reads.
PLAIN = noise(3 * CHUNK_SIZE + 20 * 16 + 5)
SEALED = reference.seal(KEY, bytes(12), PLAIN.tobytes())
PLACES = [9000, SEALED_CHUNK_SIZE + 100, 2 * SEALED_CHUNK_SIZE + CHUNK_SIZE - 1, 3 * SEALED_CHUNK_SIZE + 20 * 16 + 2]
ROUNDS, PATIENCE = 800, 60.0


@pytest.fixture
def runs(engine_under_test):
    return Runs(engine_under_test, KEY)


def verdicts(opened):
    """Judge each chunk: "opened", "refused" (zeros), or "forged" if it is neither."""
    for start in range(0, PLAIN.size, CHUNK_SIZE):
        place, truth = opened[start : start + CHUNK_SIZE], PLAIN[start : start + CHUNK_SIZE]
        yield "opened" if np.array_equal(place, truth) else "forged" if place.any() else "refused"


def tally(attempt):
    """Attempt it over and over, until both verdicts were seen so often that the meddler must have been at it."""
    seen, rounds, deadline = Counter(), 0, time.monotonic() + PATIENCE
    while rounds < ROUNDS or not (seen["opened"] > 50 and seen["refused"] > 50):
        seen.update(verdicts(attempt()))
        rounds += 1
        assert time.monotonic() < deadline, f"the other process hardly ran: {seen}"
    return seen


def test_ciphertext_that_changes_while_it_is_opened_gives_plaintext_or_zeros(runs, tmp_path):
    out = np.empty(PLAIN.size, np.uint8)
    with shared_with_a_meddler(tmp_path / "sealed", SEALED, PLACES) as source:

        def attempt():
            bad = runs.engine.open_run(runs.schedule, source, out, 0)
            refused = [chunk for chunk, verdict in enumerate(verdicts(out)) if verdict != "opened"]
            assert bad == (refused[0] if refused else None)
            return out

        assert tally(attempt)["forged"] == 0


def test_ciphertext_that_changes_while_it_is_gathered_gives_plaintext_or_zeros(runs, tmp_path):
    out = np.empty(PLAIN.size, np.uint8)
    halves = [(start, 5000) for start in range(0, PLAIN.size - 5000, 5000)]
    pieces, size = plan([*halves, (halves[-1][0] + 5000, PLAIN.size - halves[-1][0] - 5000)])
    assert size == PLAIN.size
    with shared_with_a_meddler(tmp_path / "sealed", SEALED, PLACES) as source:

        def attempt():
            runs.engine.open_gather(runs.schedule, source, out, pieces)
            return out

        assert tally(attempt)["forged"] == 0


def test_ciphertext_that_changes_while_many_messages_are_opened_gives_plaintext_or_zeros(engine_under_test, tmp_path):
    pieces, size = plan([(0, 9000), (9000, PLAIN.size - 9000)])
    assert size == PLAIN.size
    out = np.empty((3, PLAIN.size), np.uint8)
    with shared_with_a_meddler(tmp_path / "sealed", SEALED, PLACES) as source:

        def attempt():
            plans = [None, pieces, None]
            messages = messages_of([raw_key(KEY)] * 3, [PLAIN.size] * 3, out, sealed=[source] * 3, plans=plans)
            bad = engine_under_test.open_jobs(messages)
            found = [((n, chunk), v) for n, opened in enumerate(out) for chunk, v in enumerate(verdicts(opened))]
            assert bad == next((place for place, verdict in found if verdict != "opened"), None)
            assert "forged" not in {verdict for _, verdict in found}
            return out[0]

        tally(attempt)


@pytest.mark.slow
def test_ciphertext_that_changes_while_it_is_written_is_refused_or_opens_as_it_was(runs, tmp_path):
    # An engine that read back what it wrote would put its tag under what the other process made of it.
    out = np.empty(PLAIN.size, np.uint8)
    with shared_with_a_meddler(tmp_path / "sealed", bytes(len(SEALED)), [*PLACES, PLACES[0] + 32]) as target:
        assert target.size == PLAIN.size + 4 * TAG_SIZE

        def attempt():
            runs.engine.seal_run(runs.schedule, PLAIN, target, 0)
            runs.engine.open_run(runs.schedule, target.copy(), out, 0)
            return out

        assert tally(attempt)["forged"] == 0
