"""Nests: dicts, lists, tuples, named tuples and dataclasses, in one another, with tensors at the leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def tree_map(change: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """The same nest with `change(leaf, *other leaves)` in place of each leaf. No part of `nest` is altered.

    Raises
    ------
    ValueError
        If one of `others` is not built like `nest`.
    """
    if isinstance(nest, Mapping):
        for other in others:
            _require(isinstance(other, Mapping) and other.keys() == nest.keys(), nest, other)
        made = {key: tree_map(change, value, *(other[key] for other in others)) for key, value in nest.items()}
        return _like_mapping(nest, made)
    if isinstance(nest, (list, tuple)):
        for other in others:
            _require(isinstance(other, (list, tuple)) and len(other) == len(nest), nest, other)
        return _like_sequence(nest, [tree_map(change, *leaves) for leaves in zip(nest, *others, strict=True)])
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for other in others:
            _require(type(other) is type(nest), nest, other)
        changed = copy.copy(nest)
        for field in dataclasses.fields(nest):
            if not hasattr(nest, field.name):
                continue  # declared, and never set
            value = tree_map(change, getattr(nest, field.name), *(getattr(other, field.name) for other in others))
            object.__setattr__(changed, field.name, value)  # a frozen one refuses setattr
        return changed
    return change(nest, *others)


def tree_path(leaf: object, nest: Any) -> str | None:
    """Return where an object stands in a nest, as in ``['image'][2]``, or None if the nest does not hold it."""
    for step, part in _parts(nest):
        if part is leaf:
            return step
        place = tree_path(leaf, part)
        if place is not None:
            return step + place
    return None


def _parts(nest: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(nest, Mapping):
        yield from ((f"[{key!r:.80}]", value) for key, value in nest.items())
    elif isinstance(nest, (list, tuple)):
        names = getattr(nest, "_fields", None)
        yield from ((f".{names[at]}" if names else f"[{at}]", part) for at, part in enumerate(nest))
    elif dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in dataclasses.fields(nest) if hasattr(nest, field.name)]
        yield from ((f".{name}", getattr(nest, name)) for name in names)


def _like_mapping(nest: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if type(nest) is dict:
        return made
    if isinstance(nest, (dict, UserDict)) or (isinstance(nest, MutableMapping) and hasattr(nest, "__copy__")):
        changed = copy.copy(nest)  # keeps a default factory, an order and attributes
        for key, value in made.items():
            changed[key] = value
        return changed
    return made  # one that cannot be written to, such as a sealed file, or not be copied: what it maps, in a dict


def _like_sequence(nest: Any, made: list[Any]) -> Any:
    if isinstance(nest, tuple):
        return nest._make(made) if hasattr(nest, "_make") else type(nest)(made)
    if type(nest) is list:
        return made
    changed = copy.copy(nest)
    changed[:] = made
    return changed


def _require(alike: bool, nest: Any, other: Any) -> None:
    if not alike:
        raise ValueError(
            f"out= must be built like what it receives: {type(nest).__name__} there, {type(other).__name__} here"
        )
