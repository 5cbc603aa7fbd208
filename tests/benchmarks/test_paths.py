"""The reference path is slow, not wrong."""

from itertools import product

import numpy as np
import pytest

from fastrack import AuthenticationError
from fastrack._bench.paths import BouncePath, ParallelBouncePath

PATHS = (BouncePath, ParallelBouncePath)


def test_both_forms_deliver_what_they_were_given():
    for path, bits, size in product(PATHS, (128, 256), (1, 16384, 100_000)):
        plain = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        bounce = path(size, bits)
        for move, given in ((bounce.sealed_to_device, bounce.seal(plain)), (bounce.plain_to_device, plain)):
            out = np.zeros(size, np.uint8)
            move(given, out)
            assert np.array_equal(out, plain), (path, bits, size)


def test_both_forms_refuse_an_altered_message():
    for path in PATHS:
        bounce = path(100_000)
        message = bounce.seal(np.ones(100_000, np.uint8))
        message[50_000] ^= 1
        with pytest.raises(AuthenticationError, match="altered"):
            bounce.sealed_to_device(message, np.zeros(100_000, np.uint8))


def test_the_session_side_never_uses_a_nonce_twice():
    bounce = ParallelBouncePath(1000)
    seen = set()
    for _ in range(20):
        bounce.plain_to_device(np.zeros(1000, np.uint8), np.zeros(1000, np.uint8))
        seen.add(bytes(bounce._session.nonce))
    assert len(seen) == 20
