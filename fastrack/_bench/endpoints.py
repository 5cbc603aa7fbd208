"""The ends of transfers, by the kind of device: a tensor there, a plain copy, and a chain that is opened or sealed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from fastrack._bench.measure import BOUNCE, COPY
from fastrack._bench.paths import BouncePath, OneBlockPath, copy, touched
from fastrack._crypto.base import Bytes
from fastrack._devices.cpu import CpuDevice
from fastrack._devices.cuda.commands import Commands
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import Driver
from fastrack._tensors import arrays

OVERLAP = "+ overlap"  # the last step, which is fastrack

Direction = Literal["to_device", "to_host"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

_FILLER = 0x5A  # no tensor of random bytes consists of only this byte
_DETOUR = {
    "to_device": ("host opens", "host seals", "copy", "device opens"),
    "to_host": ("device seals", "copy", "host opens", "host seals"),
}


class CpuEndpoint:
    """The end of a transfer on "cpu": the tensor and a device for `OneSlab` in host memory, and OpenSSL for a chain."""

    def __init__(self, plain: Bytes, bits: int) -> None:
        self.array = touched(plain.size)
        self.device = CpuDevice()
        self.chain = BouncePath(plain.size, bits)
        self._plain = plain

    def passes(self, direction: Direction, step: str) -> tuple[str, ...]:
        apart = ("copy", "device opens") if direction == "to_device" else ("device seals", "copy")
        together = "opened while copied" if direction == "to_device" else "sealed while copied"
        return {BOUNCE: _DETOUR[direction], OVERLAP: (together,), COPY: ("copy",)}.get(step, apart)

    def view(self, *, writable: bool) -> Bytes:
        return self.array

    def put(self) -> None:
        """Make the plain copy to the device."""
        copy(self.array, self._plain)

    def get(self) -> Bytes:
        """Return the plain copy to the host."""
        result = arrays.empty_bytes(self.array.size)
        copy(result, self.array)
        return result

    def read(self) -> Bytes:
        """Return the bytes of the tensor, untimed."""
        return self.array

    def forget(self, direction: Direction) -> None:
        """Overwrite the memory of a result, if that exists already."""
        if direction == "to_device":
            self.array.fill(_FILLER)

    def clear(self) -> None:
        self.array.fill(0)


class CudaEndpoint:
    """The end of a transfer on a GPU, with one thread block for a chain."""

    def __init__(self, driver: Driver, plain: Bytes, bits: int) -> None:
        self.array = driver.empty("U8", plain.shape, "cupy")
        self.device = CudaDevice(driver)
        self.chain = OneBlockPath(driver, plain.size, bits)
        self._pointer = self.device.view(self.array, writable=True).address
        self._driver = driver
        self._stream = driver.stream(high_priority=True)
        self._locked = driver.host(plain.size)
        self._locked[:] = plain

    def passes(self, direction: Direction, step: str) -> tuple[str, ...]:
        apart = {
            "to_device": ("to page-locked memory", "copy", "device opens"),
            "to_host": ("device seals", "copy", "out of page-locked memory"),
        }
        return {BOUNCE: _DETOUR[direction], COPY: ("copy",)}.get(step, apart[direction])

    def view(self, *, writable: bool) -> Any:
        return self.device.view(self.array, writable=writable)

    def put(self) -> None:
        with self._run() as commands:
            commands.upload(self._pointer, self._locked, self._stream)

    def get(self) -> Bytes:
        return self._download(self._locked)

    def read(self) -> Bytes:
        return self._download(self._driver.host(self._locked.size))

    def forget(self, direction: Direction) -> None:
        if direction == "to_device":
            self._fill(_FILLER)
        else:
            self._locked.fill(_FILLER)

    def clear(self) -> None:
        self._fill(0)

    def _download(self, target: Bytes) -> Bytes:
        with self._run() as commands:
            commands.download(target, self._pointer, self._stream)
        return target

    def _fill(self, value: int) -> None:
        with self._run() as commands:
            commands.fill(self._pointer, value, self._locked.size, self._stream)

    @contextmanager
    def _run(self) -> Iterator[Commands]:
        """Yield commands to add to, then issue them and wait until they are done."""
        commands = Commands()
        yield commands
        event = self._driver.event()
        commands.drain(self._stream, event)
        self._driver.issue(commands)


Endpoint = CpuEndpoint | CudaEndpoint


def open_driver(name: str) -> Driver:
    from fastrack._devices.cuda.cupy_driver import CupyDriver

    return CupyDriver(int(name.removeprefix("cuda:")))
