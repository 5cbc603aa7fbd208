"""The description of a checkpoint: the file and the position of each shard of each tensor. It holds no pickle."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fastrack._files.reader import SealedFile
from fastrack._tensors import dtypes
from fastrack._util.locations import Location, join, locate, locate_target
from fastrack.errors import FormatError

NAME = "checkpoint.safetensors"
"""The file with the description. A checkpoint is there when this file is."""
_VERSION = 1
SHARDS = re.compile(r"shards-[0-9a-f]{32}\.safetensors")
"""Names of the files of processes."""
_ID = re.compile(r"[0-9a-f]{32}")
_MAX_DIMENSIONS = 64
_MEMBERS = {"distributed", "key", "files", "tensors", "values", "shards", "planner"}


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A message of a checkpoint: its file, its number in the file, and its dtype and shape.

    `number` is None for values that are no tensors: these share one message.
    """

    file_id: str
    number: int | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()


class InFolder:
    """The checkpoint folder that torch asks storage writers and readers for."""

    _path: Location

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder of the checkpoint, or its URL."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for a path and for a URL."""
        try:
            locate(checkpoint_id)
        except ValueError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a checkpoint, in `checkpoint_id` if it is given."""
        if checkpoint_id:
            self._path = locate_target(checkpoint_id)


def shard_file(folder: Location, file_id: str) -> Location:
    """Return the path of a process's file."""
    return join(folder, f"shards-{file_id}.safetensors")


def shard_names(folder: Location) -> set[str]:
    """Return the names of the files in a folder that are named as those of processes."""
    if isinstance(folder, Path):
        names = [path.name for path in folder.iterdir()]
    else:
        from fastrack._remote.upload import list_names

        names = list_names(folder)
    return set(filter(SHARDS.fullmatch, names))


def own_files(folder: Location, names: Iterable[str], key_id: str) -> Iterator[Location]:
    """Return the shard files under this key, of those of these names.

    Other files with a similar name, for example in a shared folder, are skipped.
    """
    for path in [join(folder, name) for name in names]:
        with contextlib.suppress(OSError, FormatError), SealedFile(path) as file:
            if (file.kind, file.key_id, shard_file(folder, str(file.file_id))) == ("checkpoint", key_id, path):
                yield path


def checkpoint_index(metadata: Metadata, shards: Mapping[MetadataIndex, Shard], key_id: str) -> dict[str, Any]:
    """Return the pytree that `save_checkpoint` stores as the description.

    The table has a row for each shard, tensor after tensor: the number of the file, the number in the file, the
    offsets, the sizes.
    """
    files = list(dict.fromkeys(shard.file_id for shard in shards.values()))
    numbers = {file_id: number for number, file_id in enumerate(files)}
    tensors: dict[str, Any] = {}
    values: dict[str, int] = {}
    table: list[int] = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            values[name] = numbers[_find(shards, MetadataIndex(name)).file_id]
            continue
        for chunk in entry.chunks:
            shard = _find(shards, MetadataIndex(name, chunk.offsets))
            assert shard.number is not None
            table += [numbers[shard.file_id], shard.number, *chunk.offsets, *chunk.sizes]
        tensors[name] = [dtypes.from_torch(entry.properties.dtype), list(entry.size), len(entry.chunks)]
    return {
        "distributed": _VERSION,
        "key": key_id,
        "files": files,
        "tensors": tensors,
        "values": values,
        "shards": np.array(table, np.int64),
        "planner": metadata.planner_data,
    }


def _find(shards: Mapping[MetadataIndex, Shard], index: MetadataIndex) -> Shard:
    if index not in shards:
        raise RuntimeError(f"{index.fqn!r:.200}: expected that a process has written it, got none. Save it again")
    return shards[index]


def parse(document: Any, path: Location) -> tuple[Metadata, str]:
    """Return the metadata and the key id of a description. Raise FormatError if it is malformed."""
    try:
        return _parse(document)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
        raise FormatError(
            f"{path}: expected the description of a distributed checkpoint of this version of fastrack, got another "
            f"sealed checkpoint ({type(error).__name__}). Update fastrack, or open it with load_checkpoint"
        ) from None


def _parse(document: Any) -> tuple[Metadata, str]:
    _require(type(document) is dict and document.keys() == _MEMBERS)
    _require(type(document["distributed"]) is int and document["distributed"] == _VERSION)
    files, table = document["files"], document["shards"]
    _require(type(files) is list and all(_ID.fullmatch(file_id) for file_id in files))
    _require(len(set(files)) == len(files) and _ID.fullmatch(document["key"]))
    _require(type(table) is np.ndarray and table.dtype == np.int64 and table.ndim == 1)
    _require(type(document["tensors"]) is dict and type(document["values"]) is dict)
    _require(not document["tensors"].keys() & document["values"].keys())
    entries: dict[str, Any] = {}
    shards: dict[MetadataIndex, Shard] = {}
    numbers = iter(table.tolist())
    for name, (dtype, size, count) in document["tensors"].items():
        _require(type(name) is str and len(size) <= _MAX_DIMENSIONS and _are_extents(size) and type(count) is int)
        chunks = []
        for _ in range(count):
            file, number, *box = itertools.islice(numbers, 2 + 2 * len(size))
            offsets, sizes = box[: len(size)], box[len(size) :]
            _require(len(sizes) == len(size) and file >= 0 and number >= 0 and _are_extents(box))
            _require(all(offset + extent <= whole for offset, extent, whole in zip(offsets, sizes, size, strict=True)))
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            shards[MetadataIndex(name, offsets)] = Shard(files[file], number, dtype, tuple(sizes))
        entries[name] = TensorStorageMetadata(TensorProperties(dtypes.to_torch(dtype)), torch.Size(size), chunks)
    _require(next(numbers, None) is None)
    for name, file in document["values"].items():
        _require(type(name) is str and type(file) is int and file >= 0)
        entries[name] = BytesStorageMetadata()
        shards[MetadataIndex(name)] = Shard(files[file])
    return Metadata(entries, document["planner"], shards), document["key"]


def _are_extents(numbers: list[Any]) -> bool:
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _require(holds: object) -> None:
    if not holds:
        raise ValueError("a member has a value out of range")
