"""Check paths that a caller gives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from fastrack._util.shown import shown


def require_path(path: object, usage: str) -> None:
    """Raise TypeError if `path` is not a path, for example when arguments are swapped. `usage` shows the call."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path: expected str or os.PathLike, got {type(path).__name__}. Call {usage}")


def require_files(paths: object, columns: object) -> None:
    """Raise TypeError if the arguments of `SealedDataset` are others, such as tensors or a key."""
    usage = "Call SealedDataset(paths, columns, keys=...), of files that DatasetWriter or save_file wrote"
    for path in paths if isinstance(paths, (list, tuple)) else [paths]:
        is_other = path is not paths or isinstance(paths, Mapping) or hasattr(paths, "shape")
        if not isinstance(path, (str, os.PathLike)) and (is_other or not isinstance(paths, Iterable)):
            raise TypeError(f"paths: expected sealed files, got {shown(path)}. {usage}")
    if columns is not None and not isinstance(columns, Iterable):
        raise TypeError(f"columns: expected names, got {shown(columns)}. {usage}")
