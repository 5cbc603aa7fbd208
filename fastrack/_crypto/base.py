"""Define the contract of the engines, and check the buffers that they are given."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt

from fastrack._crypto import cobblestone, gather
from fastrack._crypto.cobblestone import DERIVED_SIZE, MessageKey
from fastrack.format import CHUNK_SIZE, MAX_CHUNKS, TAG_SIZE

if TYPE_CHECKING:
    from fastrack._crypto.message_keys import MessageKeys

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int64]
Secret = cobblestone.Bytes
Texts = Sequence[cobblestone.Bytes]
_UINT8 = np.dtype(np.uint8)


class KeySchedule(ABC):
    """A message key, expanded by an engine for its own use. Call `wipe` after the last chunk of the message.

    `wipe` must also work on an object whose `__init__` raised.
    """

    @abstractmethod
    def wipe(self) -> None: ...

    def __del__(self) -> None:
        self.wipe()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key schedule holds a secret and cannot be pickled")


class GatherPlan:
    """A list of byte ranges of chunks, and the offsets in the result that they are copied to. It does not change.

    Attributes
    ----------
    chunks : int64 (n,); the numbers of the chunks to open, without duplicates
    starts : int64 (n + 1,); the ranges of chunk `i` are `table[starts[i]:starts[i + 1]]`
    table : int64 (m, 3); offset in the chunk, offset in the result, length; in bytes
    """

    __slots__ = ("_arrays", "_made")

    def __init__(self, chunks: Words, starts: Words, table: Words) -> None:
        self._arrays: gather.PlanArrays | None = gather.PlanArrays(chunks, starts, table)
        self._made: gather.PlanMemory | gather.EvenRows | None = None

    @classmethod
    def of(cls, made: gather.PlanMemory | gather.EvenRows) -> Self:
        """Return the plan that `gather` made, or that it makes when it is needed. Arrays are made if asked for."""
        plan = cls.__new__(cls)
        plan._arrays, plan._made = None, made  # noqa: SLF001 - its own
        return plan

    @property
    def chunks(self) -> Words:
        return self.arrays.chunks

    @property
    def starts(self) -> Words:
        return self.arrays.starts

    @property
    def table(self) -> Words:
        return self.arrays.table

    @property
    def arrays(self) -> gather.PlanArrays:
        if self._arrays is None:
            assert self._made is not None
            if isinstance(self._made, gather.EvenRows):
                self._made, _ = self._made.make_plan()
            self._arrays = gather.arrays_of(self._made)
        return self._arrays

    def locate(self, sealed: int, plain: int, target: int) -> tuple[int, int, int, int]:
        """Return the number of chunks, and the addresses of the arrays, for native code.

        Raise ValueError if the plan reaches outside its message, of `sealed` bytes with tags and `plain` bytes without,
        or outside its result of `target` bytes. Native code relies on this check.
        """
        count, made = chunks_between(sealed, plain), self._made
        if isinstance(made, gather.EvenRows):
            memory, is_inside = made.make_plan(count, plain, target)
            if is_inside:
                self._made = memory
                return gather.locate(memory)
        elif self.arrays.is_sound and gather.is_inside(self.arrays, count, plain, target):
            return self.arrays.locate()
        raise ValueError("expected a gather plan inside its message and its result, got one that reaches outside")


class HostMemory(NamedTuple):
    """Bytes of host memory that were checked once, for native code: `size` of them at `address`.

    `owner` keeps them alive.
    """

    address: int
    size: int
    owner: object

    @classmethod
    def of(cls, array: Bytes, *, writable: bool = False) -> HostMemory:
        """Return the memory of a buffer. Raise ValueError as `check_buffers` does."""
        check_buffers(array, array if writable else None)
        return cls(address(array), array.size, array)

    def part(self, start: int, stop: int) -> HostMemory:
        """Return a range of these bytes, which ends with them at the latest, with the same owner."""
        stop = min(stop, self.size)
        if not 0 <= start <= stop:
            raise ValueError(f"expected bytes of a buffer of {self.size}, got those from {start} to {stop}")
        return HostMemory(self.address + start, stop - start, self.owner)

    @property
    def array(self) -> Bytes:
        """The bytes as an array, which is valid as long as this object."""
        if type(self.owner) is np.ndarray and self.owner.dtype == np.uint8:
            flat = self.owner.reshape(-1)
            start = self.address - address(flat)
            return flat[start : start + self.size]
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.address))


@dataclass(slots=True)
class Jobs:
    """Messages to open together, each of them whole or by the chunks of a gather: parallel sequences.

    Attributes
    ----------
    keys : the keys of the messages
    nbytes : bytes of plaintext of each message
    memories : memory that each message fills, or that its gather is copied to; writable
    sealed : all chunks of each message; None for one in `plain`
    plain : the plaintext of messages of which each chunk is sealed, and opened from there; None for others
    plans : the gathers; None for messages that are opened whole
    """

    keys: MessageKeys
    nbytes: Sequence[int]
    memories: Sequence[HostMemory]
    sealed: Sequence[HostMemory | None]
    plain: Sequence[HostMemory | None]
    plans: Sequence[GatherPlan | None]


class Engine(Protocol):
    """An implementation that opens and seals runs of chunks on the host.

    Buffers are one-dimensional, contiguous `uint8` arrays. A run of chunks starts at chunk `first`; the number of its
    chunks follows from the sizes, as each adds a tag of 16 bytes. All methods but `seal_run` return the number of the
    first chunk that failed authentication, or None; `target` then holds zeros in place of every chunk that failed.
    Several threads may call every method at once.
    """

    name: str
    threads: int

    def derive_keys(
        self, secret: Secret, headers: Texts, contexts: Texts, rows: Sequence[int], target: memoryview
    ) -> int | None:
        """Derive the keys of messages, as `derivation.derive_rows` specifies. Headers and secret have their lengths.

        Raise ValueError if a row is not in the target.
        """

    def expand_key(self, key: MessageKey) -> Any: ...

    def open_run(self, schedule: Any, source: Bytes, target: Bytes, first: int) -> int | None: ...

    def verify_run(self, schedule: Any, source: Bytes, first: int) -> int | None: ...

    def seal_run(self, schedule: Any, source: Bytes, target: Bytes, first: int) -> None: ...

    def open_gather(self, schedule: Any, source: Bytes, target: Bytes, plan: GatherPlan) -> int | None:
        """Open the chunks of `plan` from the whole raw message `source`, and copy their ranges to `target`."""

    def open_jobs(self, jobs: Jobs) -> tuple[int, int] | None:
        """Open messages in one call.

        Return the first message with a chunk that failed authentication, and its first such chunk, or None.
        """


@lru_cache(maxsize=1024)
def chunks_between(sealed: int, plain: int, first: int = 0) -> int:
    """Return the number of chunks of a run of `sealed` bytes with tags and `plain` bytes without.

    Raise ValueError if no run of chunks from `first` on has these sizes. Native code relies on this check.
    """
    count, remainder = divmod(sealed - plain, TAG_SIZE)
    if remainder or count < 0 or not (count - 1) * CHUNK_SIZE <= plain <= count * CHUNK_SIZE:
        raise ValueError(f"no run of chunks has {sealed} bytes sealed and {plain} bytes plain")
    if not 0 <= first <= MAX_CHUNKS - count:
        raise ValueError(f"expected chunks below number 2^38, got {count} chunks from number {first} on")
    return count


def check_buffers(source: Bytes, target: Bytes | None = None) -> None:
    """Raise ValueError unless buffers are one-dimensional, contiguous `uint8` arrays, and the target is writable.

    Native code relies on this check.
    """
    for array in (source,) if target is None else (source, target):
        if array.dtype != _UINT8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError("expected a one-dimensional, contiguous uint8 array as a buffer")
    if target is not None and not target.flags.writeable:
        raise ValueError("expected a writable target buffer, got a read-only one")


def check_rows(rows: Sequence[int], target: memoryview) -> None:
    """Raise ValueError unless all rows of derived keys are in the target, and that is writable.

    Native code relies on this check.
    """
    if rows and not (min(rows) >= 0 and (max(rows) + 1) * DERIVED_SIZE <= target.nbytes and not target.readonly):
        raise ValueError(
            f"expected rows in {target.nbytes} bytes that can be written to, got rows {min(rows)} to {max(rows)}"
        )


def check_plan(plan: GatherPlan, sealed: int, plain: int, target: int) -> None:
    """Raise ValueError as `GatherPlan.locate` does."""
    plan.locate(sealed, plain, target)


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of the first byte of an array."""
    return int(array.__array_interface__["data"][0])
