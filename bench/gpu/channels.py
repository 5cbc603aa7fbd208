"""Channels to the GPU with the settings of a measurement, not fastrack's."""

from contextlib import contextmanager

from fastrack import Channel
from fastrack._devices.cuda.device import MAX_COPIERS, CudaDevice
from fastrack._devices.cuda.streams import LANES
from fastrack._transfer.channel import DEPTH

DEFAULTS = {"slab": CudaDevice.max_slab_size, "lead": CudaDevice.first_slab_size, "depth": DEPTH}
DEFAULTS |= {"lanes": LANES, "threads": MAX_COPIERS}


@contextmanager
def channel_on(driver, key, *, share=1.0, slab=None, lead=None, depth=None, threads=None, lanes=None):
    """Open a channel over this driver. Absent settings come from `DEFAULTS`."""
    device = CudaDevice(driver, share=share, threads=threads)
    device.max_slab_size = slab or device.max_slab_size
    device.first_slab_size = min(lead or device.first_slab_size, device.max_slab_size)
    device.lanes = device._pipeline.lanes = lanes or device.lanes
    with Channel._from_device(device, keys=key, depth=depth or DEPTH) as channel:
        yield channel
