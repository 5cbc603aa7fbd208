"""Checkpoints of Lightning's Trainer as sealed files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.plugins.io import CheckpointIO

from fastrack._crypto.keyring import KeyRing
from fastrack._crypto.keys import Key
from fastrack._training.checkpoint import load_checkpoint, save_checkpoint
from fastrack._util.locations import locate


class SealedCheckpointIO(CheckpointIO):  # type: ignore[misc]  # not installed where types are checked
    """Plugin of Lightning's Trainer that seals its checkpoints."""

    def __init__(self, key: Key, ring: KeyRing) -> None:
        self._key = key
        self._ring = ring

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Seal a checkpoint into a new file."""
        if storage_options is not None:
            raise TypeError("saving a sealed checkpoint failed: expected storage_options=None, got others. Omit them")
        place = locate(path)
        if isinstance(place, Path):
            place.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, checkpoint, key=self._key)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = None, **_: Any) -> Any:
        """Open a checkpoint in host memory, from where Lightning takes it to its devices."""
        return load_checkpoint(path, keys=self._ring)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, which may be a folder that a strategy has written."""
        files = get_filesystem(path)
        if files.exists(path):
            files.rm(path, recursive=True)
