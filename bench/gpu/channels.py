"""Channels to the GPU whose settings are those of a measurement rather than fastrack's."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

from fastrack import Channel
from fastrack._devices.cuda.device import CudaDevice
from fastrack._transfer import channel


@contextmanager
def channel_on(driver, key, *, share=1.0, slab=None, lead=None, depth=None):
    """A channel over this driver. What is not given is as fastrack has it."""
    device = CudaDevice(driver, share=share)
    device.max_slab_size = slab or device.max_slab_size
    device.first_slab_size = min(lead or device.first_slab_size, device.max_slab_size)
    with (
        patch.object(channel, "open_device", lambda *_, **__: device),
        patch.object(channel, "_DEPTH", depth or channel._DEPTH),
    ):
        opened = Channel(driver.name, keys=key)
    with opened:
        yield opened


def defaults():
    """What fastrack does where nobody says."""
    return {"slab": CudaDevice.max_slab_size, "lead": CudaDevice.first_slab_size, "depth": channel._DEPTH}
