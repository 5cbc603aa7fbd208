"""Check paths that a caller gives."""

from __future__ import annotations

import os


def require_path(path: object, usage: str) -> None:
    """Raise TypeError if `path` is not a path, for example when arguments are swapped. `usage` shows the call."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected str or os.PathLike, got {type(path).__name__}. Call {usage}")
