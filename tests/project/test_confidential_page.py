"""Each behaviour of confidential mode on its page has a source, and a test, or a reason why there can be none."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/dev/confidential.md"

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not PAGE.exists(), reason="the tests run without the documentation"),
]


def rows():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_there_are_enough_and_each_has_a_source():
    found = rows()
    assert [int(row[0]) for row in found] == list(range(1, len(found) + 1))
    assert len(found) >= 12
    assert [row[1] for row in found if not row[2] and "no report says" not in row[1]] == []


def test_each_names_a_test_that_there_is_or_says_why_there_is_none():
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    for row in rows():
        named = set(re.findall(r"`(test_\w+)`", row[5]))
        assert named <= known
        assert named or re.search(r"nothing|no result|nowhere|neither|all tests", row[5]), row
