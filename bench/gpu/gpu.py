"""The GPU that is measured: fastrack's driver, the device's clock, and the few calls that fastrack does not make."""

from __future__ import annotations

from bench.gpu import needs

_COPY = 3  # cudaMemcpyDeviceToDevice


class Skip(Exception):  # noqa: N818 - it is no error
    """A step cannot be done here; says why."""


class WrongResultError(Exception):
    """Something else came out than had to."""


class Gpu:
    """An NVIDIA GPU by way of CuPy.

    Attributes
    ----------
    driver : CupyDriver
        What fastrack itself uses.
    name : str
        What it is called, such as "NVIDIA H100 80GB HBM3".
    """

    def __init__(self, device):
        import cupy

        from fastrack.devices.cupy_driver import CupyDriver

        self._cupy = cupy
        self.index = int(device.removeprefix("cuda:"))
        self.driver = CupyDriver(self.index)
        cupy.cuda.runtime.setDevice(self.index)
        self._properties = cupy.cuda.runtime.getDeviceProperties(self.index)
        self.name = _text(self._properties["name"])

    def describe(self):
        """What a report says of it."""
        runtime, found = self._cupy.cuda.runtime, self._properties
        return {
            "name": self.name,
            "device": self.driver.name,
            "memory": int(found.get("totalGlobalMem", 0)),
            "multiprocessors": self.driver.multiprocessors,
            "capability": f"{found.get('major')}.{found.get('minor')}",
            "l2": int(found.get("l2CacheSize", 0)),
            "cuda": {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()},
        }

    # Memory, streams and what is put on them, as the driver has it: the only place of the suite that asks a driver.

    def memory(self, size):
        """Allocate device memory."""
        return self.driver.memory(size)

    def host(self, size):
        """Allocate page-locked host memory."""
        return self.driver.host(size)

    def stream(self, *, urgent=False):
        """Make a stream."""
        return self.driver.stream(urgent=urgent)

    def upload(self, pointer, source, stream):
        """Copy host memory to the device."""
        self.driver.upload(pointer, source, stream)

    def download(self, target, pointer, stream):
        """Copy device memory to the host."""
        self.driver.download(target, pointer, stream)

    def fill(self, pointer, value, size, stream):
        """Set bytes of device memory."""
        self.driver.fill(pointer, value, size, stream)

    def launch(self, kernel, blocks, arguments, stream):
        """Start a kernel."""
        self.driver.launch(kernel, blocks, arguments, stream)

    def stamp(self, stream):
        """Record an event that notes the device's time."""
        return self.driver.stamp(stream)

    def elapsed(self, before, after):
        """Return the seconds between two stamps."""
        return self.driver.elapsed(before, after)

    def wait(self, stream):
        """Block until a stream has nothing left to do."""
        event = self.driver.event()
        self.driver.record(event, stream)
        self.driver.synchronize(event)

    def copy(self, target, source, size, stream):
        """Copy from the device to itself."""
        with self._cupy.cuda.Device(self.index):
            self._cupy.cuda.runtime.memcpyAsync(target, source, size, _COPY, stream.ptr)

    def array(self, size):
        """A vector of bytes on the device."""
        return self.driver.empty("U8", (size,), "cupy")

    def pointer(self, array):
        return self.driver.view(array, writable=True).pointer

    def product(self, side):
        """A matrix product to be disturbed."""
        problem = needs.lacks("torch")
        if problem:
            raise Skip(problem)
        return Product(self.index, side)

    def in_use(self):
        """Bytes of its memory that are taken, by whomever."""
        with self._cupy.cuda.Device(self.index):
            free, total = self._cupy.cuda.runtime.memGetInfo()
        return total - free

    def is_well(self):
        """Whether it still does what it is asked."""
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
        with torch.cuda.device(index):
            self._stream = torch.cuda.Stream(device)
            self._a, self._b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
            self._out = torch.empty_like(self._a)
            torch.cuda.synchronize(device)
        self._index = index

    def run(self, count):
        """Seconds of one product, on average over so many in a row."""
        torch = self._torch
        with torch.cuda.device(self._index), torch.cuda.stream(self._stream):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            for _ in range(count):
                torch.mm(self._a, self._b, out=self._out)
            after.record()
            self._stream.synchronize()
        return before.elapsed_time(after) / 1e3 / count


def _text(name):
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)
