"""``python -m bench.compare BASE``."""

import sys

from bench.compare.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
