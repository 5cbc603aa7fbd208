"""The digest by which a plan names its training code."""

import functools
import sys
from hashlib import sha256

import pytest

from fastrack import tour
from fastrack.errors import FormatError

CODE = "def train(state, shards):\n    return state\n\n\ndef dump(state, shards):\n    return list(shards)\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of this name, and its file."""
    (tmp_path / "wards.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "wards"
    sys.modules.pop("wards", None)


def test_it_is_the_digest_of_the_name_and_the_file_with_their_lengths(module):
    parts = b"train", b"wards.py", CODE.encode()
    expected = sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).hexdigest()
    assert tour.code_digest(f"{module}:train") == expected


def test_another_function_of_the_module_is_other_code(module):
    assert tour.code_digest(f"{module}:train") != tour.code_digest(f"{module}:dump")


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("code", [functools.partial(print), "wards:absent", "absent:train", "wards", "", print])
def test_what_is_no_function_in_a_file_is_refused(code):
    with pytest.raises(FormatError, match="expected"):
        tour.code_digest(code)


def test_a_wrapped_function_has_the_digest_of_its_own_file(module, tmp_path):
    text = f"import functools, {module}\n@functools.wraps({module}.train)\ndef train(state, shards):\n    pass\n"
    (tmp_path / "evil.py").write_text(text)
    try:
        assert tour.code_digest("evil:train") != tour.code_digest(f"{module}:train")
        with pytest.raises(FormatError, match="expected a function of wards"):
            tour.code_digest(sys.modules["evil"].train)
    finally:
        sys.modules.pop("evil", None)


def test_all_of_the_outermost_package_is_code(tmp_path, monkeypatch):
    folder = tmp_path / "ward" / "deep"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder.parent / "util.py", folder / "__init__.py"):
        path.write_text("")
    (folder / "core.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        before = tour.code_digest("ward.deep.core:train")
        (folder.parent / "util.py").write_text("x = 1\n")
        assert tour.code_digest("ward.deep.core:train") != before
    finally:
        for name in ("ward", "ward.deep", "ward.deep.core"):
            sys.modules.pop(name, None)
