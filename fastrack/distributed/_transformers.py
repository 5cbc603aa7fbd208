"""Checkpoints of the Trainer of transformers as sealed folders."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from fastrack._crypto.keys import Key
from fastrack._sealed.folder_writer import seal_folder
from fastrack._util.rights import require_own

_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")


class SealedFolderCallback(TrainerCallback):  # type: ignore[misc]  # not installed where types are checked
    """Callback that seals each checkpoint that the Trainer has written into memory."""

    def __init__(self, folder: Path, key: Key) -> None:
        self._folder = folder
        self._key = key

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Refuse to train if a checkpoint would be written to a disk, or could not be sealed as a whole."""
        staging = Path(args.output_dir)
        if (kind := file_system(staging)) not in _IN_MEMORY:
            raise ValueError(
                f"output_dir={args.output_dir!r:.200}: expected a folder in memory (tmpfs), since the Trainer writes "
                f"plain checkpoints there, got one on {kind}. Name one in /dev/shm"
            )
        staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(staging)
        staging.chmod(0o700)  # the Trainer has made it for others to read
        if args.local_process_index != args.process_index:
            raise ValueError(
                f"checkpoint_callback: expected all processes on one machine, since a folder in its memory has what "
                f"they save, got process {args.process_index} as number {args.local_process_index} of its machine. "
                "Save with torch.distributed.checkpoint and a SealedWriter"
            )
        later = [step for step in map(_step, self._folder.glob("checkpoint-*")) if step > state.global_step]
        if later:
            raise FileExistsError(
                errno.EEXIST,
                f"expected no checkpoint after step {state.global_step}, where this run begins, got one of step "
                f"{max(later)}. Resume from that one, or name another folder",
                str(self._folder),
            )

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Seal the checkpoint that all processes have just written, on one of them."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # the Trainer does not wait for the files of other processes, such as their random states
        if state.is_world_process_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"checkpoint-{state.global_step}"
            seal_folder(Path(args.output_dir, name), self._folder / name, self._key)


def _step(path: Path) -> int:
    """Return the step of a checkpoint, or -1 for a folder of another name."""
    number = path.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


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
