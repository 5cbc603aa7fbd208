"""Checkpoints of the Trainer of transformers as sealed folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fastrack._crypto.keys import Key
from fastrack._sealed.folder_writer import seal_folder

_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")


class SealedFolderCallback(TrainerCallback):  # type: ignore[misc]  # not installed where types are checked
    """Callback that seals each checkpoint that the Trainer has written into memory."""

    def __init__(self, folder: Path, key: Key) -> None:
        self._folder = folder
        self._key = key

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        """Refuse to train if plain checkpoints would be written to a disk."""
        if (kind := file_system(Path(args.output_dir))) not in _IN_MEMORY:
            raise ValueError(
                f"output_dir={args.output_dir!r:.200}: expected a folder in memory (tmpfs), since the Trainer writes "
                f"plain checkpoints there, got one on {kind}. Name one in /dev/shm"
            )

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Seal the checkpoint that was just written, on one process."""
        if state.is_world_process_zero:
            name = f"checkpoint-{state.global_step}"
            self._folder.mkdir(parents=True, exist_ok=True)
            if not (self._folder / name).exists():
                seal_folder(Path(args.output_dir, name), self._folder / name, self._key)


def file_system(path: Path) -> str:
    """Return the type of the file system that a path is on or will be made on, or "unknown"."""
    path = Path(os.path.realpath(path))
    try:
        lines = _MOUNTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    kinds: dict[str, str] = {}
    for line in lines:
        fields, _, rest = line.partition(" - ")
        kinds[fields.split()[4].replace("\\040", " ")] = rest.split()[0]  # a later mount hides an earlier one
    return next((kinds[str(parent)] for parent in [path, *path.parents] if str(parent) in kinds), "unknown")
