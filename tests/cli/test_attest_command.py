"""``fastrack attest`` and ``fastrack broker``, as an owner and a machine use them."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import local_machine
from helpers.fake_nvml import FakeNvml
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

from fastrack import FastrackError, Key, attest
from fastrack._cli.attest import exchange as module
from fastrack.attest._broker.ledger import Ledger
from fastrack.grants import Signer


@pytest.fixture(autouse=True)
def _owner(cli, folder, monkeypatch):
    cli("keygen owner.signer --signer")
    cli("keygen data.key")
    (folder / "policy.toml").write_text(policy(1))
    machine = Machine("tdx", 1)
    local_machine.replace(monkeypatch, lambda binding, **_: machine.collect(binding))
    cli("attest challenge challenge")


class Collecting(threading.Thread):
    """``fastrack attest collect`` in a thread, which must not use the streams that commands of a test have."""

    def __init__(self, out):
        super().__init__(daemon=True)
        self.out = Path(out)
        self.error = None
        self.start()

    def run(self):
        try:
            module.collect("challenge", "offer", grants="grants", owner=[Path("owner.signer.pub")], out=self.out)
        except FastrackError as error:
            self.error = str(error)


GRANT = "--challenge challenge --policy policy.toml --sign owner.signer --key data.key"


def test_no_document_replaces_a_file(cli, folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for line in (
        "challenge data.key",
        "challenge challenge",
        "collect challenge owner.signer",
        f"grant offer {GRANT} --out data.key",
    ):
        assert "exists and is left as it was" in cli.error(f"attest {line}")
    cli("attest collect challenge offer")
    (folder / "there").mkdir()
    for out in ("there", "nowhere/grants"):
        cli.error(f"attest grant offer {GRANT} --out {out}")
        assert (folder / "challenge").exists()  # and was not used up for what cannot be written
    shutil.rmtree("there")
    (folder / "offer").unlink()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.usefixtures("quiet")
def test_an_exchange_by_files(cli, folder, monkeypatch):
    shown = cli.json("attest show challenge")
    assert (shown["kind"], shown["verified"]) == ("challenge", False)
    collecting = Collecting("machine.key")
    while not (folder / "offer").exists():
        pass
    assert cli.json("attest show offer")["devices"] == 1
    assert "NOT VERIFIED" in cli("attest show offer").output
    assert cli.json("attest verify offer --challenge challenge --policy policy.toml")["cpu"]["tcb_status"] == "UpToDate"
    assert "accepted by the policy" in cli("attest verify offer --challenge challenge --policy policy.toml").output
    many = " ".join(f"--file-id {number:032x}" for number in range(1500))
    assert "--file-id, --key: " in cli.error(f"attest grant offer {GRANT} --out grants {many}", status=2)
    cli(f"attest grant offer {GRANT} --out grants")
    collecting.join()
    assert collecting.error is None
    assert Key.load("machine.key") == Key.load("data.key")
    assert (folder / "machine.key").stat().st_mode & 0o777 == 0o600
    assert cli.json("attest show grants") == {
        "kind": "grants",
        "verified": False,
        "challenge": shown["challenge"],
        "grants": 1,
    }
    assert not (folder / "challenge").exists()
    shutil.copy(folder / f"challenge.used-{shown['challenge'][:16]}", folder / "challenge")
    assert "expected one that was not used" in cli.error(f"attest grant offer {GRANT} --out again")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "of another container"))
    assert "expected one that was not used" in cli.error(f"attest grant offer {GRANT} --out again")
    assert not (folder / "again").exists()


def test_a_new_challenge_may_have_the_name_of_a_used_one(cli, folder):
    for number in range(3):
        cli(f"attest collect challenge offer{number}")
        cli(f"attest grant offer{number} {GRANT} --out grants{number}")
        cli("attest challenge challenge")
    assert len(list(folder.glob("challenge.used-*"))) == 3


def answer(folder, write):
    """Answer the offer of ``collect`` when it is there, as an owner elsewhere does, with a function that copies."""

    def run():
        while not (folder / "offer").exists():
            pass
        challenge = attest.Challenge.from_bytes((folder / "challenge").read_bytes())
        rules = attest.Policy.from_toml(folder / "policy.toml")
        offer = (folder / "offer").read_bytes()
        verified = attest.verify_offer(offer, challenge, rules, now=NOW, roots=roots())
        signer = Signer.load(folder / "owner.signer")
        write(attest.issue_grants(verified, Key.load(folder / "data.key"), signer=signer, now=NOW))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


COLLECT = "attest collect challenge offer --grants grants --owner owner.signer.pub --out machine.key"


@pytest.mark.parametrize("newline", [True, False])
@pytest.mark.slow
def test_an_answer_that_is_still_being_copied_is_waited_for(cli, folder, newline):
    def copy(grants):
        assert grants.endswith(b"\n")
        with (folder / "grants").open("wb") as file:
            for part in (b"", grants[:100], grants[100:] if newline else grants[100:-1]):
                time.sleep(0.3)
                file.write(part)
                file.flush()

    copying = answer(folder, copy)
    if newline:
        cli(COLLECT)
        assert Key.load("machine.key") == Key.load("data.key")
    else:  # it is taken, and its form is judged as that of any document
        assert "within" not in cli.error(COLLECT)
    copying.join()


def test_it_is_said_what_is_waited_for_and_where_the_key_is(cli, folder):
    answering = answer(folder, (folder / "grants").write_bytes)
    said = cli(COLLECT).stderr.splitlines()
    answering.join()
    assert re.fullmatch(r"offer written to offer; waiting for grants until \d\d:\d\d", said[0])
    assert said[1:] == [f"key {Key.load('data.key').id} stored in machine.key"]
    assert cli("attest collect challenge").stderr == ""


def test_what_is_to_be_set_on_a_gpu_before_its_first_process_is_said(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(persistence=0, ready=0))
    said = cli("attest collect challenge").stderr.splitlines()  # for a pipe too: what is attested ends with the session
    assert [line.partition(":")[0] for line in said] == ["ready", "persistence"]
    assert [said[0].endswith("nvidia-smi conf-compute -srs 1"), said[1].endswith("nvidia-smi -pm 1")] == [True, True]
    assert cli("attest collect challenge --no-gpus").stderr == ""
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(persistence=0, ready=0, feature=0))
    assert cli("attest collect challenge").stderr == ""


def test_an_answer_to_an_earlier_offer_is_not_taken(cli, folder):
    (folder / "grants").write_text("earlier")
    assert "exists and is left as it was" in cli.error(COLLECT)
    assert not (folder / "offer").exists()


@pytest.mark.parametrize(("there", "got"), [(None, "got none"), ("{", "got 1 bytes of one that is not whole")])
@pytest.mark.slow
def test_an_answer_that_does_not_come_is_named(cli, folder, monkeypatch, there, got):
    make = attest.make_offer

    def make_offer(*given):
        if there is not None:
            (folder / "grants").write_text(there)
        return make(*given)

    monkeypatch.setattr(attest, "make_offer", make_offer)
    told = cli.error(f"{COLLECT} --wait 1s")
    assert f"waiting for grants failed: expected an answer within 1s, {got}. Start again" in told


def test_a_grant_that_the_policy_refuses_lists_all_and_uses_nothing_up(cli, folder):
    cli("attest collect challenge offer")
    text = policy(8)
    (folder / "policy.toml").write_text(text.replace("61" * 48, "77" * 48))
    line = f"attest grant offer {GRANT} --out grants"
    errors = cli.error(line, status=3).splitlines()
    assert errors == cli.error(line.partition(" --sign")[0].replace("grant", "verify"), status=3).splitlines()
    assert len(errors) >= 1
    assert "number of GPUs" in errors[-1]
    assert (folder / "challenge").exists()
    assert not (folder / "grants").exists()


def test_an_accepted_offer_is_shown_claim_by_claim(cli):
    cli("attest collect challenge offer")
    line = "attest verify offer --challenge challenge --policy policy.toml"
    shown = cli(line).stdout.splitlines()
    assert "cpu: tdx" in shown
    assert "cpu.tdx.tcb_status: UpToDate" in shown
    assert {f"cpu.tdx.tcb_parts.{part}: UpToDate, 2026-03-13" for part in ("platform", "module")} < set(shown)
    assert max(map(len, shown)) < 300
    assert any(re.match("device 0: chip GH100, chip_id .*, driver 5", one) for one in shown)
    found = cli.json(line)
    assert (found["verified"], found["accepted"], found["mismatches"]) == (True, True, [])


def test_a_document_of_another_kind_is_named(cli):
    assert "reading owner.signer.pub failed: expected a challenge" in cli.error("attest show owner.signer.pub")


@pytest.mark.parametrize("copy", [os.symlink, os.link, shutil.copy, os.rename])
def test_a_challenge_in_two_files_is_used_once(cli, folder, copy):
    (folder / "elsewhere").mkdir()
    copies = ["other", "elsewhere/challenge"]
    shutil.copy("challenge", "kept")
    cli("attest collect challenge offer")
    for name in copies:
        copy(folder / "challenge", folder / name)
        if copy is os.rename:
            shutil.copy("kept", "challenge")
    cli(f"attest grant offer {GRANT.replace('--challenge challenge', '--challenge other')} --out first")
    for name in ("challenge", "kept", *copies):
        line = f"attest grant offer {GRANT.replace('--challenge challenge', f'--challenge {name}')} --out second"
        assert re.search("expected one that was not used|No such file", cli.error(line))
    assert "expected one that was not used" in cli.error(
        f"attest grant offer {GRANT.replace('e challenge', 'e kept')} -o second"
    )


def test_marks_of_used_challenges_are_kept_until_these_have_ended(cli, folder, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    marks = folder / "state" / "fastrack" / "challenges"
    cli("attest collect challenge offer")
    marks.mkdir(parents=True)
    marks.chmod(0o700)
    for name, days in (("a" * 32, 7.5), ("b" * 32, 8.5)):
        (marks / name).touch()
        os.utime(marks / name, (time.time() - days * 86_400,) * 2)
    cli(f"attest grant offer {GRANT} --out first")
    left = {path.name for path in marks.iterdir()}
    assert len(left) == 2
    assert "a" * 32 in left


def test_a_mark_is_on_the_disk_before_anything_is_granted(cli, folder, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    synced, sync = [], os.fsync

    def note_names(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            names = os.listdir(descriptor)  # noqa: PTH208 - a descriptor
            synced.append((sorted(names), (folder / "first").exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note_names)
    cli("attest collect challenge offer")
    number = cli.json("attest show challenge")["challenge"]
    cli(f"attest grant offer {GRANT} --out first")
    assert ([number], False) in synced


def test_a_machine_without_a_place_for_marks_is_told_how_to_name_one(cli, folder, monkeypatch):
    cli("attest collect challenge offer")
    (folder / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "file"))  # as a home that is not there, or only read
    assert "name one with XDG_STATE_HOME" in cli.error(f"attest grant offer {GRANT} --out first")
    assert not (folder / "first").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    cli(f"attest grant offer {GRANT} --out first")


@pytest.mark.usefixtures("quiet")
def test_an_exchange_by_pipes(cli, folder):
    os.mkfifo("offer")
    os.mkfifo("grants")
    collecting = Collecting(".")
    cli(f"attest grant offer {GRANT} --out grants")
    collecting.join()
    key = Key.load("data.key")
    assert Key.load(folder / f"{key.id}.key") == key


def test_documents_pass_on_standard_streams(cli, folder, monkeypatch):
    written = cli("attest challenge").stdout
    assert attest.Challenge.from_bytes(written.encode()).id in written
    (folder / "challenge").write_text(written)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(written.encode() + b"next\n")))
    assert module.read_document("-", 1000) == written.encode()
    assert module.read_document("-", 1000) == b"next\n"
    offer = cli("attest collect challenge").stdout
    assert attest.Offer.from_bytes(offer.encode())


@pytest.mark.slow
def test_wrong_offers_are_refused(cli, folder):
    cli("attest challenge other")
    cli("attest collect other offer")
    assert "verifying the challenge of the offer failed" in cli.error(f"attest grant offer {GRANT}")
    assert (folder / "challenge").exists()
    found = cli.json("attest verify offer --challenge challenge --policy policy.toml", status=1)
    assert found["error"]["type"] == "AttestationError"
    (folder / "policy.toml").write_text(policy(8))
    assert "number of GPUs" in cli.error("attest verify offer --challenge other --policy policy.toml", status=3)
    (folder / "empty").write_text("")
    assert "expected one document, got the end" in cli.error("attest show empty")
    (folder / "text").write_text("text")
    assert "expected a challenge, an offer or grants" in cli.error("attest show text")
    (folder / "folder").mkdir()
    assert "expected a file, got a folder" in cli.error("attest show folder")
    for wrong in ("5", "0s", "8d", "x"):
        assert "expected a period" in cli.error(f"attest challenge --lifetime {wrong}", status=2)
    assert "expected --owner and --out" in cli.error("attest collect other --grants grants", status=2)
    line = "attest collect other x --grants grants --owner owner.signer.pub --out data.key"
    assert "left as it was" in cli.error(line)
    line = line.replace("data.key", "new.key") + " --wait 1s"
    assert "expected an answer within 1s, got none" in cli.error(line)


@pytest.mark.usefixtures("quiet")
def test_a_restricted_key_is_not_stored(cli, folder):
    collecting = Collecting("machine.key")
    while not (folder / "offer").exists():
        pass
    cli(f"attest grant offer {GRANT} --out grants --file-id {'ab' * 16}")
    collecting.join()
    assert "restricted to some" in collecting.error
    assert not (folder / "machine.key").exists()


# The broker.

SERVE = "--policy policy.toml --signer owner.signer --key data.key --database broker.db"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("", "expected --certificate and --private-key"),
        ("", "--insecure-loopback"),
        ("--certificate tls.pem", "expected --certificate and --private-key"),
        ("--insecure-loopback --host 0.0.0.0", "expected a loopback address"),
        ("--insecure-loopback --certificate tls.pem", "expected a loopback address and no certificate"),
        ("--host localhost", "expected an IP address"),
    ],
)
def test_a_broker_needs_tls(cli, folder, options, told):
    shown = cli.error(f"broker serve {SERVE} {options}", status=2)
    assert told in " ".join(re.sub("[│╭╮╰╯─]", " ", shown).split())
    assert not (folder / "broker.db").exists()


@pytest.mark.parametrize("lease", ["1s", "0s", "8d", "soon"])
def test_a_lease_of_another_length_is_refused_by_its_option(cli, folder, lease):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    assert "--lease" in cli.error(f"broker serve {SERVE} --insecure-loopback --lease {lease}", status=2)
    assert not (folder / "broker.db").exists()


def test_more_files_than_a_machine_reads_are_refused_by_their_option(cli, monkeypatch):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("fastrack._service.server._log_as_json", int)
    ids = " ".join(f"--file-id {number:032x}" for number in range(1500))
    shown = cli.error(f"broker serve {SERVE} --insecure-loopback --port 0 {ids}", status=2)
    assert "--file-id, --key: " in shown
    assert "1 keys for 1500 files" in shown


@pytest.mark.slow
def test_a_broker_is_served_and_its_log_is_shown(cli):
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    command = [
        sys.executable,
        "-m",
        "fastrack",
        "broker",
        "serve",
        *SERVE.split(),
        "--insecure-loopback",
        "--port",
        "0",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        line = json.loads(process.stderr.readline())
        assert (line["event"], line["tls"]) == ("listening", False)
        with closing(HTTPConnection("127.0.0.1", line["port"], timeout=30)) as connection:
            connection.request("POST", "/v1/challenges")
            response = connection.getresponse()
            challenge = attest.Challenge.from_bytes(response.read())
            connection.request("POST", "/v1/offers", b"{}", {"Content-Type": "application/json"})
            assert connection.getresponse().status == 400
        process.send_signal(signal.SIGTERM)
        rest = [json.loads(one) for one in process.stderr]
        assert [one.get("challenge") for one in rest] == [challenge.id, None]
    assert process.returncode in {0, 143, -15}
    shown = cli.json("broker log --database broker.db")
    assert (shown["count"], shown["entries"][0]["event"]) == (1, "started")
    head = shown["head"]
    assert f"head: {head}" in cli(f"broker log --database broker.db --head {head}").output
    assert "noted hash" in cli.error(f"broker log --database broker.db --head {'00' * 32}")
    assert "hexadecimal" in cli.error("broker log --database broker.db --head x", status=2)
    assert "No such file" in cli.error("broker log --database none.db")
    cli("broker head first.head --database broker.db --signer owner.signer")
    with closing(Ledger("broker.db")) as ledger:
        ledger.append("started", {}, now=NOW)
    cli("broker head later.head --database broker.db --signer owner.signer")
    by_owner = "--owner owner.signer.pub"
    assert cli.json(f"broker compare first.head broker.db {by_owner}") == {"state": "newer", "known": 1, "now": 2}
    assert cli(f"broker compare later.head broker.db {by_owner}").output.startswith("same: broker.db has 2 entries")
    back = cli(f"broker compare broker.db first.head {by_owner}", status=1).output
    assert back.startswith("older: first.head has 1 entries, broker.db 2")
    assert cli(f"broker compare first.head later.head {by_owner}", status=1).output.startswith("unknown")
    assert "signature by a trusted key" in cli.error("broker compare first.head broker.db")


def test_a_broker_without_its_extra_says_so(cli, monkeypatch):
    for name in ("starlette", "uvicorn", "fastrack.attest._broker.app", "fastrack._service.server"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'fastrack-io[broker]'" in cli.error(f"broker serve {SERVE} --insecure-loopback")
