"""Measure `to_device` by slab, depth of the staging pool, share of the GPU, and threads that copy to staging buffers.

The size of the first slab is varied on small transfers, where it is a large part.
"""

from contextlib import ExitStack

from bench.gpu.channels import DEFAULTS, channel_on
from bench.gpu.host_data import Pair
from bench.gpu.plan import fraction, size_of
from bench.gpu.timing import Row, interleave, wall
from fastrack._crypto.workers import default_threads

PATH = "to_device, sealed"


def measure(gpu, plan):
    threads = tuple(count for count in plan.fill_threads if count <= default_threads())
    pair = Pair(gpu, plan.sweep_size)
    settings = {"slab": plan.sweep_slabs, "depth": plan.sweep_depths, "share": plan.sweep_shares, "threads": threads}
    for setting, values in settings.items():
        yield from _vary(gpu, plan, pair, setting, values)
    for size in plan.lead_sizes:
        leads = tuple(lead for lead in plan.sweep_leads if lead <= size)
        yield from _vary(gpu, plan, Pair(gpu, size), "lead", leads)


def _vary(gpu, plan, pair, setting, values):
    print(f"    {size_of(pair.size)}, {setting}: {values}")
    with ExitStack() as stack:
        runs = {}
        for value in values:
            move = pair.mover(stack.enter_context(channel_on(gpu.driver, pair.key, **{setting: value})))
            runs[value] = lambda number, move=move: wall(move, number)
        measured = interleave(runs, plan)
    others = {**DEFAULTS, "share": "1", "threads": min(default_threads(), DEFAULTS["threads"])}
    for value, times in measured.items():
        settings = {**others, setting: fraction(value) if setting == "share" else value}
        yield Row("sweep", PATH, pair.size, times, {"varied": setting, **settings})
