"""Tables of Arrow, in files and in memory, as columns of samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples.arrow_types import from_arrow, nulls_in, pyarrow, with_nulls
from fastrack._samples.blocks import VALID, Block, Column, source_columns
from fastrack._util.regular_file import open_regular
from fastrack._util.shown import shown
from fastrack.errors import FormatError

_ROWS = 4096  # of a batch
_UNREADABLE = "expected batches of Arrow as its format has them, got others"


@dataclass
class _Nulls:
    """The columns that have nulls, and those whose lists have nulls in them: found before the first batch is given."""

    columns: set[str] = field(default_factory=set)
    in_lists: set[str] = field(default_factory=set)

    def find(self, name: str, array: Any) -> None:
        has_nulls, has_inner = nulls_in(array)
        if has_nulls:
            self.columns.add(name)
        if has_inner:
            self.in_lists.add(name)


def read_files(paths: Iterable[Path], chosen: Sequence[str] | None = None) -> Iterator[Mapping[str, Block]]:
    """Return the batches of Parquet, Arrow and Feather files, in the same order each time that `paths` is iterated."""
    nulls = _Nulls()
    for path in paths:
        with _Refusing(path):
            _survey(path, chosen, nulls)
    for path in paths:
        with _Refusing(path):
            yield from _read_batches(_batches_of(path, chosen), nulls, chosen, path)


def read_table(source: Any, chosen: Sequence[str] | None = None) -> Iterator[Mapping[str, Block]] | None:
    """Return the batches of a table of PyArrow, pandas or datasets; None for another object."""
    package = type(source).__module__.partition(".")[0]
    if package not in {"pyarrow", "pandas", "datasets"} or package not in sys.modules:
        return None
    pa = pyarrow()
    if package == "pandas":
        try:
            source = pa.Table.from_pandas(source, preserve_index=False)
        except pa.ArrowException:
            name = _mixed_column(source)
            column = "" if name is None else f"column {shown(name, 80)}: "
            raise FormatError(
                f"DataFrame: {column}expected values of one type, got others. Convert them, for example by astype(str)"
            ) from None
    batches: Callable[[], Iterator[Any]]
    if isinstance(source, Mapping):
        raise TypeError(
            f"import_samples: expected one split, got {type(source).__name__} of {shown(', '.join(source))}. "
            "Choose one, such as source['train']"
        )
    if package == "datasets":
        batches = lambda: (b for part in source.with_format("arrow").iter(_ROWS) for b in part.to_batches())  # noqa: E731
    elif isinstance(source, pa.Table):
        batches = lambda: iter(source.to_batches(max_chunksize=_ROWS))  # noqa: E731
    elif isinstance(source, pa.RecordBatchReader):
        batches = lambda: iter(source)  # noqa: E731
    else:
        return None
    is_once = isinstance(source, pa.RecordBatchReader) or not hasattr(source, "__len__")
    nulls = None if is_once else _survey_batches(batches(), chosen)
    # A file given by its path alone is read for a dataset, and refused elsewhere: the author of the table would choose
    # which files of this machine are read.
    return _read_batches(batches(), nulls, chosen, package, follow_paths=package == "datasets")


def _mixed_column(frame: Any) -> str | None:
    """Return the name of the first column that Arrow has no type for."""
    pa = pyarrow()
    for name in frame.columns:
        try:
            pa.array(frame[name], from_pandas=True)
        except pa.ArrowException:
            return str(name)
    return None


def _survey_batches(batches: Iterable[Any], chosen: Sequence[str] | None) -> _Nulls:
    nulls = _Nulls()
    for batch in batches:
        _validate(batch, "table")
        for name in source_columns(batch.schema.names, chosen, "table"):
            nulls.find(name, batch.column(name))
    return nulls


def _read_batches(
    batches: Iterable[Any],
    nulls: _Nulls | None,
    chosen: Sequence[str] | None,
    where: object,
    *,
    follow_paths: bool = False,
) -> Iterator[Mapping[str, Block]]:
    """Return record batches as columns. Without `nulls`, the first batch is to have all columns that have nulls."""
    for batch in batches:
        _validate(batch, where)
        names = source_columns(batch.schema.names, chosen, where)
        if not batch.num_rows:
            continue
        if nulls is None:
            nulls = _survey_batches([batch], names)
        columns: dict[str, Block] = {}
        for name in names:
            array = batch.column(name)
            found = nulls_in(array)
            if (found[0] and name not in nulls.columns) or (found[1] and name not in nulls.in_lists):
                raise FormatError(
                    f"column {name!r:.80}: expected no nulls, as the batches before had none, got some. Fill them, or "
                    "import files or a table, which are read twice"
                )
            block, valid = _files_of(name, array, follow_paths) or from_arrow(
                name, array, has_inner_nulls=name in nulls.in_lists
            )
            columns[name] = block
            if name in nulls.columns:
                columns[name + VALID] = Block.of(np.ones(len(array), np.bool_) if valid is None else valid)
        yield columns


def _validate(batch: Any, where: object) -> None:
    """Refuse values that are none of their type, such as text that is no UTF-8. PyArrow does not look at them."""
    try:
        batch.validate(full=True)
    except pyarrow().ArrowException:
        raise FormatError(f"{where}: {_UNREADABLE}. Write it again") from None


def _survey(path: Path, chosen: Sequence[str] | None, nulls: _Nulls) -> None:
    """Find the nulls of a file by reading: PyArrow aborts the process at statistics of Parquet that are malformed."""
    for batch in _batches_of(path, chosen):
        _validate(batch, path)
        for name in source_columns(batch.schema.names, chosen, path):
            nulls.find(name, batch.column(name))


class _Refusing:
    """Raise FormatError in the place of the errors of PyArrow about a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        is_of_system = isinstance(error, OSError) and error.errno is not None
        path = self._path
        if isinstance(error, UnicodeDecodeError):
            raise FormatError(f"{path}: expected names of columns in UTF-8, got other bytes. Write it again") from None
        if isinstance(error, (pyarrow().ArrowException, OSError)) and not is_of_system:
            raise FormatError(  # without the text of the error, which may have values
                f"{path} is no {path.suffix} file that can be read ({type(error).__name__}). Write it again"
            ) from None


def _batches_of(path: Path, chosen: Sequence[str] | None) -> Iterator[Any]:
    """Return the record batches of a file, of Parquet with the chosen columns alone."""
    pa = pyarrow()
    with open_regular(path) as file:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            opened = parquet.ParquetFile(file)
            names = source_columns(opened.schema_arrow.names, chosen, path)
            yield from opened.iter_batches(_ROWS, columns=names)
            return
        start = file.read(len(b"ARROW1"))
        file.seek(0)
        reader = pa.ipc.open_file(file) if start == b"ARROW1" else pa.ipc.open_stream(file)
        yield from map(reader.get_batch, range(reader.num_record_batches)) if start == b"ARROW1" else reader


def _files_of(name: str, array: Any, follow_paths: bool) -> tuple[Block, Any] | None:
    """Return the contents of files as the library `datasets` has them; None for other columns."""
    types, kind = pyarrow().types, array.type
    if not types.is_struct(kind) or {each.name for each in kind} != {"bytes", "path"}:
        return None
    if not types.is_binary(kind.field("bytes").type) or not types.is_string(kind.field("path").type):
        return None
    files = [_content_of(name, value, follow_paths) for value in array.drop_null().to_pylist()]
    block = Block.of(files, empty=Column("U8", None))
    if not array.null_count:
        return block, None
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    return with_nulls(block, valid), valid


def _content_of(name: str, value: dict[str, Any], follow_paths: bool) -> bytes:
    """Return the content of a file that is in the table, or else at its path."""
    if value["bytes"] is not None:
        return bytes(value["bytes"])
    if value["path"] is None or not follow_paths:
        got = "none" if value["path"] is None else "a path"
        raise FormatError(
            f"{name!r:.80}: expected the bytes of a file in the table, got {got}. Store them, or give a dataset"
        )
    with open_regular(value["path"]) as file:
        return file.read()
