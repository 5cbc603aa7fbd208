"""`export_samples`: the samples of a sealed dataset, as files of other formats again."""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from fastrack._files.writer import Progress
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._samples.blocks import LABEL, PATH, VALID, Block, Column
from fastrack._samples.data_set import opened_shard, read_headers
from fastrack._samples.stored import DataSet, read_blocks, read_data_set
from fastrack._samples.table_files import FORMS, Values, records_of
from fastrack._sets.anchor import Anchor
from fastrack._sets.load_file import resolve_anchor
from fastrack._sets.manifest import is_name
from fastrack._tensors import arrays
from fastrack._util.atomic import new_file
from fastrack._util.locations import locate_local
from fastrack._util.new_folder import made_parents, new_folder
from fastrack._util.public import public
from fastrack._util.shown import list_names, shown
from fastrack.errors import FormatError

_FILE, _FOLDER = 0o600, 0o700  # the modes of plaintext
# Names that Windows gives to devices, or takes for other names.
_RESERVED = re.compile(
    r"(?i)(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[\d¹²³])\s*(?:[.:].*)?|.*[. ]|[a-z]:.*", re.DOTALL
)
_COMPONENT = 255  # bytes of a name in a folder, at most, on most file systems


@public
def export_samples(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    anchor: Anchor | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> int:
    r"""Decrypt the samples of a dataset into a table, a file of text, or a folder of files.

    All of a shard is authenticated before a sample of it is written, and two shards are in memory at most. The target
    has its name when it is complete and on disk, and only you may read it; in the place of a file that others may read,
    it keeps the rights of that file.

    Parameters
    ----------
    folder : path
        The dataset: a folder of shards, as `import_samples` and `DatasetWriter` make it.
    target : path
        What to write. The suffix decides:

        - ``.parquet``, ``.arrow`` and ``.feather``, with PyArrow: all columns, with the types and nulls that they were
          imported with.
        - ``.csv`` and ``.tsv``: columns of numbers and text; a null is an empty cell. Cells are as stored: a
          spreadsheet takes one that begins with ``=`` for a formula.
        - ``.jsonl``: an object for each sample. What JSON has no value for is text.
        - ``.txt``: a line for each record of the only column.
        - No suffix: a folder of files. The column "path" names them, if there is one, and another column has their
          content: bytes, or arrays of ``.npy`` files. The column "label" is left out: the folders tell it. Without
          paths the files are those of which the dataset was imported, by their names and in their formats.
    keys : KeySource, optional
        As for `unseal`.
    columns : sequence of str, optional
        The columns to write, in this order. By default all.
    overwrite : bool
        Allow `target` to replace an existing file. A folder is never replaced.
    anchor : Anchor or path, optional
        As for `load_file`: the shards have to be those of the owner's newest manifest.
    progress : callable, optional
        Called with the number of bytes of plaintext done since the previous call.

    Returns
    -------
    int
        Number of samples.

    Raises
    ------
    AuthenticationError
        If a shard was altered. `RollbackError` if it is not as the anchor says.
    FormatError
        If a shard is missing, or not in its place, or the target cannot hold the values. If the last run of the import
        did not come to its end, what it stored is exported.
    ImportError
        If PyArrow is needed and not installed.
    UnknownKeyError
        If the key is not among `keys`.
    ValueError
        If `columns` names no column of the dataset, or the suffix of `target` is another one.
    OSError
        If a file cannot be read or written, or `target` exists. No part of `target` is left behind then.

    Examples
    --------
    >>> import pathlib
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> with fastrack.DatasetWriter("cities", key) as writer:
    ...     writer.write_batch({"name": ["Oslo", "Lima"], "size": [709037, 10092000]})
    >>> fastrack.export_samples("cities", "cities.csv", key)
    2
    >>> pathlib.Path("cities.csv").read_text()
    'name,size\nOslo,709037\nLima,10092000\n'
    """
    out, ring = locate_local(target), KeyRing.resolve(keys)
    if out.suffix and out.suffix.lower() not in FORMS:
        raise ValueError(
            f"target: expected a suffix among {', '.join(FORMS)}, or none for a folder, got {shown(out.suffix, 20)}. "
            "Choose another name"
        )
    place, anchor = locate_local(folder), resolve_anchor(anchor)
    read_headers(place, anchor)  # refuses copies, and with an anchor what its manifest does not list
    samples = _Samples(read_data_set(place, ring), ring, anchor, progress)
    chosen = samples.choose(columns)
    write = FORMS.get(out.suffix.lower())
    if write is None:
        _write_folder(samples, chosen, out)
    else:
        with made_parents(out), new_file(out, mode=_FILE, overwrite=overwrite) as file:
            write(file, chosen, samples.values(chosen))
    return samples.data.samples


@dataclass(frozen=True, slots=True)
class _Samples:
    """The samples of a dataset, shard by shard."""

    data: DataSet
    ring: KeyRing
    anchor: Anchor | None
    progress: Progress | None

    @property
    def files(self) -> list[tuple[str, int]]:
        """The files of the samples, in order, and the number of each; "" for samples of none."""
        parts = [part for _, about in self.data.shards for part in about.files or (("", about.samples),)]
        return [(name, sum(count for _, count in group)) for name, group in groupby(parts, itemgetter(0))]

    def choose(self, names: Sequence[str] | None) -> dict[str, Column]:
        """Return columns by their names, without those that tell nulls."""
        present = {name: column for name, column in self.data.columns.items() if not self._tells_nulls(name)}
        if isinstance(names, str):
            raise TypeError(f"columns=: expected a sequence of names, got one text. Give [{shown(names, 200)}]")
        for name in names or ():
            if name not in present:
                raise ValueError(f"columns=: the dataset has no column {shown(name, 80)}; {list_names(name, present)}")
        if names is not None and not names:
            raise ValueError("columns=: expected a column or more, got none")
        return {name: present[name] for name in names or present}

    def values(self, columns: Iterable[str]) -> Iterator[dict[str, Values]]:
        """Authenticate the shards one by one, and return the values of these columns in each."""
        names = list(columns)
        nulls = [name + VALID for name in names if self._tells_nulls(name + VALID)]
        read = {name: self.data.columns[name] for name in (*names, *nulls)}
        for path, about in self.data.shards:
            with opened_shard(path, about, self.ring, self.anchor) as file:
                blocks = read_blocks(file, read, self.ring)
            if self.progress is not None:
                sizes = (
                    block.data.size + (0 if block.ends is None else block.ends.nbytes) for block in blocks.values()
                )
                self.progress(sum(sizes))
            yield {name: Values(blocks[name], blocks.get(name + VALID)) for name in names}

    def _tells_nulls(self, name: str) -> bool:
        column = self.data.columns.get(name)
        is_mask = column is not None and (column.dtype, column.shape) == ("BOOL", ()) and name.endswith(VALID)
        return is_mask and name.removesuffix(VALID) in self.data.columns


def _write_folder(samples: _Samples, columns: dict[str, Column], out: Path) -> None:
    """Write a folder of files: by paths, or those that were imported."""
    write = _files_by_path(samples, columns) if PATH in columns else _files_as_imported(samples, columns, out)
    if os.path.lexists(out):
        raise FileExistsError(errno.EEXIST, "exists, and no folder is replaced. Choose another name", str(out))
    with made_parents(out), new_folder(out, mode=_FOLDER) as folder:
        write(folder)


def _files_by_path(samples: _Samples, columns: dict[str, Column]) -> Callable[[Path], None]:
    """Return what writes a file for each sample, after all paths were checked."""
    contents = [name for name in columns if name not in {PATH, LABEL}]
    if len(contents) != 1 or columns[PATH].shape is not None or columns[PATH].dtype != "U8":
        raise FormatError(
            f'exporting files by path: expected the columns "path", of text, and one of their content, got '
            f"{', '.join(map(repr, columns)):.200}. Name two (columns=, --columns), or a target such as out.parquet"
        )
    [content] = contents
    paths: list[str] = []
    labels: dict[str, set[int]] = {}
    checked = [name for name in (PATH, LABEL) if name in columns]
    for shard in _Samples(samples.data, samples.ring, samples.anchor, None).values(checked):
        names = [_decoded(record, len(paths) + index) for index, record in enumerate(records_of(shard[PATH].block))]
        paths += names
        if LABEL in columns:
            found = arrays.from_bytes(shard[LABEL].block.data, columns[LABEL].dtype, (len(names), -1), "numpy")
            for name, label in zip(names, found[:, 0].tolist(), strict=True):
                labels.setdefault(name.partition("/")[0], set()).add(label)
    if [labels[name] for name in sorted(labels)] != [{number} for number in range(len(labels))]:
        raise FormatError(
            'exporting files by path: expected as "label" the number of the folder of each file, got other numbers, '
            f"which would be lost. Leave them out (columns=, --columns {PATH},{content}), or name a target such as "
            "out.parquet"
        )
    is_array = columns[content].dtype != "U8" or columns[content].shape is not None
    _require_names(paths, lambda index: f"sample {index}: {PATH}", suffix=".npy" if is_array else "")

    def write(folder: Path) -> None:
        left = iter(paths)
        for shard in samples.values([content]):
            block = shard[content].block
            for index in range(block.count):
                _write_file(folder / next(left), block, index, is_array=is_array)

    return write


def _write_file(path: Path, block: Block, index: int, *, is_array: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content, shape = block.between(index, index + 1), block.column.shape
    with new_file(path, mode=_FILE, overwrite=False) as file:
        if is_array:
            array = arrays.from_bytes(content, block.column.dtype, (-1,) if shape is None else shape, "numpy")
            np.lib.format.write_array(file, array, allow_pickle=False)
        else:
            file.write(content.data)


def _files_as_imported(samples: _Samples, columns: dict[str, Column], out: Path) -> Callable[[Path], None]:
    """Return what writes the files that the samples were imported of."""
    files = samples.files
    names = [name for name, _ in files]
    unknown = [name for name in names if Path(name).suffix.lower() not in FORMS]
    if unknown:
        got = "samples of no file" if "" in unknown else f"a file such as {shown(unknown[0], 80)}"
        raise FormatError(
            f"{out}: expected samples with paths, or of files of {', '.join(FORMS)}, to make a folder of them, got "
            f"{got}. Name a file with one of these suffixes"
        )
    _require_names(names, lambda index: f"name of file {index + 1} of {len(names)}")

    def write(folder: Path) -> None:
        parts = _parts(samples.values(columns), [count for _, count in files])
        for (name, _), part in zip(files, parts, strict=True):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path, mode=_FILE, overwrite=False) as file:
                FORMS[path.suffix.lower()](file, columns, part)

    return write


def _parts(shards: Iterator[dict[str, Values]], counts: Sequence[int]) -> Iterator[Iterator[dict[str, Values]]]:
    """Divide samples into parts of these sizes, each of which is read to its end before the next one."""
    left: dict[str, Values] = {}

    def take(count: int) -> Iterator[dict[str, Values]]:
        nonlocal left
        while count:
            left = left or next(shards)
            size = next(iter(left.values())).block.count
            taken = min(count, size)
            yield {name: values.between(0, taken) for name, values in left.items()}
            left = {name: values.between(taken, size) for name, values in left.items()} if taken < size else {}
            count -= taken

    for count in counts:
        yield take(count)


def _decoded(record: bytes, index: int) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError:
        raise FormatError(f"sample {index}: {PATH}: expected a path in UTF-8, got other bytes. Name a table") from None


def _require_names(names: Sequence[str], label: Callable[[int], str], suffix: str = "") -> None:
    """Refuse names of files that lead out of the folder, or that a file system has no file for, before any is written.

    The names are not in the errors: they are sealed.
    """
    advice = "Export a table, such as out.parquet, in its place"
    taken: set[str] = set()
    folders: set[str] = set()
    for index, name in enumerate(names):
        is_path = is_name(name)
        parts = name.split("/") if is_path else []
        if not is_path or any(_RESERVED.fullmatch(part) or len(part.encode()) > _COMPONENT for part in parts):
            raise FormatError(
                f"{label(index)}: expected a path of Unicode text that leads to a file in the folder, on any system, "
                f"got another. {advice}"
            )
        if suffix and not name.lower().endswith(suffix):
            raise FormatError(f"{label(index)}: expected a name that ends with {suffix}, got another. {advice}")
        same = unicodedata.normalize("NFC", name).casefold()
        above = {same[:end] for end, letter in enumerate(same) if letter == "/"}
        if same in taken or same in folders or above & taken:
            raise FormatError(
                f"{label(index)}: expected a path of its own, got one of a file before, of a folder, or the same but "
                f"for its case. {advice}"
            )
        taken.add(same)
        folders |= above
