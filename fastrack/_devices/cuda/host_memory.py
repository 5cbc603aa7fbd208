"""Choose the host memory for staging: page-locked, or pageable where the driver copies it faster.

CUDA documents page-locked memory as the faster kind, and as the only one whose copies do not block. In confidential
mode every copy blocks and passes through the driver's own encrypted buffers: there both are compared, once per device.
"""

from __future__ import annotations

import time
import warnings
from functools import cache
from statistics import median

import numpy as np

from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import CopySpeeds, Driver, PageLockedMemoryError
from fastrack.errors import DeviceError

SIZE = 4 << 20  # bytes of each of three buffers, as long as the probe lasts
_ROUNDS = 4  # the first is dropped
_SECONDS = 0.25  # after which no other round begins


def measure_copies(driver: Driver) -> CopySpeeds | None:
    """Copy from and to both kinds of memory, in turn, and return the median speeds; None if memory is short."""
    try:
        there, stream, event = driver.memory(SIZE), driver.stream(high_priority=True), driver.event()
        kinds = (driver.host(SIZE), np.empty(SIZE, np.uint8))
        for memory in kinds:
            memory.fill(1)  # no copy is to wait for the first use of a page
        rounds: list[tuple[float, ...]] = []
        stop = time.perf_counter() + _SECONDS
        while len(rounds) < _ROUNDS and (not rounds or time.perf_counter() < stop):
            taken = []
            for memory in kinds:
                commands = Commands()
                commands.upload(there.pointer, memory, stream)
                commands.download(memory, there.pointer, stream)
                commands.record(event, stream)
                commands.synchronize(event)
                start = time.perf_counter()
                driver.issue(commands)
                taken.append(time.perf_counter() - start)
            rounds.append(tuple(taken))
    except (DeviceError, MemoryError):
        return None
    page_locked, pageable = (2 * SIZE / median(times) / 1e9 for times in zip(*(rounds[1:] or rounds), strict=True))
    return CopySpeeds(page_locked, pageable)


def staging_memory(driver: Driver, size: int) -> Bytes:
    """Allocate host memory of a staging buffer. It holds ciphertext, and may be swapped out; keys may not.

    Where page-locked memory is short, it is pageable.
    """
    speeds = driver.copy_speeds
    if speeds is None or not speeds.prefers_pageable:
        try:
            return driver.host(size)
        except PageLockedMemoryError as error:
            _warn_once(str(error))
    return np.empty(size, np.uint8)


@cache  # once for each device, which the problem names
def _warn_once(problem: str) -> None:
    warnings.warn(f"{problem}. Transfers go on with pageable memory, which may be slower", RuntimeWarning, stacklevel=3)
