"""Nests keep their shape, their types and every leaf that is not asked to change."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import MutableMapping
from types import MappingProxyType
from typing import NamedTuple

import pytest

from fastrack._util.tree import tree_map, tree_path


class Pair(NamedTuple):
    left: object
    right: object


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: int
    label: str
    size: int = dataclasses.field(init=False, default=7)


class Tagged(list):
    tag = "kept"


class Records(dict):
    note = "none"


def double(leaf):
    return 2 * leaf if isinstance(leaf, int) else leaf


@pytest.mark.parametrize(
    ("nest", "expected"),
    [
        (3, 6),
        ("text", "text"),
        (None, None),
        ([1, [2, (3,)]], [2, [4, (6,)]]),
        ({"a": 1, "b": {"c": 2}}, {"a": 2, "b": {"c": 4}}),
        (Pair(1, [2]), Pair(2, [4])),
        ((), ()),
        ({}, {}),
    ],
)
def test_leaves_change_and_the_nest_stays(nest, expected):
    changed = tree_map(double, nest)
    assert changed == expected
    assert type(changed) is type(nest)


def test_a_frozen_dataclass_keeps_its_type_and_its_other_fields():
    before = Frozen(1, "one")
    after = tree_map(double, before)
    assert (after.image, after.label, after.size) == (2, "one", 14)
    assert before.image == 1


def test_a_dataclass_type_is_a_leaf():
    assert tree_map(double, [Frozen]) == [Frozen]


def test_an_ordered_dict_keeps_its_order():
    nest = collections.OrderedDict([("z", 1), ("a", 2)])
    assert list(tree_map(double, nest).items()) == [("z", 2), ("a", 4)]


def test_a_default_dict_keeps_its_factory():
    nest = collections.defaultdict(list, {"a": 1})
    assert tree_map(double, nest)["missing"] == []


def test_a_dict_subclass_keeps_its_attributes():
    nest = Records(a=1)
    nest.note = "mine"
    changed = tree_map(double, nest)
    assert (type(changed), changed.note, changed["a"]) == (Records, "mine", 2)
    assert nest["a"] == 1


def test_a_list_subclass_keeps_its_type():
    changed = tree_map(double, Tagged([1]))
    assert type(changed) is Tagged
    assert changed == [2]


def test_a_read_only_mapping_becomes_a_dict():
    assert tree_map(double, MappingProxyType({"a": 1})) == {"a": 2}


def test_two_nests_are_walked_together():
    assert tree_map(lambda a, b: a + b, {"a": [1, 2]}, {"a": (10, 20)}) == {"a": [11, 22]}


@pytest.mark.parametrize(
    ("nest", "other"),
    [({"a": 1}, {"b": 1}), ([1, 2], [1]), ([1], {"a": 1}), (Frozen(1, "x"), [1]), ({"a": 1}, [1])],
)
def test_nests_of_different_builds_are_refused(nest, other):
    with pytest.raises(ValueError, match="out="):
        tree_map(lambda a, b: a, nest, other)


class Caseless(MutableMapping):
    """A mapping of its own kind, that `copy` would copy only in part."""

    def __init__(self, items):
        self.items_ = {key.lower(): value for key, value in items.items()}

    def __getitem__(self, key):
        return self.items_[key.lower()]

    def __setitem__(self, key, value):
        self.items_[key.lower()] = value

    def __delitem__(self, key):
        del self.items_[key.lower()]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def test_a_mapping_that_cannot_be_copied_becomes_a_dict_and_stays_as_it_was():
    nest = Caseless({"A": 1})
    assert tree_map(double, nest) == {"a": 2}
    assert nest["a"] == 1


def test_a_counter_is_set_and_not_added_to():
    assert tree_map(double, collections.Counter(a=1, b=5)) == collections.Counter(a=2, b=10)


def test_a_user_dict_keeps_its_type():
    nest = collections.UserDict(a=1)
    changed = tree_map(double, nest)
    assert type(changed) is collections.UserDict
    assert (changed["a"], nest["a"]) == (2, 1)


def test_a_named_tuple_with_a_constructor_of_its_own_is_made_all_the_same():
    class Named(collections.namedtuple("Base", ["x", "y"])):  # noqa: PYI024
        __slots__ = ()

        def __new__(cls, both):
            return super().__new__(cls, both, both)

    assert tree_map(double, Named(1)) == (2, 2)


def test_a_list_with_a_constructor_of_its_own_is_made_all_the_same():
    class Pairs(list):
        def __init__(self, left, right):
            super().__init__([left, right])

    changed = tree_map(double, Pairs(1, 2))
    assert type(changed) is Pairs
    assert changed == [2, 4]


def test_a_field_that_was_never_set_stays_so():
    @dataclasses.dataclass
    class Late:
        now: int
        later: int = dataclasses.field(init=False)

    changed = tree_map(double, Late(1))
    assert changed.now == 2
    assert not hasattr(changed, "later")


@pytest.mark.parametrize(
    ("nest", "place"),
    [
        (lambda leaf: {"image": [1, {2: leaf}]}, "['image'][1][2]"),
        (lambda leaf: (0, Pair(None, leaf)), "[1].right"),
        (lambda leaf: [Frozen(leaf, "a")], "[0].image"),
        (lambda leaf: collections.UserDict(a={"b": (leaf, leaf)}), "['a']['b'][0]"),
        (lambda leaf: leaf, None),
        (lambda _: {"a": [1]}, None),
    ],
)
def test_a_leaf_is_found_where_it_stands(nest, place):
    leaf = object()
    assert tree_path(leaf, nest(leaf)) == place


def test_a_long_key_is_cut_short():
    leaf = object()
    assert len(tree_path(leaf, {"x" * 1000: leaf})) == 82
