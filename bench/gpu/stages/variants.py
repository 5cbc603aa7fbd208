"""Compare the kernels with every candidate: known answers first, then speed, with two splits of shared memory."""

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu import candidates

TREE = "kernels"
SPLITS = (-1, 100)  # percent of a multiprocessor's memory that is shared; -1 leaves it to the CUDA driver


def run(stage):
    from bench.gpu import kernels, known

    record, short = stage.record, stage.plan.shortened(shares=(1,), budget=2.0)
    for name in [TREE, *candidates.names()]:
        for split in SPLITS:
            step, settings = f"{name}, split {split}", {"variant": name, "split": split}
            opened = []

            def check(name=name, split=split, opened=opened):
                with _opened(stage.device, name) as gpu:
                    record.gpu = gpu
                    opened.append(gpu)
                    gpu.split_shared_memory(split)
                    return {"right": known.check(gpu), "kernels": gpu.kernels()}

            def rows(settings=settings, opened=opened):
                for row in kernels.measure(opened[0], short):
                    if "share" in row.settings:
                        yield dataclasses.replace(row, step="variants", settings={**row.settings, **settings})

            if record.step(step, check, is_check=True):
                record.measure(f"{step}, speed", rows)


@contextmanager
def _opened(device, name):
    """Open the device with the kernels of that name."""
    from bench.gpu.gpu import Gpu

    if name == TREE:
        yield Gpu(device)
        return
    with TemporaryDirectory(prefix="fastrack-") as folder:
        yield Gpu(device, candidates.assemble(name, Path(folder)))
