"""The tests of tests/kernels/test_cu_gather.py, by the device rather than by its shim."""

from __future__ import annotations

from test_cu_gather import *  # noqa: F403
