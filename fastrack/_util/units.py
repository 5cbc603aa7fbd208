"""Format numbers with their units."""

from __future__ import annotations


def format_size(count: float) -> str:
    """Format a number of bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f}".removesuffix(".0") + f" {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
