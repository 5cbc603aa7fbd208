"""Torch's tensors on fake CUDA devices: memory of the host that torch sees on `cuda:N`, and work that streams put off.

What torch computes on such a tensor is put on the current stream of its device, which runs it late. What would bring
its bytes to the host is refused. Of `torch.cuda` there is what groups use.
"""

import threading
from contextlib import contextmanager

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import View
from fastrack.distributed import _group, _places
from fastrack.errors import DeviceError
from helpers.fake_cuda import FakeDriver

_POISON = 0xA5
_FUTURE = _group.Told
_DEVICE = torch.Tensor.device.__get__
_COMPUTED = {"add", "div_", "copy_", "zero_"}
_OF_METADATA = {
    *("__get__", "__getitem__", "data_ptr", "detach", "is_complex", "is_conj", "is_contiguous", "is_floating_point"),
    *("is_neg", "numel", "reshape", "t", "unbind", "view"),
}


class TorchDriver(FakeDriver):
    """A `FakeDriver` of which the arrays are torch's. `capturing` says that a CUDA graph captures the user's stream."""

    def __init__(self, fake, index, mode, seed):
        super().__init__(mode, seed)
        self.index = index
        self.name = f"cuda:{index}"
        self.capturing = False
        self._fake = fake

    def view(self, array, *, writable):
        self._enter("view")
        assert self._fake.driver_of(array) is self, f"an array that is not on {self.name}"
        stream = self._fake.current_stream(self.name).stream
        if self.capturing and stream is self.user:
            raise DeviceError("cannot move on a stream that is captured into a CUDA graph")
        return View(array.data_ptr(), array.nbytes, stream, array)

    def tensor(self, content):
        """Return a tensor on the device. Its content arrives late, on the user's stream."""
        made = self.new(content.shape, content.dtype)
        self.later(_at_once(torch.Tensor.copy_, made, content))
        return made

    def new(self, shape, dtype):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        block = np.full(nbytes + 64, _POISON, np.uint8)
        self.space.blocks[block.ctypes.data] = block
        self._fake.drivers_of[block.ctypes.data] = self
        return torch.from_numpy(block)[:nbytes].view(dtype).view(shape)


class FakeTorchCuda:
    """Several devices below torch, each of which one group opens. A thread that uses them works within `seen`."""

    def __init__(self, monkeypatch, count, mode="lazy", seed=0):
        self.drivers_of = {}  # by the address of the memory
        self.drivers = [TorchDriver(self, index, mode, seed + index) for index in range(count)]
        self.opened = [CudaDevice(driver) for driver in self.drivers]  # now, since what they compile may take seconds
        self.futures = []
        self._local = threading.local()
        monkeypatch.setattr(_places, "open_device", self._open_device)
        for name in ("current_stream", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self.driver(device), None))
        monkeypatch.setattr(_group, "Told", self._future)

    def driver(self, device):
        return self.drivers[torch.device(device).index]

    def driver_of(self, tensor):
        with torch._C.DisableTorchFunction():
            return self.drivers_of.get(tensor.untyped_storage().data_ptr())

    def seen(self):
        """Return the context manager within which the tensors are on their devices."""
        return _Mode(self)

    def current_stream(self, device):
        driver = self.driver(device)
        return self._streams().setdefault(driver.name, FakeStream(driver, driver.user))

    @contextmanager
    def stream(self, stream):
        streams, name = self._streams(), stream.driver.name
        before = self.current_stream(name)
        streams[name] = stream
        try:
            with self.seen():
                yield
        finally:
            streams[name] = before

    def stop(self):
        """End all streams, and require that no program did what it may not."""
        for driver in self.drivers:
            driver.stop()
            assert driver.violations == []

    def _streams(self):
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        return self._local.streams

    def _open_device(self, name):
        return self.opened[self.driver(name).index]

    def _future(self, *, devices):
        if devices is not None:
            self.futures.append(devices)
        return _FUTURE(devices=None)


class FakeStream:
    """As much of `torch.cuda.Stream` as groups use."""

    def __init__(self, driver, stream):
        self.driver = driver
        self.stream = stream or driver.stream(high_priority=False)

    def record_event(self):
        with _errors_of_torch():
            event = self.driver.event()
            self.driver.record(event.ptr, self.stream.ptr)
            return event

    def wait_event(self, event):
        with _errors_of_torch():
            self.driver.wait(self.stream.ptr, event.ptr)

    def synchronize(self):
        event = self.record_event()
        with _errors_of_torch():
            self.driver._synchronize(event, held=False)


@contextmanager
def _errors_of_torch():
    try:
        yield
    except DeviceError as error:
        raise RuntimeError(*error.args) from None


class _Mode(TorchFunctionMode):
    def __init__(self, fake):
        super().__init__()
        self._fake = fake

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.empty and str(kwargs.get("device", "cpu")) != "cpu":
            return self._fake.driver(kwargs["device"]).new((args[0],), kwargs["dtype"])
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        drivers = {self._fake.driver_of(tensor) for tensor in tensors} or {None}
        if drivers == {None}:
            return function(*args, **kwargs)
        (driver,) = drivers
        if function == _DEVICE:
            return torch.device(driver.name)
        name = function.__name__
        if name in _OF_METADATA:
            return function(*args, **kwargs)
        if name not in _COMPUTED:
            driver.violations.append(f"the host asked for {name} of a tensor on {driver.name}")
            raise TypeError(f"{name} of a tensor on {driver.name}")
        driver.later(_at_once(function, *args, **kwargs), self._fake.current_stream(driver.name).stream)
        return kwargs.get("out", args[0])


def _at_once(function, *args, **kwargs):
    """Return a call of a function of torch that no mode puts off."""

    def run():
        with torch._C.DisableTorchFunction(), torch.no_grad():
            function(*args, **kwargs)

    return run
