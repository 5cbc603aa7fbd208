"""How the size of a slab, of the first slab, the depth of the ring and the share of the GPU tell on `to_device`."""

from contextlib import ExitStack

from bench.gpu.channels import channel_on, defaults
from bench.gpu.host_data import noise
from bench.gpu.plan import fraction, size_of
from bench.gpu.timing import Row, interleave, wall
from fastrack import Key, seal

PATH = "to_device, sealed"


def measure(gpu, plan, say):
    key = Key.generate(256)
    stock = noise(plan.sweep_size + (1 << 20))
    sealed = [seal(stock[start : start + plan.sweep_size], key) for start in (0, 1 << 20)]
    out = [gpu.array(plan.sweep_size) for _ in sealed]
    standard = defaults()
    for setting, values in (
        ("slab", plan.sweep_slabs),
        ("depth", plan.sweep_depths),
        ("lead", plan.sweep_leads),
        ("share", plan.sweep_shares),
    ):
        say(f"    {setting}: {', '.join(_told(setting, value) for value in values)}")
        with ExitStack() as stack:
            runs = {}
            for value in values:
                channel = stack.enter_context(channel_on(gpu.driver, key, **{setting: value}))
                runs[value] = lambda n, channel=channel: wall(channel.to_device, sealed[n % 2], out=out[n % 2])
            found = interleave(runs, plan)
        for value, times in found.items():
            settings = {**standard, "share": "1", setting: fraction(value) if setting == "share" else value}
            yield Row("sweep", PATH, plan.sweep_size, times, {"varied": setting, **settings})


def _told(setting, value):
    if setting == "share":
        return fraction(value)
    return str(value) if setting == "depth" else size_of(value)
