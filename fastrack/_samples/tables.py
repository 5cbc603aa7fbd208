"""Tables of Arrow, in files and in memory, as columns of samples."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples import arrow_types
from fastrack._samples.arrow_types import from_arrow, join_kinds, nulls_in, pyarrow, with_nulls
from fastrack._samples.blocks import VALID, Block, Column, source_columns
from fastrack._util.regular_file import open_regular
from fastrack._util.shown import shown
from fastrack.errors import FormatError

_ROWS = 4096  # of a batch
_UNREADABLE = "expected batches of Arrow as its format has them, got others"


@dataclass
class Survey:
    """Findings before the first batch is given: the columns that have nulls, or nulls in lists, and their types.

    stored : the types of the columns that the samples are added to
    chosen : the columns that are taken; all by default
    follow_paths : whether files are read that are given by their paths
    """

    stored: Mapping[str, Column]
    chosen: Sequence[str] | None = None
    follow_paths: bool = False
    columns: set[str] = field(default_factory=set)
    in_lists: set[str] = field(default_factory=set)
    kinds: dict[str, Any] = field(default_factory=dict)

    def find(self, arrays: Mapping[str, Any]) -> None:
        """Look at arrays: PyArrow aborts the process at statistics of Parquet that are malformed."""
        for name, array in arrays.items():
            has_nulls, has_inner = nulls_in(array)
            if has_nulls:
                self.columns.add(name)
            if has_inner:
                self.in_lists.add(name)
            kind = self.kinds.setdefault(name, array.type)
            self.kinds[name] = join_kinds(kind, array.type) or kind

    def kind_for(self, name: str, array: Any) -> Any:
        """Return the type to store an array as; the writer refuses that of the array where there is no other."""
        kind = arrow_types.stored_kind(self.stored.get(name)) or self.kinds[name]
        return join_kinds(kind, array.type, is_stored=True) or array.type


def read_files(
    paths: Iterable[Path], chosen: Sequence[str] | None, stored: Mapping[str, Column]
) -> Iterator[Mapping[str, Block]]:
    """Return the batches of Parquet, Arrow and Feather files, in the same order each time that `paths` is iterated."""

    def batches() -> Iterator[Any]:
        for path in paths:
            with _refusing(path):
                for batch in _batches_of(path, chosen):
                    yield path, batch

    return _read_batches(batches, Survey(stored, chosen))


def read_table(
    source: Any, chosen: Sequence[str] | None, stored: Mapping[str, Column]
) -> Iterator[Mapping[str, Block]] | None:
    """Return the batches of a table of PyArrow, pandas, datasets or with a stream of Arrow; None for another object."""
    package = type(source).__module__.partition(".")[0]
    is_dataset = package == "datasets" and package in sys.modules
    is_frame = isinstance(source, getattr(sys.modules.get("pandas"), "DataFrame", ()))
    is_scanned = package == "pyarrow" and hasattr(source, "scanner")  # a dataset of PyArrow
    is_once = not is_scanned and not hasattr(source, "__len__")
    if not (is_dataset or is_frame or is_scanned or hasattr(source, "__arrow_c_stream__")):
        return None
    pa = pyarrow()
    if is_frame:
        source = _table_of_frame(source)
    if isinstance(source, Mapping):
        raise TypeError(
            f"import_samples: expected one split, got {type(source).__name__} of {shown(', '.join(source))}. "
            "Choose one, such as source['train']"
        )
    if not (is_dataset or is_scanned or is_once):
        try:
            source = pa.table(source)
        except (pa.ArrowException, TypeError, ValueError):  # such as a series, which has no names of columns
            return None

    def batches() -> Iterator[Any]:
        found: Any
        if is_dataset:
            found = (b for part in source.with_format("arrow").iter(_ROWS) for b in part.to_batches())
        elif is_scanned:
            found = source.to_batches(batch_size=_ROWS)
        else:
            found = pa.RecordBatchReader.from_stream(source) if is_once else source.to_batches(_ROWS)
        return ((package, batch) for batch in found)

    # A file given only by its path is read for a dataset, and refused elsewhere: the author of the table would choose
    # which files of this machine are read.
    return _read_batches(batches, Survey(stored, chosen, is_dataset), is_once=is_once)


def _table_of_frame(frame: Any) -> Any:
    """Return a DataFrame as a table of Arrow, with its index as columns, unless that numbers the rows only."""
    pa = pyarrow()
    source_columns(map(str, frame.columns), None, "DataFrame")
    if any(name is not None for name in frame.index.names) or type(frame.index).__name__ != "RangeIndex":
        try:
            frame = frame.reset_index()
        except ValueError:
            raise FormatError(
                f"DataFrame: expected names of the index that no column has, got {list(frame.index.names)!s:.80}. "
                "Rename it (rename_axis), or leave it out by reset_index(drop=True)"
            ) from None
    with suppress(pa.ArrowException, TypeError):  # the latter for columns that are sparse
        if not any(map(_is_of_periods, frame.dtypes)):
            return pa.Table.from_pandas(frame, preserve_index=False)
    name = _mixed_column(frame)
    column = "" if name is None else f"column {shown(name, 80)}: "
    raise FormatError(
        f"DataFrame: {column}expected values of one type that Arrow has, got others. Convert them, for example by "
        "astype(str)"
    )


def _is_of_periods(kind: Any) -> bool:
    """Return whether a type of pandas is one of periods, whose months or years are numbers only to Arrow."""
    return type(kind).__name__ == "PeriodDtype"


def _mixed_column(frame: Any) -> str | None:
    """Return the name of the first column that Arrow has no type for."""
    pa = pyarrow()
    for name in frame.columns:
        try:
            pa.array(frame[name], from_pandas=True)
        except (pa.ArrowException, TypeError):
            return str(name)
        if _is_of_periods(frame[name].dtype):
            return str(name)
    return None


def _read_batches(
    batches: Callable[[], Iterator[Any]], survey: Survey, *, is_once: bool = False
) -> Iterator[Mapping[str, Block]]:
    """Return record batches as columns. Of those that come once, the first is to have all columns that have nulls."""
    for where, batch in () if is_once else batches():
        with _refusing(where):
            survey.find(_arrays_of(batch, survey, where))
    for where, batch in batches():
        with _refusing(where):
            arrays = _arrays_of(batch, survey, where)
            if batch.num_rows:
                if is_once and not survey.kinds:
                    survey.find(arrays)
                yield read_arrays(arrays, survey)


def read_arrays(arrays: Mapping[str, Any], survey: Survey) -> dict[str, Block]:
    """Return arrays as columns."""
    columns: dict[str, Block] = {}
    for name, array in arrays.items():
        found = nulls_in(array)
        if (found[0] and name not in survey.columns) or (found[1] and name not in survey.in_lists):
            raise FormatError(
                f"column {name!r:.80}: expected no nulls, as the batches before had none, got some. Fill them, or "
                "import files, a table or a list, which are read twice"
            )
        block, valid = _files_of(name, array, survey.follow_paths) or from_arrow(
            name, array, survey.kind_for(name, array), has_inner_nulls=name in survey.in_lists
        )
        columns[name] = block
        if name in survey.columns:
            columns[name + VALID] = Block.of(np.ones(len(array), np.bool_) if valid is None else valid)
    return columns


def infer(name: str, values: Sequence[Any]) -> Any:
    """Return values of a sample as an array of the type that Arrow infers, if it holds all of them."""
    pa, got = pyarrow(), "others, such as text beside numbers"
    try:
        array = pa.array(values)
        if not re.search("date|time|duration", str(array.type)) or _are_same(values, array.to_pylist()):
            return array
    except UnicodeEncodeError:
        got = "text with lone surrogates"
    except (pa.ArrowException, TypeError, ValueError, OverflowError):  # whose text may have values
        pass
    raise FormatError(
        f"samples: column {shown(name, 80)}: expected values of one type that Arrow has, got {got}. Convert them, for "
        "example by json.dumps"
    )


def _are_same(value: Any, stored: Any) -> bool:
    """Return whether dates and times were stored as they are, where Arrow drops times of day and zones, and so only.

    Numbers beside them become dates and times.
    """
    if isinstance(value, Mapping):
        return all(_are_same(each, stored[name]) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_are_same, value, stored))
    if isinstance(value, (date, time)) or isinstance(stored, (date, time, timedelta)):
        return isinstance(value, (np.datetime64, np.timedelta64)) or bool(value == stored)
    return True


def _arrays_of(batch: Any, survey: Survey, where: object) -> dict[str, Any]:
    """Return the chosen columns of a batch; refuse values that are none of their type: PyArrow does not look."""
    try:
        batch.validate(full=True)
    except pyarrow().ArrowException:
        raise FormatError(f"{where}: {_UNREADABLE}. Write it again") from None
    return {name: batch.column(name) for name in source_columns(batch.schema.names, survey.chosen, where)}


@contextmanager
def _refusing(where: Path | str) -> Iterator[None]:
    """Raise FormatError in the place of the errors of PyArrow about a file, or about a table, by its package."""
    try:
        yield
    except UnicodeDecodeError:
        raise FormatError(f"{where}: expected names of columns in UTF-8, got other bytes. Write it again") from None
    except (pyarrow().ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = f"{where.suffix} file" if isinstance(where, Path) else "table"
        raise FormatError(  # without the text of the error, which may have values
            f"{where} is no {kind} that can be read ({type(error).__name__}). Write it again"
        ) from None


def _batches_of(path: Path, chosen: Sequence[str] | None) -> Iterator[Any]:
    """Return the record batches of a file, of Parquet with only the chosen columns."""
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
