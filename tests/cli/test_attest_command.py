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
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

from fastrack import FastrackError, Key, attest
from fastrack._cli.commands import attest as module


@pytest.fixture(autouse=True)
def _owner(cli, folder, monkeypatch):
    cli("keygen owner.signer --signer")
    cli("keygen data.key")
    (folder / "policy.toml").write_text(policy(1))
    machine = Machine("tdx", 1)
    monkeypatch.setattr(attest, "collect_evidence", lambda binding, **_: machine.collect(binding))
    monkeypatch.setattr("fastrack.attest._exchange.VENDOR_ROOTS", roots())
    monkeypatch.setattr(module, "read_clock", lambda: NOW)
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


def test_an_exchange_by_files(cli, folder):
    shown = cli.json("attest show challenge")
    assert (shown["kind"], shown["verified"]) == ("challenge", False)
    collecting = Collecting("machine.key")
    while not (folder / "offer").exists():
        pass
    assert cli.json("attest show offer")["devices"] == 1
    assert "NOT VERIFIED" in cli("attest show offer").output
    assert cli.json("attest verify offer --challenge challenge --policy policy.toml")["cpu"]["tcb_status"] == "UpToDate"
    assert "accepted by the policy" in cli("attest verify offer --challenge challenge --policy policy.toml").output
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
    (folder / "challenge.used").rename(folder / "challenge")
    cli("attest challenge challenge.used")
    assert "expected one that was not used" in cli.error(f"attest grant offer {GRANT} --out again")
    assert not (folder / "again").exists()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_challenge_with_two_names_is_used_once(cli, folder, link):
    link("challenge", "other")
    cli("attest collect challenge offer")
    used = GRANT.replace("--challenge challenge", "--challenge other")
    if link is os.symlink:
        cli(f"attest grant offer {used} --out first")
        assert not (folder / "challenge").exists()
    else:
        assert "expected a file with one name" in cli.error(f"attest grant offer {used} --out first")
        (folder / "other").unlink()
        cli(f"attest grant offer {GRANT} --out first")
    for line in (GRANT, used):
        assert "No such file" in cli.error(f"attest grant offer {line} --out second")


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
    assert "No such file" in cli.error(line)


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


def test_a_broker_without_its_extra_says_so(cli, monkeypatch):
    for name in ("starlette", "uvicorn", "fastrack.attest._broker.app", "fastrack.attest._broker.server"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'fastrack-io[broker]'" in cli.error(f"broker serve {SERVE} --insecure-loopback")
