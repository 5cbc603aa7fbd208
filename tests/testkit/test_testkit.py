"""The kit is what its generator makes, and covers the rules that it names."""

import doctest
import hashlib
import re
import shutil
import tarfile
from collections import Counter, defaultdict
from pathlib import Path

import fastrack_testkit
import pytest
from fastrack_testkit import Case, cases, parse
from generator.kinds import files, kinds
from generator.parts.case import CLASSES, Cases

HERE = Path(__file__).parent
KINDS = {"sealed", "widened", "key-file", "secret-file", "public-file", "wrapped", "grants", "manifest", "folder"}
KINDS |= {"data-set", "challenge", "offer", "answer", "chain", "message", "confirmation", "block"}


@pytest.fixture(scope="module")
def kit() -> list[Case]:
    return list(cases())


def raw(case: Case) -> bytes:
    """Return the file of a case as it is in the archive of its kind."""
    with tarfile.open(HERE / "cases" / f"{case.kind}.tar") as archive:
        file = archive.extractfile(f"{case.kind}/{case.name}")
        assert file is not None
        return file.read()


@pytest.mark.slow
def test_the_cases_and_the_rules_are_what_the_generator_makes() -> None:
    made = files()
    there = {str(path.relative_to(HERE)) for path in (HERE / "cases").rglob("*") if path.is_file()} | {"rules.md"}
    assert there == made.keys(), "run `python -m generator` in tests/testkit"
    differing = [name for name, data in made.items() if (HERE / name).read_bytes() != data]
    assert differing == [], "run `python -m generator` in tests/testkit"


def test_there_are_all_kinds_and_at_least_450_cases(kit: list[Case]) -> None:
    assert {case.kind for case in kit} == KINDS
    assert len(kit) >= 450


def test_each_kind_has_cases_that_open_and_cases_that_fail(kit: list[Case]) -> None:
    outcomes = defaultdict(set)
    for case in kit:
        outcomes[case.kind].add(case.expect)
    assert all("success" in outcomes[kind] and len(outcomes[kind]) > 1 for kind in KINDS)


def test_each_class_of_failures_has_cases(kit: list[Case]) -> None:
    assert {case.expect for case in kit} == {"success", *CLASSES}


def test_each_case_has_its_lines(kit: list[Case]) -> None:
    for case in kit:
        assert [line for line, _ in case.fields[:4]] == ["kit", "kind", "rule", "expect"], case
        assert case.get("sha256") == hashlib.sha256(case.payload).hexdigest()
        assert (case.expect == "success") == (case.result is not None)
        assert all(text.isascii() for line, text in case.fields if line != "comment"), case
        assert re.fullmatch(r"[a-z0-9.-]+", case.name)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_archive_has_files_and_nothing_of_the_machine_that_made_it(kind: str) -> None:
    with tarfile.open(HERE / "cases" / f"{kind}.tar", "r:") as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert all(member.isfile() and member.name.startswith(f"{kind}/") for member in members)
    assert {(member.mtime, member.mode, member.uid, member.gid, member.uname) for member in members} == {
        (0, 0o644, 0, 0, "")
    }


def test_a_case_that_was_altered_is_refused_and_so_is_one_that_is_gone(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(fastrack_testkit, "__file__", str(tmp_path / "fastrack_testkit" / "__init__.py"))
    shutil.copytree(HERE / "cases", tmp_path / "cases")
    archive = tmp_path / "cases" / "block.tar"
    whole = archive.read_bytes()
    archive.write_bytes(whole.replace(b"kind: block", b"kind: Block", 1))
    with pytest.raises(ValueError, match="expected a case of its digest in SHA256SUMS"):
        list(cases("block"))
    first = 512 + -(-int(whole[124:135], 8) // 512) * 512
    archive.write_bytes(whole[first:])
    with pytest.raises(ValueError, match=r"block/.*: expected a case in block.tar, got none"):
        list(cases("block"))


def test_the_files_of_a_case_are_its_payload(kit: list[Case]) -> None:
    for case in kit:
        if case.all("file"):
            assert b"".join(case.files().values()) == case.payload
            assert not any(name.startswith("/") or ".." in name.split("/") for name in case.files())


def test_each_rule_is_listed_and_has_a_case(kit: list[Case]) -> None:
    listed = re.findall(r"^\| `([a-z0-9.-]+)` \|", (HERE / "rules.md").read_text(), re.MULTILINE)
    assert Counter(listed) == Counter(set(listed))
    assert {case.rule for case in kit} == set(listed)


@pytest.mark.slow
def test_each_rule_is_of_a_section_of_the_page() -> None:
    page = (HERE.parent.parent / "docs" / "format.md").read_text()
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    sections = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert {section for kind in kinds() for section, _ in kind.rules.values()} <= sections


def test_few_cases_derive_from_a_passphrase(kit: list[Case]) -> None:
    # The derivation takes a second and longer where it is not in native code.
    deriving = [case for case in kit if case.get("passphrase") and case.expect in {"success", "grant"}]
    assert len(deriving) <= 3


def test_the_kit_is_small(kit: list[Case]) -> None:
    assert sum(len(case.payload) for case in kit) < 8 << 20


def test_an_altered_case_is_no_case(kit: list[Case]) -> None:
    data = raw(kit[0])
    with pytest.raises(ValueError, match="expected a payload of its hash"):
        parse(data + b"\0", "x")


def test_a_case_without_its_hash_or_without_the_end_of_its_head_is_no_case(kit: list[Case]) -> None:
    data = raw(kit[0])
    with pytest.raises(ValueError, match="expected a payload of its hash"):
        parse(re.sub(rb"sha256: .*\n", b"", data, count=1), "x")
    with pytest.raises(ValueError, match="x: expected an empty line after the head, got none"):
        parse(b"kit: 1\nkind: sealed\nrule: r\nexpect: format\nsha256: " + hashlib.sha256().hexdigest().encode(), "x")


def test_a_kind_that_the_kit_does_not_have_is_refused_by_the_call() -> None:
    for kind in ("seal", "", "*", ".."):
        with pytest.raises(ValueError, match=r"expected one of answer, block, .* got "):
            cases(kind)


def test_a_case_of_a_later_kit_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a case of kit 1, got 2"):
        parse(b"kit: 2\nkind: sealed\n\n", "x")


def test_a_rule_that_is_not_listed_has_no_case() -> None:
    made = Cases("sealed", {"tag": ("the-message", "")})
    with pytest.raises(ValueError, match="no rule"):
        made.fails("x", "other", "format", b"")


def test_the_examples_of_the_package_run() -> None:
    assert doctest.testmod(fastrack_testkit).failed == 0
