"""Open 256 MiB a few times, for a profiler: ``python -m bench.gpu.one cuda:0``."""

import dataclasses
import sys


def main(device):
    from bench.gpu import kernels, plan
    from bench.gpu.gpu import Gpu

    few = dataclasses.replace(plan.FULL, kernel_sizes=(256 * plan.MIB,), kernel_shares=(1,), rounds=3, budget=0)
    for row in kernels.measure(Gpu(device), few, print):
        print(row.path, round(row.gbps, 1))


if __name__ == "__main__":
    main(sys.argv[1])
