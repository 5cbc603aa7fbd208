"""A GPU of host memory in the place of the first one."""

from contextlib import contextmanager

from fastrack._bench import steps
from fastrack._transfer import channel
from helpers import fake_cuda


@contextmanager
def standing_in(patch, driver, device):
    """Have channels find a device over a driver at "cuda:0", and measurements the driver, which the block stops."""
    fake_cuda.install(patch)
    patch.setattr(channel, "open_device", lambda *_: device(driver))
    patch.setattr(steps, "open_driver", lambda _: driver)
    yield driver
    driver.stop()
    assert driver.violations == []
