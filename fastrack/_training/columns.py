"""Columns of samples: the tensors of sealed files that hold them, joined to a dataset."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._remote.listing import is_pattern, list_objects, split_pattern
from fastrack._samples.blocks import LABEL, LENGTHS, PATH, RECORDS, columns_of
from fastrack._samples.data_set import warning_of
from fastrack._samples.imports import classes_in
from fastrack._samples.shard_index import INDEX, SUFFIX, ShardIndex, read_index
from fastrack._samples.stored import SHARD, Part, order_shards, read_blocks, read_shards
from fastrack._sealed.file_header import ABOUT
from fastrack._sealed.indexing import Indices
from fastrack._training.handles import CombinedDataset, DatasetHandle, record_layout, row_layout, window_layout
from fastrack._training.plain_columns import PlainColumns
from fastrack._training.shards import PathLike, Shards, columns_in, require_samples
from fastrack._util.locations import Location, Url, join, locate
from fastrack._util.regular_file import matches, no_match
from fastrack._util.shown import list_names, shown
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor


@dataclass(frozen=True, slots=True)
class Source:
    """Sealed files of samples, in order.

    is_folder : all of a folder; sizes : of the files of a folder, in bytes, by name
    index : lists them, in place of their headers
    """

    paths: Sequence[PathLike]
    is_folder: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    index: ShardIndex | None = None

    def open(
        self, names: Sequence[str] | None, file_ids: Sequence[str] | None = None, anchor: Anchor | None = None
    ) -> Shards:
        """Open the tensors of these names, or of all columns."""
        if self.index is None:
            return Shards(self.paths, names, file_ids, anchor)
        if anchor is None:
            return Shards.of_index(self.index, names or [name for name, *_ in self.index.tensors])
        return Shards(self.index.locations(), names, [shard.file_id for shard in self.index.shards], anchor)


def find_shards(
    paths: PathLike | Sequence[PathLike],
    anchor: Anchor | None = None,
    keys: KeySource | None = None,
    file_ids: Sequence[str] | None = None,
    *,
    use_index: bool = True,
) -> Source:
    """Find the sealed files of a folder, on this machine or a server, of a pattern or of an index.

    With an anchor none of a folder may be missing. An index in a folder is compared with the names and sizes there; an
    anchor makes it needless. `file_ids` has the one of the index then.
    """
    if not isinstance(paths, (str, os.PathLike)):
        return Source(paths)
    location = locate(paths)
    is_folder = isinstance(location, Path) and location.is_dir()
    if use_index and location.suffix == SUFFIX and not is_folder:
        return Source((), index=read_index(location, keys, _only(file_ids), anchor))
    listed = _list_remote(location) if isinstance(location, Url) else _list_local(location, anchor)
    if listed is None:
        return Source([paths])
    folder, sizes, is_folder = listed
    if not is_folder:
        return Source([join(folder, name) for name in sizes])
    names = order_shards(sizes, folder) or sorted(name for name in sizes if name.endswith(".safetensors"))
    if use_index and INDEX in sizes and anchor is None:
        index = read_index(join(folder, INDEX), keys, _only(file_ids))
        index.require_same({name: sizes[name] for name in names})
        return Source((), index=index)
    if not names:
        raise FileNotFoundError(errno.ENOENT, "expected .safetensors files in this folder, got none", str(folder))
    return Source([join(folder, name) for name in names], is_folder=True, sizes=sizes)


_Listed = tuple[Location, dict[str, int], bool]  # a folder, the sizes of files in it by name, and whether of all of it


def _list_remote(url: Url) -> _Listed | None:
    """List a folder or a pattern. Return None for a file."""
    pattern = is_pattern(url)
    may_be_file = not pattern and not url.full.endswith("/")
    if may_be_file:
        if url.suffix or url.scheme in {"http", "https"}:
            return None
        url = Url(f"{url.full}/")
    objects = list_objects(url)
    if may_be_file and not objects:
        return None  # a file without a suffix
    if pattern and not objects:
        raise no_match(url)
    return split_pattern(url)[0], {name: size for name, size, _ in objects}, not pattern


def _list_local(path: Path, anchor: Anchor | None) -> _Listed | None:
    if path.is_dir():
        if anchor is not None:
            names = sorted(name for name in anchor.names_in(path) if re.fullmatch(r"[^/]+\.safetensors", name))
            for name in list(filter(SHARD.fullmatch, names)) or names:
                anchor.require_file(path / name)
        return path, dict(_sizes_in(path)), True
    found = matches(path)
    return None if found == [path] else (Path(), {str(name): 0 for name in found}, False)


def _sizes_in(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the names and sizes of the files that a dataset may be made of."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".safetensors", INDEX)):
                try:
                    yield entry.name, entry.stat().st_size
                except FileNotFoundError:
                    if not entry.name.startswith("."):  # such as an editor's lock, a link to nothing
                        raise


def _only(file_ids: Sequence[str] | None) -> str | None:
    """Return the file id of the index."""
    if file_ids is None:
        return None
    ids = [file_ids] if isinstance(file_ids, str) else list(file_ids)
    if len(ids) != 1:
        raise ValueError(f"file_ids=: expected that of the index, which has those of the shards, got {len(ids)}")
    return ids[0]


def require_files(paths: object, columns: object) -> None:
    """Raise TypeError if the arguments of `SealedDataset` are others, such as tensors or a key."""
    usage = "Call SealedDataset(paths, columns, keys=...), of files that DatasetWriter or save_file wrote"
    for path in paths if isinstance(paths, (list, tuple)) else [paths]:
        is_other = path is not paths or isinstance(paths, (Mapping, bytes, IOBase)) or hasattr(paths, "shape")
        if not isinstance(path, (str, os.PathLike)) and (is_other or not isinstance(paths, Iterable)):
            raise TypeError(f"paths: expected sealed files, got {shown(path)}. {usage}")
    if columns is not None and not isinstance(columns, Iterable):
        raise TypeError(f"columns: expected names, got {shown(columns)}. {usage}")


def require_places(shards: Shards, keys: KeyRing) -> None:
    """Refuse shards of a folder that are not what the `DatasetWriter` wrote there.

    Warn if its last run has no end, or if shards do not say their place and no anchor does. Files of other programs
    have none.
    """
    if not shards.say_place and not SHARD.fullmatch(Path(str(shards.paths[0])).name):
        return
    data = read_shards(((Path(str(file.path)), file) for file in shards.open_all()), keys)
    if list(data.file_ids) != [contexts[0].file for contexts in shards.contexts]:
        raise FormatError(f"{shards.paths[0]} or a file beside it was replaced meanwhile. Make the dataset again")
    folder = Path(str(shards.paths[0])).parent
    if data.before and not shards.are_anchored:
        warnings.warn(f"{warning_of(data, folder)}. Open it with an anchor, or import it anew", stacklevel=5)
    elif data.is_complete is False:
        warnings.warn(
            f"{folder}: the dataset of {data.samples} samples is not complete: it is still "
            "being written, its last run was interrupted, or its last shards are missing. Continue that run, or get "
            "them from its owner",
            stacklevel=5,
        )


def read_classes(shards: Shards, keys: KeyRing) -> tuple[str, ...]:
    """Return the names of the classes of images, by their labels; none if the samples do not tell one for each."""
    numbers = classes_in(_labelled_paths(shards, keys))
    return tuple(sorted(numbers, key=numbers.__getitem__)) if sorted(numbers.values()) == [*range(len(numbers))] else ()


def _labelled_paths(shards: Shards, keys: KeyRing) -> Iterator[Part]:
    for shard, contexts in enumerate(shards.contexts):
        with shards.open(shard) as file:
            if file.file_id != contexts[0].file:
                raise FormatError(f"{file.path} was replaced since this dataset was made. Make the dataset again")
            count, columns = columns_of([file[name].context for name in file], file.path)
            chosen = {name: columns[name] for name in (PATH, LABEL) if name in columns}
            yield Part("", read_blocks(file, chosen, keys), 0, count)


def tuple_of_names(names: Sequence[str], label: str) -> tuple[str, ...]:
    """Return names as a tuple; refuse a text, which is also a sequence."""
    if isinstance(names, str):
        raise TypeError(f"{label}: expected a sequence of names, got one text. Give [{shown(names, 200)}]")
    return tuple(names)


def find_tensors(source: Source, columns: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Return the tensors that hold each column in the first file: one, or the records and their offsets.

    The name of a tensor, which is authenticated, says whether it holds records.
    """
    if source.index is None and not len(source.paths):
        return {}
    if source.index is not None:
        sealed, plain, label = [name for name, *_ in source.index.tensors], list[str](), source.index.location
    else:
        with SealedFile(source.paths[0]) as file:
            require_samples(file)
            sealed, plain, label = list(file), list(file.plain), file.path
    if not sealed:
        return {}  # which `Shards` refuses
    present = columns_in([name for name in sealed if name != ABOUT])
    if columns is None:
        return present
    chosen = () if isinstance(columns, str) else tuple(columns)
    if not chosen:
        raise ValueError(
            f"columns=: expected a sequence of names, got {shown(columns, 200)}; {label} has {list(present)!s:.300}"
        )
    for name in chosen:
        if name not in present and name not in sealed:
            raise ValueError(f"{label} has no {_absent_column(name, present, plain)}")
    return {name: present.get(name, (name,)) for name in chosen}


def _absent_column(name: str, sealed: Iterable[str], plain: Iterable[str]) -> str:
    if name in plain:
        return f"sealed column {shown(name, 200)}, which is stored unencrypted. Name it in plain_columns="
    return f"column {shown(name, 200)}; {list_names(name, sealed)}"


def join_columns(
    shards: Shards,
    tensors: Mapping[str, tuple[str, ...]],
    keys: KeyRing | None,
    plain: tuple[str, ...],
    lengths: str | None = None,
) -> DatasetHandle | CombinedDataset:
    """Lay out the columns of `find_tensors`, and the unencrypted columns in `plain`.

    lengths : column name of record lengths; by default the name of the records + `LENGTHS`
    """
    names: list[str] = []
    parts = []
    rows = [stored[0] for stored in tensors.values() if len(stored) == 1]
    if rows:
        parts.append(DatasetHandle(row_layout(shards if len(rows) == len(shards.names) else shards.select(rows))))
    for name, stored in tensors.items():
        names.append(name)
        if len(stored) == 2:
            names.append(lengths or name + LENGTHS)
            parts.append(DatasetHandle(record_layout(shards.select(stored), keys, (name, names[-1]))))
    for part in parts:
        _require_alike(shards, parts[0].layout.ends, part.layout.ends)
    columns = PlainColumns(shards, plain, parts[0].layout.ends) if plain else None
    return _join(parts, (*names, *plain), columns)


def join_windows(
    shards: Shards, names: tuple[str, ...], plain: tuple[str, ...], size: int, step: int
) -> DatasetHandle | CombinedDataset:
    """Lay out windows on columns. The columns in `plain` are not sealed."""
    stored = {name: _tensor_of(shards, name) for name in names if name not in plain}
    if not stored:
        raise ValueError(f"windows: expected a sealed column among them, got {list(names)!s:.300}. Add one")
    layout = window_layout(shards.select(list(stored.values())), tuple(stored), size, step)
    chosen = tuple(name for name in names if name in plain)
    columns = PlainColumns(shards, chosen, layout.ends, size, step) if chosen else None
    return _join([DatasetHandle(layout)], names, columns)


def _join(
    parts: list[DatasetHandle], names: tuple[str, ...], plain: PlainColumns | None
) -> DatasetHandle | CombinedDataset:
    if len(set(names)) != len(names):
        raise ValueError(
            f"columns of samples: expected different names, got {', '.join(map(shown, names)):.300}. Rename a column"
        )
    if plain is not None:
        plain.open()
    return CombinedDataset(parts, names, plain) if plain is not None or len(parts) > 1 else parts[0]


def _tensor_of(shards: Shards, column: str) -> str:
    """Return the name of the tensor that holds a column, or its records."""
    for name in (column, column + RECORDS):
        if name in shards.names:
            return name
    raise ValueError(f"this dataset has no {_absent_column(column, columns_in(shards.names), ())}")


def _require_alike(shards: Shards, ends: Indices, other: Indices) -> None:
    """Refuse columns of rows and of records that differ in their number of samples in a file."""
    differing = np.flatnonzero(ends != other)
    if differing.size:
        raise ValueError(
            f"{shards.paths[differing[0]]}: expected columns of as many samples each, got rows and records that differ "
            "in number. Name those of one number in columns="
        )
