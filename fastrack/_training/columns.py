"""Columns of samples: the tensors of sealed files that hold them, joined to a data set."""

from __future__ import annotations

import errno
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastrack._files.reader import SealedFile
from fastrack._keys.keyring import KeyRing
from fastrack._samples.about import ABOUT
from fastrack._samples.blocks import LENGTHS, RECORDS
from fastrack._samples.data_set import warning_of
from fastrack._samples.stored import SHARD, read_shards, shards_in
from fastrack._sealed.indexing import Indices
from fastrack._training.handles import CombinedDataset, DatasetHandle, record_layout, row_layout, window_layout
from fastrack._training.plain_columns import PlainColumns
from fastrack._training.shards import PathLike, Shards, columns_in, require_samples
from fastrack._util.locations import locate
from fastrack._util.names import list_names
from fastrack._util.shown import shown
from fastrack.errors import FormatError

if TYPE_CHECKING:
    from fastrack._sets.anchor import Anchor


def list_shards(paths: PathLike | Sequence[PathLike], anchor: Anchor | None) -> PathLike | Sequence[PathLike]:
    """Return the sealed files of a folder, and other paths unchanged. With an anchor none may be missing."""
    if not isinstance(paths, (str, os.PathLike)):
        return paths
    folder = locate(paths)
    if isinstance(folder, Path) and folder.is_dir():
        if anchor is not None:
            names = sorted(name for name in anchor.names_in(folder) if re.fullmatch(r"[^/]+\.safetensors", name))
            for name in list(filter(SHARD.fullmatch, names)) or names:
                anchor.require_file(folder / name)
        shards = shards_in(folder) or sorted(folder.glob("*.safetensors"))
        if not shards:
            raise FileNotFoundError(errno.ENOENT, "expected .safetensors files in this folder, got none", str(folder))
        return shards
    return paths


def require_places(shards: Shards, keys: KeyRing) -> None:
    """Refuse shards of a folder that are not what the `DatasetWriter` wrote there.

    Warn if its last run has no end, or if shards do not say their place and no anchor does. Files of other programs
    have none.
    """
    if not shards.say_place and not SHARD.fullmatch(Path(str(shards.paths[0])).name):
        return
    opened = (shards.open(index) for index in range(len(shards)))
    data = read_shards(((Path(str(file.path)), file) for file in opened), keys)
    if list(data.file_ids) != [contexts[0].file for contexts in shards.contexts]:
        raise FormatError(f"{shards.paths[0]} or a file beside it was replaced meanwhile. Make the data set again")
    folder = Path(str(shards.paths[0])).parent
    if data.before and not shards.are_anchored:
        warnings.warn(f"{warning_of(data, folder)}. Open it with an anchor, or import it anew", stacklevel=4)
    elif data.is_complete is False:
        warnings.warn(
            f"{folder}: the data set of {data.samples} samples is not complete: it is still "
            "being written, its last run was interrupted, or its last shards are missing. Continue that run, or get "
            "them from its owner",
            stacklevel=4,
        )


def tuple_of_names(names: Sequence[str], label: str) -> tuple[str, ...]:
    """Return names as a tuple; refuse a text, which is also a sequence."""
    if isinstance(names, str):
        raise TypeError(f"{label}: expected a sequence of names, got one text. Give [{shown(names, 200)}]")
    return tuple(names)


def find_tensors(paths: PathLike | Sequence[PathLike], columns: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Return the tensors that hold each column in the first file: one, or the records and their offsets.

    The name of a tensor, which is authenticated, says whether it holds records.
    """
    first = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)[:1]
    if not first or isinstance(columns, str):
        return {}
    with SealedFile(first[0]) as file:
        require_samples(file)
        if not file:
            return {}  # which `Shards` refuses
        present = columns_in([name for name in file if name != ABOUT])
        if columns is None:
            return present
        for name in columns:
            if name not in present and name not in file:
                raise ValueError(f"{file.path} has no {_absent_column(name, present, file.plain)}")
    return {name: present.get(name, (name,)) for name in columns}


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
        plain.check()
    return CombinedDataset(parts, names, plain) if plain is not None or len(parts) > 1 else parts[0]


def _tensor_of(shards: Shards, column: str) -> str:
    """Return the name of the tensor that holds a column, or its records."""
    for name in (column, column + RECORDS):
        if name in shards.names:
            return name
    raise ValueError(f"this data set has no {_absent_column(column, columns_in(shards.names), ())}")


def _require_alike(shards: Shards, ends: Indices, other: Indices) -> None:
    """Refuse columns of rows and of records that differ in their number of samples in a file."""
    differing = np.flatnonzero(ends != other)
    if differing.size:
        raise ValueError(
            f"{shards.paths[differing[0]]}: expected columns of as many samples each, got rows and records that differ "
            "in number. Name those of one number in columns="
        )
