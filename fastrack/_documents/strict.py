"""Parse JSON that has one meaning to all parsers."""

from __future__ import annotations

import json
import math
from typing import Any


def parse_strict(text: str) -> Any:
    """Parse JSON in which each member stands once, numbers are finite and not written as -0, and texts are Unicode."""
    value = json.loads(
        text, object_pairs_hook=unique, parse_int=_whole, parse_float=parse_finite, parse_constant=refuse_constant
    )
    # By \u lone surrogates can be written; those of `surrogateescape` stand for themselves. One byte is found sooner.
    if "\\" in text and "\\u" in text:
        parsed = value
        try:
            text.encode()
        except UnicodeEncodeError:  # without these no second value, which may take four times the text
            parsed = json.loads(text.encode(errors="surrogateescape").decode(errors="replace"))
        json.dumps(parsed, ensure_ascii=False).encode()
    return value


def _whole(text: str) -> int:
    if text == "-0":
        raise ValueError("expected 0, got -0")
    return int(text)


def parse_finite(text: str) -> float:
    """Read a number that is no integer. None is larger than a float can be: ``1e999`` would read as infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is out of range")
    return number


def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a JSON object with a repeated member, since parsers differ in the value that they take."""
    document = dict(members)
    if len(document) != len(members):
        raise ValueError("expected each member once")
    return document


def refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python reads and writes."""
    raise ValueError(f"{name} is no JSON")
