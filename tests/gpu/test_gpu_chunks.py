"""The tests of tests/kernels/test_cu_chunks.py, by the device rather than by its shim."""

from __future__ import annotations

from test_cu_chunks import *  # noqa: F403
from test_cu_chunks import test_no_kernel_leaves_a_secret_in_shared_memory as _needs_the_shim

del test_no_kernel_leaves_a_secret_in_shared_memory, _needs_the_shim  # noqa: F821 - nothing else shows shared memory
