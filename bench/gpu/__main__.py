"""``python -m bench.gpu``. Says what is missing before anything is imported that may be."""

import sys

from bench.gpu.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
