"""Sources of samples, opened by what they are: files of one kind, folders of images or arrays, tables, iterables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from io import IOBase
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples import archives, folders, json_lines, tables
from fastrack._samples.blocks import VALID, Block, Column, is_value, require_names, source_columns
from fastrack._samples.csv import csv_files
from fastrack._samples.csv.cell_types import Schema
from fastrack._samples.text_lines import Line, read_lines, require_text, take
from fastrack._util.locations import Location, locate_local
from fastrack._util.regular_file import matches, not_found
from fastrack.errors import FormatError

Batch = Mapping[str, Any]


class Source:
    """The batches of a source, read once, in order.

    batches : columns, and the name of the file that they are of; None where the samples have a path themselves
    paths : the files that samples are taken of; none for an object
    current : the file that is being read, for errors
    skipped : names of files that are passed over, each with the reason
    classes : the number of each class, of a folder of such folders
    notes : remarks on the files, such as columns that became text by a cell
    stored : columns that the samples are added to: where cells and members do not tell their types, they get those
    schema : nulls, and types of columns, of CSV
    """

    def __init__(
        self,
        paths: list[Path],
        skipped: Sequence[tuple[Path, str]] = (),
        root: Path | None = None,
        seen: dict[str, int] | None = None,
        stored: Mapping[str, Column] | None = None,
        schema: Schema | None = None,
    ) -> None:
        self.stored, self.schema = stored or {}, schema or Schema()
        self._seen = {} if seen is None else seen
        self._root = root or Path(os.path.commonpath([path.parent.absolute() for path in paths] or [Path("/")]))
        self.paths, self.current = paths, paths[0] if paths else self._root
        self.skipped = [(self.name_of(path), reason) for path, reason in skipped]
        self.classes: dict[str, int] = {}
        self.notes: list[str] = []
        self.batches: Iterator[tuple[str | None, Batch]] = iter(())

    def __iter__(self) -> Iterator[Path]:
        for path in self.paths:
            self.current = path
            self.require_same(path)
            yield path
            self.require_same(path)  # once its last byte is read

    def require_same(self, path: Path) -> None:
        """Refuse a file that is another than at the first look: samples would be lost or torn, and none tell of it."""
        status = path.stat()
        state = hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        if self._seen.setdefault(str(path), state) != state:
            raise FormatError(f"{path}: expected the file as it was at the first look, got one that changed. Try again")

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches; a fault of a file that changed is told as that."""
        try:
            yield from batches
        except FormatError:
            self.require_same(self.current)
            raise

    def name_of(self, path: Path) -> str:
        """Return the path in the folder of the source, or in the folder that its files have in common."""
        return Path(os.path.relpath(path, self._root)).as_posix()


def open_source(
    source: Any,
    target: Location | None = None,
    chosen: Sequence[str] | None = None,
    seen: dict[str, int] | None = None,
    stored: Mapping[str, Column] | None = None,
    schema: Schema | None = None,
) -> Source:
    """Open a source of samples, and take the chosen columns. `target` is a folder that is not read, but written.

    seen : the state of each file, by its path, that an earlier opening of the source left there
    stored : columns that the samples are added to
    schema : nulls, and types of columns

    Raise FormatError if it is of no kind that can be read, or a chosen column is absent; ValueError for a schema of
    what has types of its own.
    """
    if isinstance(source, (str, os.PathLike)):
        paths = matches(locate_local(source))
    elif isinstance(source, Sequence) and source and all(isinstance(path, (str, os.PathLike)) for path in source):
        paths = [path for name in source for path in matches(locate_local(name))]
    elif schema:
        raise _no_schema("import_samples")
    else:
        opened = Source([], stored=stored)
        batches = _read_object(source, chosen, opened.stored)
        opened.batches = ((None, batch) for batch in _choose(batches, chosen, "import_samples"))
        return opened
    root = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    listing = folders.Listing(paths) if root is None else folders.list_folder(root, target)
    labels, opened = listing.labels, Source(listing.paths, listing.skipped, root, seen, stored, schema)
    for path, label in zip(listing.paths, labels or [], strict=labels is not None):
        opened.classes.setdefault(opened.name_of(path).partition("/")[0], label)
    for path in opened.paths:
        if not path.exists():
            raise not_found(path)
        opened.require_same(path)
    if schema and any(path.suffix.lower() not in _CSV for path in opened.paths):
        raise _no_schema(paths[0])
    if opened.paths and all(map(folders.is_one_sample, opened.paths)):
        batches = opened.watch(folders.read_files(opened, map(opened.name_of, opened.paths), labels))
        opened.batches = ((None, batch) for batch in _choose(batches, chosen, paths[0]))
    else:
        batches = opened.watch(_reader_of(opened.paths, paths[0])(opened, chosen))
        opened.batches = ((opened.name_of(opened.current), batch) for batch in _choose(batches, chosen, paths[0]))
    return opened


def _no_schema(source: object) -> ValueError:
    return ValueError(
        f"{source}: nulls= and types=: expected .csv or .tsv files beside them, got a source whose values have types. "
        "Leave them out, or convert the values first"
    )


def _reader_of(paths: list[Path], source: Path) -> Callable[[Source, Sequence[str] | None], Iterator[Batch]]:
    kinds = {path.suffix.lower(): path.name for path in reversed(paths)}
    if len(kinds) == 1 and (read := _READERS.get(next(iter(kinds)))):
        return read
    known = sorted({name for suffix, name in kinds.items() if suffix in _READERS or folders.is_one_sample(Path(name))})
    if len(known) > 1:
        raise FormatError(
            f"{source}: expected files of one kind, got {', '.join(f'{name!r:.80}' for name in known):.200}. Import "
            "each kind into a folder of its own"
        )
    others = [name for name in kinds.values() if name not in known]
    got = ", ".join(f"{name!r:.80}" for name in sorted(others)) or "none"
    raise FormatError(
        f"{source}: expected images, or files that all end with one of .npy, {', '.join(_READERS)}, got {got:.200}. "
        f"{_ADVICE.get(others[0][others[0].rfind('.') :].lower() if others else '', 'Name such files')}"
    )


def _choose(batches: Iterable[Batch], chosen: Sequence[str] | None, where: object) -> Iterator[Batch]:
    """Take the chosen columns of each batch, in that order, and with each the column that tells of its nulls."""
    for batch in batches:
        if chosen is None:
            yield batch
            continue
        names = source_columns((name for name in batch if not name.endswith(VALID)), chosen, where)
        yield {each: batch[each] for name in names for each in (name, name + VALID) if each in batch}


def _read_object(source: Any, chosen: Sequence[str] | None, stored: Mapping[str, Column]) -> Iterator[Batch]:
    batches = tables.read_table(source, chosen, stored)
    if batches is not None:
        return batches
    way = next((name for name in _WAYS if callable(getattr(source, name, None))), None)
    is_loader = hasattr(source, "batch_sampler")  # of torch, whose batches would be samples
    if (
        way is None
        and not is_loader
        and isinstance(source, Iterable)
        and not isinstance(source, (Mapping, str, bytes, IOBase))
    ):
        return _read_samples(source, chosen, stored)
    advice = "such an object, or write samples with a DatasetWriter"
    if way is not None:
        advice = f"its table, as by its method {way}()"
    elif is_loader:
        advice = "its dataset, without the loader"
    elif isinstance(source, Mapping):
        advice = "a dict for each sample, or write columns by DatasetWriter.write_batch"
    elif hasattr(source, "__getitem__") and not isinstance(source, bytes):
        advice = "dicts, such as ({'x': source[i][0], 'y': source[i][1]} for i in range(len(source)))"
    raise TypeError(
        f"import_samples: expected paths, a table or an iterable of samples, got {type(source).__name__}. Give {advice}"
    )


def _read_samples(source: Iterable[Any], chosen: Sequence[str] | None, stored: Mapping[str, Column]) -> Iterator[Batch]:
    """Return samples one by one; in batches, by the types that Arrow infers, if one of the first has other values."""
    rows = map(_require_sample, source)
    first = list(rows) if isinstance(source, (list, tuple)) else take(rows, _size_of)
    others = {name for sample in first for name, value in sample.items() if not is_value(value)}
    others = others if chosen is None else others.intersection(chosen)
    if not others or find_spec("pyarrow") is None:
        yield from ({name: [value] for name, value in sample.items()} for sample in chain(first, rows))
        return
    require_names(first[0])
    source_columns(first[0], None, "samples")
    found = tables.Survey(stored)
    for name in others:
        found.find({name: tables.infer(name, [sample[name] for sample in first if name in sample])})
    left = chain(first, rows)
    while samples := take(left, _size_of):
        odd = next((sample for sample in samples if sample.keys() != first[0].keys()), None)
        if odd is not None:
            raise ValueError(f"samples: expected the columns {[*first[0]]!s:.300}, got {[*odd]!s:.300}. Give all these")
        values: dict[str, Any] = {name: [sample[name] for sample in samples] for name in first[0]}
        arrays = {name: tables.infer(name, values[name]) for name in others}
        columns = {**values, **tables.read_arrays(arrays, found)}
        yield {each: columns[each] for name in values for each in (name, name + VALID) if each in columns}


def _require_sample(sample: Any) -> Mapping[str, Any]:
    if not isinstance(sample, Mapping):
        raise TypeError(_NO_SAMPLES.format(type(sample).__name__))
    return sample


def _size_of(sample: Mapping[str, Any]) -> int:
    return sum(len(v) if isinstance(v, (str, bytes)) else getattr(v, "nbytes", 0) for v in sample.values())


def _read_text(files: Source) -> Iterator[Batch]:
    for path in files:
        yield from map(_text_of, read_lines(path))


def _text_of(lines: list[Line]) -> Batch:
    content = require_text(lines)
    ends = np.cumsum([0, *map(len, content)], dtype=np.int64)
    column = Column("U8", None, "text")
    return {"text": Block(column, np.frombuffer(b"".join(content), np.uint8), len(content), ends)}


_NO_SAMPLES = (
    "import_samples: expected each sample as a mapping from names of columns to values, got one that is {}. Give "
    "dicts, such as {{'x': row}} for each row of an array, or write whole arrays with DatasetWriter.write_batch"
)
_WAYS = ("to_frame", "collect", "compute", "toArrow", "to_arrow", "to_pyarrow")  # of series, and of tables not computed
_TABLE = "Read it by pandas.{}, and import its table in Python: fastrack.import_samples(table, folder, key)"
_ADVICE = {  # by the suffix of a file
    ".gz": "Unpack it first, by gunzip",
    ".xlsx": _TABLE.format("read_excel"),
    ".xls": _TABLE.format("read_excel"),
    ".pkl": _TABLE.format("read_pickle") + ", if you trust the file: it can run any code",
    ".zip": "Unpack it first",
    ".json": "Write one object on each line of a file that ends with .jsonl",
}

_CSV, _TABLES = (".csv", ".tsv"), (".parquet", ".arrow", ".feather")
_READERS: dict[str, Callable[[Source, Sequence[str] | None], Iterator[Batch]]] = {
    **dict.fromkeys(_CSV, lambda f, chosen: csv_files.read_files(f, chosen, f.notes, f.stored, f.schema)),
    ".txt": lambda files, _: _read_text(files),
    ".jsonl": lambda files, _: json_lines.read_files(files, files.stored),
    ".tar": lambda files, _: archives.read_files(files),
    **dict.fromkeys(_TABLES, lambda files, chosen: tables.read_files(files, chosen, files.stored)),
}
