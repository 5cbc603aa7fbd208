"""``python -m bench.peers``."""

import sys

from bench.peers.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
