"""Tables of Arrow, in files and in memory, as columns of samples."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples.blocks import Block, Column
from fastrack._tensors import dtypes
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

_ROWS = 4096  # of a batch
_BYTES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view"}


def read_files(paths: Iterable[Path]) -> Iterator[Mapping[str, Block]]:
    """Return the batches of Parquet, Arrow and Feather files."""
    return read_batches(batch for path in paths for batch in _batches_of(path))


def open_table(source: Any) -> Iterator[Any] | None:
    """Return the record batches of a table of PyArrow, pandas or datasets; None for another object."""
    package = type(source).__module__.partition(".")[0]
    if package not in {"pyarrow", "pandas", "datasets"} or package not in sys.modules:
        return None
    pa = _pyarrow()
    if package == "datasets":
        parts = source.with_format("arrow").iter(batch_size=_ROWS)
        return (batch for table in parts for batch in table.to_batches())
    if package == "pandas":
        source = pa.Table.from_pandas(source, preserve_index=False)
    batches: Iterator[Any] | None = None
    if isinstance(source, pa.Table):
        batches = iter(source.to_batches(max_chunksize=_ROWS))
    elif isinstance(source, pa.RecordBatchReader):
        batches = iter(source)
    return batches


def read_batches(batches: Iterable[Any], *, follow_paths: bool = False) -> Iterator[Mapping[str, Block]]:
    """Return record batches as columns.

    Without `follow_paths`, a file given by its path alone is refused: the table's author would choose which files of
    this machine are read.
    """
    for batch in batches:
        if batch.num_rows:
            columns = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
            yield {name: _block_of(name, column, follow_paths) for name, column in columns.items()}


def _pyarrow() -> Any:
    try:
        import pyarrow as pa
    except ImportError:
        raise ImportError("reading a table takes PyArrow: pip install pyarrow") from None
    return pa


def _batches_of(path: Path) -> Iterator[Any]:
    """Return the record batches of a file. Batches of Arrow files are validated here, since PyArrow does not do so."""
    pa = _pyarrow()
    with open_regular(path) as file:
        try:
            if path.suffix.lower() == ".parquet":
                from pyarrow import parquet

                yield from parquet.ParquetFile(file).iter_batches(_ROWS)
                return
            start = file.read(len(b"ARROW1"))
            file.seek(0)
            reader = pa.ipc.open_file(file) if start == b"ARROW1" else pa.ipc.open_stream(file)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if start == b"ARROW1" else reader
            for batch in batches:
                batch.validate(full=True)
                yield batch
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise FormatError(f"{path} is no {path.suffix} file that can be read: {error!s:.300}") from None


def _block_of(name: str, array: Any, follow_paths: bool = False) -> Block:
    """Return a column of Arrow as values of samples."""
    pa = _pyarrow()
    array = _stored_values(name, array)
    types, kind = pa.types, array.type
    if types.is_struct(kind) and {field.name for field in kind} == {"bytes", "path"}:  # files of `datasets`
        files = [_content_of(name, value, follow_paths) for value in array.to_pylist()]
        return Block.of(files, empty=Column("U8", None))
    if str(kind) in _BYTES:
        return _records_of_bytes(array.cast(pa.large_binary()))
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return Block.of(array.to_numpy(zero_copy_only=False))
    if types.is_fixed_size_binary(kind):
        values = _records_of_bytes(array.cast(pa.large_binary())).data
        return Block(Column("U8", (kind.byte_width,)), values, len(array))
    block = _block_of_lists(name, array)
    if block is None:
        raise FormatError(
            f"column {name!r:.80}: expected numbers, dates, text, bytes or lists of numbers, got {kind!s:.80}. Cast or "
            "flatten it, or leave it out"
        )
    return block


def _stored_values(name: str, array: Any) -> Any:
    """Return values by the type that Arrow stores: no categories, extensions or dates. Refuse nulls."""
    pa = _pyarrow()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if array.null_count:
        raise FormatError(
            f"column {name!r:.80}: expected no nulls, got {array.null_count} in {len(array)} rows. Fill them, or leave "
            "the column out"
        )
    if pa.types.is_temporal(array.type) and array.type.bit_width in {32, 64}:
        return array.view(pa.int64() if array.type.bit_width == 64 else pa.int32())
    return array


def _block_of_lists(name: str, array: Any) -> Block | None:
    """Return lists of numbers: rows if they are of one size by their type, else records. None for other types."""
    types, kind = _pyarrow().types, array.type
    if types.is_fixed_size_list(kind):
        values = _block_of(name, array.flatten())
        if values.column.shape is not None:
            return Block(Column(values.column.dtype, (kind.list_size, *values.column.shape)), values.data, len(array))
    elif types.is_list(kind) or types.is_large_list(kind):
        values = _block_of(name, array.flatten())
        if values.column.shape == ():
            ends = array.offsets.to_numpy().astype(np.int64) * dtypes.nbytes(values.column.dtype, ())
            return Block(Column(values.column.dtype, None), values.data, len(array), ends - ends[0])
    return None


def _records_of_bytes(array: Any) -> Block:
    """Return an array of large_binary as records."""
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1] if len(array) else np.zeros(1)
    memory = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    start, stop = int(offsets[0]), int(offsets[-1])
    return Block(Column("U8", None), memory[start:stop], len(array), offsets.astype(np.int64) - start)


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
