"""Types of Arrow: their values as bytes of samples, and back."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fastrack._samples.blocks import Block, Column
from fastrack._tensors import dtypes
from fastrack._tensors.arrays import Bytes
from fastrack.errors import FormatError

Mask = npt.NDArray[np.bool_]

ARROW = "arrow:"
"""Start of a `Column.type`; after it, in base64, the schema in which Arrow's IPC has the type of the only field."""

_JSON = "json"  # name of that field if the values are stored as JSON
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}  # which have NaN
_NULLS = 1 << 27  # that nulls in the place of lists of one size stand for, at most: a few bytes tell any size
_LISTS = ("is_list", "is_large_list", "is_list_view", "is_large_list_view")


def pyarrow() -> Any:
    """Import PyArrow; raise ImportError with advice if it is absent."""
    try:
        import pyarrow as pa
        import pyarrow.compute
    except ImportError:
        raise ImportError("tables of Arrow and Parquet need PyArrow: pip install pyarrow") from None
    return pa


def from_arrow(name: str, array: Any, kind: Any, *, has_inner_nulls: bool) -> tuple[Block, Mask | None]:
    """Return the values of a column of Arrow, and which of them are no nulls; None if all are.

    kind : the type to store them as: that of the array, or one that `join_kinds` returned
    has_inner_nulls : whether lists of this column have nulls in them, in any batch: then they are stored as JSON

    Raise FormatError if Arrow's type cannot be stored.
    """
    array = _plain(_cast(name, array, kind))
    if pyarrow().types.is_decimal(array.type):
        array = array.cast(pyarrow().string()).cast(pyarrow().large_binary())
    valid = array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None
    as_json = _is_stored_as_json(kind, has_inner_nulls=has_inner_nulls)
    try:
        block = _json_block(array) if as_json else _block_of(array if valid is None else array.drop_null())
    except _UnknownTypeError:
        raise FormatError(
            f"column {name!r:.80}: expected a type that Parquet has, got {kind!s:.80}. Cast it, or leave it out"
        ) from None
    if valid is not None and not as_json:
        block = with_nulls(block, valid)
    return replace(block, column=replace(block.column, type=_type_text(kind, block.column, as_json))), valid


def to_arrow(name: str, block: Block, valid: Mask | None = None) -> Any:
    """Return values as an array of the type of Arrow that they came from, or that is the nearest to their dtype.

    valid : one value a sample, False for a null

    Raise FormatError if Arrow has no such type, or the bytes are no values of it.
    """
    pa = pyarrow()
    try:
        kind, as_json = kind_of(block.column)
        array = _array_of(_values_of_json(block, valid), kind) if as_json else _array_of_bytes(block, valid, kind)
        array.validate(full=True)
    except _UnknownTypeError:
        raise FormatError(
            f"column {name!r:.80}: expected a dtype that Arrow has, got {block.column.dtype}. Leave the column out"
        ) from None
    except (pa.ArrowException, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise FormatError(
            f"column {name!r:.80}: expected values of its type in Arrow, got others. Import it again, or leave it out"
        ) from None
    return array


def nulls_in(array: Any) -> tuple[bool, bool]:
    """Return whether an array has nulls, and whether lists of numbers in it have nulls in them."""
    kind, array = array.type, _plain(array)
    has_inner = not _is_stored_as_json(kind) and _is_a_list(array.type) and any(nulls_in(array.flatten()))
    return bool(array.null_count), has_inner


_UTC = {"UTC", "Etc/UTC", "GMT", "Z", "+00:00", "+0000"}


def join_kinds(kind: Any, other: Any, *, is_stored: bool = False) -> Any:
    """Return the type for the values of two types, or None: one of the two, or what Arrow promotes both to.

    is_stored : whether samples have `kind` already. Then it is that one, if a cast tells what it cannot hold
    """
    pa = pyarrow()
    types, first, second = pa.types, _simple(kind), _simple(other)
    if first == second:
        return kind
    try:
        schemas = [pa.schema([("", each)]) for each in (first, second)]
        joined = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    is_mixed = _is_bytes(joined) and (_is_text(first) or _is_text(second))  # which the writer knows
    if is_mixed or ("decimal" in f"{first}{second}" and "decimal" not in str(joined)):  # a float may round them
        return None
    if joined == first:
        return kind
    if is_stored:  # casts to floats, lists and structures may change values without a word
        return kind if types.is_integer(first) or types.is_temporal(first) or types.is_decimal(first) else None
    if types.is_integer(first) or types.is_floating(first):
        joined = None  # of numbers the first type stays
    return other if joined == second else joined


@cache
def _simple(kind: Any) -> Any:
    """Return a type without what writers choose and values do not tell: categories, widths of offsets, names of UTC."""
    pa = pyarrow()
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _simple(kind.value_type)
    if _is_text(kind) or _is_bytes(kind):
        return pa.large_string() if _is_text(kind) else pa.large_binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.large_list(_simple(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([(field.name, _simple(field.type)) for field in kind])
    return pa.timestamp(kind.unit, "UTC") if types.is_timestamp(kind) and kind.tz in _UTC else kind


def _cast(name: str, array: Any, kind: Any) -> Any:
    """Return values as those of another type; raise FormatError if they would be others."""
    if (simple := _simple(kind)) == _simple(array.type):
        return array
    try:
        return array.cast(simple)
    except pyarrow().ArrowException:
        raise FormatError(
            f"column {name!r:.80}: expected values that {kind!s:.80} has, the type in the samples before, got others, "
            f"of {array.type!s:.80}. Cast the column, or import it into another folder"
        ) from None


@cache
def _is_stored_as_json(kind: Any, *, has_inner_nulls: bool = False) -> bool:
    """Return whether the values of a type are stored as JSON: all that nest, but lists of numbers without nulls."""
    types, kind = pyarrow().types, plain_kind(kind)
    if types.is_fixed_size_list(kind):
        return has_inner_nulls or not _is_row(kind)
    if _is_a_list(kind):
        return has_inner_nulls or not _is_number(plain_kind(kind.value_type))
    return bool(types.is_nested(kind))


class _UnknownTypeError(Exception):
    """The type is none that can be stored, or the dtype is none of Arrow's."""


def _is_a_list(kind: Any) -> bool:
    types = pyarrow().types
    return types.is_fixed_size_list(kind) or any(getattr(types, is_one)(kind) for is_one in _LISTS)


def _is_number(kind: Any) -> bool:
    """Return whether values of a type are one number each, of a dtype."""
    types = pyarrow().types
    is_date = types.is_temporal(kind) and kind.bit_width <= 64
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or is_date)


def _is_row(kind: Any) -> bool:
    """Return whether values of a type have all as many bytes."""
    types, kind = pyarrow().types, plain_kind(kind)
    if types.is_fixed_size_list(kind):
        return _is_row(kind.value_type)
    return bool(_is_number(kind) or types.is_fixed_size_binary(kind) or types.is_temporal(kind))


def plain_kind(kind: Any) -> Any:
    """Return a type without its extension, categories or runs."""
    pa = pyarrow()
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def _plain(array: Any) -> Any:
    """Return values without extension, categories and runs; text and bytes as large_binary, which takes and drops."""
    pa = pyarrow()
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = pa.DictionaryArray.from_arrays(array.indices, _plain(array.dictionary)).dictionary_decode()
        elif pa.types.is_run_end_encoded(array.type):
            array = pa.compute.run_end_decode(array)
        else:
            break
    return array.cast(pa.large_binary()) if _is_bytes(array.type) or _is_text(array.type) else array


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


# From Arrow.


def _block_of(array: Any) -> Block:
    """Return values without nulls: numbers, rows of them, or records."""
    pa = pyarrow()
    types, kind = pa.types, array.type
    if types.is_null(kind):
        return Block.of([], empty=Column("U8", None))
    if _is_bytes(array.type):
        return _records_of(array)
    if types.is_fixed_size_binary(kind) or (types.is_temporal(kind) and kind.bit_width == 128):
        width = kind.bit_width // 8
        memory = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return Block(Column("U8", (width,)), memory[array.offset * width :][: len(array) * width], len(array))
    if types.is_temporal(kind):
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if _is_number(array.type):
        return Block.of(array.to_numpy(zero_copy_only=False))
    if not _is_a_list(kind):
        raise _UnknownTypeError
    values = _block_of(_plain(array.flatten()))
    column = values.column
    if types.is_fixed_size_list(kind):
        assert column.shape is not None
        return Block(Column(column.dtype, (kind.list_size, *column.shape)), values.data, len(array))
    sizes = pa.compute.list_value_length(array).to_numpy().astype(np.int64) * dtypes.nbytes(column.dtype, ())
    return Block(Column(column.dtype, None), values.data, len(array), _ends(sizes))


def _records_of(array: Any) -> Block:
    """Return an array of large_binary as records."""
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1] if len(array) else np.zeros(1)
    start, stop = int(offsets[0]), int(offsets[-1])
    memory = np.frombuffer(data or b"", np.uint8)[start:stop]
    return Block(Column("U8", None), memory, len(array), offsets.astype(np.int64) - start)


def _ends(sizes: Any) -> Any:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def with_nulls(block: Block, valid: Mask) -> Block:
    """Return the values with NaN in a column of floats, else zeros or an empty record, in the place of each null."""
    if block.ends is not None:
        sizes = np.zeros(valid.size, np.int64)
        sizes[valid] = np.diff(block.ends)
        return Block(block.column, block.data, valid.size, _ends(sizes))
    width = dtypes.nbytes(block.column.dtype, block.column.shape or ())
    rows = np.zeros((valid.size, width), np.uint8)
    if block.column.dtype in _FLOATS:  # which a model that overlooks `x.valid` cannot take for a measurement
        rows.view(_FLOATS[block.column.dtype])[:] = np.nan
    rows[valid] = block.data.reshape(block.count, width)
    return Block(block.column, rows.reshape(-1), valid.size)


def _json_block(array: Any) -> Block:
    dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    values = ["" if value is None else dump(value) for value in _values_of(array)]
    return Block.of(values, empty=Column("U8", None))


def _values_of(array: Any) -> list[Any]:
    """Return values as JSON has them: bytes in base64, decimals as text, dates as the integers that Arrow stores."""
    pa = pyarrow()
    is_text = _is_text(plain_kind(array.type))
    array = _plain(array)
    types, kind = pa.types, array.type
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise _UnknownTypeError
        members = zip(*map(_values_of, array.flatten()), strict=True) if names else [()] * len(array)
        values: list[Any] = [dict(zip(names, row, strict=True)) for row in members]
        return _with_none(values, array)
    if types.is_map(kind):
        return _with_none(_slices(np.diff(array.offsets), list(map(list, _members_of_map(array)))), array)
    if _is_a_list(kind):
        sizes = pa.compute.list_value_length(array).fill_null(0)
        return _with_none(_slices(sizes, _values_of(array.flatten())), array)
    return _values_of_leaves(array, is_text)


def _values_of_leaves(array: Any, is_text: bool) -> list[Any]:
    pa = pyarrow()
    types, kind = pa.types, array.type
    if types.is_temporal(kind) and kind.bit_width <= 64:
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    elif types.is_float16(kind):
        array = array.cast(pa.float32())  # for numbers of Python
    elif types.is_decimal(kind):
        array = array.cast(pa.string())
    elif is_text:
        array = array.cast(pa.large_string())
    elif _is_bytes(kind) or types.is_fixed_size_binary(kind):
        return [None if value is None else base64.b64encode(value).decode() for value in array.to_pylist()]
    elif not (_is_number(kind) or types.is_null(kind) or types.is_temporal(kind)):
        raise _UnknownTypeError
    return list(array.to_pylist())


def _members_of_map(array: Any) -> Iterable[tuple[Any, Any]]:
    start, stop = (array.offsets[0].as_py(), array.offsets[-1].as_py()) if len(array) else (0, 0)
    return zip(_values_of(array.keys[start:stop]), _values_of(array.items[start:stop]), strict=True)


def _slices(sizes: Any, values: list[Any]) -> list[Any]:
    ends = _ends(np.asarray(sizes, np.int64)).tolist()
    return [values[start:stop] for start, stop in itertools.pairwise(ends)]


def _with_none(values: list[Any], array: Any) -> list[Any]:
    if not array.null_count:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]


# To Arrow.


def _default_kind(column: Column) -> Any:
    """Return the type of Arrow that a dtype and a shape have by themselves."""
    pa = pyarrow()
    if column.type in {"text", "json"}:
        return pa.string()
    if column.shape is None and column.dtype == "U8":
        return pa.binary()
    if column.dtype not in dtypes.NUMPY or column.dtype == "C64":
        raise _UnknownTypeError
    kind = pa.from_numpy_dtype(dtypes.NUMPY[column.dtype])
    if column.shape is None:
        return pa.list_(kind)
    for size in reversed(column.shape):
        kind = pa.list_(kind, size)
    return kind


def _type_text(kind: Any, column: Column, as_json: bool) -> str:
    pa = pyarrow()
    if not as_json and kind == pa.string():
        return "text"
    if not as_json and kind == _default_kind(column):
        return ""
    schema = pa.schema([pa.field(_JSON if as_json else "value", kind)])
    return ARROW + base64.b64encode(schema.serialize().to_pybytes()).decode()


def stored_kind(column: Column | None) -> Any:
    """Return the type of Arrow of a stored column; None if there is no column, or no such type."""
    try:
        return None if column is None else kind_of(column)[0]
    except _UnknownTypeError:
        return None


def describe_type(column: Column) -> str:
    """Return the type of a column in words."""
    try:
        return f"{kind_of(column)[0]!s:.80}" if column.type.startswith(ARROW) else column.type or str(column)
    except ImportError:
        return "one of Arrow, whose name needs PyArrow"
    except FormatError:
        return column.type[:80]


def kind_of(column: Column) -> tuple[Any, bool]:
    """Return the type of Arrow that a column is to have, and whether its values are stored as JSON.

    Raise FormatError if what tells it is no such type.
    """
    if not column.type.startswith(ARROW):
        return _default_kind(column), False
    pa = pyarrow()
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(column.type.removeprefix(ARROW), validate=True)))
        return schema.field(0).type, schema.field(0).name == _JSON
    except (pa.ArrowException, OSError, ValueError, LookupError, RecursionError):
        raise FormatError("a column: expected a type of Arrow, got other bytes. Import the dataset again") from None


def _wrapped(array: Any, kind: Any) -> Any:
    """Return plain values with the extension, categories or runs of their type."""
    pa = pyarrow()
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _wrapped(array, kind.storage_type))
    if pa.types.is_dictionary(kind):
        encoded = _wrapped(array, kind.value_type)
        base = pa.large_binary() if _is_bytes(encoded.type) or _is_text(encoded.type) else encoded.type
        encoded = encoded.cast(base).dictionary_encode()
        words = encoded.dictionary.cast(kind.value_type)
        return pa.DictionaryArray.from_arrays(encoded.indices.cast(kind.index_type), words, ordered=kind.ordered)
    if pa.types.is_run_end_encoded(kind):
        return pa.compute.run_end_encode(_wrapped(array, kind.value_type), kind.run_end_type)
    return array


def _array_of_bytes(block: Block, valid: Mask | None, kind: Any) -> Any:
    pa = pyarrow()
    plain, count = plain_kind(kind), block.count
    if valid is not None and valid.shape != (count,):
        raise ValueError
    bits = None if valid is None else pa.array(np.ascontiguousarray(valid, np.bool_)).buffers()[1]
    if pa.types.is_null(plain):
        array = pa.nulls(count)
    elif block.ends is None:
        array = _array_of_rows(block.data, count, plain, bits)
    else:
        ends, data = np.ascontiguousarray(block.ends, np.int64), pa.py_buffer(np.ascontiguousarray(block.data))
        if _is_a_list(plain):
            width = dtypes.nbytes(block.column.dtype, ())
            values = _array_of_rows(block.data, block.data.size // width, plain.value_type, None)
            array = _lists(plain, np.diff(ends) // width, values, valid)
        else:
            array = pa.Array.from_buffers(pa.large_binary(), count, [bits, pa.py_buffer(ends), data])
            array.validate(full=True)  # PyArrow follows offsets in a cast without a look at them
            array = array.cast(pa.string()).cast(plain) if pa.types.is_decimal(plain) else array.cast(plain)
    return _wrapped(array, kind)


def _array_of_rows(data: Bytes, count: int, kind: Any, bits: Any) -> Any:
    """Return values of one size each. `bits` has a bit for each, which is 0 for a null."""
    pa = pyarrow()
    plain = plain_kind(kind)
    if pa.types.is_fixed_size_list(plain):
        values = _array_of_rows(data, count * plain.list_size, plain.value_type, None)
        array = pa.Array.from_buffers(plain, count, [bits], children=[values])
    elif data.size != count * _width(plain):
        raise ValueError
    elif pa.types.is_boolean(plain):
        packed = pa.array(data.view(np.bool_)).buffers()[1]
        array = pa.Array.from_buffers(plain, count, [bits, packed])
    else:
        array = pa.Array.from_buffers(plain, count, [bits, pa.py_buffer(np.ascontiguousarray(data))])
    return _wrapped(array, kind)


def _width(kind: Any) -> int:
    """Return the bytes of a value of one size, as a sample has them."""
    return max(int(kind.bit_width) // 8, int(pyarrow().types.is_boolean(kind)))


def _lists(kind: Any, sizes: Any, values: Any, valid: Mask | None) -> Any:
    """Return lists of these sizes, of values that follow each other."""
    pa = pyarrow()
    types, ends = pa.types, _ends(sizes)
    mask = None if valid is None else pa.array(~valid)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        is_large = types.is_large_list_view(kind)
        width, made = (pa.int64(), pa.LargeListViewArray) if is_large else (pa.int32(), pa.ListViewArray)
        starts = pa.array(ends[:-1]).cast(width)
        return made.from_arrays(starts, pa.array(sizes).cast(width), values, type=kind, mask=mask)
    if types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(ends), values, type=kind, mask=mask)
    offsets = pa.array(ends).cast(pa.int32())
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=mask)


def _values_of_json(block: Block, valid: Mask | None) -> list[Any]:
    is_valid = np.ones(block.count, np.bool_) if valid is None else valid
    return [json.loads(block.between(i, i + 1).tobytes()) if is_valid[i] else None for i in range(block.count)]


def _array_of(values: list[Any], kind: Any) -> Any:
    """Return the array of values that `_values_of` gave."""
    pa = pyarrow()
    types, plain = pa.types, plain_kind(kind)
    if types.is_struct(plain):
        members = [_array_of([v and v[field.name] for v in values], field.type) for field in plain]
        mask = pa.array([value is None for value in values], pa.bool_())
        if members:
            array = pa.StructArray.from_arrays(members, fields=list(plain), mask=mask)
        else:
            array = pa.array(values, plain)
    elif types.is_fixed_size_list(plain):
        if values.count(None) * plain.list_size > _NULLS:
            raise ValueError("more nulls than memory")
        none = [None] * plain.list_size
        flat = _array_of([item for value in values for item in (none if value is None else value)], plain.value_type)
        mask = pa.array([value is None for value in values], pa.bool_())
        array = pa.FixedSizeListArray.from_arrays(flat, type=plain, mask=mask)
    elif types.is_map(plain) or _is_a_list(plain):
        sizes = np.array([len(value or ()) for value in values], np.int64)
        items = [item for value in values for item in value or ()]
        valid = np.array([value is not None for value in values], np.bool_)
        if types.is_map(plain):
            members = [
                _array_of([item[i] for item in items], t) for i, t in enumerate((plain.key_type, plain.item_type))
            ]
            offsets = pa.array(_ends(sizes)).cast(pa.int32())
            array = pa.MapArray.from_arrays(offsets, *members, type=plain, mask=pa.array(~valid))
        else:
            array = _lists(plain, sizes, _array_of(items, plain.value_type), valid)
    else:
        array = _array_of_leaves(values, plain)
    return _wrapped(array, kind)


def _array_of_leaves(values: list[Any], kind: Any) -> Any:
    pa = pyarrow()
    types = pa.types
    if types.is_temporal(kind) and kind.bit_width <= 64:
        return pa.array(values, pa.int64() if kind.bit_width == 64 else pa.int32()).view(kind)
    if types.is_temporal(kind):
        return pa.array([None if value is None else tuple(value) for value in values], kind)
    if types.is_decimal(kind):
        return pa.array(values, pa.string()).cast(kind)
    if _is_bytes(kind) or types.is_fixed_size_binary(kind):
        decoded = [None if value is None else base64.b64decode(value) for value in values]
        return pa.array(decoded, pa.binary()).cast(kind)
    if types.is_float16(kind):  # of which PyArrow 20 takes only NumPy's scalars
        return pa.array([None if value is None else np.float16(value) for value in values], kind)
    return pa.array(values, kind)
