"""What the comparison is for, put in by hand: a slow-down that it has to find."""

from __future__ import annotations

from pathlib import Path

from bench.compare.errors import CannotCompareError

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


Channel._run = _slowed(Channel._run)
"""


def plant(source: Path) -> None:
    """Make the transfer loop of the tree in `source` take 20 % longer.

    Raises
    ------
    CannotCompareError
        If the loop is not where it was.
    """
    channel = source / _CHANNEL
    text = channel.read_text()
    if text.count("    def _run(\n") != 1:
        raise CannotCompareError(f"{_CHANNEL} has no method _run any more; let bench/compare/selftest.py slow what is")
    channel.write_text(text + _PLANT)
