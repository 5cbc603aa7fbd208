"""Define the contract of the engines, and check the buffers that they are given."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from fastrack._crypto import cobblestone
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.gather import GatherPlan
from fastrack.format import ciphertext_size

if TYPE_CHECKING:
    from fastrack._crypto.message_keys import MessageKeys

Bytes = npt.NDArray[np.uint8]
Secret = cobblestone.Bytes
Texts = Sequence[cobblestone.Bytes]
_UINT8 = np.dtype(np.uint8)
_BYTE: Any = ctypes.c_char


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
        if type(self.owner) is np.ndarray and self.owner.dtype == _UINT8:
            if self.owner.ndim == 1 and self.owner.size == self.size:  # all of them
                return self.owner
            flat = self.owner.reshape(-1)
            start = self.address - address(flat)
            return flat[start : start + self.size]
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.address))


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scales by which a message of values is widened to BF16 while it is opened.

    Element e of the values is in row r and column c of ``divmod(e, columns)``. Its scale is the element
    ``r // rows_a_scale * -(-columns // columns_a_scale) + c // columns_a_scale`` of the scales. The result is
    ``bf16(f32(value) * f32(scale))``: one multiplication in float32, rounded to nearest even, and so to BF16. Every NaN
    is 0x7FC0.

    Attributes
    ----------
    memory : the opened scales: a `HostMemory` for an engine, and a view for a device
    dtype : of the scales: "F32" or "BF16"
    values : the dtype of the values: "F8_E4M3", "F8_E5M2" or "I8"
    columns : elements of a row of the values
    rows_a_scale, columns_a_scale : consecutive rows, and consecutive columns, that share a scale
    """

    memory: Any
    dtype: str
    values: str
    columns: int
    rows_a_scale: int
    columns_a_scale: int


@dataclass(slots=True)
class Messages:
    """Messages to open or to seal together: parallel sequences, which a message's number indexes.

    The sequences do not change while an operation of a device uses them.

    Attributes
    ----------
    keys : the keys. The caller wipes them after `Operation.finish`. A device that has copied them may wipe them before.
    nbytes : bytes of plaintext of each message, also where only some of its chunks are gathered
    memories : the memory that each message fills, that its gather is copied to, or that it is sealed from: a
        `HostMemory`, writable, for an engine, and a view of the array for a device. Messages of gathers may share one.
        All are of one call of one thread, and so on one stream. A message that is opened or sealed in runs has a view
        of `nbytes`, from its first byte on; only the bytes of its segments need to be memory.
    sealed : the chunks of each message, all of them and without its header, in host memory: read to open it, written to
        seal it. None for a message in `plain`, and for one whose chunks the caller puts into the staging buffers, or
        takes from there
    plain : the plaintext of a message that is sealed on its way. The caller seals it into the staging buffers, at the
        offsets of its segments; an engine, and so a device that works in place, seals each chunk, and opens it into the
        result. None for all others
    plans : the gather of each message of which not all is wanted, which `Segment.plan` has parts of; None for others
    scalings : the scales of each message of values that is widened on its way, which has no plan; None for others. Its
        memory has two bytes for each byte of plaintext. Its scales are a message of the same operation with a lower
        number. Sealing ignores them
    """

    keys: MessageKeys
    nbytes: Sequence[int]
    memories: Sequence[Any]
    sealed: Sequence[HostMemory | None]
    plain: Sequence[HostMemory | None]
    plans: Sequence[GatherPlan | None]
    scalings: Sequence[Scaling | None]

    @property
    def first_chunk(self) -> int:
        """That of the first message."""
        return 0

    @property
    def sealed_size(self) -> int:
        """Bytes of all chunks of all messages."""
        return sum(map(ciphertext_size, self.nbytes))

    def __len__(self) -> int:
        return len(self.nbytes)


WORDS = 9
"""The words of a row."""

KEY, BITS, SOURCE, TARGET, SIZE, FIRST, CHUNKS, STARTS, RANGES = range(WORDS)
"""The columns of the table.

Addresses of the key, of the source and of the result; bits of the key; bytes of plaintext of the message; the number of
chunks of the jobs before; and the addresses of a gather's plan, or `WHOLE`, `SEALS` or
`WIDENS` in place of its chunks.
"""

WHOLE, SEALS, WIDENS = 0, 1, 2  # no addresses. In a row that widens, `STARTS` is the address of a `scaling_row`

SCALING_WORDS, VALUES_KIND = 8, 2
VALUES = ("F8_E4M3", "F8_E5M2", "I8")
_STREAMED = 4 << 20  # values whose results, of twice their bytes, are more than caches of one CPU hold


def scaling_row(scaling: Scaling, nbytes: int) -> tuple[int, ...]:
    """Return a scaling as words, or raise ValueError unless the scales are those of `nbytes` values.

    The words: the address of the scales, 1 if they are F32, the kind of the values, the columns, the rows and the
    columns that share a scale, the number of scales across all columns, and 1 if results are to be streamed.
    """
    columns, tall, wide = scaling.columns, scaling.rows_a_scale, scaling.columns_a_scale
    across = -(-columns // wide)
    size = across * -(-nbytes // (columns * tall)) * (4 if scaling.dtype == "F32" else 2)
    if scaling.memory.size != size:
        raise ValueError(f"expected scales of {size} bytes, got {scaling.memory.size}")
    if across == 1:  # whole rows: longer runs
        columns, tall, wide = columns * tall, 1, columns * tall
    kinds = int(scaling.dtype == "F32"), VALUES.index(scaling.values)
    return scaling.memory.address, *kinds, columns, tall, wide, across, int(nbytes >= _STREAMED)


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

    def open_jobs(self, jobs: Messages) -> tuple[int, int] | None:
        """Open messages in one call.

        Return the first message with a chunk that failed authentication, and its first such chunk, or None.
        """


def check_buffers(source: Bytes, target: Bytes | None = None) -> None:
    """Raise ValueError unless buffers are one-dimensional, contiguous `uint8` arrays, and the target is writable.

    Native code relies on this check.
    """
    for each in (source,) if target is None else (source, target):
        if each.dtype != _UINT8 or each.ndim != 1 or not each.flags.c_contiguous:
            raise ValueError("expected a one-dimensional, contiguous uint8 array as a buffer")
    if target is not None and not target.flags.writeable:
        raise ValueError("expected a writable target buffer, got a read-only one")


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of the first byte of an array."""
    if array.flags.writeable:
        try:
            return ctypes.addressof(_BYTE.from_buffer(array))  # takes a quarter as long as the interface
        except (TypeError, ValueError):  # no bytes, not contiguous, or a dtype that NumPy does not know
            pass
    return int(array.__array_interface__["data"][0])
