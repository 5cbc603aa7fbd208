"""`CheckpointReader`: each process opens the parts of shards that it needs."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices import canonical
from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._models.load import Step, fill, fill_in_order, fits_in_place
from fastrack._models.sharded import select_box
from fastrack._sealed.contexts import Edition, new_file_id
from fastrack._sealed.message_headers import open_headers
from fastrack._sealed.seal import unseal
from fastrack._sealed.tensor import SealedTensor
from fastrack._sets.anchor import Anchor
from fastrack._sets.load_file import load_file, resolve_anchor
from fastrack._tensors.arrays import Framework
from fastrack._training.checkpoints.checkpoint import find_message, open_checkpoint
from fastrack._training.checkpoints.state import decode_state
from fastrack._transfer.api import to_device
from fastrack._util.locations import join, locate_target
from fastrack.distributed._description import NAME, InFolder, Shard, parse, shard_file
from fastrack.distributed._writer import VALUES
from fastrack.errors import AuthenticationError, FormatError


class CheckpointReader(InFolder, StorageReader):
    """Storage reader of checkpoints that `CheckpointWriter` has sealed, for ``torch.distributed.checkpoint.load``.

    Each process opens only the chunks that it needs, into the memory of its tensors. Any number of processes may
    load. No code from the checkpoint is run.

    Parameters
    ----------
    path : path or URL
        Folder of the checkpoint. ``checkpoint_id=`` of ``load`` replaces it.
    keys : KeySource, optional
        As for `fastrack.to_device`.
    anchor : Anchor or path, optional
        The description of the checkpoint, and so all its files, must match the owner's newest manifest, as for
        `fastrack.load_file`.

    Notes
    -----
    ``load`` raises a ``CheckpointException`` in all processes; its ``failures`` has the error of each failed process:
    `AuthenticationError` for another key, a file of another checkpoint, or altered data; `FormatError` for another
    kind of checkpoint; otherwise the errors of `fastrack.load_file` and `fastrack.to_device`. Torch turns an error
    about the description into an ``AssertionError`` that quotes it.

    Each process checks the files that it needs, authenticates the headers of the messages that it needs, and opens
    the values that are no tensors. No tensor is written until all processes have finished these checks and have the
    same checkpoint. After an altered chunk the tensors of its process hold zeros.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed.checkpoint as dcp
    >>> import fastrack
    >>> from fastrack.distributed import CheckpointReader, CheckpointWriter
    >>> key = fastrack.Key.generate()
    >>> _ = dcp.save({"w": torch.arange(3)}, storage_writer=CheckpointWriter("checkpoint", key=key), no_dist=True)
    >>> state = {"w": torch.zeros(3, dtype=torch.int64)}
    >>> dcp.load(state, storage_reader=CheckpointReader("checkpoint", keys=key), no_dist=True)
    >>> state["w"]
    tensor([0, 1, 2])
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        keys: KeySource | None = None,
        *,
        anchor: Anchor | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._path = locate_target(path)
        self._ring = KeyRing.resolve(keys)
        self._anchor = anchor
        self._edition: Edition | None = None  # of the description, which names all file ids
        self._key_id = ""
        self._shards: Mapping[MetadataIndex, Shard] = {}
        self._files: dict[str, SealedFile] = {}
        self._values: dict[str, dict[str, Any]] = {}  # by file id
        self.load_id = new_file_id()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to load, from `checkpoint_id` if it is given."""
        super().reset(checkpoint_id)
        self._files, self._values = {}, {}
        self.load_id = new_file_id()

    def read_metadata(self) -> Metadata:
        """Open the description of the checkpoint."""
        path = join(self._path, NAME)
        anchor = resolve_anchor(self._anchor)
        with load_file(path, anchor=anchor) as file:
            document, save_id = open_checkpoint(file, self._ring), file.file_id
        self._edition = None if anchor is None else anchor.edition
        metadata, self._key_id = parse(document, path)
        metadata.storage_meta = StorageMeta(self._path, save_id, self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Keep the shards of the description."""
        self._shards = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check the files, authenticate the headers of all shards that this process needs, and open its values.

        No process reads tensors before the coordinator has compared the checkpoints of all processes.
        """
        messages = [self._find(item) for item in plan.items]
        keys = MessageKeys(len(messages))
        try:
            open_headers(messages, self._ring, keys)
        finally:
            keys.wipe()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._value_of(item)
        return replace(plan, storage_data=self._digest_of_files())

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse plans of different checkpoints, even if each is authentic."""
        expected = self._digest_of_files()
        for rank, plan in enumerate(plans):
            if plan.storage_data != expected:
                raise AuthenticationError(
                    f"{self._path}: process {rank}: expected the checkpoint that the coordinator has, got another. "
                    "It was replaced meanwhile, or the storage gives them different files; load again",
                    path=self._path,
                )
        return plans

    def _digest_of_files(self) -> str:
        """Return the SHA-256 of the ids of all files. Every checkpoint has new ids."""
        return hashlib.sha256("".join(sorted({shard.file_id for shard in self._shards.values()})).encode()).hexdigest()

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Open the planned items into the memory of their tensors."""
        values = {item: self._value_of(item) for item in plan.items if item.type == LoadItemType.BYTE_IO}
        steps, targets = [], []
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                target = planner.resolve_tensor(item).detach()
                part = select_box(self._find(item), item.storage_offsets, item.lengths)
                if tuple(target.shape) != part.shape:
                    raise FormatError(
                        f"{item.dest_index.fqn!r:.200}: expected a part of shape {list(part.shape)}, got a tensor of "
                        f"{list(target.shape)}. Use a planner that gives one of the shape of the part"
                    )
                fits = fits_in_place(part, target, part.dtype)
                steps.append(Step(part, target, target, canonical(target.device), fits, ()))
                targets.append((item, target))
        fill_in_order(steps)
        fill(steps, self._ring)
        for item, target in targets:
            planner.commit_tensor(item, target)
        for item, value in values.items():
            planner.load_bytes(item, _pickle(value))
        self._files, self._values = {}, {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _find(self, item: ReadItem) -> SealedTensor:
        """Return the message of an item, checked against the description."""
        shard = self._shards[item.storage_index]
        file = self._open(shard.file_id)
        name = VALUES if shard.number is None else str(shard.number)
        sealed = find_message(file, name)
        if shard.number is not None and (sealed.dtype, sealed.shape) != (shard.dtype, shard.shape):
            raise AuthenticationError(
                f"{file.path}: message {name}: expected {shard.dtype} {list(shard.shape)} by the description of the "
                f"checkpoint, got {sealed.dtype} {list(sealed.shape)}; it was altered. Get the file that was saved",
                tensor=name,
                path=file.path,
            )
        return sealed

    def _open(self, file_id: str) -> SealedFile:
        file = self._files.get(file_id)
        if file is None:
            file = load_file(shard_file(self._path, file_id), file_id=file_id)
            if file.key_id != self._key_id or file.kind != "checkpoint":
                raise AuthenticationError(
                    f"{file.path}: expected a part of a checkpoint under key {self._key_id}, got a {file.kind} file "
                    f"under {file.key_id}; it is another file. Get the one that was saved",
                    path=file.path,
                )
            file.edition = self._edition
            self._files[file_id] = file
        return file

    def _value_of(self, item: ReadItem) -> Any:
        """Return a value that is no tensor. All values of a file are opened together."""
        file_id, name = self._shards[item.storage_index].file_id, item.storage_index.fqn
        if file_id not in self._values:
            self._values[file_id] = _decode_values(self._open(file_id), self._ring)
        values = self._values[file_id]
        if name not in values:
            raise FormatError(
                f"{self._open(file_id).path}: expected the value {name!r:.200} by the description of the checkpoint, "
                "got none. Save it again"
            )
        return values[name]


def _decode_values(file: SealedFile, keys: KeyRing) -> dict[str, Any]:
    def fetch(number: int, framework: Framework) -> Any:
        return to_device(find_message(file, f"{VALUES}.{number}"), keys=keys, framework=framework)

    values = decode_state(unseal(file[VALUES], keys, framework="numpy").tobytes(), fetch)
    if type(values) is not dict:
        raise FormatError(f"{file.path}: expected a dict of values, got another type. Save the checkpoint again")
    return values


def _pickle(value: Any) -> io.BytesIO:
    """Pickle a value for the planner, which unpickles it again."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
