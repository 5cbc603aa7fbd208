"""Format numbers with their units."""

from __future__ import annotations


def size_of(count: float) -> str:
    """Return a number of bytes as text, in powers of 1024: 1536 is ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f}".removesuffix(".0") + f" {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
