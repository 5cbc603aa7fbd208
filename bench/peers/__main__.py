"""``python -m bench.peers``."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # this checkout, whatever else is installed

from bench.peers.command import main  # noqa: E402 - it is found there

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
