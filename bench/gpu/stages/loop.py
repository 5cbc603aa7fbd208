"""Time a training loop that `fastrack.wrap` feeds, next to batches on the device and to plain copies."""

from bench.gpu.gpu import Skip, require
from bench.gpu.timing import rows, wall

WIDTH = 15_000  # values of bf16 in a row
THERE, PINNED, WRAPPED = "batches on the device", "plain, page-locked", "fastrack.wrap"
_SIDE = 8192
_SETS = 4


def run(stage):
    stage.record.measure("loop", lambda: measure(stage.device, stage.plan))


def measure(device, plan):
    """Yield rows of the time of one batch, for every number of matrix products that a batch is given."""
    require("torch")
    import torch

    import fastrack

    if device != "cpu" and not torch.cuda.is_available():
        raise Skip(f"this torch ({torch.__version__}) cannot use a GPU")
    key = fastrack.Key.generate()
    plain = [torch.randn(plan.loop_rows, WIDTH).to(torch.bfloat16) for _ in range(_SETS)]
    sealed = [fastrack.seal(batch, key) for batch in plain]
    locked = plain if device == "cpu" else [batch.pin_memory() for batch in plain]
    there = [batch.to(device) for batch in plain]
    side = min(_SIDE, plan.matrix)
    weights = torch.randn(side, side, device=device).to(torch.bfloat16) / 100
    order = [number % _SETS for number in range(plan.loop_steps)]

    def train(batches, products):
        for batch in batches:
            y = weights
            for _ in range(products):
                y = torch.mm(y, weights)
            y.sum() + batch.float().sum()
        if device != "cpu":
            torch.cuda.synchronize(device)

    def run_of(batches, products):
        return lambda _: wall(lambda: train(batches(), products)) / plan.loop_steps

    feeds = {
        THERE: lambda: (there[n] for n in order),
        PINNED: lambda: (locked[n].to(device, non_blocking=True) for n in order),
        WRAPPED: lambda: fastrack.wrap([sealed[n] for n in order], device, keys=key),
    }
    for products in plan.loop_products:
        runs = {name: run_of(batches, products) for name, batches in feeds.items()}
        yield from rows("loop", plain[0].nbytes, runs, plan, products=products)
