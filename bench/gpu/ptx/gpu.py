"""A stand-in for `bench.gpu.gpu.Gpu` whose launches interpret PTX: `bench.gpu.known.check(PtxGpu(text))`."""

from __future__ import annotations

import numpy as np

from bench.gpu.ptx.machine import Machine
from bench.gpu.ptx.memory import Space, Violation
from bench.gpu.ptx.parse import parse
from fastrack._devices.cuda.link import STATE_SIZE
from fastrack._devices.cuda.nvrtc import find_kernels

_GUARD = 0xA5  # that `bench.gpu.launches` fills fences with: a read of it is one of bytes that were never written


class PtxGpu:
    """Runs `launch` at once, blocks one after another. `reports` has the kernel and the `Report` of every launch.

    With `strict` a launch raises `Violation` for what is found that leaves the answer as it is, a race for example.
    `shared` gives the bytes of shared memory of a kernel by its name.
    """

    resident, multiprocessors, state_size = 2, 4, STATE_SIZE

    def __init__(self, text, *, seed=None, strict=True, shared=None):
        self.module, self.space, self.driver = parse(text), Space(), self
        self.seed, self.strict = seed, strict
        self.reports = []
        self._shared = shared or find_kernels().shared
        globals_ = self.module.globals.items()
        self._globals = [self.space.add(len(each), each, name=name, writable=False) for name, each in globals_]
        self._machines = {}

    # What a driver has.

    def memory(self, size):
        return self.space.add(max(size, 1))

    def host(self, size):
        return np.zeros(size, np.uint8)

    def stream(self, *, high_priority=False):
        return None

    # What `Gpu` has.

    def upload(self, pointer, source, stream):
        buffer, start = self._find(pointer, source.size)
        buffer.put(start, source)

    def download(self, target, pointer, stream):
        buffer, start = self._find(pointer, target.size)
        target[:] = buffer.bytes[start : start + target.size]

    def fill(self, pointer, value, size, stream):
        buffer, start = self._find(pointer, size)
        buffer.put(start, np.full(size, value, np.uint8))
        buffer.written[start : start + size] = value != _GUARD

    def launch(self, kernel, blocks, arguments, stream, table=b""):
        """Run a kernel, and return its `Machine`, which has the shared memory of its last block."""
        if kernel not in self._machines:
            symbols = {buffer.name: buffer.pointer for buffer in self._globals}
            self._machines[kernel] = Machine(self.module, kernel, self.space, symbols, self._shared(kernel))
        report = self._machines[kernel].launch(blocks, arguments, table, self.seed)
        self.reports.append((kernel, report))
        if self.strict and report.violations:
            raise Violation(f"{kernel}: {'; '.join(report.violations)}")
        return self._machines[kernel]

    def wait(self, stream):
        pass

    def extend_state(self, state):
        return state

    def _find(self, pointer, size):
        buffer = self.space.find(pointer)
        if buffer is None or pointer + size > buffer.pointer + buffer.size:
            raise ValueError(f"no buffer holds {size} bytes at {pointer:#x}")
        return buffer, pointer - buffer.pointer
