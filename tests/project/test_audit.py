"""The page for auditors is what the sources are, and its first ring stays small."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 9_100  # lines of code of the core; a change that needs more raises it, and says for what in its message

pytestmark = [
    pytest.mark.repository,
    pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="the tests run outside a checkout"),
]


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_command_writes(audit):
    assert audit.PAGE.read_text(encoding="utf-8") == audit.make_page(), "run `python .ci/audit.py --write`"


def test_every_file_is_in_one_ring(audit):
    files = [path for paths in audit.rings().values() for path in paths]
    places = ROOT / "fastrack", ROOT / "kernels"
    assert sorted(files) == sorted(path for place in places for path in place.rglob("*.py"))


def test_the_core_is_small_and_has_nothing_of_what_is_around_it(audit):
    core = audit.rings()["core"]
    assert sum(len(audit.code_lines(path)) for path in core) <= MOST
    outside = ("attest", "grants", "providers", "tour", "kv", "_cli", "_remote", "_training", "_samples", "_sets")
    assert [path for path in core if path.relative_to(ROOT / "fastrack").parts[0] in outside] == []


def test_lines_of_code_are_those_that_run(audit, tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        '"""A\n\ndocstring."""\n\n# a comment\nx = """a\ntext"""\n\n\ndef f():\n    """Do it."""\n    return x\n'
    )
    assert audit.code_lines(path) == {6, 7, 10, 12}
