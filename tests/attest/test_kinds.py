"""A kind of evidence of CPUs is one file and one line: the toy of `helpers/toy_kind` goes all the way of a real one."""

import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from helpers import toy_kind
from helpers.cases import each
from helpers.foundry.authority import NOW

import fastrack
from fastrack import AttestationError, FormatError, attest
from fastrack._cli.machine import read_tee
from fastrack._cli.proofs import read_proofs
from fastrack._devices.graphics import Graphics
from fastrack.attest import _kinds, _verify_offer
from fastrack.grants import Signer

CHALLENGE = attest.Challenge.generate(now=NOW)
TEXT = "version = 1\n[cpu.toy]\nmodels = ['bear']"


@pytest.fixture(autouse=True)
def _kind(monkeypatch):
    monkeypatch.setitem(_kinds.CPU_KINDS, "toy", toy_kind.TOY)  # the line


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes an offer, as on a machine whose kernel has a driver for toys."""

    def offer(maker=toy_kind.MAKER):
        (tmp_path / "model").write_text("bear")
        entry = tmp_path / "tsm" / "exchange"
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "provider").write_text("toy_guest\n")

        def collect(binding):
            (entry / "outblob").write_bytes(toy_kind.report(binding.report_data([]), maker))
            return attest.collect_evidence(binding, root=tmp_path / "tsm", collateral=tmp_path, gpus=False)

        return attest.make_offer(CHALLENGE, collect)

    return offer


def verify(offer, text=TEXT, **options):
    return attest.verify_offer(offer, CHALLENGE, attest.Policy.from_toml(text), now=NOW, **options)


def test_a_machine_of_a_new_kind_gets_the_key(machine):
    pending = machine()
    assert attest.Offer.from_bytes(pending.to_bytes()) == pending.offer
    verified = verify(pending.to_bytes())
    assert verified.describe()["cpu"] == {"type": "toy", "model": "bear"}
    key, owner = fastrack.Key.generate(), Signer.generate()
    grants = attest.issue_grants(verified, key, signer=owner, now=NOW)
    assert pending.unlock(grants, owner=owner.verifier, now=NOW).first == key


def test_a_policy_can_be_hashed():
    text = f"{TEXT}\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = 'any'\n[gpu]\nmin_vbios = {{ hopper = '1' }}"
    assert len({attest.Policy.from_toml(text) for _ in range(2)}) == 1
    assert hash(attest.TdxPolicy(dict.fromkeys(("mrtd", "rtmr1", "rtmr2"))))


def test_what_is_wrong_with_a_new_kind_is_refused(machine):
    pending, stranger = machine(), Ed25519PrivateKey.generate()
    for field, act in {
        "kind": lambda: verify(pending.offer, "version = 1"),
        "model": lambda: verify(pending.offer, TEXT.replace("bear", "doll")),
        "root": lambda: verify(machine(stranger).offer),
        "report data": lambda: verify(replaced(pending.offer, bytes(64))),
    }.items():
        with pytest.raises(AttestationError) as error:
            act()
        assert error.value.field == field
    with pytest.raises(FormatError, match=r"cpu\.toy\.model,"):
        attest.Policy.from_toml(TEXT.replace("models", "model"))
    with pytest.raises(FormatError, match="tdx or snp or toy"):
        attest.Offer.from_bytes(pending.to_bytes().replace(b'"type":"toy"', b'"type":"joy"'))


def replaced(offer, report_data):
    cpu = toy_kind.ToyEvidence(toy_kind.report(report_data), b"bear")
    return attest.Offer(offer.challenge_id, offer.recipient, attest.MachineEvidence(cpu))


@each("name", ["gpu", "others", "check_cpu"])
def test_a_kind_may_have_the_name_of_anything_else_of_a_policy(monkeypatch, name):
    monkeypatch.setitem(_kinds.CPU_KINDS, "toy", replace(toy_kind.TOY, name=name))
    verified = toy_kind.VerifiedToy(bytes(64), "bear", NOW)
    attest.Policy(others={name: {"bear"}}).check_cpu(verified, now=NOW)
    for policy in (attest.Policy(), attest.Policy(gpu=attest.GpuPolicy())):
        with pytest.raises(AttestationError, match="kind"):
            policy.check_cpu(verified, now=NOW)


def test_an_empty_set_of_roots_trusts_none(machine):
    with pytest.raises(AttestationError, match="root"):
        verify(machine().offer, roots=attest.TrustedRoots(others={"toys": frozenset()}))
    for kind in (_kinds.TDX, _kinds.SNP):
        assert _verify_offer._roots_of(kind, attest.TrustedRoots()) == kind.roots
        assert _verify_offer._roots_of(kind, attest.TrustedRoots(**{kind.vendor: frozenset()})) == frozenset()


def test_the_commands_know_a_new_kind(machine, tmp_path, monkeypatch, capfd):
    from fastrack._cli import main

    path = tmp_path / "offer.json"
    path.write_bytes(machine().to_bytes())
    monkeypatch.setattr("sys.argv", ["fastrack", "attest", "show", str(path), "--json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capfd.readouterr().out)["cpu"] == {"type": "toy"}
    folder = tmp_path / "sys/kernel/config/tsm/report/doctor"
    folder.mkdir(parents=True)
    (folder / "provider").write_text("toy_guest\n")
    (tmp_path / "dev/toy_guest").mkdir(parents=True)
    assert read_tee(tmp_path).kind == "A toy"
    (proof,) = read_proofs(read_tee(tmp_path), Graphics(absent="no driver"), tmp_path)
    assert str(proof) == "can give a toy report"


def test_evidence_that_is_of_no_kind_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="TdxEvidence or SnpEvidence or ToyEvidence, got bytes"):
        attest.make_offer(CHALLENGE, lambda _: attest.MachineEvidence(b"evidence")).to_bytes()
