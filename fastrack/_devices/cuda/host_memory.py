"""Choose the host memory for staging: page-locked, or pageable where the driver copies it faster.

CUDA documents page-locked memory as the faster kind, and as the only one whose copies do not block. In confidential
mode every copy passes through the driver's own encrypted buffers. There both kinds are compared, once per device, for
each way by itself, in large copies and in small ones.
"""

from __future__ import annotations

import time
import warnings
from functools import cache
from itertools import product
from statistics import median

import numpy as np

from fastrack._crypto.base import Bytes
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import LARGE, SMALL, CopySpeeds, Driver, PageLockedMemoryError, Speeds
from fastrack.errors import DeviceError

_ROUNDS = 6  # the first is dropped
_SECONDS = 0.25  # after which no other round begins


def measure_copies(driver: Driver) -> CopySpeeds | None:
    """Make copies each way, of each kind of memory, in turn, and return the median speeds; None if memory is short."""
    try:
        there, stream, event = driver.memory(LARGE), driver.stream(high_priority=True), driver.event()
        kinds = (driver.host(LARGE), np.empty(LARGE, np.uint8))
        for memory in kinds:
            memory.fill(1)  # no copy is to wait for the first use of a page
        rounds: list[list[float]] = []
        stop = time.perf_counter() + _SECONDS
        while len(rounds) < _ROUNDS and (not rounds or time.perf_counter() < stop):
            speeds = []
            for is_upload, memory, size in product((True, False), kinds, (SMALL, LARGE)):
                commands = Commands()
                if is_upload:
                    commands.upload(there.pointer, memory[:size], stream)
                else:
                    commands.download(memory[:size], there.pointer, stream)
                commands.drain(stream, event)
                start = time.perf_counter()
                driver.issue(commands)
                speeds.append(size / (time.perf_counter() - start) / 1e9)
            rounds.append(speeds)
    except (DeviceError, MemoryError):
        return None
    medians = [median(speeds) for speeds in zip(*(rounds[1:] or rounds), strict=True)]
    pairs = list(zip(medians[::2], medians[1::2], strict=True))
    return CopySpeeds(Speeds(*pairs[:2]), Speeds(*pairs[2:]))


def staging_memory(driver: Driver, size: int, *, pageable: bool) -> Bytes:
    """Allocate host memory for copies. It holds ciphertext or verdicts, and may be swapped out.

    The key of a link lies there until the call that uploads it has ended. Where page-locked memory is short, it is
    pageable.
    """
    if not pageable:
        try:
            return driver.host(size)
        except PageLockedMemoryError as error:
            _warn_once(str(error))
    return np.empty(size, np.uint8)


@cache  # once for each device, which the problem names
def _warn_once(problem: str) -> None:
    warnings.warn(f"{problem}. Transfers go on with pageable memory, which may be slower", RuntimeWarning, stacklevel=3)
