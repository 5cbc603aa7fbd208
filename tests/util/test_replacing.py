"""Functions of other libraries are replaced wherever they are held, and put back."""

import sys
import types

import pytest
from helpers.foreign import take_back

from fastrack._patches.attributes import replace, replace_everywhere


@pytest.fixture
def library(monkeypatch):
    """Return a module with a function, and a second module that has copied it under another name."""
    source, copier = types.ModuleType("some_library"), types.ModuleType("some_copier")
    source.work = copier.labour = lambda: "old"
    for module in (source, copier):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield source, copier
    take_back()


def new():
    return "new"


def test_a_function_is_replaced_under_every_name_and_put_back(library):
    source, copier = library
    assert replace_everywhere((source.work, new)) == 2
    assert (source.work(), copier.labour()) == ("new", "new")
    take_back()
    assert (source.work(), copier.labour()) == ("old", "old")


def test_modules_of_fastrack_keep_what_they_hold(library, monkeypatch):
    source, _ = library
    own = types.ModuleType("fastrack.some_part")
    own.work = source.work
    monkeypatch.setitem(sys.modules, own.__name__, own)
    replace_everywhere((source.work, new))
    assert own.work() == "old"


def test_lazy_modules_and_what_is_no_module_are_left_alone(library, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "some_lazy", Lazy("some_lazy"))
    monkeypatch.setitem(sys.modules, "some_thing", None)
    assert replace_everywhere((library[0].work, new)) == 2


def test_a_class_that_inherits_gets_its_own_and_loses_it_again():
    class Base:
        def work(self):
            return "old"

    class Child(Base):
        pass

    assert replace(Child, "work", lambda self: "new") is Base.work
    assert (Child().work(), Base().work()) == ("new", "old")
    take_back()
    assert Child().work() == "old"
    assert "work" not in vars(Child)


def test_an_attribute_that_is_not_there_is_refused_and_nothing_changes(library):
    with pytest.raises(AttributeError):
        replace(library[0], "moved", new)
    assert not hasattr(library[0], "moved")
