"""CSV by PyArrow, several times as fast as the csv module: where both would read the same, and nowhere else.

PyArrow splits blocks of rows into cells, as texts. It takes what is no CSV, such as ``"x"y`` for ``xy``, so a block is
looked at first, and one that it might read in another way is left to the csv module, with all that follow.
"""

from __future__ import annotations

import io
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastrack._samples.arrow_types import pyarrow
from fastrack._samples.blocks import Block, Column
from fastrack._samples.csv.cells import EMPTY, INTEGER, LONG, NUMBER, TEXT, TextCells
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
    """Return blocks of whole rows that PyArrow reads as the csv module does."""
    rest, is_first = b"", True
    while True:
        new = file.read(max(_BLOCK, len(rest)))  # twice as much where rows are long
        if not new and not rest:
            return
        rest += new
        quotes = np.flatnonzero(np.frombuffer(rest, np.uint8) == ord('"')) if b'"' in rest else np.empty(0, np.int64)
        block = rest[: _end_of_rows(rest, quotes) if new else len(rest)]
        if (new or is_first) and block.count(b"\n") < _ROWS and len(block) < _SIZE * width:
            if len(rest) >= _LARGEST or not new:
                raise Unsure
            continue
        _require_sure(block, quotes[: np.searchsorted(quotes, len(block))], delimiter, width)
        yield block
        rest, is_first = rest[len(block) :], False


def _end_of_rows(block: bytes, quotes: Any) -> int:
    """Return where the last line ends that does not end within quotes."""
    if not quotes.size:
        return block.rfind(b"\n") + 1
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))  # at once, as a cell may have any number
    ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
    return int(ends[-1]) + 1 if ends.size else 0


def _require_sure(block: bytes, quotes: Any, delimiter: str, width: int) -> None:
    """Raise `Unsure` for a block that PyArrow may read in another way."""
    if block.startswith(BOM_UTF8):  # which it drops, as of a file
        raise Unsure
    if b"\0" in block or (b"\r" in block and block.count(b"\r") != block.count(b"\r\n")):
        raise Unsure
    if width == 1 and (block.startswith((b"\n", b"\r")) or b"\n\n" in block or b"\n\r" in block):
        raise Unsure  # an empty line, which is a row here
    if quotes.size:  # each opens a cell or closes one, or two of them in it are one
        text, edges = np.frombuffer(block, np.uint8), np.zeros(256, np.bool_)
        edges[list(f'\r\n"{delimiter}'.encode())] = True
        before, after = quotes[::2] - 1, quotes[1::2] + 1
        are_edges = edges[text[before[before >= 0]]].all() and edges[text[after[after < text.size]]].all()
        if quotes.size % 2 or not are_edges:
            raise Unsure


@dataclass(frozen=True, slots=True)
class ArrowCells:
    """Cells as an array of Arrow, judged by what PyArrow casts and writes again in the same way."""

    cells: Any

    def texts(self) -> Sequence[str]:
        return list(self.cells.to_pylist())

    def without(self, nulls: frozenset[str]) -> tuple[ArrowCells, Any]:
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
        there = pa.compute.not_equal(self.cells, "")
        empty = 0 if there.true_count == len(there) else EMPTY
        cells = self.cells.filter(there) if empty else self.cells
        if not len(cells):
            return empty
        text, _ = _bytes_of(cells)
        with suppress(pa.ArrowInvalid):
            if not text.tobytes().translate(None, b"0123456789-"):
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
        if kind == "bool":
            return TextCells(self.texts()).numbers(kind)
        pa = pyarrow()
        there = pa.compute.not_equal(self.cells, "")
        is_whole = there.true_count == len(there)
        of, null = (pa.float64(), np.nan) if kind == "float" else (pa.int64(), 0)
        try:
            cells = self.cells if is_whole else pa.compute.if_else(there, self.cells, None)
            values = cells.cast(of)
        except pa.ArrowInvalid:  # a number as Python alone reads it
            return TextCells(self.texts()).numbers(kind)
        if is_whole:
            return values.to_numpy(zero_copy_only=False), None
        return values.fill_null(null).to_numpy(zero_copy_only=False), there.to_numpy(zero_copy_only=False)

    def block(self) -> Block:
        text, ends = _bytes_of(self.cells)
        return Block(Column("U8", None, "text"), text, len(self.cells), ends)


def _bytes_of(array: Any) -> tuple[Any, Any]:
    """Return the bytes of all texts, one after the other, and where each begins, and the last one ends."""
    _, offsets, data = array.buffers()
    ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]], ends - ends[0]
