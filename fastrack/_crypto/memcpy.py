"""Copy ciphertext to and from staging memory: whole segments, and chunks by their numbers.

A copy is one native call on several threads, as one thread reaches a fifth of the bandwidth of PCIe. Importing this
module imports numba, which takes a third of a second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fastrack._crypto import workers
from fastrack._crypto.base import Bytes, check_buffers
from fastrack._crypto.cobblestone import CHUNK_SIZE, SEALED_CHUNK_SIZE
from fastrack._crypto.jit import _DONE, compiled, copy_bytes, fetch_add, source_digest, wait_until_done
from fastrack._crypto.vaes import address, is_compiling

PARALLEL_THRESHOLD = (512 << 10) // CHUNK_SIZE  # chunks that one thread copies before another has woken up


def copy(target: Bytes, source: Bytes, threads: int) -> None:
    """Copy `source` to `target`, on up to `threads` threads.

    Raises
    ------
    ValueError
        If their sizes differ, or `check_buffers` raises.
    """
    check_buffers(source, target)
    if target.size != source.size:
        raise ValueError(f"expected a target buffer of {source.size} bytes, got {target.size}")
    if threads == 1 or target.size < PARALLEL_THRESHOLD * SEALED_CHUNK_SIZE or not is_compiling():
        np.copyto(target, source)
        return
    chunks = np.arange(-(-target.size // SEALED_CHUNK_SIZE), dtype=np.int64)
    _copy_chunks(target, source, chunks, threads)


def pack(target: Bytes, source: Bytes, chunks: npt.NDArray[np.int64], threads: int) -> None:
    """Copy the chunks of these numbers next to each other, on up to `threads` threads.

    Parameters
    ----------
    target : numpy.ndarray
        uint8, as many bytes as the chunks have.
    source : numpy.ndarray
        uint8, a message without its header.
    chunks : numpy.ndarray
        int64 (n,). The last chunk of the message, which may be shorter, must be the last of them.

    Raises
    ------
    ValueError
        If `source` lacks one of the chunks, `target` has another size, or `check_buffers` raises.
    """
    check_buffers(source, target)
    _check_chunks(chunks, target.size, source.size)
    if not is_compiling():
        for index, chunk in enumerate(chunks.tolist()):
            target[index * SEALED_CHUNK_SIZE : (index + 1) * SEALED_CHUNK_SIZE] = source[
                chunk * SEALED_CHUNK_SIZE : (chunk + 1) * SEALED_CHUNK_SIZE
            ]
        return
    _copy_chunks(target, source, chunks, threads)


def _copy_chunks(target: Bytes, source: Bytes, chunks: npt.NDArray[np.int64], threads: int) -> None:
    arguments = (address(source), address(target), chunks, source.size)
    workers.run(_kernel, arguments, chunks.size, threads, (source, target), threshold=PARALLEL_THRESHOLD)


def _check_chunks(chunks: npt.NDArray[np.int64], target: int, source: int) -> None:
    """Raise unless the chunks lie in `source` bytes and fill `target` bytes. Native code relies on this check."""
    if chunks.dtype != np.int64 or chunks.ndim != 1 or not chunks.flags.c_contiguous:
        raise ValueError("expected a one-dimensional, contiguous int64 array of chunk numbers")
    expected = 0
    if chunks.size:
        last = -(-source // SEALED_CHUNK_SIZE) - 1
        if chunks.min() < 0 or chunks.max() > last or bool((chunks[:-1] == last).any()):
            raise ValueError("expected chunks inside their message, with the last of the message at the end")
        expected = (chunks.size - 1) * SEALED_CHUNK_SIZE + min(
            SEALED_CHUNK_SIZE, source - int(chunks[-1]) * SEALED_CHUNK_SIZE
        )
    if expected != target:
        raise ValueError(f"expected a target buffer of {expected} bytes for these chunks, got {target}")


def _build(digest: str) -> Any:
    def copy_chunks(source: int, target: int, chunks: Any, size: int, grain: int, counters: int, wait: bool) -> None:
        assert digest  # so that the compiled copy on disk depends on it
        count = chunks.size
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            index = start
            while index < stop:
                chunk, after = chunks[index], index + 1
                while after < stop and chunks[after] - chunk == after - index:  # adjacent chunks are copied at once
                    after += 1
                offset = chunk * SEALED_CHUNK_SIZE
                copy_bytes(
                    target + index * SEALED_CHUNK_SIZE,
                    source + offset,
                    min((after - index) * SEALED_CHUNK_SIZE, size - offset),
                )
                index = after
            fetch_add(counters + _DONE, stop - start)
        if wait:
            wait_until_done(counters, count)

    return compiled(copy_chunks)


_kernel = _build(source_digest())
