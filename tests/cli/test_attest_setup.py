"""From nothing to a released key: collateral is fetched, a policy drafted, a key granted, with only commands."""

import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import local_machine
from helpers.foundry import tdx
from helpers.foundry.machine import Machine
from helpers.vendor_services import VendorServices

from fastrack import attest
from fastrack._cli.attest import exchange


@pytest.fixture
def service(monkeypatch):
    """Return the services of a machine that has no collateral of its own, and whose kernel gives it evidence."""
    machine = Machine("tdx", 1)

    def collect(binding, **_):
        bare = [replace(machine.collect(binding).devices[0], manifests=(), ocsp=None)]
        quote = machine.prove(binding.report_data(bare)).quote
        return attest.MachineEvidence(attest.TdxEvidence(quote), tuple(bare))

    local_machine.replace(monkeypatch, collect)
    with VendorServices(machine).running() as running:
        yield running


TDX = f"tdx-{tdx.FMSPC.hex()}.json"
SIGN = "--sign owner.signer --key data.key --out grants"


@pytest.mark.usefixtures("quiet")
def test_an_operator_gets_from_nothing_to_a_key_in_few_commands(cli, folder, service):
    lines = [
        "keygen owner.signer --signer",
        "keygen data.key",
        "attest challenge first",
        "attest collect first sample",
        f"attest fetch sample collateral {service.options}",
        "attest policy sample policy.toml --challenge first --collateral collateral",
        "attest challenge challenge",
        "attest verify offer --challenge challenge --policy policy.toml --collateral collateral",
        f"attest grant offer --challenge challenge --policy policy.toml --collateral collateral {SIGN}",
    ]
    for line in lines[:7]:
        cli(line)
    options = {"grants": "grants", "owner": [Path("owner.signer.pub")], "out": Path("machine.key")}
    machine = threading.Thread(target=exchange.collect, args=("challenge", "offer"), kwargs=options)
    machine.start()
    while not (folder / "offer").exists():
        pass
    assert "verified, and accepted by the policy" in cli(lines[7]).stdout
    cli(lines[8])
    machine.join()
    assert (folder / "machine.key").read_text() == (folder / "data.key").read_text()
    assert len(lines) + 2 == 11  # with `collect` on the machine, and `show`


def test_a_second_fetch_asks_for_nothing_and_says_what_holds(cli, folder, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    line = f"attest fetch offer collateral {service.options}"
    first = cli.json(line)["documents"]
    assert all(document["fetched"] for document in first)
    service.asked.clear()
    second = cli.json(line)["documents"]
    assert [document["name"] for document in second] == [document["name"] for document in first]
    assert not any(document["fetched"] for document in second)
    assert not service.asked
    assert cli(line).stdout.count("holds ") == len(first)
    moved = cli.json("attest fetch offer elsewhere --bundle collateral")["documents"]
    assert len(moved) == len(first)
    assert not service.asked
    (folder / "collateral" / TDX).unlink()
    assert f"expected {TDX} in the bundle, got none" in cli.error("attest fetch offer third --bundle collateral")


def test_a_document_that_could_not_be_renewed_is_heard_of(cli, folder, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    line = f"attest fetch offer collateral {service.options}"
    cli(line)
    before = {path: path.read_bytes() for path in folder.joinpath("collateral").rglob("*") if path.is_file()}
    service.answers["/tdx/certification/v4/tcb"] = [(404, {}, b"")]
    assert f"{TDX} is kept as it was: " in cli(f"{line} --refresh", status=1).stderr
    service.answers["/tdx/certification/v4/tcb"] = [(404, {}, b"")]
    documents = cli.json(f"{line} --refresh", status=1)["documents"]
    assert [document["name"] for document in documents if document["kept_because"]] == [TDX]
    assert before == {path: path.read_bytes() for path in before}
    cli(line)


def test_a_policy_is_drafted_of_evidence_that_verifies_alone(cli, folder, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    assert "TDX collateral" in cli.error("attest policy offer")
    claimed = cli("attest policy offer --unverified").stdout
    assert claimed.startswith("# NOT VERIFIED")
    assert attest.Policy.from_toml(claimed).gpu.count == 1
    cli(f"attest fetch offer collateral {service.options}")
    cli("attest policy offer policy.toml --collateral collateral")
    assert cli("attest policy offer --collateral collateral --diff policy.toml").stdout == ""
    text = (folder / "policy.toml").read_text()
    (folder / "old.toml").write_text(text.replace("61" * 48, "77" * 48).replace("count = 1", "count = 2"))
    found = cli.json("attest policy offer --collateral collateral --diff old.toml", status=1)
    assert found["changes"] == [f"cpu.tdx.rtmr1: {'77' * 48} -> {'61' * 48}", "gpu.count: 2 -> 1"]
    assert "exists and is left as it was" in cli.error("attest policy offer policy.toml --collateral collateral")
    (folder / "old.toml").write_text("[")
    assert "expected a policy in TOML" in cli.error("attest policy offer --collateral collateral --diff old.toml")


def test_every_mismatch_is_listed_and_the_status_tells_refused_from_unproved(cli, folder, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    cli(f"attest fetch offer collateral {service.options}")
    cli("attest policy offer policy.toml --collateral collateral")
    text = (folder / "policy.toml").read_text()
    (folder / "other.toml").write_text(text.replace("61" * 48, "77" * 48).replace("count = 1", "count = 2"))
    line = "attest verify offer --challenge challenge --policy other.toml --collateral collateral"
    errors = cli.error(line, status=3).splitlines()
    assert ["RTMR1" in errors[0], "number of GPUs" in errors[1], len(errors)] == [True, True, 2]
    found = cli.json(line, status=3)
    assert (found["verified"], found["accepted"]) == (True, False)
    assert [one["field"] for one in found["mismatches"]] == ["RTMR1", "number of GPUs"]
    cli("attest challenge another")
    cli.error(line.replace("--challenge challenge", "--challenge another"), status=1)
    assert "TDX collateral" in cli.error(line.replace(" --collateral collateral", ""), status=1)


def test_an_offer_is_shown_with_all_that_a_policy_can_name(cli, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    shown = cli("attest show offer").stdout
    assert "NOT VERIFIED" in shown
    for line in (
        f"cpu.tdx.rtmr2: {'62' * 48}",
        "cpu.tdx.platforms: ",
        "gpu.min_driver: 580",
        "gpu.count: 1",
        "cpu.tdx.td_attributes: 0000001000000000",
    ):
        assert line in shown
    claims = cli.json("attest show offer")["claims"]
    assert claims["gpu"]["chips"] == "GH100"
    assert service


def test_a_drafted_policy_is_one_document_and_its_comments_are_named(cli, folder, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    cli(f"attest fetch offer collateral {service.options}")
    (folder / "collateral" / "rim").rename(folder / "rim")
    line = "attest policy offer {} --collateral collateral"
    said = cli(line.format("policy.toml")).stderr
    assert said.startswith("drafted as comments in policy.toml, since they would let in more")
    assert "gpu.require_manifests" in said
    assert "cpu.tdx.mrtd" not in said
    found = cli.json(line.format("-"))
    assert found["policy"] == tomllib.loads((folder / "policy.toml").read_text())
    assert (found["path"], "gpu.require_manifests" in found["comments"]) == (None, True)
    assert cli.json(line.format("second.toml")) == {**found, "path": "second.toml"}
    assert (folder / "second.toml").read_text() == (folder / "policy.toml").read_text()


def test_a_bundle_that_is_not_there_is_named(cli, folder, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    told = cli.error("attest fetch offer collateral --bundle nowhere")
    assert "nowhere: expected a folder" in told
    assert not (folder / "collateral").exists()
    assert not service.asked


def test_an_address_or_a_product_that_cannot_be_is_a_wrong_command_line(cli, service):
    cli("attest challenge challenge")
    cli("attest collect challenge offer")
    wrong = {"--intel http://pccs.example": "https://HOST", "--amd https://a:b@kds.example": "password"}
    for option, text in {**wrong, "--product Turin": "Turin"}.items():
        assert text in cli.error(f"attest fetch offer collateral {option}", status=2)
    assert not service.asked


def test_a_policy_is_drafted_of_the_offer_that_was_asked_for(cli, service):
    for name in ("first", "other"):
        cli(f"attest challenge {name}")
    cli("attest collect first sample")
    cli(f"attest fetch sample collateral {service.options}")
    line = "attest policy sample --collateral collateral --challenge"
    assert cli(f"{line} first").stdout == cli("attest policy sample --collateral collateral").stdout
    assert "verifying the challenge of the offer failed" in cli.error(f"{line} other")
