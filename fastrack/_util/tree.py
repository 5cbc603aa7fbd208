"""Pytrees of dicts, lists, tuples, named tuples and dataclasses, nested in one another, with tensors at the leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple


class Tree:
    """The structure of a pytree and its leaves in order. `rebuild` makes a tree of this structure from other leaves.

    The original containers are referenced, and never changed.
    """

    __slots__ = ("_keys", "_node", "leaves")

    def __init__(self, tree: Any) -> None:
        self._keys: list[Any] | None = None
        self._node: _Node | None = None
        cls: Any = type(tree)
        if cls is dict:  # fast path: most batches are a dict of leaves, whose structure is its keys
            self._keys, self.leaves = list(tree), list(tree.values())
            for leaf in self.leaves:
                cls = type(leaf)
                if _kind(cls) is not _Kind.LEAF:
                    break
            else:
                return
        elif _kind(cls) is _Kind.LEAF:
            self.leaves = [tree]
            return
        self._keys, self.leaves = None, []
        self._node = _take_apart(tree, self.leaves)

    @property
    def _root(self) -> _Node | None:
        return self._node if self._keys is None else _take_apart(dict.fromkeys(self._keys), [])

    def leaves_of(self, other: Any) -> list[Any]:
        """Return the leaves of another tree, in the order of this one. Raise `ValueError` if its structure differs."""
        root = self._root
        if root is None:
            return [other]
        leaves: list[Any] = []
        _match(root, other, leaves)
        return leaves

    def rebuild(self, leaves: Iterable[Any]) -> Any:
        """Return a tree of this structure with other leaves, in order."""
        if self._keys is not None:
            return dict(zip(self._keys, leaves, strict=True))
        if self._node is None:
            return next(iter(leaves))
        return _put_together(self._node, iter(leaves))

    def path(self, index: int) -> str:
        """Return the path of leaf number `index`, such as ``['image'][2]``. The path of a single leaf is empty."""
        return _path(self._root, index)[0]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of `tree` with `function(leaf)` in place of each leaf. `tree` is not changed."""
    apart = Tree(tree)
    return apart.rebuild(map(function, apart.leaves))


class _Kind(Enum):
    LEAF = auto()
    MAPPING = auto()
    SEQUENCE = auto()
    DATACLASS = auto()


class _Node(NamedTuple):
    kind: _Kind
    tree: Any
    keys: Sequence[Any]  # keys of a mapping, fields of a dataclass, or numbers
    parts: list[_Node | None]  # None stands for a leaf


@lru_cache(maxsize=256)
def _kind(cls: Any) -> _Kind:
    if issubclass(cls, Mapping):
        return _Kind.MAPPING
    if issubclass(cls, (list, tuple)):
        return _Kind.SEQUENCE
    return _Kind.DATACLASS if dataclasses.is_dataclass(cls) else _Kind.LEAF


def _take_apart(tree: Any, leaves: list[Any]) -> _Node | None:
    cls: Any = type(tree)
    kind = _kind(cls)
    if kind is _Kind.LEAF:
        leaves.append(tree)
        return None
    keys: Sequence[Any]
    if kind is _Kind.MAPPING:
        keys, values = list(tree.keys()), list(tree.values())
    elif kind is _Kind.SEQUENCE:
        keys, values = range(len(tree)), tree
    else:
        # Without fields that were declared and never set.
        keys = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        values = [getattr(tree, name) for name in keys]
    return _Node(kind, tree, keys, [_take_apart(value, leaves) for value in values])


def _match(node: _Node | None, other: Any, leaves: list[Any]) -> None:
    if node is None:
        leaves.append(other)
        return
    kind, tree, keys, parts = node
    if kind is _Kind.MAPPING:
        _require(isinstance(other, Mapping) and other.keys() == tree.keys(), tree, other)
        values = [other[key] for key in keys]
    elif kind is _Kind.SEQUENCE:
        _require(isinstance(other, (list, tuple)) and len(other) == len(parts), tree, other)
        values = other
    else:
        _require(type(other) is type(tree), tree, other)
        values = [getattr(other, name) for name in keys]
    for part, value in zip(parts, values, strict=True):
        _match(part, value, leaves)


def _put_together(node: _Node | None, leaves: Iterator[Any]) -> Any:
    if node is None:
        return next(leaves)
    kind, tree, keys, parts = node
    values = [next(leaves) if part is None else _put_together(part, leaves) for part in parts]
    if kind is _Kind.MAPPING:
        return _like_mapping(tree, dict(zip(keys, values, strict=True)))
    if kind is _Kind.SEQUENCE:
        return _like_sequence(tree, values)
    changed = copy.copy(tree)
    for name, value in zip(keys, values, strict=True):
        object.__setattr__(changed, name, value)  # a frozen one refuses setattr
    return changed


def _path(node: _Node | None, index: int) -> tuple[str, int]:
    """Return the path of a leaf, and the number of leaves still to pass, negative if the leaf is in this part."""
    if node is None:
        return "", index - 1
    names = getattr(node.tree, "_fields", None) if node.kind is _Kind.SEQUENCE else None
    for number, (key, part) in enumerate(zip(node.keys, node.parts, strict=True)):
        path, index = _path(part, index)
        if index < 0:
            if node.kind is _Kind.DATACLASS or names:
                return f".{names[number] if names else key}{path}", index
            return f"[{key!r:.80}]{path}", index
    return "", index


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
