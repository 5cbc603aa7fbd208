"""A dataset as one thing: the headers of its shards, a shard that is still the one of before, and another key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastrack._files.reader import SealedFile
from fastrack._files.rekey import rekey_file
from fastrack._files.writer import Progress
from fastrack._keys.keyring import KeyLike, KeyRing
from fastrack._samples.about import About, read_about
from fastrack._samples.blocks import OFFSETS, RECORDS, Column, columns_of
from fastrack._samples.stored import SHARD, DataSet, shards_in
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sets.anchor import Anchor
from fastrack._sets.folder import INDEX
from fastrack._sets.load_file import load_file
from fastrack._util.locations import Location
from fastrack._util.new_folder import made_parents, new_folder
from fastrack.errors import FormatError


@dataclass(frozen=True, slots=True)
class Shard:
    """The header of a shard, unauthenticated.

    samples : how many it has; nbytes : of plaintext; size : of the file, in bytes
    """

    path: Location
    file_id: str
    samples: int
    nbytes: int
    size: int


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a dataset, unauthenticated: shards, in order, and columns, with their bytes of plaintext."""

    key_id: str
    shards: tuple[Shard, ...]
    columns: dict[str, Column]
    sizes: dict[str, int]
    anchor: Anchor | None = None

    @property
    def samples(self) -> int:
        """Number of samples, by the headers."""
        return sum(shard.samples for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of plaintext."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(shard.size for shard in self.shards)

    def open(self, shard: Shard) -> SealedFile:
        """Open a shard, which must still be the one whose header was read."""
        return load_file(shard.path, file_id=shard.file_id, anchor=self.anchor)


def is_data_set(path: Path) -> bool:
    """Return whether a path is a folder of shards that a `DatasetWriter` wrote, and no sealed folder."""
    if not path.is_dir() or (path / INDEX).exists():
        return False
    with os.scandir(path) as entries:
        return any(SHARD.fullmatch(entry.name) for entry in entries)


def read_headers(folder: Path, anchor: Anchor | None = None) -> Headers:
    """Read the headers of all shards; with an anchor, as its manifest lists them, and none may be missing.

    Raise FormatError if one is missing in between, there twice, under another key, or has other columns.
    """
    if anchor is not None:
        for name in sorted(filter(SHARD.fullmatch, anchor.names_in(folder))):
            anchor.require_file(folder / name)
    paths = shards_in(folder)
    if not paths:
        raise FormatError(f"{folder}: expected shards of a dataset, got none. Name the folder of one")
    shards: dict[str, Shard] = {}
    key_id, columns, sizes = "", dict[str, Column](), dict[str, int]()
    for path in paths:
        with load_file(path, anchor=anchor) as file:
            if file.kind != "tensor" or not file or file.key_id is None or file.file_id is None:
                raise FormatError(
                    f"{path}: expected a shard of samples, got another file. Move it away, or get it again"
                )
            count, found = columns_of([file[name].context for name in file], path)
            shard = Shard(path, file.file_id, count, sum(tensor.nbytes for tensor in file.values()), file.size)
            if file.key_id != (key_id or file.key_id):
                raise FormatError(
                    f"{path}: expected shards under one key, {key_id}, got one under {file.key_id}. Move the shards of "
                    "the other dataset away"
                )
            if found != (columns or found):
                raise FormatError(
                    f"{path}: expected columns as in {paths[0].name}, got others. Move the shards of the other "
                    "dataset away"
                )
            if shard.file_id in shards:
                raise FormatError(
                    f"{path}: expected another shard, got a copy of {shards[shard.file_id].path.name}. Get it again "
                    "from its owner"
                )
            key_id, columns = file.key_id, found
            shards[shard.file_id] = shard
            for name in columns:
                stored = [file[part].nbytes for part in (name, name + RECORDS, name + OFFSETS) if part in file]
                sizes[name] = sizes.get(name, 0) + sum(stored)
    return Headers(key_id, tuple(shards.values()), columns, sizes, anchor)


def warning_of(data: DataSet, folder: Path) -> str | None:
    """Return what a reader of a dataset must know: that it is not complete, or that its shards do not tell."""
    if data.is_complete is False:
        return f"{folder} is not complete: its last run was interrupted, or its last shards are missing"
    if data.before:
        return (
            f"{folder} has shards that do not say their order and number, as version 0.1 wrote them, or as someone "
            "removed it: swapped and missing ones, types and nulls were not checked"
        )
    return None


@contextmanager
def opened_shard(path: Location, about: About, keys: KeyRing, anchor: Anchor | None = None) -> Iterator[SealedFile]:
    """Open the shard of which `read_data_set` authenticated what it says; refuse one that took its place since."""
    with load_file(path, anchor=anchor) as file:
        authenticate_headers([file[name] for name in file], keys)
        count, _ = columns_of([file[name].context for name in file], path)
        if read_about(file, keys) != (about if about.data_set else None) or count != about.samples:
            raise FormatError(f"{path} was replaced since this dataset was opened. Open it again")
        yield file


def rekey_data_set(
    data: DataSet, target: Path, keys: KeyRing, *, key: KeyLike, progress: Progress | None = None
) -> None:
    """Seal all shards of a dataset under another key into a new folder, which is there when it is complete.

    Each shard is as `rekey_file` makes it, and says of itself what it said.
    """
    with made_parents(target), new_folder(target) as folder:
        for path, about in data.shards:
            with opened_shard(path, about, keys) as file:
                rekey_file(file, folder / path.name, keys, key=key, progress=progress)
