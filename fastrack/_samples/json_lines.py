"""JSON lines: the columns of objects, and their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples.blocks import Block, source_columns
from fastrack.errors import FormatError


class JsonColumns:
    """Columns of JSON objects, which the first object determines."""

    def __init__(self) -> None:
        self._kinds: dict[str, str] = {}

    def parse(self, lines: Iterable[tuple[bytes, Path, int]]) -> dict[str, Block]:
        """Return the columns of lines, each with its file and number. Raise FormatError if one is no such object."""
        columns: dict[str, list[Any]] = {}
        for line, path, number in lines:
            members = _parse_line(line, path, number)
            if not self._kinds:
                source_columns(members, None, f"{path}, line {number}")
                self._kinds = {name: _kind_of(value) for name, value in members.items()}
            if members.keys() != self._kinds.keys():
                raise FormatError(
                    f"{path}, line {number}: expected the members {list(self._kinds)!s:.200} of the first line, got "
                    f"{list(members)!s:.200}"
                )
            for name, value in members.items():
                kind = self._kinds[name]
                if not _KINDS[kind][0](value):
                    raise FormatError(
                        f"{path}, line {number}: {name!r:.80}: expected {kind}, as in the first line, got "
                        f"{type(value).__name__}"
                    )
                columns.setdefault(name, []).append(value)
        return {name: _block_of(self._kinds[name], values) for name, values in columns.items()}


def _parse_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        members = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}, line {number}: expected JSON, got other text ({error!s:.80})") from None
    if not isinstance(members, dict) or not members:
        raise FormatError(f"{path}, line {number}: expected a JSON object with members, got another value")
    return members


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a float of 64 bits holds exactly."""
    return type(value) is float or (type(value) is int and abs(value) <= 2**53)


# Kinds of columns, tried in this order on the first value: the test of a value, and the dtype of numbers.
_KINDS: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "text": (lambda value: type(value) is str, None),
    "a truth value": (lambda value: type(value) is bool, np.bool_),
    "an integer of 64 bits": (_is_integer, np.int64),
    "a number": (_is_number, np.float64),
    "a list of integers": (lambda value: type(value) is list and all(map(_is_integer, value)), np.int64),
    "a list of numbers": (lambda value: type(value) is list and all(map(_is_number, value)), np.float64),
    "JSON": (lambda _: True, None),
}


def _kind_of(value: Any) -> str:
    """Return the kind of a first value. An empty list has no type of elements, and is kept as JSON."""
    return "JSON" if value == [] else next(kind for kind, (fits, _) in _KINDS.items() if fits(value))


def _block_of(kind: str, values: list[Any]) -> Block:
    dtype = _KINDS[kind][1]
    if kind == "text":
        return Block.of(values)
    if kind == "JSON":
        texts = Block.of([json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values])
        return replace(texts, column=replace(texts.column, type="json"))
    if kind.startswith("a list"):
        return Block.of([np.array(value, dtype) for value in values], are_records=True)
    return Block.of(np.array(values, dtype))
