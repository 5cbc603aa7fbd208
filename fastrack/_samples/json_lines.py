"""JSON lines: the columns of objects, by what all of their members are."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._samples.blocks import VALID, Block, Column, require_unicode, source_columns
from fastrack._samples.text_lines import Line, read_lines
from fastrack.errors import FormatError

_NULL, _OTHER, _EMPTY = "null", "JSON", "an empty list"
_INTEGER, _LONG, _NUMBER = "an integer", "an integer beyond 2**53", "a number"  # which only a float holds

# What the values of a column may be, for each kind of column: the first that fits. All else is JSON.
_KINDS: dict[str, frozenset[str]] = {
    "text": frozenset({"text"}),
    "bool": frozenset({"a truth value"}),
    "int64": frozenset({_INTEGER, _LONG}),
    "float64": frozenset({_INTEGER, _NUMBER}),
    "lists of int64": frozenset({_EMPTY, f"a list of {_INTEGER}", f"a list of {_LONG}"}),
    "lists of float64": frozenset({_EMPTY, f"a list of {_INTEGER}", f"a list of {_NUMBER}"}),
}


def read_files(paths: Iterable[Path], stored: Mapping[str, Column]) -> Iterator[Mapping[str, Block]]:
    """Return the batches of files, after a first pass that finds what the members of all objects are.

    stored : columns that the values are added to, whose types they get if they can
    """
    found: dict[str, set[str]] = {}
    counts: Counter[str] = Counter()
    objects = 0
    for path in paths:
        for line in (line for lines in read_lines(path, keep_empty=False) for line in lines):
            members = _parse_line(line)
            if not members.keys() <= found.keys():
                source_columns(members, None, f"{path}, line {line[2]}")
            for name, value in members.items():
                found.setdefault(name, set()).add(_what_is(value))
            counts.update(members.keys())
            objects += 1
    kinds = {name: _kind_of(what, stored.get(name)) for name, what in found.items()}
    nulls = {name for name, what in found.items() if _NULL in what or counts[name] < objects}
    for path in paths:
        for lines in read_lines(path, keep_empty=False):
            rows = list(map(_parse_line, lines))
            columns: dict[str, Block] = {}
            for name, kind in kinds.items():
                columns |= _blocks_of(name, kind, [row.get(name) for row in rows], has_nulls=name in nulls)
            yield columns


def _parse_line(line: Line) -> dict[str, Any]:
    content, path, number = line
    try:
        members = json.loads(content.decode(), object_pairs_hook=_members_of, parse_float=_float_of)
    except (ValueError, RecursionError) as error:  # of Python some have what is in the line
        why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        raise FormatError(f"{path}, line {number}: expected JSON, got other text ({why:.80})") from None
    if not isinstance(members, dict) or not members:
        raise FormatError(f"{path}, line {number}: expected a JSON object with members, got another value")
    if b"\\u" in content:  # the only way to half of a surrogate pair, such as of an emoji that was cut
        try:
            require_unicode(json.dumps(list(members.values()), ensure_ascii=False), f"{path}, line {number}: ")
        except ValueError as error:
            raise FormatError(f"{error}. Remove that character, or leave the line out") from None
    return members


def _members_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object, each of a name of its own."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise json.JSONDecodeError("two members of one name", "", 0)
    return members


def _float_of(text: str) -> float:
    """Return a number that a float holds, if only nearly."""
    value = float(text)
    if math.isinf(value) or (not value and re.search("[1-9]", text.lower().partition("e")[0])):
        raise json.JSONDecodeError("a number that 64 bits cannot hold", "", 0)
    return value


def _what_is(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return "text"
    if kind is int:
        return _INTEGER if abs(value) <= 2**53 else _LONG if -(2**63) <= value < 2**63 else _OTHER
    if kind is list:
        what = set(map(_what_is, value))
        of = next((each for each in (_INTEGER, _LONG, _NUMBER) if what <= {_INTEGER, each}), _OTHER)
        return _EMPTY if not value else _OTHER if of == _OTHER else f"a list of {of}"
    return {float: _NUMBER, bool: "a truth value", type(None): _NULL}.get(kind, _OTHER)


def _kind_of(what: set[str], stored: Column | None) -> str:
    """Return the kind of a column. One of only empty lists or nulls has no type of values, and is kept as JSON."""
    values = what - {_NULL}
    if stored is not None:
        kind = {"BOOL": "bool", "I64": "int64", "F64": "float64"}.get(stored.dtype, "")
        kind = stored.type or (f"lists of {kind}" if stored.shape is None else kind)
        if kind == "json" or values <= _KINDS.get(kind, frozenset()):
            return _OTHER if kind == "json" else kind
    if values <= {_EMPTY}:
        return _OTHER
    return next((kind for kind, accepted in _KINDS.items() if values <= accepted), _OTHER)


def _blocks_of(name: str, kind: str, values: list[Any], *, has_nulls: bool) -> dict[str, Block]:
    """Return the values of a column, and which of them are there if it has nulls; JSON has a null of its own."""
    if kind == _OTHER:
        texts = Block.of([json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values])
        return {name: replace(texts, column=replace(texts.column, type="json"))}
    valid = np.array([value is not None for value in values], np.bool_)
    if kind == "text":
        block = Block.of(["" if value is None else value for value in values])
    elif kind.startswith("lists of "):
        arrays = [np.array(() if value is None else value, kind.removeprefix("lists of ")) for value in values]
        block = Block.of(arrays, are_records=True)
    else:
        null = np.nan if kind == "float64" else 0
        block = Block.of(np.array([null if value is None else value for value in values], kind))
    return {name: block, name + VALID: Block.of(valid)} if has_nulls else {name: block}
