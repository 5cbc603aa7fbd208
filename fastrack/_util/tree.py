"""Pytrees of dicts, lists, tuples, named tuples and dataclasses, nested in one another, with tensors at the leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Return a tree like `tree` with `function(leaf, *other leaves)` in place of each leaf; `tree` stays as it is.

    Raise `ValueError` if one of `others` has another structure than `tree`.
    """
    if isinstance(tree, Mapping):
        for other in others:
            _require(isinstance(other, Mapping) and other.keys() == tree.keys(), tree, other)
        made = {key: tree_map(function, value, *(other[key] for other in others)) for key, value in tree.items()}
        return _like_mapping(tree, made)
    if isinstance(tree, (list, tuple)):
        for other in others:
            _require(isinstance(other, (list, tuple)) and len(other) == len(tree), tree, other)
        return _like_sequence(tree, [tree_map(function, *leaves) for leaves in zip(tree, *others, strict=True)])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for other in others:
            _require(type(other) is type(tree), tree, other)
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if not hasattr(tree, field.name):
                continue  # declared, but never set
            value = tree_map(function, getattr(tree, field.name), *(getattr(other, field.name) for other in others))
            object.__setattr__(changed, field.name, value)  # a frozen one refuses setattr
        return changed
    return function(tree, *others)


def tree_path(leaf: object, tree: Any) -> str | None:
    """Return the path of a leaf in a tree, such as ``['image'][2]``, or None if the tree does not hold it."""
    for step, part in _parts(tree):
        if part is leaf:
            return step
        path = tree_path(leaf, part)
        if path is not None:
            return step + path
    return None


def _parts(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r:.80}]", value) for key, value in tree.items())
    elif isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", None)
        yield from ((f".{names[index]}" if names else f"[{index}]", part) for index, part in enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        yield from ((f".{name}", getattr(tree, name)) for name in names)


def _like_mapping(tree: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    if type(tree) is dict:
        return made
    if isinstance(tree, (dict, UserDict)) or (isinstance(tree, MutableMapping) and hasattr(tree, "__copy__")):
        changed = copy.copy(tree)  # keeps a default factory, an order and attributes
        for key, value in made.items():
            changed[key] = value
        return changed
    return made  # a dict stands for a mapping that cannot be written to or copied, such as a sealed file


def _like_sequence(tree: Any, made: list[Any]) -> Any:
    if isinstance(tree, tuple):
        return tree._make(made) if hasattr(tree, "_make") else type(tree)(made)
    if type(tree) is list:
        return made
    changed = copy.copy(tree)
    changed[:] = made
    return changed


def _require(alike: bool, tree: Any, other: Any) -> None:
    if not alike:
        raise ValueError(
            f"filling out= failed: expected {type(tree).__name__} with the structure of the source, got "
            f"{type(other).__name__} of another structure. Build out= like the source"
        )
