"""`checkpoint_io` and `checkpoint_callback`: sealed checkpoints for trainers of other libraries."""

from __future__ import annotations

import os
from typing import Any

from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._util.locations import locate_local


def checkpoint_io(key: KeyLike | None = None, keys: KeySource | None = None) -> Any:
    """Return a plugin that makes Lightning's Trainer write sealed checkpoints.

    Parameters
    ----------
    key : KeyLike, optional
        The owner's key, as for `fastrack.seal`.
    keys : KeySource, optional
        Keys that may open a checkpoint to resume from, by default `key`.

    Returns
    -------
    lightning.pytorch.plugins.io.CheckpointIO
        For ``Trainer(plugins=[...])``. It stores the types of `fastrack.save_checkpoint`.

    Raises
    ------
    TypeError
        By ``fit``, before the first step, if `fastrack.save_checkpoint` cannot store a hyperparameter.
    ValueError
        By the Trainer, if its strategy writes plain checkpoints past any plugin, such as sharded checkpoints.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.distributed import checkpoint_io
    >>> key = fastrack.Key.generate()
    >>> trainer = lightning.Trainer(plugins=[checkpoint_io(key)])  # doctest: +SKIP
    """
    from fastrack.distributed._lightning import SealedCheckpointIO

    owner = sealing_key(key)
    return SealedCheckpointIO(owner, KeyRing.resolve(owner if keys is None else keys))


def checkpoint_callback(folder: str | os.PathLike[str], key: KeyLike | None = None) -> Any:
    """Return a callback for the Trainer of transformers that seals each checkpoint into a folder.

    The Trainer itself writes plaintext, so its ``output_dir`` must be in memory, such as in ``/dev/shm``, and belong
    to this user; any other is refused. It gets mode 0700. To resume, restore a checkpoint there with
    `fastrack.unseal_folder`. All processes must run on one machine, because they share the folder in memory.

    Parameters
    ----------
    folder : path
        Folder for the sealed checkpoints, each made by `fastrack.seal_folder`. No checkpoint is ever replaced: a run
        is refused if the folder has checkpoints after its first step. ``save_total_limit`` removes the oldest
        checkpoints that are no longer in ``output_dir``, except the best, and only from this run and the runs that
        it resumed.
    key : KeyLike, optional
        The owner's key, as for `fastrack.seal`.

    Returns
    -------
    transformers.TrainerCallback
        For ``Trainer(callbacks=[...])``.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.distributed import checkpoint_callback
    >>> key = fastrack.Key.generate()
    >>> memory = tempfile.mkdtemp(dir="/dev/shm")  # doctest: +SKIP
    >>> arguments = TrainingArguments(output_dir=memory, save_steps=100)  # doctest: +SKIP
    >>> trainer = Trainer(model, arguments, callbacks=[checkpoint_callback("run", key)])  # doctest: +SKIP
    >>> fastrack.unseal_folder("run/checkpoint-100", f"{memory}/checkpoint-100", key)  # doctest: +SKIP
    >>> trainer.train(resume_from_checkpoint=f"{memory}/checkpoint-100")  # doctest: +SKIP
    """
    from fastrack.distributed._transformers import SealedFolderCallback

    return SealedFolderCallback(locate_local(folder), sealing_key(key))
