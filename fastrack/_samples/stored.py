"""A folder of shards: what it holds, and its samples, compared with a source that is imported again."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing
from fastrack._samples.about import About, read_about
from fastrack._samples.arrow_types import describe_type
from fastrack._samples.blocks import OFFSETS, RECORDS, Block, Column, columns_of
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sealed.messages import open_whole
from fastrack._tensors import dtypes
from fastrack._util.locations import Location, join
from fastrack._util.regular_file import not_found
from fastrack._util.shown import shown
from fastrack.errors import FormatError

SHARD = re.compile(r"shard-(\d{6,})\.safetensors")


@dataclass(frozen=True, slots=True)
class DataSet:
    """A folder of shards, as they describe it themselves, authenticated.

    shards : location of each shard and what it says of itself, in order. A shard of version 0.1 has an `About` without
        `data_set`, `types` and `files`, not complete, of the run that begins with sample 0
    columns : by name, with their types; in a dataset of only such shards, types are unknown and ""
    file_ids : of the shards, in order
    """

    shards: tuple[tuple[Location, About], ...]
    columns: dict[str, Column]
    file_ids: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Number of samples in all shards."""
        return self.shards[-1][1].first + self.shards[-1][1].samples if self.shards else 0

    @property
    def run(self) -> int:
        """Number of the first sample of the last run."""
        return self.shards[-1][1].run if self.shards else 0

    @property
    def is_complete(self) -> bool | None:
        """False if the last run did not come to its end, or its last shards are missing; None if no shard tells."""
        if not self.shards or not self.shards[-1][1].data_set:
            return None
        return self.shards[-1][1].complete

    @property
    def is_whole(self) -> bool | None:
        """`is_complete`, but None unless all shards say their place."""
        return False if self.is_complete is False else None if self.before else self.is_complete

    @property
    def id(self) -> str:
        """Id of the dataset; "" if no shard tells."""
        return self.shards[-1][1].data_set if self.shards else ""

    @property
    def before(self) -> int:
        """Number of samples in shards that do not say their place: of version 0.1, or with that removed."""
        return self.shards[-1][1].before if self.id else self.samples


def shards_in(folder: Location) -> list[Location]:
    """Return the shards that a `DatasetWriter` wrote into a folder, in order. Raise FormatError if one is missing."""
    if isinstance(folder, Path):
        if not folder.exists():
            raise not_found(folder)
        return [folder / name for name in order_shards((path.name for path in folder.iterdir()), folder)]
    from fastrack._remote.upload import list_names

    return [join(folder, name) for name in order_shards(list_names(folder), folder)]


def order_shards(names: Iterable[str], folder: Location) -> list[str]:
    """Return those of these names in a folder that a `DatasetWriter` gave, in order, as `shards_in` does."""
    shards = sorted(filter(SHARD.fullmatch, names))
    for index, name in enumerate(shards):
        if name != f"shard-{index:06}.safetensors":
            raise FormatError(f"{folder}: expected shard-{index:06}.safetensors, got none. Get it from the owner")
    return shards


def read_data_set(folder: Location, keys: KeyRing, *, key_id: str | None = None) -> DataSet:
    """Authenticate the headers of all shards of a folder, and what the shards say of themselves.

    Shards that are missing, swapped with each other or of another dataset are refused; after the last one some may
    be missing: see `DataSet.is_complete`. Chunks of the samples are not read. Raise ValueError for a shard under
    another key than `key_id`.
    """
    return read_shards(((path, SealedFile(path)) for path in shards_in(folder)), keys, key_id=key_id)


def read_shards(files: Iterable[tuple[Location, SealedFile]], keys: KeyRing, *, key_id: str | None = None) -> DataSet:
    """Do as `read_data_set` with the opened shards of a folder, in order, and close each."""
    shards, file_ids, last = list[tuple[Location, About]](), list[str](), DataSet((), {})
    for path, file in files:
        with file:
            last = _after(last, path, file, keys, key_id)
            file_ids.append(file.file_id or "")
        shards += last.shards
    return DataSet(tuple(shards), last.columns, tuple(file_ids))


def _after(data_set: DataSet, path: Location, file: SealedFile, keys: KeyRing, key_id: str | None) -> DataSet:
    """Return a dataset of only the shard that follows the last one of `data_set`."""
    if file.kind != "tensor" or not file:
        raise FormatError(
            f"{path}: expected a shard of samples, got a {file.kind} file of {len(file)} tensors. Choose another "
            "folder, or move the file away"
        )
    if key_id is not None and file.key_id != key_id:
        raise ValueError(
            f"{path}: expected shards under the key {key_id}, got one under {file.key_id}. Give that key, or choose "
            "another folder"
        )
    authenticate_headers([file[name] for name in file], keys)
    count, columns = columns_of([file[name].context for name in file], path)
    if columns != (data_set.columns or columns):
        raise FormatError(
            f"{path}: expected columns as in the first shard of the folder, got others. Choose another folder for "
            "these samples"
        )
    about = _place_of(path, file, keys, data_set, count)
    if about.data_set:
        if about.types.keys() != columns.keys():
            raise FormatError(f"{path}: expected the columns that the shard was written with, got others. Get it again")
        columns = {name: replace(columns[name], type=kind) for name, kind in about.types.items()}  # in their order
        if data_set.id:
            try:
                columns = {name: with_type_of(column, data_set.columns[name]) for name, column in columns.items()}
            except ValueError as error:
                raise FormatError(f"{path}: {error}. Get it again") from None
    return DataSet(((path, about),), columns)


def _place_of(path: Location, file: SealedFile, keys: KeyRing, before: DataSet, count: int) -> About:
    """Return what a shard says of itself, or what follows from the shards before it; refuse another place."""
    first, about = before.samples, read_about(file, keys)
    if about is None:
        if before.id:
            raise FormatError(
                f"{path}: expected a shard that says its place, as those before it do, got one that does not, which "
                "version 0.1 wrote or someone changed. Get it again"
            )
        return About("", "", "", 0, first, count, 0, complete=False)
    if about.before != (before.before if before.id else first):
        raise FormatError(
            f"{path}: expected shards that say their place from sample {about.before} on, got others before it, which "
            "version 0.1 wrote or someone changed. Get them again"
        )
    if (about.first, about.samples) != (first, count):
        raise FormatError(
            f"{path}: expected samples {first} to {first + count - 1} of its dataset, got {about.first} to "
            f"{about.first + about.samples - 1}. Give the shards their names again"
        )
    if about.data_set != (before.id or about.data_set) or about.run not in {before.run, first}:
        raise FormatError(f"{path}: expected a shard of the dataset of those before it, got another's. Get it again")
    if about.previous != (before.shards[-1][1].shard if before.shards else ""):
        last = before.shards[-1][0].name if before.shards else "no other"
        raise FormatError(
            f"{path}: expected the shard that was written after {last}, got one that followed another, such as one of "
            "a copy. Get them again"
        )
    return about


def with_type_of(column: Column, other: Column) -> Column:
    """Return a column with the type of its values and those of another: text and bytes together are bytes.

    Raise ValueError for types that differ in another way.
    """
    if column.type == other.type:
        return column
    if {column.type, other.type} != {"", "text"}:
        raise ValueError(
            f"expected values of the type {describe_type(other)!r}, as before, got {describe_type(column)!r}"
        )
    return replace(column, type="")


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one file, or of none, in a shard or a batch: `count` of `blocks`, from `start` on."""

    file: str
    blocks: Mapping[str, Block]
    start: int
    count: int


def read_parts(
    shards: Iterable[tuple[Location, About]], keys: KeyRing, columns: Collection[str] | None = None
) -> Iterator[Part]:
    """Authenticate the samples of shards, one shard after the other, and return them, or `columns`, file by file."""
    for path, about in shards:
        blocks, start = _open_shard(path, keys, about, columns), 0
        for file, count in about.files or (("", about.samples),):
            yield Part(file, blocks, start, count)
            start += count
        del blocks


class StoredSamples:
    """The samples of the last run of a dataset, in order. One shard of them is in memory."""

    def __init__(self, folder: Location, data_set: DataSet, keys: KeyRing) -> None:
        self._folder, self._data_set = folder, data_set
        self._taken, self._count = data_set.run, data_set.samples
        last_run = (shard for shard in data_set.shards if shard[1].first >= data_set.run)
        self._parts = read_parts(last_run, keys)
        self._part: Part | None = None
        self._left = 0
        self._has_more = False

    @property
    def is_compared(self) -> bool:
        """True if all samples were compared."""
        return self._taken == self._count

    def take(self, blocks: Mapping[str, Block], count: int, file: str) -> int:
        """Compare `count` samples with the next stored ones. Return how many were compared: fewer at the last one.

        Raise ValueError if a sample differs from the stored one, or is of a file of another name.
        """
        done = 0
        while done < count and self._taken < self._count:
            if not self._left:
                self._part = None  # before the next shard is in memory
                self._part = next(self._parts)
                self._left = self._part.count
            assert self._part is not None
            size = min(count - done, self._left)
            at = self._part.start + self._part.count - self._left
            different = _first_difference(blocks, done, self._part.blocks, at, size)
            if file and self._part.file and file != self._part.file:
                different = 0
            if different is not None:
                raise self._other_sample(self._taken + different, self._part.file, file)
            self._left -= size
            self._taken += size
            done += size
        if self._taken == self._count:
            self._part = None
        self._has_more |= done < count
        return done

    def require_whole_run(self) -> None:
        """Raise ValueError if the source had fewer samples, or no more than a run that was interrupted has stored."""
        first, advice = self._data_set.run, "Give it as it was, or import it into another folder"
        if not self.is_compared:
            raise ValueError(
                f"resume=: expected a source with the {self._count - first} samples that the last run stored in "
                f"{self._folder}, got {self._taken - first}. {advice}"
            )
        if self._data_set.is_complete is False and not self._has_more:
            raise ValueError(
                f"resume=: expected more than the {self._count - first} samples that {self._folder} has of this "
                f"source, since the run that stored them was interrupted before its end, got no more. {advice}"
            )

    def _other_sample(self, number: int, stored: str, got: str) -> ValueError:
        of, named = f", of {shown(stored, 80)}" if stored else "", f" of {shown(got, 80)}" if got else ""
        return ValueError(
            f"resume=: expected sample {number} as {self._folder} has it{of}, got another{named}. Give the source as "
            "it was, with new samples only at its end, or import it into another folder"
        )


def _first_difference(
    blocks: Mapping[str, Block], start: int, stored: Mapping[str, Block], first: int, count: int
) -> int | None:
    """Return which of `count` samples is the first that differs, or None if all are the same."""

    def are_same(at: int, count: int) -> bool:
        return all(_are_same(blocks[name], start + at, block, first + at, count) for name, block in stored.items())

    return None if are_same(0, count) else next(at for at in range(count) if not are_same(at, 1))


def _are_same(block: Block, start: int, stored: Block, first: int, size: int) -> bool:
    if block.ends is not None and stored.ends is not None:
        lengths = np.diff(block.ends[start : start + size + 1])
        if not np.array_equal(lengths, np.diff(stored.ends[first : first + size + 1])):
            return False
    ours, theirs = block.between(start, start + size), stored.between(first, first + size)
    return block.column == stored.column and np.array_equal(ours, theirs)


def _open_shard(path: Location, keys: KeyRing, about: About, chosen: Collection[str] | None) -> dict[str, Block]:
    with SealedFile(path) as file:
        count, columns = columns_of([file[name].context for name in file], path)
        if count != about.samples:
            raise FormatError(f"{path} was replaced since this dataset was opened. Open it again")
        return read_blocks(file, {name: columns[name] for name in columns if chosen is None or name in chosen}, keys)


def read_blocks(file: SealedFile, columns: Mapping[str, Column], keys: KeyRing) -> dict[str, Block]:
    """Authenticate and decrypt columns of a shard."""
    blocks = {}
    for name, column in columns.items():
        if column.shape is not None:
            blocks[name] = Block(column, open_whole(file[name], keys), file[name].shape[0])
            continue
        data, ends = open_whole(file[name + RECORDS], keys), open_whole(file[name + OFFSETS], keys).view(np.int64)
        width = dtypes.nbytes(column.dtype, (1,))
        # Authentic, yet another program of the owner's may have written it.
        if ends[0] != 0 or ends[-1] != data.size // width or np.any(np.diff(ends) < 0):
            raise FormatError(f"{file.path}: {name!r:.80}: expected offsets of records, got others. Write it again")
        blocks[name] = Block(column, data, ends.size - 1, ends * width)
    return blocks
