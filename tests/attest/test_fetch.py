"""Collateral is fetched for what an offer names, verified before it is kept, and asked for again when it ends."""

import fcntl
import itertools
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote as percent_encode

import pytest
from cryptography.x509 import ocsp
from helpers.foundry import nvidia, snp, tdx
from helpers.foundry.authority import NOW, Authority, bundle
from helpers.foundry.machine import Machine, policy, roots
from helpers.vendor_services import VendorServices, manifest_answer, signed

import fastrack
from fastrack import AttestationError, FormatError, attest
from fastrack._net import retries
from fastrack.attest import _device_collateral, _errors
from fastrack.attest._broker.app import _refuse
from fastrack.attest._broker.ledger import Ledger, read_log
from fastrack.attest._broker.service import Broker, Settings
from fastrack.attest._cpu.snp_kind import snp_files
from fastrack.attest._fetch import client as clients
from fastrack.attest._fetch import collateral
from fastrack.grants import Signer

TCB = "/tdx/certification/v4/tcb"
AMD = "/vcek/v1/Milan/"
TDX = f"tdx-{tdx.FMSPC.hex()}.json"


@pytest.fixture
def _no_network():
    """Let this module open loopback connections, unlike the rest of attestation."""


@pytest.fixture(autouse=True)
def waits(monkeypatch, _no_network):
    """The seconds that were waited for services: none of them passes."""
    waited = []
    monkeypatch.setattr(retries, "time", SimpleNamespace(monotonic=time.monotonic, sleep=waited.append))
    return waited


@pytest.fixture
def start():
    """A function that starts the services of a machine."""
    running = []

    def begin(cpu="tdx", gpus=1):
        service = VendorServices(Machine(cpu, gpus)).running()
        running.append(service)
        return service.__enter__()

    yield begin
    for service in running:
        service.__exit__(None, None, None)


def offer_of(machine):
    challenge = attest.Challenge.generate(now=NOW)
    return challenge, attest.make_offer(challenge, machine)


def fetch(service, folder, now=NOW, **options):
    offer = attest.Offer.from_bytes(offer_of(service.machine)[1].to_bytes())
    options = {"services": service.services, "roots": roots(), "now": now} | options
    return list(attest.fetch_collateral(offer.evidence, folder, **options))


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_what_was_fetched_verifies_and_is_not_asked_for_again(start, tmp_path, cpu):
    service = start(cpu, gpus=2)
    documents = fetch(service, tmp_path)
    assert all(document.is_new and document.valid_until > NOW for document in documents)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} - {".lock"}
    assert {document.name for document in documents} == names
    amd = {"vcek-0102030405060708-3-0-8-115.der", "cert_chain-Milan.pem", "crl-Milan.der"}
    cpus = {f"tdx-{tdx.FMSPC.hex()}.json"} if cpu == "tdx" else amd
    assert {name.partition("/")[0] for name in names} == cpus | {"rim", "ocsp"}
    assert service.asked.pop("/") == len(list((tmp_path / "ocsp").iterdir()))  # each certificate once, of two GPUs
    assert set(service.asked.values()) == {1}
    before = {name: (tmp_path / name).read_bytes() for name in names}
    service.asked.clear()
    assert not any(document.is_new for document in fetch(service, tmp_path))
    assert not service.asked
    assert before == {name: (tmp_path / name).read_bytes() for name in names}


def test_documents_are_kept_byte_for_byte_as_they_were_signed(start, tmp_path):
    service = start()
    fetch(service, tmp_path)
    wanted = attest.TdxCollateral(**tdx.collateral())
    found = attest.TdxCollateral.from_json((tmp_path / TDX).read_bytes())
    assert (found.tcb_info, found.qe_identity) == (wanted.tcb_info, wanted.qe_identity)
    assert (found.tcb_info_issuer_chain, found.pck_crl_issuer_chain) == (
        wanted.tcb_info_issuer_chain,
        wanted.pck_crl_issuer_chain,
    )
    manifests = {manifest.data for manifest in service.machine.manifests[0]}
    assert {path.read_bytes() for path in (tmp_path / "rim").iterdir()} == manifests
    assert service.queries[TCB] == {"fmspc": [tdx.FMSPC.hex()]}


def test_the_chip_and_its_levels_are_what_is_asked_of_amd(start, tmp_path):
    service = start("snp", gpus=0)
    fetch(service, tmp_path)
    levels = snp.report(service.machine.chip)
    tcb = attest.parse_snp_report(levels).reported_tcb
    found = {name: int(values[0]) for name, values in service.queries[AMD + snp.CHIP_ID.hex()].items()}
    assert found == {"blSPL": tcb.bootloader, "teeSPL": tcb.tee, "snpSPL": tcb.snp, "ucodeSPL": tcb.microcode}


def test_the_folder_is_what_the_exchange_needs(start, tmp_path):
    service = start()
    fetch(service, tmp_path)
    machine = service.machine
    own, machine.collateral = attest.TdxCollateral.from_json((tmp_path / TDX).read_bytes()), None
    challenge, pending = offer_of(machine)
    verified = attest.verify_offer(
        attest.Offer.from_bytes(pending.to_bytes()),
        challenge,
        attest.Policy.from_toml(policy(1)),
        now=NOW,
        roots=roots(),
        collateral=own,
    )
    assert verified.cpu.tcb.status == "UpToDate"


def test_a_manifest_that_is_not_published_keeps_nothing_else_away(start, tmp_path):
    service = start()
    offer = attest.Offer.from_bytes(offer_of(service.machine)[1].to_bytes())
    driver = f"NV_GPU_DRIVER_GH100_{nvidia.DRIVER}"
    service.answers[f"/v1/rim/{driver}"] = [(404, {}, b"")]
    with pytest.raises(OSError, match=f"{driver} failed.*404.*wait until the vendor has published one"):
        list(attest.fetch_collateral(offer.evidence, tmp_path, services=service.services, roots=roots(), now=NOW))
    whole = {"tdx", "rim", "ocsp"}
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir() if path.name != ".lock"} == whole
    assert len(list((tmp_path / "rim").iterdir())) == 1
    assert len(list((tmp_path / "ocsp").iterdir())) == service.asked["/"] > 3


def test_documents_that_end_are_fetched_anew(start, tmp_path):
    service = start()
    fetch(service, tmp_path)
    stale = tmp_path / TDX
    old = tdx.collateral(info=tdx.tcb_info(start=NOW - timedelta(40), end=NOW - timedelta(10)))
    stale.write_text(tdx.as_json(old))
    service.asked.clear()
    (document,) = (one for one in fetch(service, tmp_path) if one.is_new)
    assert document.name == TDX
    assert service.asked[TCB] == 1
    assert set(service.asked) == {
        TCB,
        "/tdx/certification/v4/qe/identity",
        "/sgx/certification/v4/pckcrl",
        "/IntelSGXRootCA.der",
    }


def intel_signed(**parts):
    found = tdx.collateral(**parts)
    return signed("tcbInfo", found["tcb_info"], found["tcb_info_signature"])


def chain_header(of=None):
    return {"TCB-Info-Issuer-Chain": percent_encode(tdx.collateral(of=of)["tcb_info_issuer_chain"])}


WRONG = {
    "no answer of that kind": ((404, {"Request-ID": "7" * 32}, b""), OSError, r"404 \(request 7{32}\).*none for this"),
    "withdrawn": ((410, {}, b""), OSError, "410.*withdrawn"),
    "a key is wanted": ((401, {}, b""), OSError, "401.*mirror"),
    "a redirect": ((302, {"Location": "http://127.0.0.1:1/x"}, b""), OSError, "a redirect"),
    "cut in the middle": ((200, {"Content-Length": "9"}, b"{"), OSError, "expected an answer"),
    "no chain": ((200, {}, intel_signed()), FormatError, "tcb-info-issuer-chain"),
    "of other roots": (
        (200, chain_header(of=tdx.intel.__wrapped__()), intel_signed()),
        AttestationError,
        "pinned fingerprints",
    ),
    "altered": (
        (200, chain_header(), intel_signed().replace(b"UpToDate", b"Outdated")),
        AttestationError,
        "signature",
    ),
    "printed again": (
        (200, chain_header(), json.dumps(json.loads(intel_signed()), indent=1).encode()),
        FormatError,
        "another form",
    ),
    "stale": (
        (200, chain_header(), intel_signed(info=tdx.tcb_info(start=NOW - timedelta(40), end=NOW - timedelta(9)))),
        AttestationError,
        "validity",
    ),
    "of another platform": (
        (200, chain_header(), intel_signed(info=tdx.tcb_info(fmspc="00" * 6))),
        AttestationError,
        "fmspc",
    ),
    "no text": ((200, {"TCB-Info-Issuer-Chain": "%ff"}, intel_signed()), FormatError, "UTF-8"),
    "too large": ((200, chain_header(), b"{" * (2 << 20)), OSError, "up to"),
}


@pytest.mark.slow
def test_what_does_not_hold_is_refused_and_nothing_of_it_kept(start, tmp_path):
    service = start(gpus=0)
    for name, (answer, error, text) in WRONG.items():
        service.answers[TCB] = [answer] * 5
        with pytest.raises(error, match=text):
            fetch(service, tmp_path / name)
        assert not list((tmp_path / name).glob("*")), name


def test_a_mirror_that_lies_about_a_manifest_is_found_out(start, tmp_path):
    service = start()
    device = service.machine.devices[0]
    report = attest.parse_gpu_report(nvidia.report(device))
    verified = attest.verify_gpu_report(report, device.pem, nonce=report.nonce, now=NOW, roots=roots().nvidia)
    driver, vbios = (manifest.data for manifest in service.machine.manifests[0])
    rim_id = verified.rim_ids[0]
    other = nvidia.rim(product="GB100")
    lies = {
        "another digest": (manifest_answer(rim_id, driver, sha256="0" * 64), "digest of the manifest"),
        "another id": (manifest_answer("NV_GPU_DRIVER_GH100_1", driver), "as its id"),
        "another manifest": (manifest_answer(rim_id, vbios), "version"),
        "of another product": (manifest_answer(rim_id, other), "product"),
        "an unknown form": (manifest_answer(rim_id, driver, rim_format="CORIM"), "rim_format"),
        "an altered one": (manifest_answer(rim_id, driver.replace(b"Measurement_1", b"Measurement_7")), "RIM|manifest"),
        "no base64": (manifest_answer(rim_id, driver, rim="?"), "base64"),
        "no JSON": (b"<html>", "JSON"),
    }
    for name, (content, text) in lies.items():
        service.answers[f"/v1/rim/{rim_id}"] = [(200, {}, content)]
        with pytest.raises((AttestationError, FormatError), match=text):
            fetch(service, tmp_path / name)
        assert not list((tmp_path / name).rglob("*.xml")), name


@pytest.mark.slow
def test_a_revocation_is_told_and_kept_so_that_the_machine_is_refused_from_then_on(start, tmp_path):
    for cpu in ("gpu", "tdx", "snp"):
        folder = tmp_path / cpu
        service = start("snp" if cpu == "snp" else "tdx", gpus=cpu == "gpu")
        fetch(service, folder)
        revoke(cpu, service)
        for options in ({"refresh": True}, {}, {"refresh": True}):
            with pytest.raises(AttestationError, match=r"revoked|revocation"):
                fetch(service, folder, **options)
        challenge, pending = offer_of(service.machine)
        judge = attest.Policy.from_toml(policy(int(cpu == "gpu")))
        with pytest.raises(AttestationError, match=r"revoked|revocation"):
            attest.verify_offer(pending.offer, challenge, judge, now=NOW, roots=roots(), collateral=folder)


def revoke(part, service):
    """Have the services answer that a part of the machine is revoked."""
    machine, respond = service.machine, service.respond
    if part == "tdx":
        listed = tdx.intel().platform_ca.crl([machine.platform.pck])
        answer = (200, {"SGX-PCK-CRL-Issuer-Chain": percent_encode(tdx.collateral()["pck_crl_issuer_chain"])}, listed)
        service.respond = lambda path, body: answer if path.endswith("pckcrl") else respond(path, body)
    elif part == "snp":
        machine.crl = snp.amd("Milan").ark.crl([snp.amd("Milan").ask])
    else:
        rom, issuer = machine.devices[0].chain[1:3]
        response = nvidia.status(rom, issuer, good=False)

        def answer(path, body):
            is_asked = path == "/" and ocsp.load_der_ocsp_request(body).serial_number == rom.certificate.serial_number
            return (200, {}, response) if is_asked else respond(path, body)

        service.respond = answer


def test_an_older_document_takes_no_newer_ones_place(start, tmp_path):
    service = start(gpus=0)
    newest = tdx.tcb_info(start=NOW - timedelta(0.5), end=NOW + timedelta(29), tcbEvaluationDataNumber=18)
    tmp_path.joinpath(TDX).write_text(tdx.as_json(tdx.collateral(info=newest)))
    (kept,) = fetch(service, tmp_path, refresh=True)  # of a mirror that is a day behind
    assert not kept.is_new
    assert "no older than the one there" in kept.kept_because
    assert json.loads(tmp_path.joinpath(TDX).read_text())["tcb_info"] == newest.decode()
    carried = tmp_path / "carried"
    fetch(service, carried)
    (kept,) = fetch(service, tmp_path, refresh=True, bundle=carried)
    assert "no older than the one there" in kept.kept_because


def days(number):
    return NOW + timedelta(number)


def test_an_older_list_takes_no_place_of_one_that_has_ended(start, tmp_path):
    service, amd = start("snp", gpus=0), snp.amd("Milan")
    older, newer = amd.ark.crl(start=days(-40), end=days(335)), amd.ark.crl([amd.ask], start=days(-20), end=days(27))
    folder, carried, path = tmp_path / "own", tmp_path / "carried", tmp_path / "own" / "crl-Milan.der"
    service.machine.crl = newer
    with pytest.raises(AttestationError, match="revoked"):
        fetch(service, folder)
    service.machine.crl = older
    fetch(service, carried)
    for options in ({"now": days(28)}, {"now": days(28), "bundle": carried}, {"now": days(-30)}):
        with pytest.raises(AttestationError, match="no older than the one there"):
            fetch(service, folder, **options)
        assert path.read_bytes() == newer
    service.machine.crl = newest = amd.ark.crl([amd.ask], start=days(27), end=days(57))
    with pytest.raises(AttestationError, match="revoked"):
        fetch(service, folder, now=days(28))
    assert path.read_bytes() == newest


def test_an_older_list_takes_no_place_of_one_that_came_meanwhile(start, tmp_path):
    service, amd = start("snp", gpus=0), snp.amd("Milan")
    older, newer = amd.ark.crl(start=days(-2), end=days(30)), amd.ark.crl(start=days(-1), end=days(31))
    respond, asked = service.respond, []

    def answer(path, body):
        if not path.endswith("crl"):
            return respond(path, body)
        asked.append(path)
        if len(asked) == 2:
            return 200, {}, newer
        assert fetch(service, tmp_path)[-1].is_new  # another process asks later, and is answered first
        return 200, {}, older

    service.respond = answer
    *_, kept = fetch(service, tmp_path)
    assert "no older than the one there" in kept.kept_because
    assert (tmp_path / "crl-Milan.der").read_bytes() == newer


def test_one_run_at_a_time_compares_and_replaces_a_document(start, tmp_path, monkeypatch):
    service, written, new = start("snp", gpus=0), [], collateral.new_file

    def check(path, **options):
        with (tmp_path / ".lock").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written.append(path)
        return new(path, **options)

    monkeypatch.setattr(collateral, "new_file", check)
    assert len(fetch(service, tmp_path)) == len(written)
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600  # another user who may read it could hold it
    with (tmp_path / ".lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("number", [6, None])
def test_a_list_of_a_lower_number_takes_no_place_of_another(start, tmp_path, number):
    service, ark = start("snp", gpus=0), snp.amd("Milan").ark
    fetch(service, tmp_path)
    service.machine.crl = ark.crl(start=days(-0.5), number=number)
    kept = fetch(service, tmp_path, refresh=True)[-1]
    assert not kept.is_new
    assert "no older than the one there" in kept.kept_because


def test_an_older_answer_about_a_certificate_takes_no_place_of_one_that_has_ended(start, tmp_path):
    service = start(gpus=1)
    rom, issuer = service.machine.devices[0].chain[1:3]
    respond, answers = service.respond, [nvidia.status(rom, issuer, good=False, start=days(-0.5), end=days(0.5))]

    def answer(path, body):
        is_asked = path == "/" and ocsp.load_der_ocsp_request(body).serial_number == rom.certificate.serial_number
        return (200, {}, answers[-1]) if is_asked else respond(path, body)

    service.respond = answer
    with pytest.raises(AttestationError, match="revoked"):
        fetch(service, tmp_path)
    answers.append(nvidia.status(rom, issuer))
    with pytest.raises(AttestationError, match="no older than the one there"):
        fetch(service, tmp_path, now=days(0.75))


def test_older_tcb_info_takes_no_place_of_one_that_has_ended(start, tmp_path):
    service = start(gpus=0)
    newer = tdx.tcb_info(start=days(-0.5), end=days(10), tcbEvaluationDataNumber=18)
    (tmp_path / TDX).write_text(tdx.as_json(tdx.collateral(info=newer)))
    with pytest.raises(AttestationError, match="no older than the one there"):
        fetch(service, tmp_path, now=days(11))
    assert json.loads((tmp_path / TDX).read_text())["tcb_info"] == newer.decode()


def test_a_chain_of_amd_is_kept_only_if_it_is_the_products(start, tmp_path):
    service = start("snp", gpus=0)
    milan, genoa = snp.amd("Milan"), snp.amd("Genoa")
    wrong = {
        "of another product": genoa.ask.pem + genoa.ark.pem,
        "not issued by the root": genoa.ask.pem + milan.ark.pem,
        "only the root": milan.ark.pem,
    }
    for name, chain in wrong.items():
        service.answers[AMD + "cert_chain"] = [(200, {}, chain)]
        with pytest.raises(AttestationError):
            fetch(service, tmp_path / name)
        assert not list((tmp_path / name).glob("*")), name


def test_manifests_are_asked_for_again_when_that_is_wanted(start, tmp_path):
    service = start()
    fetch(service, tmp_path)
    service.asked.clear()
    fetch(service, tmp_path, refresh=True)
    assert sum(count for path, count in service.asked.items() if path.startswith("/v1/rim/")) == 2


def test_a_document_is_asked_for_again_after_half_of_its_life_and_kept_to_its_end(start, tmp_path):
    service = start(gpus=0)
    fetch(service, tmp_path)
    issued, end = NOW - timedelta(1), NOW + timedelta(29)
    service.asked.clear()
    half = issued + (end - issued) / 2
    fetch(service, tmp_path, now=half - timedelta(1))
    assert not service.asked
    fetch(service, tmp_path, refresh=True)
    assert service.asked.pop(TCB) == 1
    service.answers[TCB] = [(404, {}, b"")]
    (kept,) = fetch(service, tmp_path, now=half + timedelta(1))
    assert service.asked[TCB] == 1
    assert not kept.is_new
    assert (tmp_path / TDX).exists()


def test_one_folder_serves_machines_of_two_kinds(start, tmp_path):
    services = [start(cpu, gpus=1) for cpu in ("tdx", "snp")]
    for service in services:
        fetch(service, tmp_path)
    for service in services:
        machine = service.machine
        challenge, pending = offer_of(machine)
        offer = attest.Offer.from_bytes(pending.to_bytes())
        judge = attest.Policy.from_toml(policy(1))
        assert attest.verify_offer(offer, challenge, judge, now=NOW, roots=roots(), collateral=tmp_path)
    with pytest.raises(NotADirectoryError):
        attest.verify_offer(offer, challenge, judge, now=NOW, roots=roots(), collateral=tmp_path / "none")


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_a_folder_with_nothing_for_a_machine_refuses_it(start, tmp_path, cpu):
    fetch(start("snp" if cpu == "tdx" else "tdx"), tmp_path)
    challenge, pending = offer_of(Machine(cpu, 1))  # which sends what would do
    judge = attest.Policy.from_toml(policy(1))
    assert attest.verify_offer(pending.offer, challenge, judge, now=NOW, roots=roots())
    with pytest.raises(AttestationError, match=r"collateral.*attest fetch"):
        attest.verify_offer(pending.offer, challenge, judge, now=NOW, roots=roots(), collateral=tmp_path)


def judged(machine, folder, trusted=None):
    challenge, pending = offer_of(machine)
    judge = attest.Policy.from_toml(policy(len(machine.devices)))
    options = {"now": NOW, "roots": trusted or roots(), "collateral": folder}
    return attest.verify_offer(pending.offer, challenge, judge, **options)


def test_what_a_folder_lacks_for_a_gpu_stays_as_the_machine_sent_it(start, tmp_path):
    service = start()
    fetch(service, tmp_path)
    boards = tmp_path / "rim"
    boards.joinpath("NV_GPU_VBIOS_1010_0200_882_9600740020.xml").write_bytes(nvidia.vbios_rim(tag_id="other board"))
    assert judged(service.machine, tmp_path).devices
    for remove in ("ocsp/*", "rim/*VBIOS*", "rim/*"):  # responses; then a manifest; then all of them
        for path in tmp_path.glob(remove):
            path.unlink()
        assert judged(service.machine, tmp_path).devices, remove


def test_a_list_in_an_owners_folder_counts_whatever_the_machine_sends(tmp_path, monkeypatch):
    machine = Machine("snp", 0)
    files = {"vcek.der": machine.chip.leaf, "cert_chain.pem": machine.chip.issuers}
    for name, data in files.items():
        tmp_path.joinpath(name).write_bytes(data)
    with pytest.raises(AttestationError, match=r"revocation.*expected a check"):
        judged(machine, tmp_path)  # though the machine sends a list
    tmp_path.joinpath("crl.der").write_bytes(snp.amd("Milan").ark.crl([snp.amd("Milan").ask]))
    prove = machine.prove
    for left_out in ((), ("issuers",), ("leaf", "issuers"), ("leaf", "issuers", "crl")):
        bare = dict.fromkeys(left_out)
        monkeypatch.setattr(machine, "prove", lambda data, bare=bare: replace(prove(data), **bare))
        with pytest.raises(AttestationError, match="revocation"):
            judged(machine, tmp_path)


def test_nothing_of_a_cpu_is_the_machines_but_the_leaf(tmp_path):
    machine = Machine("snp", 0)
    files = {"vcek.der": machine.chip.leaf, "cert_chain.pem": machine.chip.issuers, "crl.der": machine.crl}
    machine.crl = snp.amd("Milan").ark.crl(start=NOW - timedelta(days=300), end=NOW + timedelta(days=75))
    told = {"crl.der": "revocation of the SNP report", "cert_chain.pem": "AMD certificate"}
    for number, kept in enumerate(kept for size in (1, 2, 3) for kept in itertools.combinations(files, size)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in kept:
            folder.joinpath(name).write_bytes(files[name])
        absent = [told[name] for name in ("cert_chain.pem", "crl.der") if name not in kept]
        if absent:
            with pytest.raises(AttestationError, match=absent[0]):
                judged(machine, folder)
        else:
            assert judged(machine, folder).cpu.revocation_checked_at == NOW - timedelta(days=1)
    folder.joinpath("vcek.der").write_bytes(snp.chip(chip_id=b"\7" * 64).leaf)
    with pytest.raises(AttestationError):  # the owner's leaf comes before the machine's
        judged(machine, folder)


def test_collateral_of_another_kind_of_cpu_leaves_none_to_the_machine():
    machine = Machine("snp", 0)
    with pytest.raises(AttestationError, match=r"collateral.*for it, got none.*attest fetch"):
        judged(machine, attest.TdxCollateral(**tdx.collateral()))


def test_a_folder_of_two_products_serves_reports_that_name_none(tmp_path):
    trusted = attest.TrustedRoots(amd=snp.amd("Milan").roots | snp.amd("Genoa").roots)
    machines = []
    for product in ("Milan", "Genoa"):
        machine = Machine("snp", 0)
        machine.chip = snp.chip(product)
        machine.crl = snp.amd(product).ark.crl()
        machine.prove = lambda data, machine=machine: attest.SnpEvidence(
            snp.report(machine.chip, version=2, report_data=data), machine.chip.leaf, machine.chip.issuers, machine.crl
        )
        for name, data in (("cert_chain", machine.chip.issuers), ("crl", machine.crl)):
            end = "pem" if name == "cert_chain" else "der"
            tmp_path.joinpath(f"{name}-{product}.{end}").write_bytes(data)
        machines.append(machine)
    for machine in machines:
        assert judged(machine, tmp_path, trusted).cpu.product == machine.chip.product


def test_platforms_of_both_authorities_have_files_of_their_own(start, tmp_path):
    service = start(gpus=0)
    fetch(service, tmp_path)
    intel = tdx.intel()
    processor = Authority("Intel SGX PCK Processor CA", intel.root, path_length=0)
    service.machine.platform = tdx.platform(issuer=processor)
    chain = bundle(processor, intel.root)
    answer = (200, {"SGX-PCK-CRL-Issuer-Chain": percent_encode(chain)}, processor.crl())
    service.answers["/sgx/certification/v4/pckcrl"] = [answer]
    (document,) = fetch(service, tmp_path)
    assert document.name == TDX.replace(".json", "-processor.json")
    assert service.queries["/sgx/certification/v4/pckcrl"]["ca"] == ["processor"]
    service.machine.collateral = None
    assert judged(service.machine, tmp_path)


@pytest.mark.parametrize(("place", "umask"), [(".", 0o002), ("ocsp", 0o002), (TDX, 0o002), (TDX, 0)])
def test_collateral_that_another_user_may_replace_is_refused(start, tmp_path, place, umask):
    folder = tmp_path / "new" / "collateral"
    mask = os.umask(umask)  # 002 is that of systems whose users have groups of their own
    try:
        service = start()
        fetch(service, folder)
    finally:
        os.umask(mask)
    assert judged(service.machine, folder)
    folder.joinpath(place).chmod(0o777)
    with pytest.raises(fastrack.KeyPermissionError, match="may be replaced by others"):
        judged(service.machine, folder)


DAMAGED = {
    TDX: b"{",
    "ocsp/unknown.der": b"<html>",
    "rim/unknown.xml": b"<rim/>",
    "crl-Milan.der": b"0",
    "cert_chain-Milan.pem": b"-----BEGIN",
    "vcek-00.der": b"0",
}


@pytest.mark.slow
def test_a_damaged_file_of_the_owner_is_told_with_its_name(start, tmp_path):
    service = start()
    for name, content in DAMAGED.items():
        folder = tmp_path / name.replace("/", " ")
        fetch(service, folder)
        _device_collateral.check_folder(folder)
        (folder / name).write_bytes(content)
        with pytest.raises(_errors.CollateralFileError, match=f"{name}.*Fetch it again, or remove it"):
            _device_collateral.check_folder(folder)


def test_the_list_of_providers_keys_is_no_damaged_certificate(tmp_path):
    report = attest.parse_snp_report(snp.report(snp.chip(is_vlek=True)))
    ark = snp.amd("Milan").ark
    tmp_path.joinpath(snp_files(report, attest.SnpProduct.MILAN)["crl"]).write_bytes(ark.crl())
    _device_collateral.check_folder(tmp_path)


@pytest.mark.parametrize("name", [TDX, "ocsp/unknown.der", "rim/unknown.xml"])
def test_a_machine_is_not_told_of_what_is_damaged_on_the_owners_side(start, tmp_path, name):
    service = start()
    folder = tmp_path / "collateral"
    fetch(service, folder)
    (folder / name).write_bytes(b"{")
    settings = Settings(attest.Policy.from_toml(policy(1)), collateral=folder, roots=roots(), clock=lambda: NOW)
    ledger = Ledger(tmp_path / "broker.db")
    broker = Broker(settings, fastrack.KeyRing([fastrack.Key.generate()]), Signer.generate(), ledger)
    pending = attest.make_offer(broker.make_challenge(), service.machine)
    with pytest.raises(_errors.CollateralFileError) as caught:
        broker.answer(pending.to_bytes(), "127.0.0.1")
    answer = _refuse(caught.value)
    assert (answer.status, str(folder) in str(answer.members)) == (500, False)
    assert str(folder / name) in read_log(tmp_path / "broker.db")[-1].details["reason"]


@pytest.mark.slow
def test_an_answer_that_drips_ends_with_the_time():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                for byte in itertools.chain(b"HTTP/1.1 200 OK\r\nX: ", itertools.repeat(120)):
                    connection.send(bytes([byte]))
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        begin = time.monotonic()
        with pytest.raises(OSError, match="too slowly"):
            clients.Client(seconds=0.5).ask(f"http://127.0.0.1:{server.getsockname()[1]}/", limit=100)
        assert time.monotonic() - begin < 10  # a header may have 65,536 bytes


def test_a_service_that_is_busy_is_asked_again_as_it_wants(start, tmp_path, waits):
    service = start("snp", gpus=0)
    chip = AMD + snp.CHIP_ID.hex()
    service.answers[chip] = [(429, {"Retry-After": "7"}, b""), (503, {}, b""), (500, {}, b"")]
    fetch(service, tmp_path)
    assert service.asked[chip] == 4
    assert 7 <= waits[0] <= 30
    assert all(0 < wait <= 2 for wait in waits[1:])


def test_a_service_that_stays_busy_ends_the_wait_with_words(start, tmp_path, waits):
    service = start("snp", gpus=0)
    chip = AMD + snp.CHIP_ID.hex()
    service.answers[chip] = [(429, {}, b"")] * 5
    with pytest.raises(OSError, match=r"429.*Try again in an hour"):
        fetch(service, tmp_path)
    assert service.asked[chip] == 5
    service.answers[chip] = [(429, {"Retry-After": "3600"}, b"")]
    service.asked.clear()
    with pytest.raises(OSError, match="wait for 3600 seconds"):
        fetch(service, tmp_path)
    assert service.asked[chip] == 1  # an hour is more than a command waits
    assert max(waits) < 60


def test_what_kds_has_nothing_about_is_said_before_it_is_asked(start, tmp_path):
    service = start("snp", gpus=0)
    machine = service.machine
    options = {"services": service.services, "roots": roots(), "now": NOW}
    evidence = attest.MachineEvidence(attest.SnpEvidence(snp.report(machine.chip, version=2)))
    with pytest.raises(AttestationError, match="--product"):
        list(attest.fetch_collateral(evidence, tmp_path, **options))
    assert not service.asked
    evidence = attest.MachineEvidence(attest.SnpEvidence(snp.report(machine.chip, chip_id=bytes(64))))
    documents = list(attest.fetch_collateral(evidence, tmp_path, **options))
    assert [document.name for document in documents] == [
        "cert_chain-Milan.pem",
        "crl-Milan.der",
    ]


def test_a_masked_machine_is_verified_with_the_owners_folder_and_the_leaf_of_its_host(start, tmp_path):
    service = start("snp", gpus=0)
    machine = service.machine
    bare = attest.SnpEvidence(snp.report(machine.chip, chip_id=b""))
    options = {"services": service.services, "roots": roots(), "now": NOW}
    list(attest.fetch_collateral(attest.MachineEvidence(bare), tmp_path, **options))
    machine.prove = lambda data: attest.SnpEvidence(
        snp.report(machine.chip, report_data=data, chip_id=b""), machine.chip.leaf
    )
    verified = judged(machine, tmp_path).cpu
    assert (verified.chip_id, verified.revocation_checked_at is None) == (snp.CHIP_ID, False)
    machine.prove = lambda data: attest.SnpEvidence(snp.report(machine.chip, report_data=data, chip_id=b""))
    with pytest.raises(AttestationError, match="AMD certificate"):
        judged(machine, tmp_path)


def test_a_fetch_that_got_no_list_leaves_none_to_the_machine(start, tmp_path):
    service = start("snp", gpus=0)
    service.answers[f"{AMD}crl"] = [(404, {}, b"")] * 9
    with pytest.raises(OSError, match="404"):
        fetch(service, tmp_path)
    assert [path.name for path in tmp_path.glob("cert_chain*")]
    with pytest.raises(AttestationError, match=r"revocation.*expected a check"):
        judged(service.machine, tmp_path)


def test_evidence_that_is_not_genuine_asks_for_nothing(start, tmp_path):
    service = start(gpus=0)
    quote = bytearray(service.machine.prove(bytes(64)).quote)
    quote[200] ^= 1
    evidence = attest.MachineEvidence(attest.TdxEvidence(bytes(quote)))
    with pytest.raises(AttestationError):
        list(attest.fetch_collateral(evidence, tmp_path, services=service.services, roots=roots(), now=NOW))
    assert not service.asked


def test_addresses_without_tls_or_with_a_password_are_refused(tmp_path):
    evidence = attest.MachineEvidence(Machine("tdx", 0).prove(bytes(64)))
    for address, text in (("http://pccs.example", "https://HOST"), ("https://me:hunter2@pccs.example", "password")):
        services = attest.CollateralServices(intel=address)
        with pytest.raises(ValueError, match=text) as caught:
            list(attest.fetch_collateral(evidence, tmp_path, services=services, roots=roots(), now=NOW))
        assert "hunter2" not in str(caught.value)


def test_recorded_answers_of_intel_become_collateral_that_verifies(start, tmp_path, evidence):
    folder = evidence / "wire" / "intel"
    routes = json.loads((folder / "routes.json").read_text())
    recorded = {route["path"].partition("?")[0]: route for route in routes if route["set"] == "dcap-qvl uptodate"}
    if not recorded:
        pytest.skip("no recorded answers")
    service = start(gpus=0)
    for path, route in recorded.items():
        service.answers[path] = [(route["status"], route["headers"], (folder / route["body"]).read_bytes())]
    quote = (folder / "dcap_qvl_uptodate" / "quote.bin").read_bytes()
    now = NOW.replace(year=2025, month=6, day=25)
    given = attest.MachineEvidence(attest.TdxEvidence(quote))
    (document,) = attest.fetch_collateral(given, tmp_path, services=service.services, now=now)
    found = attest.TdxCollateral.from_json(Path(tmp_path / document.name).read_bytes())
    assert attest.verify_tdx_quote(quote, found, now=now).tcb.evaluation_number == 17


def test_recorded_answers_of_amd_become_certificates_that_verify(start, tmp_path, evidence):
    folder = evidence / "wire" / "amd"
    if not (folder / "routes.json").exists():
        pytest.skip("no recorded answers")
    service = start("snp", gpus=0)
    for route in json.loads((folder / "routes.json").read_text()):
        content = (folder / route["body"]).read_bytes()
        service.answers.setdefault(route["path"].partition("?")[0], []).append((200, route["headers"], content))
    report = (folder / "genoa" / "hcl_report_azure.bin").read_bytes()[32 : 32 + 1184]
    given = attest.MachineEvidence(attest.SnpEvidence(report, b"", b""))
    now = NOW.replace(year=2025, month=7, day=1)
    documents = attest.fetch_collateral(given, tmp_path, services=service.services, now=now, product="Genoa")
    assert [document.name for document in documents] == [
        "cert_chain-Genoa.pem",
        "vcek-c70912d8d216bd3f-10-0-23-84.der",
        "crl-Genoa.der",
    ]
