"""The CPU device, the default. Plaintext is in host memory: for development, CI, laptops and CPU TEEs."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from fastrack._crypto.base import Bytes, Engine, HostMemory, Messages
from fastrack._crypto.engine import get_engine
from fastrack._devices.base import BadChunk, Slab, SpanCallback, StagingBuffer
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Framework
from fastrack.errors import DeviceError


class CpuDevice:
    """`Device` on the cores of the host.

    One native call opens all messages of an operation, directly from their sources into the results.
    """

    name = "cpu"
    in_place = True
    lanes = 1
    max_slab_size = 32 << 20
    first_slab_size = max_slab_size
    segment_overhead = 0

    def __init__(self, threads: int | None = None) -> None:
        self.engine = get_engine(threads=threads)

    def framework(self, requested: Framework | None, source: Framework | None) -> Framework:
        if requested == "cupy":
            raise DeviceError(
                "CuPy keeps no arrays on 'cpu'. Ask for framework='numpy' or 'torch', or use another device"
            )
        return requested or (source if source != "cupy" else None) or arrays.default_framework()

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, HostMemory]:
        size = dtypes.nbytes(dtype, tuple(shape))
        array, address, owner = arrays.empty(size, dtype, shape, framework)
        return array, HostMemory(address, size, owner)

    def view(self, array: Any, *, writable: bool) -> HostMemory:
        if writable:
            return HostMemory(*arrays.writable_memory(array))
        return HostMemory.of(arrays.bytes_of(array))

    def clear(self, memory: HostMemory) -> None:
        ctypes.memset(memory.address, 0, memory.size)

    def staging_buffer(self, size: int) -> CpuStagingBuffer:
        return CpuStagingBuffer(arrays.empty_bytes(size))

    def begin(self, messages: Messages, note: SpanCallback | None = None) -> CpuOperation:
        return CpuOperation(self.engine, messages)

    def close(self) -> None:
        """Do nothing: this device holds no resources."""


class CpuStagingBuffer:
    """`StagingBuffer` in ordinary memory. Each call finishes with it before returning."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        """Do nothing: no call leaves the buffer in use."""

    def wipe(self) -> None:
        self.memory.fill(0)


class CpuOperation:
    """`DeviceOperation` whose calls all complete before returning."""

    lane = 0

    def __init__(self, engine: Engine, messages: Messages) -> None:
        self._engine = engine
        self._messages = messages
        self._bad: BadChunk | None = None

    def open(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        bad = self._engine.open_jobs(self._messages)
        if bad is not None:
            self._bad = BadChunk(*bad)

    def seal(self, slab: Slab | None, buffer: StagingBuffer | None) -> None:
        messages = self._messages
        for number, (memory, sealed) in enumerate(zip(messages.memories, messages.sealed, strict=True)):
            assert sealed is not None
            key = messages.keys.key(number)
            schedule = self._engine.expand_key(key)
            try:
                self._engine.seal_run(schedule, memory.array, sealed.array, 0)
            finally:
                schedule.wipe()
                key.wipe()

    def issue(self) -> None:
        """Do nothing: every call completes before returning."""

    def finish(self, *, wait: bool = False) -> None:
        """Do nothing: the caller wipes the keys."""

    def done(self) -> bool:
        return True

    def result(self) -> BadChunk | None:
        return self._bad
