"""Test the comparison with a slow-down put in by hand, which it has to find."""

from __future__ import annotations

from pathlib import Path

SHARE = 0.2
_PACKAGE = Path("fastrack") / "__init__.py"
# Only public names, so that no change inside of the package breaks it.
_PLANT = f"""

def _slowed(run):
    from time import perf_counter

    def slow(*arguments, **options):
        start = perf_counter()
        try:
            return run(*arguments, **options)
        finally:
            now = perf_counter()
            while perf_counter() < now + {SHARE} * (now - start):
                pass

    return slow


def _slow_down():
    from fastrack import Channel

    Channel.to_device = _slowed(Channel.to_device)
    Channel.to_host = _slowed(Channel.to_host)


_slow_down()
"""


def plant(source: Path) -> None:
    """Make the transfers of the tree in `source` take 20 % longer."""
    with (source / _PACKAGE).open("a") as package:
        package.write(_PLANT)
