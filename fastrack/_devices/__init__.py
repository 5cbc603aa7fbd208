"""Devices, the places for plaintext: "cpu" and "cuda:N"."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from fastrack._crypto import native
from fastrack._util.registry import PLACES, find
from fastrack._util.shown import HIDDEN, shown
from fastrack.errors import DeviceError

if TYPE_CHECKING:
    from fastrack._devices.base import Device  # imports NumPy, which `nvml` does without

DEFAULT = "cpu"

_CUDA = re.compile(r"cuda(?::(\d{1,9}))?")


def canonical(device: object = None) -> str:
    """Return the canonical name of a device: "cpu", which is the default, or "cuda:N".

    `device` may also be a `torch.device`. Raise DeviceError if its kind is unknown, and TypeError for a tensor.
    """
    name = DEFAULT if device is None else str(device)
    cuda = _CUDA.fullmatch(name)
    if name in {"cpu", "cpu:0"}:  # torch also writes its one CPU with an index
        return "cpu"
    if cuda:
        return f"cuda:{int(cuda[1] or 0)}"
    from fastrack._keys.keyring import KeyProvider, KeyRing  # deferred: builds of the native extension do not need it
    from fastrack._keys.keys import Key

    if hasattr(device, "shape"):
        raise TypeError(
            f"device: expected 'cpu' or 'cuda:N', got {shown(device)}. Call to_device(tensors, device), or pass the "
            "device of the other tensor"
        )
    is_file = isinstance(device, str) and os.path.isfile(name)  # noqa: PTH113 - pathlib raises for a long text
    advice = ". Change the dtype of the result" if name.startswith("torch.") else ""
    if is_file or isinstance(device, (Key, KeyRing, KeyProvider, os.PathLike)) or shown(name) == HIDDEN:
        advice = ". Pass keys by name: keys="
    if type(device) is int and device >= 0:
        advice = f". Name a GPU by kind and number: 'cuda:{device}'"
    told = shown(name if type(device).__module__ == "torch" else device)
    raise DeviceError(f"no such device: {told}; expected 'cpu' or 'cuda:N'{advice}")


def open_device(name: str, threads: int | None = None, share: float | None = None, require: str = "") -> Device:
    """Open a device by its canonical name.

    `threads` is the maximum number of threads of the host, by default the number of its CPUs, and `share` the maximum
    share of a GPU's multiprocessors, above 0 and at most 1, by default all. `require` may be "confidential". Raise
    DeviceError if this machine cannot use the device; the message names a package to install or an alternative. Raise
    it as well if the GPU is not what `require`, FASTRACK_REQUIRE, or a key of this process asks for.
    """
    if name != "cpu" or require:
        find(PLACES["check"])(name, require)  # before a key is made for the device
    if name == "cpu":
        from fastrack._devices.cpu import CpuDevice

        return CpuDevice(threads)
    problem = native.problem()
    if problem is not None:
        raise DeviceError(
            f"opening {name!r} failed: expected fastrack's native extension, which issues its commands, got none: "
            f"{problem}. Until then use device='cpu'"
        )
    from fastrack._devices.cuda.cupy_driver import CupyDriver
    from fastrack._devices.cuda.device import CudaDevice

    driver = CupyDriver(int(name.removeprefix("cuda:")))
    return CudaDevice(driver, share=1.0 if share is None else share, threads=threads)
