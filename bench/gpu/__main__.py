"""``python -m bench.gpu``. Says what is missing before anything is imported that may be."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # this checkout and its kernels, whatever else is installed

from bench.gpu.command import main  # noqa: E402 - it is found there

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
