"""What an engine does: the contract that `vaes` and `openssl` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fastrack._crypto.cobblestone import CHUNK_SIZE, MAX_CHUNKS, TAG_SIZE, MessageKey

Bytes = npt.NDArray[np.uint8]


class KeySchedule(Protocol):
    """A message key made ready by an engine, for that engine. `wipe` it when the message is done with."""

    def wipe(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Which bytes of which chunks go where: the plan of a gather.

    chunks : int64 (n,), numbers of the chunks to open, each once
    starts : int64 (n + 1,), the pieces of chunk `i` are `table[starts[i]:starts[i + 1]]`
    table : int64 (m, 3), offset in the chunk, offset in the result, length; in bytes
    """

    chunks: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    table: npt.NDArray[np.int64]


class Engine(Protocol):
    """Opens and seals runs of chunks on the host.

    Buffers are one-dimensional, contiguous `uint8` arrays. A run of chunks starts at chunk `first`; how many chunks it
    has follows from the sizes, as each adds a tag of 16 bytes. `open_run`, `verify_run` and `open_gather` return the
    number of the first chunk whose tag is wrong, or None; the place of a wrong chunk in `target` holds zeros by then.
    Every method may be called from several threads at once.
    """

    name: str
    threads: int

    def expand_key(self, key: MessageKey) -> Any: ...

    def open_run(self, schedule: Any, source: Bytes, target: Bytes, first: int) -> int | None: ...

    def verify_run(self, schedule: Any, source: Bytes, first: int) -> int | None: ...

    def seal_run(self, schedule: Any, source: Bytes, target: Bytes, first: int) -> None: ...

    def open_gather(self, schedule: Any, source: Bytes, target: Bytes, pieces: GatherPlan) -> int | None:
        """Open the chunks that `pieces` names out of the whole raw message `source` and scatter their bytes."""


def chunks_between(sealed: int, plain: int, first: int = 0) -> int:
    """How many chunks a run has that takes `sealed` bytes with its tags and `plain` without.

    Raises
    ------
    ValueError
        If no run of chunks from `first` on has these sizes. Native code relies on this check.
    """
    count, rest = divmod(sealed - plain, TAG_SIZE)
    if rest or count < 0 or not (count - 1) * CHUNK_SIZE <= plain <= count * CHUNK_SIZE:
        raise ValueError(f"no run of chunks takes {sealed} bytes sealed and {plain} bytes open")
    if not 0 <= first <= MAX_CHUNKS - count:
        raise ValueError(f"a message has no {count} chunks from number {first} on; the last has number 2^38 - 1")
    return count


def check_buffers(source: Bytes, target: Bytes | None = None) -> None:
    """Refuse buffers other than one-dimensional, contiguous `uint8` arrays, and a target that is read-only.

    Raises
    ------
    ValueError
        If one is. Native code relies on this check.
    """
    for array in (source,) if target is None else (source, target):
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError("a buffer is not a one-dimensional, contiguous uint8 array")
    if target is not None and not target.flags.writeable:
        raise ValueError("the target buffer is read-only")


def check_plan(pieces: GatherPlan, sealed: int, plain: int, target: int) -> None:
    """Refuse a plan that reaches outside its message of `plain` bytes or its result of `target` bytes.

    Raises
    ------
    ValueError
        If it does. Native code relies on this check.
    """
    chunks, starts, table = pieces.chunks, pieces.starts, pieces.table
    count = chunks_between(sealed, plain)
    sound = all(array.dtype == np.int64 for array in (chunks, starts, table))
    sound = sound and (chunks.ndim, starts.ndim, table.ndim) == (1, 1, 2) and table.shape[1] == 3
    if sound and starts.size == chunks.size + 1:
        from fastrack._crypto import gather as plans  # imports numba, a third of a second: when first used

        if plans.is_inside(chunks, starts, table, count, plain, target):
            return
    raise ValueError("a gather reaches outside its message or its result")
