"""LMCache's storage, where `make test-all` put it apart, or where it is installed."""

import os
import sys
from pathlib import Path

APART = Path(__file__).parents[2] / ".lmcache"

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # it would tell its makers, by the network
if APART.is_dir() and str(APART) not in sys.path:
    sys.path.append(str(APART))  # behind all others: packages of .venv come first
