"""Copy ciphertext within host memory, to measure the cost of a copy.

A copy is one native call on several threads, since one thread reaches a fifth of the bandwidth of PCIe.
"""

from __future__ import annotations

import numpy as np

from fastrack._crypto import native, workers
from fastrack._crypto.base import Bytes, address, check_buffers
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

PARALLEL_THRESHOLD = (512 << 10) // CHUNK_SIZE  # chunks that one thread copies while another wakes up


def copy(target: Bytes, source: Bytes, threads: int) -> None:
    """Copy `source` to `target`, on up to `threads` threads.

    Raise ValueError if their sizes differ, or `check_buffers` raises.
    """
    check_buffers(source, target)
    if target.size != source.size:
        raise ValueError(f"expected a target buffer of {source.size} bytes, got {target.size}")
    count = -(-target.size // SEALED_CHUNK_SIZE)
    if threads == 1 or count < PARALLEL_THRESHOLD or native.load() is None:
        np.copyto(target, source)
        return
    arguments = (address(source), address(target), count, source.size)
    workers.run(
        native.functions().copy_chunks,
        arguments,
        count,
        threads,
        threshold=PARALLEL_THRESHOLD,
        waking_threshold=PARALLEL_THRESHOLD,
    )
