"""Nests keep their shape, their types and every leaf that is not asked to change."""

import dataclasses
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from types import MappingProxyType
from typing import NamedTuple

import pytest
from helpers.cases import each

from fastrack._util.tree import Tree, tree_map


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


class Named(namedtuple("Base", ["x", "y"])):  # noqa: PYI024
    """A tuple whose constructor takes something else than its fields, as that of `Pairs` than its items."""

    __slots__ = ()

    def __new__(cls, both):
        return super().__new__(cls, both, both)


class Pairs(list):
    def __init__(self, left, right):
        super().__init__([left, right])


def double(leaf):
    return 2 * leaf if isinstance(leaf, int) else leaf


@each(
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
        ([Frozen], [Frozen]),  # a type is a leaf
        (Tagged([1]), [2]),
        (Pairs(1, 2), [2, 4]),
        (Named(1), (2, 2)),
        (OrderedDict([("z", 1), ("a", 2)]), OrderedDict([("z", 2), ("a", 4)])),
        (Counter(a=1, b=5), Counter(a=2, b=10)),  # is set and not added to
        (UserDict(a=1), {"a": 2}),
    ],
)
def test_leaves_change_and_the_nest_stays(nest, expected):
    before = repr(nest)
    changed = tree_map(double, nest)
    assert changed == expected
    assert type(changed) is type(nest)
    assert repr(nest) == before


def test_a_frozen_dataclass_keeps_its_type_and_its_other_fields():
    before = Frozen(1, "one")
    after = tree_map(double, before)
    assert (after.image, after.label, after.size) == (2, "one", 14)
    assert before.image == 1


def test_a_default_dict_keeps_its_factory():
    nest = defaultdict(list, {"a": 1})
    assert tree_map(double, nest)["missing"] == []


def test_a_dict_subclass_keeps_its_attributes():
    nest = Records(a=1)
    nest.note = "mine"
    changed = tree_map(double, nest)
    assert (type(changed), changed.note, changed["a"]) == (Records, "mine", 2)
    assert nest["a"] == 1


def test_two_nests_are_walked_together():
    assert Tree({"a": [1, 2], "b": 3}).leaves_of({"b": 30, "a": (10, 20)}) == [10, 20, 30]


@each(("nest", "other"), [({"a": 1}, {"b": 1}), ([1, 2], [1]), ([1], {"a": 1}), (Frozen(1, "x"), [1]), ({"a": 1}, [1])])
def test_nests_of_different_builds_are_refused(nest, other):
    with pytest.raises(ValueError, match="out="):
        Tree(nest).leaves_of(other)


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


@pytest.mark.parametrize("nest", [MappingProxyType({"a": 1}), Caseless({"A": 1})], ids=["read-only", "caseless"])
def test_a_mapping_that_cannot_be_copied_becomes_a_dict_and_stays_as_it_was(nest):
    assert tree_map(double, nest) == {"a": 2}
    assert nest["a"] == 1


def test_a_field_that_was_never_set_stays_so():
    @dataclasses.dataclass
    class Late:
        now: int
        later: int = dataclasses.field(init=False)

    changed = tree_map(double, Late(1))
    assert changed.now == 2
    assert not hasattr(changed, "later")


@each(
    ("nest", "place"),
    [
        (lambda leaf: {"image": [1, {2: leaf}]}, "['image'][1][2]"),
        (lambda leaf: (0, Pair(None, leaf)), "[1].right"),
        (lambda leaf: [Frozen(leaf, "a")], "[0].image"),
        (lambda leaf: UserDict(a={"b": (leaf, leaf)}), "['a']['b'][0]"),
        (lambda leaf: leaf, ""),
    ],
)
def test_a_leaf_is_found_where_it_stands(nest, place):
    leaf = object()
    tree = Tree(nest(leaf))
    assert tree.path(tree.leaves.index(leaf)) == place


def test_a_long_key_is_cut_short():
    assert len(Tree({"x" * 1000: object()}).path(0)) == 82
