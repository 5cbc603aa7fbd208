"""Cells of a table as values: by their characters, and by the schema of an import."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Self, TypeAlias

import numpy as np

from fastrack._samples.blocks import VALID, Block, Column, require_unicode
from fastrack._util.shown import shown

LONGEST_CELL = 1 << 28
"""Characters of a cell of CSV, at most: an open quote makes one of the rest of the file."""

Cells: TypeAlias = Any
"""The cells of a column in several rows: `TextCells`, or `csv_arrow.ArrowCells`.

`texts` returns them as they stand; `without` with nulls emptied, and which are none, or None if all are; `judge` what
they are, as a sum of flags, of which others may be missing beside TEXT; `numbers` the values of a column of int, float
or bool, and which cells are not empty, or None if all are; `block` a column of text.
"""
# What a cell is. A column of integers holds 64 bits, one of numbers floats of as many, which have no integer above
# 2**53 exactly. Text is never taken for a number if its digits would not come back: 007, +1, 1_000.
EMPTY, INTEGER, LONG, NUMBER, TEXT, NULL = 1, 2, 4, 8, 16, 32
"""Flags of what cells are; NULL tells that some are among `Schema.nulls`."""
NUMBER_CELL = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|NaN|-?(?:inf|Inf|Infinity)"
)
_INTEGER_CELL = re.compile(r"0|-?[1-9][0-9]*")
# Many cells at once, with integers that both types hold, 15 digits of numbers, and exponents that fit.
_INTEGER_CELLS = re.compile(r"(?:(?:0|-?[1-9][0-9]{0,13})?\n)*+")
_NUMBER_CELLS = re.compile(r"(?:(?=.{0,16}\n)(?:-?(?:0|[1-9][0-9]{0,13})(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?)?\n)*+")
_LONGEST_NUMBER = 1 << 17  # characters: to compare more digits would take long

# What a column of a type takes where its cells alone would not tell that it is one.
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
_TYPED = {
    "int": re.compile(r" *[+-]?[0-9]{1,99} *"),
    "float": re.compile(r" *[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|nan|NaN|inf|Inf|Infinity) *"),
}
_TYPES = {bool: "bool", float: "float", int: "int", str: "text"}
_FITTING = {"text": ~0, "int": EMPTY | INTEGER | LONG, "float": EMPTY | INTEGER | LONG | NUMBER, "bool": EMPTY}
_ROUND = "Name its type in types=: text to keep it, as ids are, or float to round it"
_WITH_COMMA = re.compile(r"-?[0-9][0-9.]*,[0-9][0-9.,]*")
POINTS = "Read the table by pandas, with its decimal= or thousands=, and import that"
"""Advice on a number with a comma."""
_NO_NUMBER = "is no number. If it is a null, name it in nulls="
EXPECTED = {"int": "an integer of 64 bits", "float": "a number", "bool": "true, false, 1 or 0"}
"""The cells that a column of each type may have, as errors name them."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The meaning of cells where they do not tell it: texts that stand for nulls, and types of columns by name."""

    nulls: frozenset[str] = frozenset()
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, nulls: Iterable[str], types: Mapping[str, Any] | None) -> Self:
        """Make one of the arguments of `import_samples`. Raise TypeError or ValueError if they are none."""
        nulls = [nulls] if isinstance(nulls, str) or not isinstance(nulls, Iterable) else list(nulls)
        if not all(isinstance(null, str) for null in nulls):
            raise TypeError("nulls=: expected texts, got another object. Give them as ['NA', 'null']")
        for null in nulls:
            require_unicode(null, "nulls=: ")
        if types is not None and not isinstance(types, Mapping):
            raise TypeError(f"types=: expected a mapping, got {type(types).__name__}. Give it as {{'price': 'float'}}")
        found = {}
        for name, kind in (types or {}).items():
            found[name] = _TYPES.get(kind, "") if isinstance(kind, type) else kind
            if found[name] not in _TYPES.values():
                raise ValueError(
                    f"types=: expected bool, float, int or text for {shown(name, 80)}, got {shown(kind, 80)}. Give one "
                    "of these"
                )
        return cls(frozenset(nulls), found)

    def __bool__(self) -> bool:
        return bool(self.nulls or self.types)


def kind_of(what: int) -> str:
    """Return the type of a column whose cells are `what`."""
    if what & TEXT or (what & NUMBER and what & LONG) or not what & (INTEGER | NUMBER):
        return "text"
    return "float" if what & NUMBER else "int"


def judge_typed(cells: Cells, kind: str) -> int:
    """Return what the cells of a column of a type are: TEXT if there is one that it does not take."""
    what = 0 if kind == "text" else cells.judge()
    if not what & ~_FITTING[kind]:
        return what
    different = set(cells.texts())
    if not all(fits(cell, kind) for cell in different):
        return TEXT
    return EMPTY if "" in different else 0


def fits(cell: str, kind: str) -> bool:
    """Return whether a column of int, float or bool takes a cell."""
    if not cell or kind == "bool":
        return not cell or cell.lower() in _TRUTHS
    if not _TYPED[kind].fullmatch(cell):
        return False
    if kind == "int":
        return -(2**63) <= int(cell) < 2**63
    return "n" in cell.lower() or not math.isinf(float(cell))


def blocks_of(name: str, cells: Cells, kind: str, what: int, nulls: frozenset[str]) -> dict[str, Block]:
    """Return the values of a column, and which of them are there if it has nulls."""
    cells, valid = cells.without(nulls) if what & NULL else (cells, None)
    if kind == "text":
        block = cells.block()
    else:
        values, valid = cells.numbers(kind)
        block = Block.of(values)
    if not what & (NULL if kind == "text" else NULL | EMPTY):
        return {name: block}
    return {name: block, name + VALID: Block.of(np.ones(block.count, np.bool_) if valid is None else valid)}


@dataclass(frozen=True, slots=True)
class TextCells:
    """Cells as Python has them."""

    cells: Sequence[str]

    def texts(self) -> Sequence[str]:
        return self.cells

    def without(self, nulls: frozenset[str]) -> tuple[TextCells, Any]:
        if not nulls or nulls.isdisjoint(self.cells):
            return self, None
        valid = [cell not in nulls for cell in self.cells]
        return TextCells([cell if keep else "" for cell, keep in zip(self.cells, valid, strict=True)]), np.array(valid)

    def judge(self) -> int:
        cells, joined = self.cells, "\n".join(self.cells) + "\n"
        if len(joined) == len(cells):
            return EMPTY
        if joined.count("\n") == len(cells):
            empty = EMPTY if joined[0] == "\n" or "\n\n" in joined else 0
            if _INTEGER_CELLS.fullmatch(joined):
                return INTEGER | empty
            if _NUMBER_CELLS.fullmatch(joined):
                return NUMBER | empty
        what = 0
        try:  # what Python writes in the same way comes back: 17 digits, most often
            given = list(filter(None, cells))
            cells = [cell for cell, again in zip(given, map(repr, map(float, given)), strict=True) if cell != again]
            what = (NUMBER if len(cells) < len(given) else 0) | (EMPTY if len(given) < len(self.cells) else 0)
        except ValueError:
            pass
        for cell in cells:
            what |= judge_cell(cell)
            if what & TEXT:
                break
        return what

    def numbers(self, kind: str) -> tuple[Any, Any]:
        if kind == "bool":
            values: Any = np.array([_TRUTHS[cell.lower() or "false"] for cell in self.cells], np.bool_)
        else:
            of, dtype, null = (float, np.float64, math.nan) if kind == "float" else (int, np.int64, 0)
            if all(self.cells):
                return np.fromiter(map(of, self.cells), dtype, len(self.cells)), None
            values = np.array([of(cell) if cell else null for cell in self.cells], dtype)
        return values, np.fromiter(map(bool, self.cells), np.bool_, len(self.cells))

    def block(self) -> Block:
        text = "".join(self.cells)
        sizes = map(len, self.cells if text.isascii() else map(str.encode, self.cells))
        ends = np.zeros(len(self.cells) + 1, np.int64)
        np.cumsum(np.fromiter(sizes, np.int64, len(self.cells)), out=ends[1:])
        return Block(Column("U8", None, "text"), np.frombuffer(text.encode(), np.uint8), len(self.cells), ends)


def judge_cell(cell: str) -> int:
    """Return what a cell is, as a sum of flags."""
    if not cell:
        return EMPTY
    if _INTEGER_CELL.fullmatch(cell):
        if len(cell) > 20 or not -(2**63) <= int(cell) < 2**63:
            return TEXT
        return INTEGER if abs(int(cell)) <= 2**53 else INTEGER | LONG
    if not NUMBER_CELL.fullmatch(cell):
        return TEXT
    return NUMBER if "n" in cell.lower() or _is_held(cell) else TEXT


def _is_held(cell: str) -> bool:
    """Return whether a float gives the digits of a number back: all that there are, or its shortest ones."""
    value = float(cell)
    if repr(value) == cell:
        return True
    if len(cell) > _LONGEST_NUMBER:
        return False
    digits = cell.lower().partition("e")[0].lstrip("-0.").replace(".", "")
    if not digits or not value or math.isinf(value):
        return not digits
    if len(digits) <= 15 and abs(value) >= sys.float_info.min:
        return True
    return Decimal(cell) in (Decimal(repr(value)), Decimal(f"{value:.{len(digits) - 1}e}"))


def is_like_number(cell: str) -> bool:
    """Return whether a cell is a number, though no type may hold it, with spaces or commas, or a truth value."""
    return bool(NUMBER_CELL.fullmatch(cell.strip(" "))) or has_comma(cell) or cell.lower() in _TRUTHS


def has_comma(cell: str) -> bool:
    """Return whether a cell is a number with commas, for decimals or thousands."""
    return bool(_WITH_COMMA.fullmatch(cell))


def reason_of(cell: str) -> str:
    """Return in words why a column with this cell is text, and what there is to do."""
    is_number, is_integer = NUMBER_CELL.fullmatch(cell), _INTEGER_CELL.fullmatch(cell)
    if is_number and not is_integer and (math.isinf(float(cell)) or not float(cell)):
        return "is beyond the range of floats"
    reasons = (
        (has_comma(cell), f"has a comma in a number. {POINTS}"),
        (cell.lower() in _TRUTHS, "is a truth value. Give it the type bool in types="),
        (judge_cell(cell) & LONG, f"is an integer beyond 2**53, which no float beside it holds. {_ROUND}"),
        (is_integer, f"has more digits than an integer of 64 bits holds. {_ROUND}"),
        (is_number, f"has more digits than a float holds. {_ROUND}"),
        (fits(cell, "float"), "begins with a zero or plus sign, or has spaces. Give it a type in types= to drop them"),
    )
    return next((reason for is_one, reason in reasons if is_one), _NO_NUMBER)
