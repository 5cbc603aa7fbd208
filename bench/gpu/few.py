"""Little work for a tool that watches it: ``python -m bench.gpu.few check cuda:0`` (or ``open cuda:0 stagger``).

`check` sends a few chunks through every kernel, for compute-sanitizer; `open` opens 256 MiB, for a profiler.
"""

import dataclasses
import sys

RIGHT = "all is right"


def main(argv):
    from bench.gpu import kernels, known, plan
    from bench.gpu.gpu import Gpu
    from bench.gpu.stages.variants import TREE, open_variant
    from fastrack.format import CHUNK_SIZE

    what, device, *variants = argv
    if what == "check":
        known.check(Gpu(device), sizes=(0, 33, CHUNK_SIZE, 2 * CHUNK_SIZE + 8191), blocks=(2,))
        print(RIGHT)
        return
    few = dataclasses.replace(plan.FULL, kernel_sizes=(256 * plan.MIB,), kernel_shares=(1,), rounds=3, budget=0)
    for variant in variants or [TREE]:
        with open_variant(device, variant) as gpu:
            for row in kernels.measure(gpu, few):
                print(row.path, round(row.gbps, 1))


if __name__ == "__main__":
    main(sys.argv[1:])
