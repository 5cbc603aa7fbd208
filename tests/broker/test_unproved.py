"""A broker's work for machines that have proved nothing: counted before it is done, and none of it twice."""

import tracemalloc
from functools import partial

import pytest
from helpers.foundry import nvidia, tdx
from helpers.foundry.authority import NOW
from helpers.foundry.machine import Machine, policy, roots

import fastrack
from fastrack import AttestationError, FormatError, attest
from fastrack.attest import _device_collateral
from fastrack.attest._broker.ledger import ChallengeError, Ledger, read_log
from fastrack.attest._broker.service import Broker, Settings
from fastrack.grants import Signer

_ADDRESS = "192.0.2.1"
_UNITS = {"lists": b"[],", "objects": b"{},", "texts": b'"",', "floats": b"1e9,", "deep": b"["}


@pytest.fixture
def folder(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def open_broker(folder):
    ledgers = []

    def begin(*keys, signer=None, **settings):
        ledgers.append(Ledger(folder / "broker.db"))
        given = Settings(attest.Policy.from_toml(policy(1)), clock=lambda: NOW, roots=roots(), **settings)
        ring = fastrack.KeyRing(list(keys) or fastrack.Key.generate())
        return Broker(given, ring, signer or Signer.generate(), ledgers[-1])

    yield begin
    for ledger in ledgers:
        ledger.close()


def peak_of_refusal(broker, body):
    tracemalloc.start()
    try:
        broker.answer(body, _ADDRESS)
    except (FormatError, AttestationError) as error:
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()
    raise AssertionError("it was answered")


def events(folder):
    return [entry.event for entry in read_log(folder / "broker.db")]


@pytest.mark.parametrize("unit", _UNITS.values(), ids=_UNITS)
def test_an_offer_of_tiny_values_is_refused_in_little_memory_and_uses_no_challenge(open_broker, folder, unit):
    broker = open_broker()
    challenge = broker.make_challenge()
    body = b'{"challenge":"%s","cpu":[' % challenge.id.encode() + unit * ((1 << 20) // len(unit)) + b"0]}\n"
    peak, error = peak_of_refusal(broker, body)
    assert isinstance(error, FormatError)
    assert peak <= 4 * len(body)
    broker.answer(attest.make_offer(challenge, Machine()).to_bytes(), _ADDRESS)
    assert events(folder) == ["started", "offered", "granted"]


def test_an_offer_that_is_none_uses_its_challenge_up_before_it_is_parsed(open_broker, folder):
    broker = open_broker()
    challenge = broker.make_challenge()
    body = b'{"challenge":"%s","cpu":[' % challenge.id.encode() + b"[]," * 1000 + b"0]}\n"
    assert isinstance(peak_of_refusal(broker, body)[1], FormatError)
    assert isinstance(peak_of_refusal(broker, body)[1], ChallengeError)
    assert events(folder) == ["started", "offered", "refused", "refused"]


def unproved(manifest):
    """Return what collects the evidence of a machine whose certificates are its own, with a manifest."""
    fake = nvidia.hopper()

    def collect(binding):
        report = nvidia.report(fake, nonce=binding.device_nonce(0))
        device = attest.DeviceEvidence(report, fake.pem, (attest.ManifestEvidence(manifest),))
        body = tdx.td_report(report_data=binding.report_data([device]))
        return attest.MachineEvidence(attest.TdxEvidence(tdx.quote(tdx.platform(), body=body)), (device,))

    return collect


def test_no_manifest_is_opened_for_a_machine_whose_cpu_has_proved_nothing(open_broker, folder, monkeypatch):
    opened = []
    monkeypatch.setattr(_device_collateral, "open_signed", lambda data, **_: opened.append(data))
    (folder / "collateral").mkdir(mode=0o755)
    broker = open_broker(collateral=folder / "collateral")
    offer = attest.make_offer(broker.make_challenge(), unproved(b"<a/>")).to_bytes()
    with pytest.raises(AttestationError):
        broker.answer(offer, _ADDRESS)
    with pytest.raises(AttestationError):
        attest.verify_evidence(attest.Offer.from_bytes(offer).evidence, now=NOW, collateral=folder / "collateral")
    assert not opened


def test_a_manifest_of_many_namespaces_takes_little_memory_of_a_broker(open_broker, folder):
    declared = " ".join(f'xmlns:p{number}="u"' for number in range(3750))
    manifest = (f"<r {declared}>" + '<a xmlns:z="q"/>' * 3750 + "</r>").encode()
    (folder / "collateral").mkdir(mode=0o755)
    broker = open_broker(collateral=folder / "collateral")
    offer = attest.make_offer(broker.make_challenge(), unproved(manifest)).to_bytes()
    assert peak_of_refusal(broker, offer)[0] <= 16 * len(offer) + (1 << 20)


def test_an_offer_names_few_manifests_for_a_device():
    challenge = attest.Challenge.generate(now=NOW)

    def collect(count, _):
        manifests = tuple(attest.ManifestEvidence(b"%d" % number) for number in range(count))
        devices = (attest.DeviceEvidence(b"report", b"chain", manifests),) * 32
        return attest.MachineEvidence(attest.TdxEvidence(b"quote"), devices)

    few, many = (attest.make_offer(challenge, partial(collect, count)).to_bytes() for count in (4, 5))
    assert len(attest.Offer.from_bytes(few).evidence.devices) == 32
    with pytest.raises(FormatError, match="expected at most 4 items"):
        attest.Offer.from_bytes(many)


def identify(count):
    return tuple(f"{number:032x}" for number in range(count))


@pytest.mark.slow
def test_a_broker_of_more_files_or_keys_than_a_machine_can_read_does_not_begin(open_broker, folder):
    for count in (1400, 2000):
        with pytest.raises(ValueError, match=r"expected as many keys|expected files="):
            open_broker(files=identify(count))
    many = [fastrack.Key.generate() for _ in range(450)]
    with pytest.raises(ValueError, match="expected as many keys and files as a machine reads, got 450 keys for all"):
        open_broker(*many, signer=Signer.generate("ML-DSA-65"))
    assert not events(folder)


def test_a_machine_reads_the_grants_of_as_many_files_as_a_broker_takes(open_broker):
    signer = Signer.generate("ML-DSA-65")
    broker = open_broker(files=identify(1250), signer=signer)
    pending = attest.make_offer(broker.make_challenge(), Machine())
    _, grants, _ = broker.answer(pending.to_bytes(), _ADDRESS)
    assert len(pending.unlock(grants, owner=signer.verifier, now=NOW).first.files) == 1250
