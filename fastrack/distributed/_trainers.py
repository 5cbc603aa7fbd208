"""`checkpoint_io` and `checkpoint_callback`: sealed checkpoints of the trainers of other libraries."""

from __future__ import annotations

import os
from typing import Any

from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._util.locations import locate_local


def checkpoint_io(key: KeyLike | None = None, keys: KeySource | None = None) -> Any:
    """Return a plugin for Lightning's Trainer, with which its checkpoints are sealed files.

    Parameters
    ----------
    key : KeyLike, optional
        The owner's key, as `fastrack.seal` takes it.
    keys : KeySource, optional
        Keys that may open a checkpoint to resume from, by default `key`.

    Returns
    -------
    lightning.pytorch.plugins.io.CheckpointIO
        For ``Trainer(plugins=[...])``. It stores what `fastrack.save_checkpoint` takes.

    Raises
    ------
    TypeError
        By ``fit``, before the first step, if a hyperparameter is nothing that `fastrack.save_checkpoint` takes.
    ValueError
        By the Trainer, if its strategy writes plain checkpoints past any plugin, as those that shard a model do.

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
    """Return a callback for the Trainer of transformers that seals each of its checkpoints into a folder.

    The Trainer itself writes in plain, so its ``output_dir`` must be in memory, such as in ``/dev/shm``, and no other
    user's; another one is refused. It gets mode 0700. To resume, restore a checkpoint there with
    `fastrack.unseal_folder`. Several processes have to be on one machine, as its memory has the files of all of them.

    Parameters
    ----------
    folder : path
        Folder for the sealed checkpoints, each a folder as `fastrack.seal_folder` makes it. None is ever replaced: if
        there are later ones than the step at which a run begins, the run is refused. With ``save_total_limit`` the
        oldest are removed that are not in ``output_dir`` any more, except the best one: those of this run and of the
        runs that it resumed, and no others.
    key : KeyLike, optional
        The owner's key, as `fastrack.seal` takes it.

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
