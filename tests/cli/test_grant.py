"""``keygen --identity``, ``keygen --signer``, ``grant``, ``seal --to`` and ``rekey``, as an owner uses them."""

import os
import stat
import subprocess
import sys
from datetime import timedelta

import numpy as np
import pytest
from helpers.tampering import flip_byte

import fastrack
from fastrack._keys.leases import LeasePage, Moment
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier


@pytest.fixture(autouse=True)
def _pairs(cli, folder, monkeypatch):
    cli("keygen owner.signer --signer")
    for line in ("alice --identity", "bob --identity --algorithm P-384", "carol --identity --name Carol"):
        cli(f"keygen {line}")
    for line in ("owner.key", "other.key --bits 128"):
        cli(f"keygen {line}")
    np.save(folder / "data.npy", np.arange(1000))
    monkeypatch.setenv("FASTRACK_OWNER", "owner.signer.pub")


@pytest.fixture
def become(monkeypatch):
    return lambda name: monkeypatch.setenv("FASTRACK_IDENTITY", name)


def test_a_pair_is_made(cli, folder):
    assert stat.S_IMODE((folder / "alice").stat().st_mode) == 0o600
    assert Identity.load("alice").recipient == Recipient.load("alice.pub")
    made = cli.json("keygen erin --signer --algorithm ML-DSA-65")
    assert made == {"path": "erin", "public": "erin.pub", "id": Verifier.load("erin.pub").id, "algorithm": "ML-DSA-65"}
    assert "expected one of --identity and --signer" in cli.error("keygen x --identity --signer", status=2)
    assert "expected an algorithm of" in cli.error("keygen x --identity --algorithm Ed25519", status=2)
    assert "left as it was" in cli.error("keygen alice --identity")
    assert not (folder / "x").exists()


def test_a_sealer_that_keeps_no_key(cli, become, folder):
    sealed = cli.json("seal data.npy data.safetensors --to alice.pub --to bob.pub --sign owner.signer")
    assert sealed["grants"] == "data.safetensors.grants"
    for name, opens in (("alice", True), ("bob", True), ("carol", False)):
        become(name)
        line = "verify data.safetensors --key data.safetensors.grants"
        if opens:
            cli(line)
        else:
            assert "was not granted to" in cli.error(line)
    become("alice")
    cli("unseal data.safetensors back.npy --key data.safetensors.grants")
    assert np.array_equal(np.load(folder / "back.npy"), np.arange(1000))
    assert sorted(path.name for path in folder.glob("*.key")) == ["other.key", "owner.key"]  # as before


@pytest.mark.parametrize(
    ("line", "status", "told"),
    [
        ("--to alice.pub", 2, "keygen owner.signer --signer"),
        ("--to owner.signer.pub --sign owner.signer", 1, "expected a public key of MLKEM768_X25519 or P-384"),
        ("--to owner.signer.pub --sign owner.signer", 1, "`fastrack keygen --identity` makes"),
        ("--to alice --sign owner.signer", 1, "it holds a secret key"),
        ("--to alice.pub --sign alice", 1, "expected a secret key of Ed25519 or ML-DSA-65"),
        ("--to alice.pub --sign owner.signer.pub", 1, "Name the secret file, without .pub"),
        ("--to alice.pub --sign owner.signer --key owner.key", 2, "got both"),
        ("--to none.pub --sign owner.signer", 1, "No such file"),
    ],
)
@pytest.mark.parametrize("mode", [0o644, 0o600], ids=oct)
def test_what_cannot_be_granted_is_not_sealed(cli, folder, line, status, told, mode):
    (folder / "owner.signer.pub").chmod(mode)  # as a umask of 022 or 077 leaves it
    assert told in cli.error(f"seal data.npy data.safetensors {line}", status=status)
    assert not (folder / "data.safetensors").exists()


def test_a_file_whose_grants_cannot_be_written_is_removed(cli, folder, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Grants, "save", refuse)
    assert "No space left" in cli.error("seal data.npy data.safetensors --to alice.pub --sign owner.signer")
    assert not (folder / "data.safetensors").exists()


def test_a_key_is_granted_changed_and_shown(cli, become, folder):
    cli("seal data.npy data.safetensors --key owner.key")
    before = (folder / "data.safetensors").read_bytes()
    cli("grant owner.key --to alice.pub --to bob.pub --sign owner.signer --file data.safetensors --expires 30d")
    assert "left as it was" in cli.error("grant owner.key --to alice.pub --sign owner.signer")
    cli("grant owner.key.grants --drop bob --to carol.pub --key owner.key --sign owner.signer")
    shown = cli.json("grant owner.key.grants --owner owner.signer.pub")
    assert [entry["name"] for entry in shown["recipients"]] == ["alice", "Carol"]
    assert shown["verified"] is True
    assert shown["files"] == [cli.json("inspect data.safetensors")["file_id"]]
    assert shown["serial"] == 3
    assert "NOT VERIFIED" in cli("grant owner.key.grants").output
    for name, opens in (("alice", True), ("bob", False), ("carol", True)):
        become(name)
        line = "verify data.safetensors --key owner.key.grants"
        if opens:
            cli(line)
        else:
            assert "was not granted to" in cli.error(line)
    assert (folder / "data.safetensors").read_bytes() == before


def test_the_only_machine_is_replaced_by_another_of_its_name(cli, folder):
    cli("grant owner.key --to alice.pub --sign owner.signer")
    before = cli.json("grant owner.key.grants")["recipients"]
    (folder / "new").mkdir()
    cli("keygen new/alice --identity")
    cli("grant owner.key.grants --to new/alice.pub --drop alice --key owner.key --sign owner.signer")
    (shown,) = cli.json("grant owner.key.grants --owner owner.signer.pub")["recipients"]
    assert shown["name"] == "alice"
    assert shown["id"] != before[0]["id"]
    assert "bob" in cli.error("grant owner.key.grants --to bob.pub --drop bob --key owner.key --sign owner.signer")
    cli("grant owner.key.grants --to new/alice.pub --drop alice --key owner.key --sign owner.signer")  # granted anew
    cli("grant owner.key.grants --to bob.pub --key owner.key --sign owner.signer")
    cli("grant owner.key.grants --to carol.pub --drop alice --drop bob --key owner.key --sign owner.signer")
    assert [each["name"] for each in cli.json("grant owner.key.grants")["recipients"]] == ["Carol"]
    assert "at least one recipient" in cli.error("grant owner.key.grants --drop Carol --sign owner.signer", status=2)


def test_nobody_is_dropped_from_a_key_that_is_granted_anew(cli):
    assert "granted anew" in cli.error("grant owner.key --to alice.pub --drop bob --sign owner.signer", status=2)


def test_another_owner_s_grants_do_not_open(cli, become, monkeypatch):
    cli("keygen other.signer --signer")
    cli("seal data.npy data.safetensors --to alice.pub --sign other.signer")
    become("alice")
    assert "expected a signature by a trusted key" in cli.error("verify data.safetensors --key data.safetensors.grants")
    monkeypatch.delenv("FASTRACK_OWNER")
    assert "set FASTRACK_OWNER" in cli.error("verify data.safetensors --key data.safetensors.grants")


@pytest.mark.parametrize("wrong", ["tomorrow", "30", "30y", "2027-13-01"])
def test_a_wrong_end_is_told(cli, wrong):
    assert "expected a date" in cli.error(
        f"grant owner.key --to alice.pub --sign owner.signer --expires {wrong}", status=2
    )


def test_a_grant_ends(cli, become):
    cli("seal data.npy data.safetensors --key owner.key")
    assert "which is over" in cli("grant owner.key --to alice.pub --sign owner.signer --expires 2020-01-01").stdout
    assert (
        "which is over" not in cli("grant owner.key --to bob.pub --sign owner.signer --expires 1d -o b.grants").stdout
    )
    become("alice")
    assert "expired at 2020-01-01T00:00:00Z" in cli.error("verify data.safetensors --key owner.key.grants")


def test_a_passphrase_comes_from_a_private_file(cli, folder, monkeypatch):
    (folder / "pass").write_text("correct horse battery staple\n")
    (folder / "pass").chmod(0o600)
    monkeypatch.setenv("FASTRACK_PASSPHRASE_FILE", "pass")
    cli("grant owner.key --passphrase --sign owner.signer")
    grants = Grants.load("owner.key.grants", owner=Verifier.load("owner.signer.pub"))
    assert grants.unlock(passphrase="correct horse battery staple").first == fastrack.Key.load("owner.key")
    (folder / "pass").write_bytes("correct horse battery staple".encode("utf-16"))
    again = "grant owner.key.grants --passphrase --key owner.key --sign owner.signer"
    assert "expected a passphrase in UTF-8" in cli.error(again)
    (folder / "pass").write_text("short\n")
    assert "12 characters" in cli.error(again, status=2)


@pytest.mark.slow
def test_a_passphrase_is_not_asked_for_without_a_terminal(folder):
    warnings = "-W error -W ignore::DeprecationWarning:typer"  # an old typer imports what click deprecates
    line = f"{warnings} -m fastrack grant owner.key --passphrase --sign owner.signer"
    command = [sys.executable, *line.split()]
    for given in (b"", b"correct horse battery staple\n" * 2):
        done = subprocess.run(command, input=given, capture_output=True, check=False, start_new_session=True)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"FASTRACK_PASSPHRASE_FILE" in done.stderr
        assert b"getpass" not in done.stderr
    assert not (folder / "owner.key.grants").exists()


def test_grants_that_cannot_be_changed_so_are_bad_usage(cli):
    cli("grant owner.key --to alice.pub --sign owner.signer")
    line = "grant owner.key.grants --sign owner.signer"
    assert "expected key" in " ".join(cli.error(f"{line} --to bob.pub --key other.key", status=2).split())
    assert "recipient" in cli.error(f"{line} --drop alice", status=2)


@pytest.mark.parametrize("option", ["--expires 30d", "--file data.npy", "--least-version 2"])
def test_limits_of_grants_that_exist_are_refused_and_not_passed_over(cli, folder, option):
    cli("grant owner.key --to alice.pub --sign owner.signer")
    before = (folder / "owner.key.grants").read_bytes()
    line = f"grant owner.key.grants --to bob.pub --key owner.key --sign owner.signer {option}"
    assert "Grant the key anew, with --out" in cli.error(line, status=2)
    assert "Grant the key anew" in cli.error(f"grant owner.key.grants {option}", status=2)
    assert (folder / "owner.key.grants").read_bytes() == before


@pytest.mark.slow
def test_a_passphrase_is_typed_twice(cli, monkeypatch):
    text = "correct horse battery staple"
    typed = iter([text, text.upper(), text, text])
    monkeypatch.setattr("fastrack.providers._passphrase.ask", lambda _: next(typed))
    line = "grant owner.key --passphrase --sign owner.signer"
    assert "twice" in cli.error(line, status=2)
    cli(line)
    grants = Grants.load("owner.key.grants", owner=Verifier.load("owner.signer.pub"))
    assert grants.unlock(passphrase=text).first == fastrack.Key.load("owner.key")


def test_a_secret_in_place_of_its_path_is_not_repeated(cli, folder, monkeypatch):
    cli("grant owner.key --to alice.pub --sign owner.signer")
    text = (folder / "alice").read_text().splitlines()[1]
    for line in (
        f"grant owner.key --to {text} --sign owner.signer -o x",
        f"grant owner.key --to alice.pub --sign {text} -o x",
        f"grant owner.key.grants --owner {text}",
        f"grant owner.key.grants --to bob.pub --identity {text} --sign owner.signer",
    ):
        for flag in ("", " --json"):
            said = cli(line + flag, status=1).output
            assert "key itself" in " ".join(said.split())
            assert text.split(":")[2] not in said
    monkeypatch.setenv("FASTRACK_PASSPHRASE_FILE", "correct horse battery staple")
    said = cli.error("grant owner.key --passphrase --sign owner.signer -o x")
    assert "FASTRACK_PASSPHRASE_FILE" in said
    assert "horse" not in said


@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_a_file_is_sealed_anew(cli, folder, suffix):
    arrays = {"x": np.arange(100_000), "y": np.ones((3, 5), np.float32), "empty": np.zeros((0, 4))}
    if suffix == "npz":
        np.savez(folder / "data.npz", **arrays)
    else:
        np.save(folder / "data.npy", arrays["x"])
    cli(f"seal data.{suffix} data.safetensors --key owner.key")
    report = cli.json("rekey data.safetensors new.safetensors --key owner.key --new other.key")
    assert report["key_id"] == fastrack.Key.load("other.key").id
    cli(f"unseal new.safetensors back.{suffix} --key other.key")
    if suffix == "npz":
        with np.load(folder / "back.npz") as back:
            assert sorted(back) == sorted(arrays)
            assert all(np.array_equal(back[name], arrays[name]) for name in arrays)
    else:
        assert np.array_equal(np.load(folder / "back.npy"), arrays["x"])
    assert "expected key" in cli.error("verify new.safetensors --key owner.key")
    assert "--force" in cli.error("rekey data.safetensors new.safetensors --key owner.key --new other.key")


def test_a_file_may_replace_itself_and_stays_as_it_was_on_failure(cli, folder):
    cli("seal data.npy data.safetensors --key owner.key")
    cli("rekey data.safetensors data.safetensors --key owner.key --new other.key --force")
    cli("verify data.safetensors --key other.key")
    flip_byte(folder / "data.safetensors")
    content = (folder / "data.safetensors").read_bytes()
    before = sorted(path.name for path in folder.iterdir())
    assert "was altered" in cli.error("rekey data.safetensors data.safetensors --key other.key --new owner.key --force")
    assert (folder / "data.safetensors").read_bytes() == content
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_is_stored_in_plain_is_copied_by_name_only(cli, folder):
    np.savez(folder / "two.npz", x=np.arange(5), labels=np.arange(3))
    cli("seal two.npz two.safetensors --key owner.key --plain labels")
    line = "rekey two.safetensors three.safetensors --key owner.key --new other.key"
    assert "unencrypted and unauthenticated" in cli.error(line)
    cli(f"{line} --plain labels")
    with fastrack.load_file("three.safetensors") as file:
        assert (list(file), list(file.plain)) == (["x"], ["labels"])


@pytest.mark.usefixtures("folder")
def test_a_checkpoint_stays_one(cli):
    fastrack.save_checkpoint("step.safetensors", {"step": 3, "w": np.arange(5)}, key="owner.key")
    cli("rekey step.safetensors again.safetensors --key owner.key --new other.key")
    assert fastrack.load_checkpoint("again.safetensors", keys="other.key")["step"] == 3
    with fastrack.load_file("again.safetensors") as file:
        assert file.kind == "checkpoint"


def test_a_file_is_not_sealed_anew_with_an_absent_tensor_in_plain(cli):
    cli("seal data.npy data.safetensors --key owner.key")
    line = "rekey data.safetensors new.safetensors --key owner.key --new other.key --plain date"
    said = " ".join(cli.error(line, status=2).split())
    assert "'date'" in said
    assert "'data'" in said


def test_older_grants_are_not_signed_anew(cli, folder):
    cli("keygen data.key")
    path = folder / "data.key.grants"
    cli("grant data.key --to alice.pub --to bob.pub --sign owner.signer")
    versions = [path.read_bytes()]
    for line in ("--to carol.pub --key data.key", "--drop bob"):
        cli(f"grant data.key.grants {line} --sign owner.signer")
        versions.append(path.read_bytes())
    assert stat.S_IMODE((folder / "owner.signer.replaced").stat().st_mode) == 0o600
    for number, older in enumerate(versions[:2], 1):
        for content in (older, older.replace(b" ", b"") + b"\n"):
            path.write_bytes(content)
            message = cli.error("grant data.key.grants --to carol.pub --key data.key --sign owner.signer")
            assert f"got number {number}, which others replaced" in message
            assert path.read_bytes() == content
    path.write_bytes(versions[2])
    for name in ("one", "two"):  # copies for others replace nothing
        cli(f"grant data.key.grants --to bob.pub --key data.key --sign owner.signer --out {name}.grants")
    cli("grant data.key.grants --drop Carol --sign owner.signer --out three.grants")
    assert "which others replaced" in cli.error("grant data.key.grants --drop Carol --sign owner.signer")


def test_a_lease_and_its_place_are_shown(cli):
    given = {"lease": timedelta(hours=1), "require": "confidential"}
    signer, recipient = Signer.load("owner.signer"), Recipient.load("alice.pub")
    Grants.issue(fastrack.Key.load("owner.key"), [recipient], signer=signer, **given).save("leased.grants")
    for owner in ("", "--owner owner.signer.pub"):
        said = cli(f"grant leased.grants {owner}").stdout
        assert "lease: 3600 s, asked for again after 1800 s\n" in said
        assert "GPUs: confidential, any\n" in said
    shown = cli.json("grant leased.grants")
    assert [shown[name] for name in ("seconds", "renew_after", "require", "gpus")] == [3600, 1800, "confidential", None]
    cli("grant owner.key --to alice.pub --sign owner.signer")
    assert "lease" not in cli("grant owner.key.grants").stdout


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="leases need Linux")
def test_keys_on_a_lease_are_listed(cli):
    keys = [fastrack.Key.load(name) for name in ("owner.key", "other.key")]
    page = LeasePage.create(keys, Moment.now().after(60))
    listed = cli.json(f"key {page.source}")["keys"]
    assert [(each["id"], each["kind"], each["bits"]) for each in listed] == [
        (key.id, "key on a lease", key.bits) for key in page.keys
    ]
    assert list(fastrack.KeyRing(page.source)) == page.keys
    page.end()
    assert "expected a lease in force" in cli.error(f"key {page.source}", status=8)
