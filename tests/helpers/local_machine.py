"""A made-up machine in the place of the one that tests run on."""

from importlib import import_module

from fastrack import attest
from fastrack.attest import _verify_offer
from helpers.foundry.authority import NOW
from helpers.foundry.machine import roots

_TOLD_THE_TIME = (
    "attest.exchange",
    "attest.fetch",
    "attest.policy",
    "tours.plan",
    "tours.desks",
    "tours.run",
)


def replace(patch, collect, clock=lambda: NOW):
    """Have evidence be collected by a function, its made-up vendors be known, and commands be told their time."""
    patch.setattr(attest, "collect_evidence", collect)
    patch.setattr(_verify_offer, "VENDOR_ROOTS", roots())
    for name in _TOLD_THE_TIME:
        patch.setattr(import_module(f"fastrack._cli.{name}"), "read_clock", clock)
    patch.setattr(import_module("fastrack_bench.qualification.machine"), "read_clock", clock)
