"""The English of docstrings and comments."""

import language
import pytest
from helpers.cases import each

pytestmark = pytest.mark.repository


def test_no_docstring_begins_with_a_relative_clause_and_none_is_about_persons():
    assert language.offences() == []


def test_docstrings_of_functions_begin_with_a_verb():
    pytest.importorskip("ruff")
    assert language.without_verb() == []


def test_words_that_the_table_of_words_replaces_are_in_no_comment_and_no_text():
    assert language.old_words() == []


@each(
    ("text", "found"),
    [
        ('"""Import a data set."""\n', ["data set"]),
        ('kind = "data set"\n', []),
        ("x = 1  # stored in plain, as before\n", ["in plain"]),
        ("found = [x for x in plain]  # in plain words\n", []),
        ('error = "swapped or exchanged"\n', ["or exchanged"]),
        ('"""Share keys, which are exchanged once. A rank stops alone."""\n', []),
        ('error = f"{use} takes torch, which is not installed"\n', ["takes torch, which is not installed"]),
        ('"""Serve this user alone, and the edition of the weights."""\n', ["this user alone", "edition of"]),
    ],
)
def test_an_old_word_is_found(tmp_path, monkeypatch, text, found):
    (tmp_path / "x.py").write_text(text)
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "sources", lambda *_: [tmp_path / "x.py"])
    assert language.old_words() == [f"x.py:1: {word}" for word in found]


@each(
    ("text", "found"),
    [
        ('def f():\n    """What it is."""\n', ["x.py:2: What it is."]),
        ('def f():\n    """Return what it is."""\n    # Nobody calls this.\n', ["x.py:3: Nobody"]),
        ('error = "has what somebody wrote"\n', ["x.py:1: somebody"]),
        ('"""Whoever reads this."""\n', ["x.py:1: Whoever"]),
        ('def f():\n    """Return which chunk failed."""\n', []),
    ],
)
def test_an_offence_is_found(tmp_path, monkeypatch, text, found):
    (tmp_path / "x.py").write_text(text)
    monkeypatch.setattr(language, "ROOT", tmp_path)
    monkeypatch.setattr(language, "sources", lambda *_: [tmp_path / "x.py"])
    assert language.offences() == found
