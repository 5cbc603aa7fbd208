"""Stand-ins of Intel and NVIDIA, from this project's tests, as no development machine can prove anything.

On a confidential machine nothing of this file is needed: `tour.visit` asks the hardware by itself
(`collect=fastrack.attest.collect_evidence` is its default), `tour.Terms.from_toml` trusts the vendors' own roots, and
all clocks are the system's.
"""

import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

from fastrack import tour

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

MACHINE = Machine("tdx", 1)  # made before the parties are forked, so that all trust the same vendors
ROOTS = roots()
POLICY = policy(1)
_began = time.monotonic()


def clock() -> datetime:
    """Return the time of the stand-ins' certificates."""
    return NOW + timedelta(seconds=time.monotonic() - _began)


def terms(policy_text: str = POLICY) -> tour.Terms:
    return tour.Terms.from_toml(policy_text, roots=ROOTS, clock=clock)
