"""The embedded default: plaintext lies in host memory. For development, CI, laptops and CPU TEEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrack._crypto import engine as aead
from fastrack._crypto.base import Bytes, Engine
from fastrack._crypto.cobblestone import MessageKey
from fastrack._devices.base import Note, Slab, StagingBuffer
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework
from fastrack.errors import DeviceError


class CpuDevice:
    """`Device` on the host's own cores.

    It opens chunks straight from where they lie into the result; a run of them is one native call a thread.
    """

    name = "cpu"
    in_place = True
    lanes = 1
    slab = 32 << 20  # sealing and opening are a call each: long ones, so that a busy interpreter delays few of them
    lead = slab  # nothing goes on while the next slab is filled

    def __init__(self, threads: int | None = None) -> None:
        self.engine = aead.get_engine(threads=threads)

    def framework(self, wanted: Framework | None, origin: Framework | None) -> Framework:
        if wanted == "cupy":
            raise DeviceError("CuPy keeps no arrays on 'cpu'; ask for framework='numpy' or 'torch', or another device")
        return wanted or (origin if origin != "cupy" else None) or arrays.default_framework()

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, Bytes]:
        memory = arrays.empty_bytes(dtypes.nbytes(dtype, shape))
        return arrays.from_bytes(memory, dtype, shape, framework), memory

    def view(self, array: Any, *, writable: bool) -> Bytes:
        return arrays.bytes_of(array, writable=writable)

    def clear(self, memory: Bytes) -> None:
        memory.fill(0)

    def slot(self, size: int) -> CpuSlot:
        return CpuSlot(arrays.empty_bytes(size))

    def begin(self, key: MessageKey, memory: Bytes, note: Note | None = None) -> CpuWork:
        return CpuWork(self.engine, key, memory)

    def close(self) -> None:
        """Nothing is held."""


class CpuSlot:
    """`Slot` that is done with when the call that used it returns."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Nothing goes on."""

    def wipe(self) -> None:
        self.memory.fill(0)


class CpuWork:
    """`Work` that is done when the call returns."""

    lane = 0

    def __init__(self, engine: Engine, key: MessageKey, memory: Bytes) -> None:
        self._engine = engine
        self._schedule = engine.expand_key(key)
        self._memory = memory
        self._bad: int | None = None

    def open(self, slab: Slab, sealed: Bytes, slot: StagingBuffer | None) -> None:
        if slab.pieces is not None:
            bad = self._engine.open_gather(self._schedule, sealed, self._memory, slab.pieces)
        else:
            bad = self._engine.open_run(self._schedule, sealed, self._memory[slab.start : slab.stop], slab.first)
        if self._bad is None:
            self._bad = bad

    def seal(self, slab: Slab, sealed: Bytes, slot: StagingBuffer | None) -> None:
        self._engine.seal_run(self._schedule, self._memory[slab.start : slab.stop], sealed, slab.first)

    def issue(self) -> None:
        """All of it was done at once."""

    def end(self, *, wait: bool = False) -> None:
        self._schedule.wipe()

    def done(self) -> bool:
        return True

    def verdict(self) -> int | None:
        return self._bad
