"""Nests: dicts, lists, tuples, named tuples and dataclasses, in one another, with tensors at the leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

__all__ = ["map_leaves"]


def map_leaves(change: Callable[..., Any], nest: Any, *others: Any) -> Any:
    """The same nest with `change(leaf, *other leaves)` in place of each leaf. No part of `nest` is altered.

    Raises
    ------
    ValueError
        If one of `others` is not built like `nest`.
    """
    if isinstance(nest, Mapping):
        for other in others:
            _require(isinstance(other, Mapping) and other.keys() == nest.keys(), nest, other)
        made = {key: map_leaves(change, value, *(other[key] for other in others)) for key, value in nest.items()}
        return _like_mapping(nest, made)
    if isinstance(nest, (list, tuple)):
        for other in others:
            _require(isinstance(other, (list, tuple)) and len(other) == len(nest), nest, other)
        return _like_sequence(nest, [map_leaves(change, *leaves) for leaves in zip(nest, *others, strict=True)])
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        for other in others:
            _require(type(other) is type(nest), nest, other)
        changed = copy.copy(nest)
        for field in dataclasses.fields(nest):
            value = map_leaves(change, getattr(nest, field.name), *(getattr(other, field.name) for other in others))
            object.__setattr__(changed, field.name, value)  # a frozen one refuses setattr
        return changed
    return change(nest, *others)


def _like_mapping(nest: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if type(nest) is dict:
        return made
    if isinstance(nest, MutableMapping):
        changed = copy.copy(nest)  # keeps a default factory, an order and attributes
        changed.update(made)
        return changed
    return made  # a read-only mapping, such as a sealed file: its tensors in a dict


def _like_sequence(nest: Any, made: list[Any]) -> Any:
    if isinstance(nest, tuple):
        return type(nest)(*made) if hasattr(nest, "_fields") else _rebuild(tuple, type(nest), made)
    return _rebuild(list, type(nest), made)


def _rebuild(base: type, kind: type, made: list[Any]) -> Any:
    return base(made) if kind is base else kind(made)


def _require(alike: bool, nest: Any, other: Any) -> None:
    if not alike:
        raise ValueError(
            f"out= must be built like what it receives: {type(nest).__name__} there, {type(other).__name__} here"
        )
