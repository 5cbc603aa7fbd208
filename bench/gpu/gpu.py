"""The GPU that is measured: fastrack's driver, the device's clock, and the few calls that fastrack does not make."""

import lzma
import time
from contextlib import contextmanager, nullcontext
from tempfile import NamedTemporaryFile
from unittest.mock import patch

from bench.gpu import needs

_COPY = 3  # cudaMemcpyDeviceToDevice
_SPIN = 10_000_000  # nanoseconds: to sleep sooner would add some microseconds to a measurement
_LOCAL, _REGISTERS, _CARVEOUT = 3, 4, 9  # CUfunction_attribute


class Skip(Exception):  # noqa: N818 - it is no error
    """A step cannot be done here; the text has the reason."""


class WrongResultError(Exception):
    """A result differs from the expected one."""


def require(*modules):
    """Raise `Skip` unless these modules can be used."""
    problem = needs.lacks(*modules)
    if problem:
        raise Skip(problem)


def require_tools(machine):
    """Raise `Skip` where no profiler or compute-sanitizer may look at a GPU: in confidential mode that protects."""
    mode = (machine.get("graphics") or {}).get("confidential") or {}
    if mode.get("enabled") and mode.get("devtools") is False:
        raise Skip("in confidential mode it needs dev-tools mode, which protects nothing")


class Gpu:
    """An NVIDIA GPU by way of CuPy: "cuda:N". A candidate has other kernels than fastrack's."""

    resident = 2  # blocks that a multiprocessor has room for, as far as fastrack's grids go: 1024 threads

    def __init__(self, device, candidate=None):
        import cupy

        from fastrack._devices.cuda import cupy_driver

        self._cupy = cupy
        self.resident = candidate.blocks if candidate else Gpu.resident
        self.index = int(device.removeprefix("cuda:"))
        with patch.object(cupy_driver, "find_kernels", lambda: candidate.kernels) if candidate else nullcontext():
            self.driver = cupy_driver.CupyDriver(self.index)
        cupy.cuda.runtime.setDevice(self.index)

    def kernels(self):
        """Return the resources of each kernel, by name: registers and local bytes a thread, blocks a multiprocessor."""
        from cupy_backends.cuda.api import driver as cuda

        resources = {}
        for name, function in self.driver.functions.items():
            room = (function.handle, function.threads, function.shared)
            blocks = cuda.occupancyMaxActiveBlocksPerMultiprocessor(*room)
            registers, local = (cuda.funcGetAttribute(number, function.handle) for number in (_REGISTERS, _LOCAL))
            resources[name] = {"registers": registers, "local": local, "blocks": blocks}
        return resources

    def split_shared_memory(self, percent):
        """Set how much of a multiprocessor's memory is to be shared memory; -1 leaves it to the CUDA driver."""
        from cupy_backends.cuda.api import driver as cuda

        for function in self.driver.functions.values():
            cuda.funcSetAttribute(function.handle, _CARVEOUT, percent)

    @property
    def architecture(self):
        """The name that the compiler has for the device, such as sm_90."""
        return f"sm_{self._cupy.cuda.Device(self.index).compute_capability}"

    def load(self, path):
        """Load a cubin that was compressed."""
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(lzma.decompress(path.read_bytes()))
            file.flush()
            module = self._cupy.RawModule(path=file.name)
            module.compile()  # reads the file now
        return module

    def compile(self, code):
        return self._cupy.RawModule(code=code, options=("-std=c++17",), backend="nvrtc")

    def run(self, module, name, blocks, threads, shared):
        """Run such a kernel on two vectors of numbers, one of 32 and one of 64 bits a block, and return both."""
        import numpy as np

        function = module.get_function(name)
        function.max_dynamic_shared_size_bytes = shared
        out, clocks = (self._cupy.zeros(blocks, dtype) for dtype in ("uint32", "uint64"))
        function((blocks,), (threads,), (out, clocks, np.uint32(3)), shared_mem=shared)
        return self._cupy.asnumpy(out), self._cupy.asnumpy(clocks)

    # Work on streams: only here does the suite ask a driver for it.

    def upload(self, pointer, source, stream):
        with self._issuing() as commands:
            commands.upload(pointer, source, stream)

    def download(self, target, pointer, stream):
        with self._issuing() as commands:
            commands.download(target, pointer, stream)

    def fill(self, pointer, value, size, stream):
        with self._issuing() as commands:
            commands.fill(pointer, value, size, stream)

    def launch(self, kernel, blocks, arguments, stream, table=b""):
        with self._issuing() as commands:
            commands.launch(self.driver.functions[kernel], blocks, arguments, stream, table)

    def stamp(self, stream):
        """Record an event that notes the device's time."""
        event = self.driver.event(timed=True)
        with self._issuing() as commands:
            commands.record(event, stream)
        return event

    def wait(self, stream):
        """Block until a stream has nothing left to do."""
        event = self.driver.event()
        with self._issuing() as commands:
            commands.record(event, stream)
            commands.poll(event, _SPIN)
            commands.synchronize(event)

    @contextmanager
    def _issuing(self):
        from fastrack._devices.cuda.commands import Commands  # imports NumPy

        commands = Commands()
        yield commands
        self.driver.issue(commands)

    def copy(self, target, source, size, stream):
        """Copy from the device to itself."""
        with self._cupy.cuda.Device(self.index):
            self._cupy.cuda.runtime.memcpyAsync(target, source, size, _COPY, stream.ptr)

    def array(self, size):
        return self.driver.empty("U8", (size,), "cupy")

    def read(self, array):
        """Return a copy of an array of the device, in host memory."""
        return self._cupy.asnumpy(array) if isinstance(array, self._cupy.ndarray) else array.cpu().numpy()

    def pointer(self, array):
        return self.driver.view(array, writable=True).address

    def product(self, side):
        require("torch")
        return Product(self.index, side)

    def in_use(self):
        """Bytes of its memory in use, by any process."""
        with self._cupy.cuda.Device(self.index):
            free, total = self._cupy.cuda.runtime.memGetInfo()
        return total - free

    def is_well(self):
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except RuntimeError:
            return False
        return True

    def tidy(self):
        """Give back memory that CuPy keeps for later."""
        self._cupy.get_default_memory_pool().free_all_blocks()


class Product:
    """A product of two square matrices in bf16, by torch, on a stream of its own."""

    def __init__(self, index, side):
        import torch

        if not torch.cuda.is_available():
            raise Skip(f"this torch ({torch.__version__}) cannot use a GPU")
        self._torch = torch
        device = f"cuda:{index}"
        self._index = index
        with torch.cuda.device(index):
            self._stream = torch.cuda.Stream(device)
            self._a, self._b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
            self._out = torch.empty_like(self._a)
            torch.cuda.synchronize(device)

    @contextmanager
    def busy(self, count):
        """Queue `count` products on their stream, and make it the current one of CuPy for the block."""
        import cupy

        with self._torch.cuda.device(self._index), self._torch.cuda.stream(self._stream):
            for _ in range(count):
                self._torch.mm(self._a, self._b, out=self._out)
        with cupy.cuda.Device(self._index), cupy.cuda.ExternalStream(self._stream.cuda_stream):
            yield

    def run(self, count):
        """Return the average seconds of a product, over `count` products in a row, on the host's clock.

        In confidential mode events have no true times.
        """
        torch = self._torch
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            self._stream.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
            self._stream.synchronize()
        return (time.perf_counter() - start) / count
