"""A GPU made of host memory, as far as the suite for GPUs needs one: its logic can be run without a GPU."""

import time
from contextlib import nullcontext

from bench.gpu import plan
from bench.gpu.gpu import Gpu
from fastrack.format import CHUNK_SIZE
from helpers.fake_cuda import FakeDriver

TINY = plan.Plan(
    link_sizes=(1000, 20 * CHUNK_SIZE),
    fill_threads=(1, 2),
    latency_sizes=(1000, 5 * CHUNK_SIZE),
    kernel_sizes=(CHUNK_SIZE, 3 * CHUNK_SIZE + 5),
    kernel_shares=(1, 1 / 2),
    transfer_sizes=(1000, 20 * CHUNK_SIZE),
    ablation_sizes=(1000, 20 * CHUNK_SIZE),
    rounds=3,
    spread=8 * CHUNK_SIZE,
    group=CHUNK_SIZE,
    sweep_size=20 * CHUNK_SIZE,
    sweep_slabs=(2 * CHUNK_SIZE, 4 * CHUNK_SIZE),
    sweep_depths=(2, 3),
    sweep_leads=(CHUNK_SIZE, 2 * CHUNK_SIZE),
    lead_sizes=(CHUNK_SIZE, 20 * CHUNK_SIZE),
    sweep_shares=(1, 1 / 4),
    timeline_size=400 * CHUNK_SIZE,
    matrix=64,
    products=3,
    stream_size=20 * CHUNK_SIZE,
    stream_shares=(1, 1 / 4),
    loop_rows=4,
    loop_steps=3,
    loop_products=(1, 2),
)
MACHINE = {"name": "Stand-In GPU (host memory)", "multiprocessors": 4, "capability": "9.0"}


class StandIn(Gpu):
    """A `Gpu` whose driver keeps everything in host memory. Its clock is the host's, so its figures mean nothing."""

    def __init__(self, mode="serial"):
        self.driver = FakeDriver(mode)
        self.driver.confidential = False  # to have a timeline
        self.driver.pageable = True
        self.well = True

    def kernels(self):
        return {}

    def split_shared_memory(self, percent):
        pass

    def read(self, array):
        return self.driver.read(array)

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
    def busy(self, count):
        return nullcontext()

    def run(self, count):
        time.sleep(0.002)
        return 0.002 / count
