"""`CheckpointWriter`: each process seals its shards, and the coordinator commits."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import write_sealed
from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import MessageContext, new_file_id
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._training.checkpoints.checkpoint import save_state
from fastrack._training.checkpoints.state import encode_state
from fastrack._transfer.api import seal_message
from fastrack._util.locations import Location, join, locate_target
from fastrack._util.trial import current, in_earnest
from fastrack.distributed._description import NAME, InFolder, Shard, checkpoint_index, shard_file
from fastrack.distributed._leftovers import Leftovers, require_checkpoint, require_files
from fastrack.distributed._process_group import SealedProcessGroup

VALUES = "values"
"""The message of all values of a process that are no tensors: the skeleton of a dict. Its arrays have numbers."""


class CheckpointWriter(InFolder, StorageWriter):
    """Storage writer that seals a checkpoint, for ``torch.distributed.checkpoint.save`` and ``async_save``.

    Each process seals its shards into one new file. Then the coordinator seals the description of all files into
    ``checkpoint.safetensors``, by renaming or in one request to a store, and removes the files that were there before,
    of an earlier checkpoint and of unfinished ones. A process that is killed at any moment leaves either the old
    checkpoint or the new one. Of saves into one folder that overlap, one that loses its files fails.

    Parameters
    ----------
    path : path or URL
        Folder of the checkpoint, on a file system that all processes share, or in a store, such as
        ``s3://bucket/run/step-100``. ``checkpoint_id=`` of ``save`` replaces it.
    key : KeyLike, optional
        The owner's key, as for `fastrack.seal`. All processes must pass the same key.

    Notes
    -----
    Tensors on a GPU are sealed there. Values that are no tensors are stored without pickle, so they need types of
    `fastrack.save_checkpoint`. Names, values, and shard positions are encrypted; dtypes and shapes of shards are
    not. ``async_save`` copies the plaintext state into host memory before the writer sees it.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed.checkpoint as dcp
    >>> import fastrack
    >>> from fastrack.distributed import CheckpointWriter
    >>> key = fastrack.Key.generate()
    >>> _ = dcp.save({"w": torch.ones(3)}, storage_writer=CheckpointWriter("checkpoint", key=key), no_dist=True)
    """

    def __init__(self, path: str | os.PathLike[str], key: KeyLike | None = None) -> None:
        super().__init__()
        self._path = locate_target(path)
        self._leftovers = Leftovers(self._path)
        resolved = sealing_key(key)  # raises early if it is wrong
        self._key = key  # a path or a provider can go to another process, a Key cannot
        self._default = resolved if key is None else None  # torch saves on its own threads, outside a use_keys block
        self._save_id, self._is_saved = new_file_id(), False

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(dist.group.WORLD, SealedProcessGroup):
            raise RuntimeError(  # noqa: TRY004 - the type is right, and the place wrong
                "saving a sealed checkpoint failed: expected the sealed process group, got a process of its own, where "
                "torch makes a plain one. Use AsyncCheckpointerType.THREAD, and process_group=dist.new_group()"
            )
        return {**self.__dict__, "_default": None, "_save_id": new_file_id(), "_is_saved": False}

    def _sealing_key(self) -> Key:
        return self._default or sealing_key(self._key)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a checkpoint, in `checkpoint_id` if it is given."""
        super().reset(checkpoint_id)
        self._save_id, self._is_saved = new_file_id(), False

    def storage_meta(self) -> StorageMeta:
        """Return the folder and the id of this save, which a reader finds in the checkpoint again."""
        return StorageMeta(self.checkpoint_id, self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, use_collectives: bool = True, **kwargs: Any) -> None:
        """Refuse to save without a coordinator, which commits the checkpoint."""
        if not use_collectives:
            raise ValueError("saving a sealed checkpoint failed: expected use_collectives=True, got False")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder, and tell the coordinator the key of this process."""
        if isinstance(self._path, Path):
            self._path.mkdir(parents=True, exist_ok=True)
        return replace(plan, storage_data=self._sealing_key().id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse processes with different keys, and note what is in the folder. Each process names its own file."""
        expected = self._sealing_key().id
        for rank, plan in enumerate(plans):
            if plan.storage_data not in {None, expected}:  # None if the planner has cached the plan
                raise ValueError(
                    f"saving a sealed checkpoint failed: expected all processes to have key {expected}, as the "
                    f"coordinator has, got {plan.storage_data} in process {rank}. Give them the same key"
                )
        self._leftovers = Leftovers.find(self._path)  # no process of this save has begun to write
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Seal the data of this process into a new file."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(_write_shards(plan, planner, self._path, self._sealing_key()) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, and remove the files of the replaced checkpoint."""
        key = self._sealing_key()
        shards = {result.index: result.storage_data for of_process in results for result in of_process}
        names = {shard_file(self._path, shard.file_id).name for shard in shards.values()}
        is_real = current() is None  # a save that is only tried leaves no file elsewhere, and replaces none
        if is_real:
            require_files(self._path, names)  # or this would replace a checkpoint that is whole by one that is not
        if self._is_saved:  # the id of a save is the file id of its description, and so of no second one
            self._save_id = new_file_id()
        self._is_saved = True
        save_state(join(self._path, NAME), checkpoint_index(metadata, shards, key.id), key, self._save_id)
        if is_real:
            self._leftovers.remove(key)
            require_checkpoint(self._path, key, names)


def _write_shards(plan: SavePlan, planner: SavePlanner, folder: Location, key: Key) -> list[WriteResult]:
    file_id = new_file_id()
    tensors: dict[str, PlainTensor] = {}
    elsewhere: dict[str, Callable[[MessageContext, Key], Bytes]] = {}
    results, values = [], {}
    for item in plan.items:
        if item.type == WriteItemType.BYTE_IO:
            values[item.index.fqn] = _unpickle_own(planner, item)
            results.append(WriteResult(item.index, 0, Shard(file_id)))
            continue
        dtype, shape, is_elsewhere = _describe(planner, item)
        name = str(len(tensors))
        # The planner resolves a tensor again for each use, since resolving may take memory.
        tensors[name] = PlainTensor(dtype, shape, partial(_reader, planner, item))
        if is_elsewhere:
            elsewhere[name] = partial(_seal, planner, item)
        results.append(WriteResult(item.index, tensors[name].nbytes, Shard(file_id, int(name), dtype, shape)))
    if values:
        tensors |= _encode_values(values)
    path = shard_file(folder, file_id)
    write_sealed(tensors, path, key, frozenset(), {}, None, kind="checkpoint", sealers=elsewhere, file_id=file_id)
    return results


def _unpickle_own(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the value that the planner has pickled in this process."""
    with in_earnest():  # in a rehearsal, too
        data = planner.resolve_data(item)
    assert isinstance(data, io.BytesIO)
    data.seek(0)
    return torch.load(data, weights_only=False)


def _encode_values(values: Mapping[str, Any]) -> dict[str, PlainTensor]:
    text, referenced = encode_state(dict(values))
    named = {VALUES: np.frombuffer(text, np.uint8)}
    named |= {f"{VALUES}.{number}": array for number, array in enumerate(referenced)}
    return {name: PlainTensor.of(array) for name, array in named.items()}


def _describe(planner: SavePlanner, item: WriteItem) -> tuple[str, tuple[int, ...], bool]:
    """Return the dtype and shape of a tensor, and whether it is on a device."""
    assert item.tensor_data is not None
    tensor = _resolve(planner, item)
    try:
        dtype, shape = arrays.dtype_and_shape(tensor)
    except TypeError as error:
        raise TypeError(f"{item.index.fqn!r:.200} cannot be saved: {error}") from error
    expected = item.tensor_data.properties.dtype, tuple(item.tensor_data.chunk.sizes)
    if (tensor.dtype, shape) != expected or dtypes.BITS[dtype] % 8:
        raise TypeError(
            f"{item.index.fqn!r:.200} cannot be saved: expected {expected[0]} {list(expected[1])} with elements of "
            f"whole bytes, got {tensor.dtype} {list(shape)}"
        )
    return dtype, shape, tensor.device.type != "cpu"


def _reader(planner: SavePlanner, item: WriteItem) -> Callable[[int, int], Bytes]:
    return arrays.reader(_resolve(planner, item).contiguous())


def _seal(planner: SavePlanner, item: WriteItem, context: MessageContext, key: Key) -> Bytes:
    return seal_message(_resolve(planner, item).contiguous(), context, key)


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach()
