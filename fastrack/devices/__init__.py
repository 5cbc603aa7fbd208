"""Where plaintext may exist. A device is found by its name: `cpu`, or `cuda:N`."""

from __future__ import annotations

import re

from fastrack.devices.base import Device, Slab, Work
from fastrack.errors import DeviceError

__all__ = ["DEFAULT", "Device", "Slab", "Work", "canonical", "open_device"]

DEFAULT = "cpu"

_CUDA = re.compile(r"cuda(?::(\d+))?")


def canonical(device: object = None) -> str:
    """The name of a device as fastrack writes it: "cpu", or "cuda:N".

    Parameters
    ----------
    device : str or torch.device, optional
        Absent, the embedded default: "cpu".

    Raises
    ------
    DeviceError
        If there is no such kind of device.
    """
    name = DEFAULT if device is None else str(device)
    cuda = _CUDA.fullmatch(name)
    if name == "cpu":
        return name
    if cuda:
        return f"cuda:{int(cuda[1] or 0)}"
    raise DeviceError(f"no such device: {name!r}; there are 'cpu' and 'cuda:N'")


def open_device(name: str, threads: int | None = None) -> Device:
    """Open a device by its canonical name.

    Raises
    ------
    DeviceError
        If this machine or this version of fastrack cannot use it.
    """
    if name == "cpu":
        from fastrack.devices.cpu import CpuDevice

        return CpuDevice(threads)
    raise DeviceError(f"{name} cannot be used: this version of fastrack has no CUDA device yet; use device='cpu'")
