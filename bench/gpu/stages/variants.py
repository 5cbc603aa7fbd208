"""Compare the kernels with every candidate: known answers first, then speed, with each split of shared memory."""

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu import candidates

TREE = "kernels"
# Percent of a multiprocessor's memory that is shared. -1 leaves it to the CUDA driver; 58 is 132 of the 228 KiB of
# sm_90, just room for two blocks, and leaves the rest to the L1 cache.
SPLITS = (-1, 58, 100)


def run(stage):
    from bench.gpu import kernels, known

    record, short = stage.record, stage.plan.shortened(shares=(1,), budget=2.0)
    for name in [TREE, *candidates.names()]:
        opened = []  # the device with these kernels, for all splits: each opening compiles a candidate anew
        for split in SPLITS:
            step, settings = f"{name}, split {split}", {"variant": name, "split": split}

            def check(name=name, split=split, opened=opened):
                if not opened:
                    with open_variant(stage.device, name) as gpu:
                        opened.append(gpu)
                gpu = record.gpu = opened[0]
                gpu.split_shared_memory(split)
                return {"right": known.check(gpu), "kernels": gpu.kernels()}

            def rows(settings=settings, opened=opened):
                for row in kernels.measure(opened[0], short):
                    if "share" in row.settings:
                        yield dataclasses.replace(row, step="variants", settings={**row.settings, **settings})

            if record.step(step, check, is_check=True):
                record.measure(f"{step}, speed", rows)


@contextmanager
def open_variant(device, name):
    """Open the device with the kernels of that name."""
    from bench.gpu.gpu import Gpu

    if name == TREE:
        yield Gpu(device)
        return
    with TemporaryDirectory(prefix="fastrack-") as folder:
        yield Gpu(device, candidates.assemble(name, Path(folder)))
