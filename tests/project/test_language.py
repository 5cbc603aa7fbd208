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
