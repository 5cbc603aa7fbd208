"""Measure `to_device` by size of the slab and of the first slab, depth of the staging pool and share of the GPU."""

from contextlib import ExitStack

from bench.gpu.channels import DEFAULTS, channel_on
from bench.gpu.host_data import Pair
from bench.gpu.plan import fraction
from bench.gpu.timing import Row, interleave, wall

PATH = "to_device, sealed"


def measure(gpu, plan):
    pair = Pair(gpu, plan.sweep_size)
    sizes = [("slab", plan.sweep_slabs), ("depth", plan.sweep_depths), ("lead", plan.sweep_leads)]
    for setting, values in [*sizes, ("share", plan.sweep_shares)]:
        print(f"    {setting}: {values}")
        with ExitStack() as stack:
            runs = {}
            for value in values:
                move = pair.mover(stack.enter_context(channel_on(gpu.driver, pair.key, **{setting: value})))
                runs[value] = lambda number, move=move: wall(move, number)
            found = interleave(runs, plan)
        for value, times in found.items():
            settings = {**DEFAULTS, "share": "1", setting: fraction(value) if setting == "share" else value}
            yield Row("sweep", PATH, plan.sweep_size, times, {"varied": setting, **settings})
