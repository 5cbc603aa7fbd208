"""Copy ciphertext within host memory, for measurements of what a copy costs.

A copy is one native call on several threads, as one thread reaches a fifth of the bandwidth of PCIe. Importing this
module imports numba, which takes a third of a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastrack._crypto import workers
from fastrack._crypto.base import Bytes, address, check_buffers
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._crypto.forms import is_compiling
from fastrack._crypto.jit import _DONE, compiled, copy_bytes, fetch_add, source_digest, wait_until_done

PARALLEL_THRESHOLD = (512 << 10) // CHUNK_SIZE  # chunks that one thread copies before another has woken up


def copy(target: Bytes, source: Bytes, threads: int) -> None:
    """Copy `source` to `target`, on up to `threads` threads.

    Raise ValueError if their sizes differ, or `check_buffers` raises.
    """
    check_buffers(source, target)
    if target.size != source.size:
        raise ValueError(f"expected a target buffer of {source.size} bytes, got {target.size}")
    count = -(-target.size // SEALED_CHUNK_SIZE)
    if threads == 1 or count < PARALLEL_THRESHOLD or not is_compiling():
        np.copyto(target, source)
        return
    arguments = (address(source), address(target), count, source.size)
    workers.run(_kernel, arguments, count, threads, (source, target), threshold=PARALLEL_THRESHOLD)


def _build(digest: str) -> Any:
    def copy_chunks(source: int, target: int, count: int, size: int, grain: int, counters: int, wait: bool) -> None:
        assert digest  # so that the compiled copy on disk depends on it
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            offset = start * SEALED_CHUNK_SIZE
            copy_bytes(target + offset, source + offset, min((stop - start) * SEALED_CHUNK_SIZE, size - offset))
            fetch_add(counters + _DONE, stop - start)
        if wait:
            wait_until_done(counters, count)

    return compiled(copy_chunks)


_kernel = _build(source_digest())
