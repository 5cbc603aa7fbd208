"""Test the comparison with a slow-down put in by hand, which it has to find."""

from __future__ import annotations

from pathlib import Path

from bench.compare import CannotCompareError

SHARE = 0.2
_CHANNEL = Path("fastrack") / "_transfer" / "channel.py"
_PLANT = f"""

def _slowed(run: Any) -> Any:
    from time import perf_counter

    def slow(*arguments: Any, **options: Any) -> Any:
        start = perf_counter()
        try:
            return run(*arguments, **options)
        finally:
            now = perf_counter()
            while perf_counter() < now + {SHARE} * (now - start):
                pass

    return slow


Channel._receive = _slowed(Channel._receive)
Channel._send = _slowed(Channel._send)
"""


def plant(source: Path) -> None:
    """Make the transfer loops of the tree in `source` take 20 % longer, or raise CannotCompareError if it has none."""
    channel = source / _CHANNEL
    text = channel.read_text()
    if not ("    def _receive(" in text and "    def _send(" in text):
        raise CannotCompareError(f"{_CHANNEL} has no _receive and _send; update bench/compare/selftest.py")
    channel.write_text(text + _PLANT)
