"""Compiled code is kept where it can be, and fastrack works where it cannot."""

import pytest
from helpers.processes import run_python

from fastrack._crypto import engine

pytestmark = pytest.mark.skipif(engine.available_engines()[0] == "openssl", reason="this CPU has no vector engine")

WITHOUT_A_CACHE = """
import numpy as np
import fastrack
key = fastrack.Key.generate()
print(fastrack.unseal(fastrack.seal(np.arange(5), key), key, framework="numpy").tolist())
"""


@pytest.mark.slow
def test_nowhere_to_keep_compiled_code_is_no_obstacle():
    assert run_python(WITHOUT_A_CACHE, FASTRACK_CACHE_DIR="/proc/nothing") == "[0, 1, 2, 3, 4]\n"
