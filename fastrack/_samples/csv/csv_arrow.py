"""CSV by PyArrow, several times as fast as the csv module: where both would read the same, and nowhere else.

PyArrow splits blocks of rows into cells, as texts. It takes what is no CSV, such as ``"x"y`` for ``xy``, so a block is
looked at first, and one that it might read in another way is left to the csv module, with all that follow.
"""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastrack._samples.arrow_types import pyarrow
from fastrack._samples.blocks import Block, Column
from fastrack._samples.csv.cell_types import EMPTY, INTEGER, LONG, NUMBER, TEXT, TextCells
from fastrack._samples.text_lines import skip_mark
from fastrack._util.regular_file import open_regular

_WORTH = 8 << 20  # bytes of a file from which on the import of PyArrow pays: it takes a quarter of a second
_BLOCK = 1 << 20  # bytes that are read at a time
_LARGEST = 16 << 20  # bytes of a block, if rows are long
_FEW = 64  # cells that tell most columns of text
_ROWS = 1024  # of a block at least, or
_SIZE = 32 << 10  # bytes for each column: else PyArrow takes longer to begin a column than the csv module to read it


class Unsure(Exception):  # noqa: N818 - no error
    """PyArrow is not there, or may read the next rows in another way."""


def read_columns(path: Path, delimiter: str, width: int, places: Sequence[int]) -> Iterator[list[ArrowCells]]:
    """Return the cells of columns, block by block. Raise `Unsure` before the first row that the csv module is to read.

    width : number of columns in the header, which is the first row and is left out
    """
    if path.stat().st_size < _WORTH:
        raise Unsure
    try:
        pa = pyarrow()
        from pyarrow import csv
    except ImportError:
        raise Unsure from None
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    names, header = [str(number) for number in range(width)], 1
    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))  # in UTF-8, or refused
    with io.BufferedReader(open_regular(path)) as file:
        if skip_mark(file) != "utf-8":
            raise Unsure
        for block in _blocks_of(file, delimiter, width):
            read = csv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names)
            try:
                table = csv.read_csv(pa.BufferReader(block), read, parse, convert).slice(header)
            except pa.ArrowInvalid:  # a row of another width, or no UTF-8, which the csv module finds
                raise Unsure from None
            header = 0
            if table.num_rows:
                yield [ArrowCells(table.column(place).combine_chunks()) for place in places]


def _blocks_of(file: IO[bytes], delimiter: str, width: int) -> Iterator[bytes]:
    """Return blocks of whole rows. Raise `Unsure` for one that PyArrow may not read as the csv module does."""
    edges = delimiter.encode() + b'\r\n"'  # each quote opens a cell or closes one, or two of them in it are one
    is_rough = re.compile(b'"(?:(?=[^%b])|(?<=[^%b]"))' % (edges, edges))
    rest, is_first = b"", True
    while (new := file.read(max(_BLOCK, len(rest)))) or rest:  # twice as much where rows are long
        rest += new
        block = rest[: _end_of_rows(rest) if new else len(rest)]
        if (new or is_first) and block.count(b"\n") < _ROWS and len(block) < _SIZE * width:
            if len(rest) >= _LARGEST or not new:
                raise Unsure
            continue
        parts = block.split(b'"')
        if len(parts) % 2 == 0 or is_rough.search(b'"'.join(parts[::2])):  # without what is in quotes
            raise Unsure
        if b"\0" in block or block.count(b"\r") != block.count(b"\r\n"):
            raise Unsure
        if block.startswith(BOM_UTF8):  # which it drops, as of a file
            raise Unsure
        if width == 1 and re.search(rb"\A[\r\n]|\n[\r\n]", block):
            raise Unsure  # an empty line, which is a row here
        yield block
        rest, is_first = rest[len(block) :], False


def _end_of_rows(block: bytes) -> int:
    """Return where the last line ends that does not end within quotes."""
    if b'"' not in block:
        return block.rfind(b"\n") + 1
    codes = np.frombuffer(block, np.uint8)
    quotes, ends = (np.flatnonzero(codes == ord(each)) for each in '"\n')
    ends = ends[np.searchsorted(quotes, ends) % 2 == 0]  # at once, as a cell may have any number
    return int(ends[-1]) + 1 if ends.size else 0


@dataclass(frozen=True, slots=True)
class ArrowCells:
    """Cells as an array of Arrow, judged by what PyArrow casts and writes again in the same way."""

    cells: Any

    def texts(self) -> Sequence[str]:
        return list(self.cells.to_pylist())

    def without(self, nulls: frozenset[str]) -> tuple[ArrowCells, Any]:
        if not nulls:
            return self, None
        pa = pyarrow()
        found = pa.compute.is_in(self.cells, pa.array(sorted(nulls), pa.string()))
        if not found.true_count:
            return self, None
        valid = pa.compute.invert(found)
        return ArrowCells(pa.compute.if_else(valid, self.cells, "")), valid.to_numpy(zero_copy_only=False)

    def judge(self) -> int:
        start = TextCells(self.cells.slice(0, _FEW).to_pylist()).judge()
        if start & TEXT:  # casts that fail take long
            return start
        pa = pyarrow()
        cells = self.cells.filter(pa.compute.not_equal(self.cells, ""))
        empty = EMPTY if len(cells) < len(self.cells) else 0
        if not len(cells):
            return empty
        if not _bytes_of(cells)[0].tobytes().translate(None, b"0123456789-"):
            with suppress(pa.ArrowInvalid):
                values = cells.cast(pa.int64())
                if pa.compute.equal(values.cast(pa.string()), cells).true_count == len(cells):
                    bounds = pa.compute.min_max(values).as_py()
                    return empty | INTEGER | (0 if -(2**53) <= bounds["min"] <= bounds["max"] <= 2**53 else LONG)
        with suppress(pa.ArrowInvalid):
            values = cells.cast(pa.float64())
            same = pa.compute.equal(values.cast(pa.string()), cells)
            near = pa.compute.less_equal(pa.compute.abs(values), 2.0**53)  # else it may be an integer, or no number
            others = cells.filter(pa.compute.invert(pa.compute.and_(same, near)))
            return empty | NUMBER | (TextCells(others.to_pylist()).judge() if len(others) else 0)
        return empty | TextCells(cells.to_pylist()).judge()

    def numbers(self, kind: str) -> tuple[Any, Any]:
        pa = pyarrow()
        there = pa.compute.not_equal(self.cells, "")
        of, null = {"int": (pa.int64(), 0), "float": (pa.float64(), np.nan), "bool": (pa.bool_(), False)}[kind]
        try:
            values = pa.compute.if_else(there, self.cells, None).cast(of).fill_null(null)
        except pa.ArrowInvalid:  # a number as only Python reads it
            return TextCells(self.texts()).numbers(kind)
        return values.to_numpy(zero_copy_only=False), there.to_numpy(zero_copy_only=False)

    def block(self) -> Block:
        text, ends = _bytes_of(self.cells)
        return Block(Column("U8", None, "text"), text, len(self.cells), ends)


def _bytes_of(array: Any) -> tuple[Any, Any]:
    """Return the bytes of all texts, one after the other, and where each begins, and the last one ends."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]], ends - ends[0]
