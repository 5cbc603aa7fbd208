"""Heads of a broker's log, and what a later log is to one that is known."""

import json
import shutil
from contextlib import closing
from datetime import UTC, datetime

import pytest
from helpers.cases import each
from helpers.signed import sign

from fastrack import AuthenticationError, FormatError, SignatureError
from fastrack.attest._broker.heads import PAYLOAD_TYPE, compare_heads, read_head, sign_head
from fastrack.attest._broker.ledger import Ledger, read_log
from fastrack.grants import Signer

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
OWNER = Signer.generate()
OWNERS = [OWNER.verifier]


def write(path, *events):
    with closing(Ledger(path)) as ledger:
        for event in events:
            ledger.append(event, {}, now=NOW)
    return path


@pytest.fixture
def logs(tmp_path):
    """The databases of a broker: as it was, as it went on, and a copy that went on otherwise; and a head of each."""
    old = write(tmp_path / "old.db", "started", "offered")
    new, other = (shutil.copyfile(old, tmp_path / f"{name}.db") for name in ("new", "other"))
    write(new, "started", "offered")
    write(other, "refused", "offered", "refused")
    paths = {"old": old, "new": new, "other": other}
    for name, path in list(paths.items()):
        paths[f"{name} head"] = tmp_path / f"{name}.head"
        paths[f"{name} head"].write_bytes(sign_head(read_log(path), OWNER))
    return paths


@each(
    ("known", "now", "state"),
    [
        ("old", "old", "same"),
        ("old head", "old", "same"),
        ("old head", "old head", "same"),
        ("old", "new", "newer"),
        ("old head", "new", "newer"),
        ("new", "old", "older"),
        ("new", "old head", "older"),
        ("new head", "old", "older"),
        ("new head", "old head", "older"),
        ("old head", "new head", "unknown"),  # the later head has one hash
        ("new", "other", "forked"),
        ("other", "new", "forked"),
        ("new head", "other", "forked"),
        ("other", "new head", "forked"),
    ],
)
def test_a_log_is_told_from_one_that_is_known(logs, known, now, state):
    assert compare_heads(*(read_head(logs[name], OWNERS) for name in (known, now))) == state


def test_a_log_without_entries_is_the_beginning_of_all(tmp_path, logs):
    empty = read_head(write(tmp_path / "empty.db"), OWNERS)
    assert compare_heads(empty, read_head(logs["new"], OWNERS)) == "newer"
    assert (compare_heads(empty, empty), compare_heads(read_head(logs["new"], OWNERS), empty)) == ("same", "older")
    (tmp_path / "head").write_bytes(sign_head([], OWNER))
    assert compare_heads(read_head(tmp_path / "head", OWNERS), read_head(logs["new head"], OWNERS)) == "newer"


def test_a_head_has_to_be_signed_by_the_owner(logs):
    path = logs["old head"]
    for owners in ([], [Signer.generate().verifier]):
        with pytest.raises(SignatureError, match="expected a signature by a trusted key"):
            read_head(path, owners)
    for place in range(0, path.stat().st_size, 7):
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        altered = path.with_name("altered")
        altered.write_bytes(content)
        try:
            found = read_head(altered, OWNERS)
        except (SignatureError, FormatError):
            continue
        assert found == read_head(path, OWNERS)  # such as a hint of the envelope


@each(
    "change",
    [{"number": 0.5}, {"number": -1}, {"hash": "00"}, {"hash": None}, {"time": 1}, {"version": 2}, {"more": 1}],
)
def test_a_head_of_another_form_is_refused(tmp_path, change):
    payload = {"number": 1, "hash": "00" * 32, "time": "", "version": 1} | change
    path = tmp_path / "head"
    path.write_bytes(sign(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode(), PAYLOAD_TYPE, OWNER))
    with pytest.raises(FormatError, match="is not a signed head"):
        read_head(path, OWNERS)


def test_other_files_and_altered_databases_are_refused(tmp_path, logs):
    path = tmp_path / "file"
    for content in (b"", b"x", b"x" * 70_000):
        path.write_bytes(content)
        with pytest.raises(FormatError):
            read_head(path, OWNERS)
    content = bytearray(logs["new"].read_bytes())
    content[content.index(b"offered")] ^= 1
    path.write_bytes(content)
    with pytest.raises((AuthenticationError, FormatError)):
        read_head(path, OWNERS)
