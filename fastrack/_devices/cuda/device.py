"""The CUDA device. Slabs are uploaded sealed, and kernels authenticate and decrypt each chunk.

Each operation records its work as lists of commands, and each list runs by one native call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastrack._crypto.base import Messages
from fastrack._crypto.engine import get_engine
from fastrack._crypto.workers import default_threads
from fastrack._devices.base import SpanCallback
from fastrack._devices.cuda.buffers import CudaStagingBuffer, MessageStatePool
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.driver import Driver, View
from fastrack._devices.cuda.link import ROW_SIZE, Link
from fastrack._devices.cuda.operation import CudaOperation
from fastrack._devices.cuda.recorder import Resources
from fastrack._devices.cuda.streams import Pipeline
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Framework
from fastrack.errors import DeviceError
from fastrack.format import TAG_SIZE

_BLOCKS_PER_MULTIPROCESSOR = 2
MAX_COPIERS = 16  # threads that copy, by default: two pieces of a slab for each; not yet measured


class CudaDevice:
    """`Device` on an NVIDIA GPU.

    `share` is the maximum share of the multiprocessors for kernels, above 0 and at most 1; the rest stays free for
    other work. `threads` is the maximum number of threads of the host for copies to staging buffers, by default the
    number of its CPUs, and at most 16. Raise ValueError if the share is out of range.
    """

    in_place = False
    max_slab_size = 8 << 20
    first_slab_size = 2 << 20
    segment_overhead = ROW_SIZE + 2 * TAG_SIZE  # its wrapped key, or what is told of it, and what aligns that

    def __init__(self, driver: Driver, *, share: float = 1.0, threads: int | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share= must be above 0 and at most 1, not {share}")
        self.name = driver.name
        self.compiled_by = driver.compiled_by
        self.copy_speeds = driver.copy_speeds
        self._pipeline = Pipeline(driver)
        self.lanes = self._pipeline.lanes
        if driver.confidential:  # each copy has a toll, and no two of them overlap
            self.max_slab_size, self.first_slab_size = 4 * self.max_slab_size, 4 * self.first_slab_size
        engine = get_engine(threads=1)
        self._states = MessageStatePool(self._pipeline)
        self._link = Link(self._pipeline, engine)
        try:
            self._link.open()
        except BaseException:
            self._states.wipe(self._link)
            raise
        blocks = max(1, int(share * driver.multiprocessors) * _BLOCKS_PER_MULTIPROCESSOR)
        copiers = threads or min(default_threads(), MAX_COPIERS)
        self.resources = Resources(self._pipeline, self._states, self._link, blocks, copiers)

    def framework(self, requested: Framework | None, source: Framework | None) -> Framework:
        if requested == "numpy":
            raise DeviceError(
                f"NumPy keeps no arrays on {self.name!r}. Ask for framework='torch' or 'cupy', or use another device"
            )
        if requested is not None:
            return requested
        if source is None:
            return "torch" if arrays.installed("torch") else "cupy"
        return "cupy" if source == "numpy" else source

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, View]:
        self._pipeline.require_usable()
        array = self._pipeline.driver.empty(dtype, shape, framework)
        return array, self._pipeline.driver.view(array, writable=True)

    def view(self, array: Any, *, writable: bool) -> View:
        self._pipeline.require_usable()
        return self._pipeline.driver.view(array, writable=writable)

    def clear(self, memory: View) -> None:
        self._pipeline.require_usable()
        driver, kernels = self._pipeline.driver, self._pipeline.lane(memory.stream).kernels
        commands, event = Commands(), driver.event()
        commands.record(event, memory.stream)
        commands.wait(kernels, event)
        if memory.size:
            commands.fill(memory.address, 0, memory.size, kernels)
        commands.drain(kernels, event)
        driver.issue(commands)

    def staging_buffer(self, size: int) -> CudaStagingBuffer:
        self._pipeline.require_usable()
        return CudaStagingBuffer(self._pipeline, size)

    def begin(self, messages: Messages, note: SpanCallback | None = None) -> CudaOperation:
        self._pipeline.require_usable()
        return CudaOperation(self.resources, messages, note)

    def close(self) -> None:
        if not self._pipeline.forked and self._pipeline.close():
            self._states.wipe(self._link)
            self._pipeline.driver.reclaim()
