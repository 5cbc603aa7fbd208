"""The CPU device, the default. Plaintext is in host memory: for development, CI, laptops and CPU TEEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrack._crypto.base import Bytes, Engine
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.engine import get_engine
from fastrack._devices.base import Slab, SpanCallback, StagingBuffer
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework
from fastrack.errors import DeviceError


class CpuDevice:
    """`Device` on the cores of the host.

    Chunks are opened from their source straight into the result, by one native call a thread.
    """

    name = "cpu"
    in_place = True
    lanes = 1
    max_slab_size = 32 << 20  # large, as a busy interpreter may delay each call
    first_slab_size = max_slab_size  # nothing runs while the next slab is filled

    def __init__(self, threads: int | None = None) -> None:
        self.engine = get_engine(threads=threads)

    def framework(self, requested: Framework | None, source: Framework | None) -> Framework:
        if requested == "cupy":
            raise DeviceError(
                "CuPy keeps no arrays on 'cpu'. Ask for framework='numpy' or 'torch', or use another device"
            )
        return requested or (source if source != "cupy" else None) or arrays.default_framework()

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, Bytes]:
        memory = arrays.empty_bytes(dtypes.nbytes(dtype, shape))
        return arrays.from_bytes(memory, dtype, shape, framework), memory

    def view(self, array: Any, *, writable: bool) -> Bytes:
        return arrays.bytes_of(array, writable=writable)

    def clear(self, memory: Bytes) -> None:
        memory.fill(0)

    def staging_buffer(self, size: int) -> CpuStagingBuffer:
        return CpuStagingBuffer(arrays.empty_bytes(size))

    def begin(self, key: MessageKey, memory: Bytes, note: SpanCallback | None = None) -> CpuOperation:
        return CpuOperation(self.engine, key, memory)

    def close(self) -> None:
        """Do nothing: this device holds no resources."""


class CpuStagingBuffer:
    """`StagingBuffer` in ordinary memory, free again when the call that uses it returns."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""

    def wipe(self) -> None:
        self.memory.fill(0)


class CpuOperation:
    """`Operation` whose every call is complete when it returns."""

    lane = 0

    def __init__(self, engine: Engine, key: MessageKey, memory: Bytes) -> None:
        self._engine = engine
        self._schedule = engine.expand_key(key)
        self._memory = memory
        self._bad: int | None = None

    def open(self, slab: Slab, sealed: Bytes, buffer: StagingBuffer | None) -> None:
        if slab.plan is not None:
            bad = self._engine.open_gather(self._schedule, sealed, self._memory, slab.plan)
        else:
            plain = self._memory[slab.start : slab.stop]
            run = self._engine.pass_run if slab.is_plain else self._engine.open_run
            bad = run(self._schedule, sealed, plain, slab.first_chunk)
        if self._bad is None:
            self._bad = bad

    def seal(self, slab: Slab, sealed: Bytes, buffer: StagingBuffer | None) -> None:
        self._engine.seal_run(self._schedule, self._memory[slab.start : slab.stop], sealed, slab.first_chunk)

    def issue(self) -> None:
        """Do nothing: every call is complete when it returns."""

    def finish(self, *, wait: bool = False) -> None:
        self._schedule.wipe()

    def done(self) -> bool:
        return True

    def result(self) -> int | None:
        return self._bad
