"""A few chunks through every kernel, for compute-sanitizer: ``python -m bench.gpu.small cuda:0``."""

import sys

RIGHT = "all is right"


def main(device):
    from bench.gpu.gpu import Gpu
    from bench.gpu.known import check
    from fastrack._crypto.cobblestone import CHUNK_SIZE

    check(Gpu(device), sizes=(0, 33, CHUNK_SIZE, 2 * CHUNK_SIZE + 8191), blocks=(2,))
    sys.stdout.write(f"{RIGHT}\n")


if __name__ == "__main__":
    main(sys.argv[1])
