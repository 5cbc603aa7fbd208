"""Checkpoints of the Trainer of transformers as sealed folders."""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from fastrack._keys.keys import Key
from fastrack._sealed.seal import unseal
from fastrack._sets.folder import load_folder
from fastrack._sets.folder_writer import seal_folder
from fastrack._util.atomic import remove_folder
from fastrack._util.rights import require_own
from fastrack.errors import FastrackError

_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")
_RUN = "fastrack.run"  # file that names the run of a checkpoint; a resumed run keeps its name


class SealedFolderCallback(TrainerCallback):  # type: ignore[misc]  # not installed where types are checked
    """Callback that seals each checkpoint that the Trainer writes into memory."""

    def __init__(self, folder: Path, key: Key) -> None:
        self._folder = folder
        self._key = key
        self._run = b""

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Refuse to train if checkpoints would reach a disk, or could not be sealed as a whole."""
        staging = Path(args.output_dir)
        if (kind := file_system(staging)) not in _IN_MEMORY:
            raise ValueError(
                f"output_dir={args.output_dir!r:.200}: expected a folder in memory (tmpfs), since the Trainer writes "
                f"plain checkpoints there, got one on {kind}. Name one in /dev/shm"
            )
        staging.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(staging)
        staging.chmod(0o700)  # the Trainer made it readable by others
        if args.local_process_index != args.process_index:
            raise ValueError(
                f"checkpoint_callback: expected all processes on one machine, since a folder in its memory has what "
                f"they save, got process {args.process_index} as number {args.local_process_index} of its machine. "
                "Save with torch.distributed.checkpoint and a CheckpointWriter"
            )
        later = [step for step in map(_step, self._folder.glob("checkpoint-*")) if step > state.global_step]
        if later:
            raise FileExistsError(
                errno.EEXIST,
                f"expected no checkpoint after step {state.global_step}, where this run begins, got one of step "
                f"{max(later)}. Resume from that one, or name another folder",
                str(self._folder),
            )
        resumed = staging / f"checkpoint-{state.global_step}" / _RUN
        self._run = resumed.read_bytes() if resumed.is_file() else secrets.token_hex(16).encode()

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Seal the checkpoint that all processes have written, on one process."""
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # the Trainer does not wait for the files of other processes, such as their random states
        if state.is_world_process_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"checkpoint-{state.global_step}"
            Path(args.output_dir, name, _RUN).write_bytes(self._run)
            seal_folder(Path(args.output_dir, name), self._folder / name, self._key)
            self._rotate(args, state)

    def _rotate(self, args: Any, state: Any) -> None:
        """Remove the oldest checkpoints of this run over ``save_total_limit``, like the Trainer in memory.

        A Trainer that resumes without its best checkpoint forgets the path, but not the step.
        """
        limit = args.save_total_limit or 0
        best = {Path(state.best_model_checkpoint or "").name, f"checkpoint-{state.best_global_step}"}
        ours = sorted(filter(self._is_of_run, self._folder.glob("checkpoint-*")), key=_step) if limit > 0 else []
        gone = [path for path in ours if path.name not in best and not Path(args.output_dir, path.name).exists()]
        for path in gone[: max(0, len(ours) - limit)]:
            try:
                remove_folder(path)
            except OSError as error:  # not worth ending a run
                warnings.warn(f"removing {path} failed: {error}. Remove it", RuntimeWarning, stacklevel=2)

    def _is_of_run(self, path: Path) -> bool:
        """Return whether this run, or a run that it resumed, sealed a folder, by its authenticated content."""
        if path.is_symlink() or _step(path) < 0:
            return False
        try:
            with load_folder(path, self._key).open(_RUN) as file:
                return bool(unseal(file[_RUN], self._key, framework="numpy").tobytes() == self._run)
        except (FastrackError, OSError, KeyError):
            return False


def _step(path: Path) -> int:
    """Return the step of a checkpoint, or -1 for other folders."""
    number = path.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def file_system(path: Path) -> str:
    """Return the file system type of a path, which need not exist, or "unknown"."""
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
