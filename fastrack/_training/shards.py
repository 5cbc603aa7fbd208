"""Several sealed files with equally named tensors."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from fastrack._files.reader import SealedFile
from fastrack._samples.blocks import OFFSETS, RECORDS
from fastrack._sealed.contexts import MessageContext
from fastrack._sealed.file_header import ABOUT
from fastrack._sealed.indexing import Indices
from fastrack._sealed.tensor import SealedTensor
from fastrack._util.locations import Location, Url, locate
from fastrack._util.pickles import unpickle
from fastrack._util.shown import list_names, shown
from fastrack.errors import FormatError, RollbackError

if TYPE_CHECKING:
    from fastrack._samples.shard_index import ShardIndex
    from fastrack._sets.anchor import Anchor
    from fastrack._sets.entries import SealedEntry

_PARALLEL = 32  # remote files that are opened in parallel

PathLike = str | os.PathLike[str]
Row = int | Indices
_Column = tuple[str, str, tuple[int, ...], bytes, bytes]  # name, dtype, shape of a row, numbers of rows, file ids
_ID_SIZE = 16


class Shards:
    """Tensors of equal names in several sealed files. After unpickling, a file is opened when it is first needed."""

    def __init__(
        self,
        paths: Sequence[PathLike],
        names: Sequence[str] | None,
        file_ids: Sequence[str] | None = None,
        anchor: Anchor | None = None,
    ) -> None:
        self.paths = [_absolute(locate(path)) for path in paths]
        if not self.paths:
            raise ValueError("paths: expected one sealed file or more, got none")
        self.index: Location | None = None  # which has authenticated the contexts
        self.only_key: str | None = None  # of all files, by an index or `file_ids`, which anybody can read
        self.files: dict[int, SealedFile] = {}
        expected = _expected_ids(file_ids, len(self.paths))
        self._entries = None if anchor is None else [anchor.sealed_entry(path) for path in self.paths]
        self.opened: list[list[SealedTensor] | None] = []
        self.contexts: list[list[MessageContext]] = []
        self.are_anchored = anchor is not None  # not in pickles, nor is the next
        self.say_place = False  # whether a `DatasetWriter` wrote one of them
        first_with: dict[str, Location] = {}
        for shard, (path, file) in enumerate(zip(self.paths, self.open_all(), strict=True)):
            require_samples(file)
            self.say_place |= ABOUT in file
            _require_distinct(file, None if expected is None else expected[shard], first_with)
            if shard == 0:
                self.names = _choose(file, names)
                self.key_id = file.key_id or ""
                self.only_key = None if expected is None else self.key_id
            self._require_key(file)
            tensors = _tensors_of(file, self.names)
            contexts = [tensor.context for tensor in tensors]
            for context, first in zip(contexts, self.contexts[0] if shard else contexts, strict=True):
                if (context.dtype, context.shape[1:]) != (first.dtype, first.shape[1:]):
                    raise ValueError(
                        f"{path}: {context.name!r:.200}: expected {first.dtype} and rows as in {list(first.shape)} of "
                        f"{self.paths[0]}, got {context.dtype} {list(context.shape)}"
                    )
            self.opened.append(tensors)
            self.contexts.append(contexts)
        if anchor is not None:
            anchor.advance()

    @classmethod
    def of_index(cls, index: ShardIndex, names: Sequence[str]) -> Shards:
        """Return the shards of an index, restricted to `names`. Each is opened and compared when it is needed."""
        shards = cls.__new__(cls)
        shards.names, shards.key_id, shards.only_key = tuple(names), index.key_id, index.key_id
        shards.paths = [_absolute(path) for path in index.locations()]
        shards.contexts = index.contexts(shards.names)
        shards.opened = [None] * len(shards.paths)
        shards.index, shards.files, shards._entries = index.location, {}, None  # noqa: SLF001 - its own
        shards.are_anchored = shards.say_place = False
        return shards

    def __len__(self) -> int:
        return len(self.paths)

    def require_open(self, shards: Iterable[int]) -> None:
        """Open those that are not open yet, in parallel if they are on servers."""
        if isinstance(self.paths[0], Url):
            absent = [shard for shard in shards if self.opened[shard] is None]
            if len(absent) > 1:
                with ThreadPoolExecutor(_PARALLEL) as threads:
                    list(threads.map(lambda shard: self.tensor(shard, 0), absent))

    def tensor(self, shard: int, column: int) -> SealedTensor:
        """Return the tensor of a column in a file."""
        tensors = self.opened[shard]
        if tensors is None:
            file = self.files.get(shard) or self.open(shard)
            tensors = _tensors_of(file, self.names)
            if [tensor.context for tensor in tensors] != self.contexts[shard]:
                raise FormatError(
                    f"{self.paths[shard]} was replaced since this dataset was made. Make the dataset again"
                )
            self.opened[shard] = tensors
            if self.index is not None:
                self.files[shard] = file  # for those that `select` made
        return tensors[column]

    def open(self, shard: int) -> SealedFile:
        """Open a file, pinned to its entry of a manifest or an index if there is one."""
        file = SealedFile(self.paths[shard], entry=None if self._entries is None else self._entries[shard])
        if self.index is not None and file.file_id != (expected := self.contexts[shard][0].file):
            raise RollbackError(
                f"{file.path}: expected the file id {expected} by {self.index}, got {file.file_id}; it is an older or "
                "another shard. Get the shards and the index of one version",
                path=file.path,
            )
        self._require_key(file)
        return file

    def _require_key(self, file: SealedFile) -> None:
        if self.only_key not in (None, file.key_id):
            raise RollbackError(
                f"{file.path}: expected a file under the key {self.only_key} of the dataset, got {file.key_id}; a "
                "holder of another key has replaced a file. Get the files again from their owner",
                path=file.path,
            )

    def select(self, names: Sequence[str]) -> Shards:
        """Return these shards restricted to `names`."""
        chosen = [self.names.index(name) for name in names]
        selected = Shards.__new__(Shards)
        vars(selected).update(vars(self))
        selected.names = tuple(names)
        selected.contexts = [[contexts[column] for column in chosen] for contexts in self.contexts]
        selected.opened = [tensors and [tensors[column] for column in chosen] for tensors in self.opened]
        return selected

    def open_all(self) -> Iterator[SealedFile]:
        """Yield all files, in order. Remote files are opened in parallel."""
        if any(isinstance(path, Url) for path in self.paths):
            with ThreadPoolExecutor(_PARALLEL) as threads:
                yield from threads.map(self.open, range(len(self.paths)))
        else:
            yield from map(self.open, range(len(self.paths)))

    def __reduce__(self) -> tuple[object, ...]:
        paths = zlib.compress(os.fsencode("\0".join(map(os.fspath, self.paths))), 1)
        columns = [_pack(contexts) for contexts in zip(*self.contexts, strict=True)]
        pinned = self._entries, self.index, self.only_key
        return unpickle, ("Shards", paths, self.key_id, columns, *(pinned if any(pinned) else ()))


def unpack_shards(
    paths: bytes,
    key_id: str,
    columns: list[_Column],
    entries: list[SealedEntry] | None = None,
    index: Location | None = None,
    only_key: str | None = None,
) -> Shards:
    """Return the shards that a pickle describes. Files are opened when first needed."""
    shards = Shards.__new__(Shards)
    shards.paths = [locate(path) for path in os.fsdecode(zlib.decompress(paths)).split("\0")]
    shards.names, shards.key_id, shards._entries = tuple(name for name, *_ in columns), key_id, entries  # noqa: SLF001
    shards.index, shards.only_key, shards.files = index, only_key, {}
    shards.contexts = [list(row) for row in zip(*map(_unpack, columns), strict=True)]
    shards.opened = [None] * len(shards.paths)
    return shards


def _pack(contexts: Sequence[MessageContext]) -> _Column:
    """Return the contexts of a column in few bytes: there may be very many files."""
    first = contexts[0]
    rows = zlib.compress(np.array([context.shape[0] for context in contexts], np.int64).tobytes(), 1)
    return first.name, first.dtype, first.shape[1:], rows, bytes.fromhex("".join(context.file for context in contexts))


def _unpack(column: _Column) -> list[MessageContext]:
    name, dtype, sample, packed, files = column
    rows = np.frombuffer(zlib.decompress(packed), np.int64).tolist()
    ids = (files[start : start + _ID_SIZE].hex() for start in range(0, len(files), _ID_SIZE))
    return [MessageContext(name, dtype, (count, *sample), file) for count, file in zip(rows, ids, strict=True)]


def _absolute(path: Location) -> Location:
    return path if isinstance(path, Url) else path.absolute()


def _choose(file: SealedFile, names: Sequence[str] | None) -> tuple[str, ...]:
    if not file:
        raise FormatError(f"{file.path}: expected sealed tensors, got none; `fastrack seal` seals a file")
    chosen = [name for name in file if name != ABOUT] if names is None else names
    if not chosen:
        there = list(columns_in([name for name in file if name != ABOUT]))
        raise ValueError(f"columns=: expected a sequence of names, got {chosen!r}; {file.path} has {there!s:.300}")
    return tuple(chosen)


def _expected_ids(file_ids: Sequence[str] | None, count: int) -> list[str] | None:
    if file_ids is None:
        return None
    expected = [file_ids] if isinstance(file_ids, str) else list(file_ids)
    if len(expected) != count:
        raise ValueError(f"file_ids=: expected {count}, one for each path, got {len(expected)}")
    return expected


def require_samples(file: SealedFile) -> None:
    """Refuse a sealed file that cannot hold samples."""
    if file.kind != "tensor":
        got = f"a {file.kind}. Open it with load_{file.kind}"
        if file.kind == "index":
            got = "an index. Give it alone, not in a list or by a pattern, under a name that ends with .index"
        raise FormatError(f"{file.path}: expected a file of samples, got {got}")


def _require_distinct(file: SealedFile, expected: str | None, first_with: dict[str, Location]) -> None:
    """Refuse a file with another id than expected, and a second file with the id of an earlier one."""
    if expected is not None and file.file_id != expected:
        raise FormatError(
            f"{file.path}: expected the file id {expected:.50}, got {file.file_id}. Get it again from its owner"
        )
    if file.file_id is None:
        return
    first = first_with.setdefault(file.file_id, file.path)
    if first is not file.path:
        raise FormatError(
            f"{file.path}: expected each file once, got {first} again or a copy of it: both have the id "
            f"{file.file_id}. Remove one of them"
        )


def _tensors_of(file: SealedFile, names: Sequence[str]) -> list[SealedTensor]:
    for name in names:
        if name not in file:
            column = name.removesuffix(RECORDS).removesuffix(OFFSETS)
            there = columns_in([name for name in file if name != ABOUT])
            if column in there:  # a part of it is missing
                raise ValueError(f"{file.path} has no sealed tensor {name!r:.200}; {list_names(name, file)}")
            raise ValueError(f"{file.path} has no column {shown(column, 200)}; {list_names(column, there)}")
    return [file[name] for name in names]


def columns_in(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the columns in tensors of these names, each with the names of its tensors."""
    bases = [name.removesuffix(RECORDS) for name in names if name.endswith(RECORDS)]
    offsets = {base + OFFSETS for base in bases}
    columns = dict.fromkeys(name.removesuffix(RECORDS) for name in names if name not in offsets)
    there = set(names)
    return {name: (name,) if name in there else (name + RECORDS, name + OFFSETS) for name in columns}


def by_shard(ends: Indices, rows: Row) -> list[tuple[int, Indices, Indices]]:
    """Return, for each file with some of the rows, its index, the rows within it, and their positions in `rows`."""
    flat = np.array([rows]) if isinstance(rows, int) else rows.reshape(-1)
    if ends.size == 1:
        return [(0, flat, np.arange(flat.size))]
    shards = np.searchsorted(ends, flat, side="right")
    order = np.argsort(shards, kind="stable")
    shards = shards[order]
    local = flat[order] - np.concatenate([[0], ends])[shards]
    bounds = [0, *(np.flatnonzero(shards[1:] != shards[:-1]) + 1).tolist(), flat.size]
    parts = [(local[first:stop], order[first:stop]) for first, stop in pairwise(bounds) if first < stop]
    return [(shard, *part) for shard, part in zip(np.unique(shards).tolist(), parts, strict=True)]
