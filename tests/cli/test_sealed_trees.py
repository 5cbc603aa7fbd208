"""``fastrack seal`` of any tree of files: what was not named by ``--plain`` is sealed, and what was is told."""

import fnmatch
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from helpers.commands import invoke
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack import Key
from fastrack._cli.console import clean

KEY = Key.from_bytes(bytes(range(32)))
SUFFIXES = ["", ".json", ".txt", ".TXT", ".md", ".yaml", ".py", ".model", ".csv", ".bin", ".npy", ".pt"]
ALPHABET = st.characters(exclude_categories=["C"], exclude_characters="/\\.")
NAMES = st.builds(
    "{}{}".format,
    st.text(ALPHABET, min_size=1, max_size=12)
    | st.sampled_from(["config", "tokenizer", "README", "LICENSE", "patients", "-q", "[a]", "*"]),
    st.sampled_from(SUFFIXES),
)
PATHS = st.builds("{}{}".format, st.sampled_from(["", "one/", "one/two/", "config/"]), NAMES)
TREES = st.dictionaries(PATHS, st.sampled_from([0, 1, 15, 16_383, 40_000]), min_size=1, max_size=6)
MODELS = st.sampled_from(["", "one/", "one/two/"]).map(
    lambda folder: {f"{folder}config.json": 15, f"{folder}pytorch_model.bin": 40_000}
)
READABLE = re.compile(r"(.*\.(json|txt|md|yaml|py)|.*tokenizer.*\.model|readme|license)", re.IGNORECASE | re.DOTALL)
PATTERNS = st.lists(st.sampled_from(["*.txt", "*.json", "one/*", "README", "config.json", "*a*"]), max_size=2)


def run(*line):
    return invoke([*map(str, line), "--key", "owner.key"])


def needle(path):
    return b"secret of " + path.encode() + b" end"


def make(folder, tree, links):
    """Write files with a needle each, and links to some; return contents by path, and the files of links."""
    found, linked = {}, {}
    for path, padding in tree.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        found[path] = bytes(padding) + needle(path) + bytes(padding)
        place.write_bytes(found[path])
    for number, name in enumerate(links):
        target = list(tree)[number % len(tree)]
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(place):
            place.symlink_to(os.path.relpath(folder / target, place.parent))
            found[name], linked[name] = found[target], target
    return found, linked


def readable_in(before, linked):
    """Return the files of a model that stay plain: by their own names, and by that of the file that a link leads to."""
    folders = {path.rpartition("/")[0] for path in before if path.rpartition("/")[2] == "pytorch_model.bin"}
    models = [f"{folder}/".lstrip("/") for folder in folders if f"{folder}/config.json".lstrip("/") in before]

    def is_plain(path):
        return any(map(path.startswith, models)) and READABLE.fullmatch(path.rpartition("/")[2]) is not None

    return {path for path in before if is_plain(path) and is_plain(linked.get(path, path))}


def named_by(pattern, before, linked):
    """Return the files that a pattern names: one by its name, or those that match, links with their targets."""
    matched = set(fnmatch.filter(before, pattern))
    return {pattern} & before.keys() or {path for path in matched if linked.get(path, path) in matched}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def has_file_as_folder(paths):
    return any(f"{path}/" == other[: len(path) + 1] for path in paths for other in paths)


@pytest.fixture(autouse=True)
def _short_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    KEY.save("owner.key")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(TREES, st.just({}) | MODELS, st.lists(PATHS, max_size=2), PATTERNS, st.booleans())
def test_all_that_was_not_named_is_sealed_and_the_rest_is_told(tree, model, links, patterns, as_json):
    tree |= model
    if has_file_as_folder([*tree, *links]):
        return
    with tempfile.TemporaryDirectory(dir=".") as name:
        root = Path(name)
        before, linked = make(root / "plain", tree, links)
        named = {path for each in patterns for path in named_by(each, before, linked)}
        named = sorted(named | readable_in(before, linked))
        given = [option for each in patterns for option in ("--plain", each)]
        result = run("seal", root / "plain", root / "out", *given, "--json" if as_json else "-q")
        is_known = all(named_by(each, before, linked) for each in patterns)
        if not is_known or len(named) == len(before):
            assert result.exit_code != 0
            assert not (root / "out").exists()
            return
        assert result.exit_code == 0, result.output
        after = contents(root / "out")
        for path, content in before.items():
            assert (after[path] == content) == (path in named), path
        needles = [needle(path) for path in tree]
        readable = [path for path, content in after.items() if any(each in content for each in needles)]
        assert sorted(readable) == named
        if as_json:
            assert json.loads(result.stdout)["not_protected"] == named
        else:
            said = [line for line in result.stdout.splitlines() if not line.startswith("found by libraries only")]
            assert said == ([f"not protected, anyone can read {', '.join(map(clean, named))}"] if named else [])
        assert run("unseal", root / "out", root / "back", "-q").exit_code == 0
        assert contents(root / "back") == before


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(TREES)
def test_file_by_file_all_is_sealed(tree):
    with tempfile.TemporaryDirectory(dir=".") as name:
        root = Path(name)
        if has_file_as_folder(tree) or any(path.endswith(".npy") for path in tree):  # that would be parsed
            return
        before, _ = make(root / "plain", tree, [])
        assert run("seal", "-r", root / "plain", root / "out", "-q").exit_code == 0
        after = contents(root / "out")
        assert not [path for path in before for content in after.values() if needle(path) in content]
        assert run("unseal", "-r", root / "out", root / "back", "-q").exit_code == 0
        assert contents(root / "back") == before


@pytest.mark.parametrize("command", ["seal", "seal -r"])
@pytest.mark.parametrize("target", ["../outside.txt", "/etc/hostname", "sub/../../outside.txt", "chain", "../nowhere"])
def test_a_link_that_leads_outside_is_refused_by_name_before_anything_is_written(tmp_path, command, target):
    make(tmp_path / "plain", {"a.txt": 1, "sub/b.txt": 1}, [])
    (tmp_path / "outside.txt").write_text("secret")
    (tmp_path / "plain" / "chain").symlink_to("../outside.txt")
    if target != "chain":
        (tmp_path / "plain" / "chain").unlink()
    (tmp_path / "plain" / "bad.json").symlink_to(target)
    result = run(*command.split(), "plain", "out", "-q")
    assert result.exit_code == 6
    assert "bad.json" in result.stderr
    assert not Path("out").exists()


def test_what_was_left_out_is_told_however_quiet():
    make(Path("plain"), {"a.txt": 1, ".env": 1, ".git/config": 1, "old.grants": 1}, [])
    assert run("seal", "plain", "out", "-q").stdout == "left out: .env, .git/config, old.grants\n"
    assert sorted(contents(Path("out"))) == ["a.txt", "fastrack.folder"]
    shutil.rmtree("out")
    assert json.loads(run("seal", "plain", "out", "--json").stdout)["left_out"] == [".env", ".git/config", "old.grants"]


def test_tensors_that_stay_plain_are_told_however_quiet():
    import numpy as np

    np.savez("a.npz", x=np.ones(2), y=np.ones(3))
    said = "not protected, anyone can read 'y'\n"
    assert run("seal", "a.npz", "a.safetensors", "--plain", "y", "-q").stdout == f"a.safetensors: {said}"
    Path("data").mkdir()
    shutil.copy("a.npz", "data/a.npz")
    assert run("seal", "-r", "data", "out", "--plain", "y", "-q").stdout == f"out/a.npz.safetensors: {said}"
