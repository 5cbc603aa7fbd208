"""What the suite for GPUs asks of a GPU, made of host memory: its logic can be run where there is none."""

from __future__ import annotations

import time

from bench.gpu.gpu import Gpu
from helpers.fake_cuda import FakeDriver


class StandIn(Gpu):
    """A `Gpu` whose driver keeps everything in host memory. Its clock is the host's, so its figures mean nothing."""

    name = "Stand-In GPU (host memory)"

    def __init__(self, mode="serial"):
        self.driver = FakeDriver(mode)
        self.well = True

    def describe(self):
        return {"name": self.name, "multiprocessors": self.driver.multiprocessors}

    def copy(self, target, source, size, stream):
        space = self.driver.space

        def run():
            space.at(target, size)[:] = space.at(source, size)

        self.driver.later(run, stream)

    def array(self, size):
        return self.driver.empty("U8", (size,), "cupy")

    def pointer(self, array):
        return array.pointer

    def product(self, side):
        return StandInProduct()

    def in_use(self):
        return sum(block.size for block in self.driver.space.blocks.values())

    def is_well(self):
        return self.well

    def tidy(self):
        pass


class StandInProduct:
    def run(self, count):
        time.sleep(0.002)
        return 0.002 / count
