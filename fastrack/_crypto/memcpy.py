"""Ciphertext into staging memory and out of it again: whole runs, and chunks by their numbers.

On several threads, since one copies at a fifth of the speed of the bus behind it, and in one native call.
Importing this imports numba, which takes a third of a second.
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

PARALLEL_THRESHOLD = (512 << 10) // CHUNK_SIZE  # chunks that one thread has copied before another has woken up


def copy(target: Bytes, source: Bytes, threads: int) -> None:
    """Copy `source` to `target`, on at most so many threads.

    Raises
    ------
    ValueError
        If they differ in size, or are no buffers.
    """
    check_buffers(source, target)
    if target.size != source.size:
        raise ValueError(f"{source.size} bytes are not to be copied into {target.size}")
    if threads == 1 or target.size < PARALLEL_THRESHOLD * SEALED_CHUNK_SIZE or not is_compiling():
        np.copyto(target, source)
        return
    count = -(-target.size // SEALED_CHUNK_SIZE)
    workers.run(
        _copy_run,
        (address(source), address(target), count, target.size),
        count,
        threads,
        (source, target),
        threshold=PARALLEL_THRESHOLD,
    )


def pack(target: Bytes, source: Bytes, chunks: npt.NDArray[np.int64], threads: int) -> None:
    """Put the chunks of these numbers next to each other, on at most so many threads.

    Parameters
    ----------
    target : numpy.ndarray
        As many bytes as the chunks have.
    source : numpy.ndarray
        A message without its header.
    chunks : numpy.ndarray
        int64 (n,). The message's last chunk, which may be short, can be the last of them only.

    Raises
    ------
    ValueError
        If `source` has no such chunks, `target` is of another size, or they are no buffers.
    """
    check_buffers(source, target)
    _check_chunks(chunks, target.size, source.size)
    if not is_compiling():
        for place, chunk in enumerate(chunks.tolist()):
            target[place * SEALED_CHUNK_SIZE : (place + 1) * SEALED_CHUNK_SIZE] = source[
                chunk * SEALED_CHUNK_SIZE : (chunk + 1) * SEALED_CHUNK_SIZE
            ]
        return
    where = (address(source), address(target), chunks, source.size)
    workers.run(_copy_chunks, where, chunks.size, threads, (source, target), threshold=PARALLEL_THRESHOLD)


def _check_chunks(chunks: npt.NDArray[np.int64], target: int, source: int) -> None:
    """Refuse chunks that do not lie in `source` bytes or do not fill `target` bytes. Native code relies on this."""
    if chunks.dtype != np.int64 or chunks.ndim != 1 or not chunks.flags.c_contiguous:
        raise ValueError("numbers of chunks are not a one-dimensional, contiguous int64 array")
    filled = 0
    if chunks.size:
        last = -(-source // SEALED_CHUNK_SIZE) - 1
        if chunks.min() < 0 or chunks.max() > last or bool((chunks[:-1] == last).any()):
            raise ValueError("a chunk to be packed lies outside its message, or another follows the message's last")
        filled = (chunks.size - 1) * SEALED_CHUNK_SIZE + min(
            SEALED_CHUNK_SIZE, source - int(chunks[-1]) * SEALED_CHUNK_SIZE
        )
    if filled != target:
        raise ValueError(f"chunks of {filled} bytes are not to be packed into {target}")


def _build_run(form: str) -> Any:
    def copy_run(source: int, target: int, count: int, size: int, grain: int, counters: int, wait: bool) -> None:
        assert form
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            offset = start * SEALED_CHUNK_SIZE
            copy_bytes(target + offset, source + offset, min(stop * SEALED_CHUNK_SIZE, size) - offset)
            fetch_add(counters + _DONE, stop - start)
        if wait:
            wait_until_done(counters, count)

    return compiled(copy_run)


def _build_gather(form: str) -> Any:
    def copy_chunks(source: int, target: int, chunks: Any, size: int, grain: int, counters: int, wait: bool) -> None:
        assert form
        count = chunks.size
        while True:
            start = fetch_add(counters, 1) * grain
            if start >= count:
                break
            stop = min(start + grain, count)
            index = start
            while index < stop:
                chunk, after = chunks[index], index + 1
                while after < stop and chunks[after] - chunk == after - index:  # neighbours are one stretch
                    after += 1
                here = chunk * SEALED_CHUNK_SIZE
                copy_bytes(
                    target + index * SEALED_CHUNK_SIZE,
                    source + here,
                    min((after - index) * SEALED_CHUNK_SIZE, size - here),
                )
                index = after
            fetch_add(counters + _DONE, stop - start)
        if wait:
            wait_until_done(counters, count)

    return compiled(copy_chunks)


_copy_run, _copy_chunks = _build_run(source_digest()), _build_gather(source_digest())
