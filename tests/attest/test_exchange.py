"""The exchange between an owner and a machine, and its documents."""

import copy
import json
import pickle
import re
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import starmap

import pytest
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.foundry import nvidia, tdx
from helpers.foundry.authority import NOW, is_refused
from helpers.foundry.machine import Machine, canonical, change, machine, policy, roots, small, spots

import fastrack
from fastrack import AttestationError, FormatError, attest
from fastrack._devices import confidential
from fastrack.grants import Grants, Identity, Recipient, Signer

MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


@cache
def made(of=None):
    """Return a challenge, and the offer of a machine for it."""
    challenge = attest.Challenge.generate(now=NOW)
    return challenge, attest.make_offer(challenge, of or machine()).offer


def verify(offer, challenge, *, gpus=1, now=NOW, text="", **options):
    return attest.verify_offer(offer, challenge, parsed(policy(gpus) + text), now=now, **{"roots": roots(), **options})


@cache
def parsed(text):
    return attest.Policy.from_toml(text)


# The whole way.


@each("gpus", [0, 1, 8])
@each("cpu", ["tdx", "snp"])
def test_a_machine_gets_the_keys(cpu, gpus):
    challenge = attest.Challenge.from_bytes(attest.Challenge.generate(now=NOW).to_bytes())
    pending = attest.make_offer(challenge, machine(cpu, gpus))
    verified = verify(pending.to_bytes(), challenge, gpus=gpus)
    assert verified.recipient == pending.offer.recipient
    assert len(verified.devices) == gpus
    assert verified.valid_until == challenge.expires
    assert verified.describe()["cpu"]["type"] == cpu
    assert json.dumps(verified.describe())
    keys, owner = [fastrack.Key.generate() for _ in range(3)], Signer.generate()
    grants = attest.issue_grants(verified, keys, signer=owner, now=NOW)
    ring = pending.unlock(grants, owner=[Signer.generate().verifier, owner.verifier], now=NOW)
    assert list(ring) == keys


def test_keys_may_be_restricted_to_files_and_come_from_a_provider():
    challenge, owner, key = attest.Challenge.generate(now=NOW), Signer.generate("ML-DSA-65"), fastrack.Key.generate()
    pending = attest.make_offer(challenge, machine())
    ring = fastrack.KeyRing(Provider(key))
    grants = attest.issue_grants(verify(pending.offer, challenge), ring, signer=owner, now=NOW, files=["ab" * 16])
    found = pending.unlock(grants, owner=owner.verifier, now=NOW).first
    assert (found, found.files) == (key, frozenset({"ab" * 16}))


class Provider:
    def __init__(self, key):
        self._key = key

    def get_key(self, key_id):
        return self._key

    def get_sealing_key(self):
        return self._key


@pytest.mark.parametrize("word", ["confidential", "proved"])
def test_a_policy_may_have_keys_open_on_confidential_gpus_only_or_on_those_of_the_offer(word, monkeypatch):
    monkeypatch.setattr(confidential, "_process", confidential._Process())
    challenge, key, owner = attest.Challenge.generate(now=NOW), fastrack.Key.generate(), Signer.generate()
    pending = attest.make_offer(challenge, machine("tdx", 2))
    rules = attest.Policy.from_toml(policy(2) + f"require = '{word}'\n")
    verified = attest.verify_offer(pending.offer, challenge, rules, now=NOW, roots=roots())
    grants = attest.issue_grants(verified, key, signer=owner, now=NOW)
    ring = pending.unlock(grants, owner=owner.verifier, now=NOW)
    chips = tuple(sorted(device.report.chip_id for device in verified.devices)) if word == "proved" else None
    assert (ring.first._bound, confidential._process.keys) == ((chips,), {key.id: chips})
    with pytest.raises(FormatError, match=r"'confidential' or 'proved' as gpu\.require"):
        attest.Policy.from_toml(policy(2) + "require = 'yes'\n")


def test_collateral_may_come_from_the_owner():
    of = copy.copy(machine())
    collateral, of.collateral = of.collateral, None
    challenge, made_offer = made(of)
    offer = made_offer.to_bytes()
    with pytest.raises(AttestationError, match="TDX collateral") as caught:
        verify(offer, challenge)
    assert caught.value.found == "none"
    assert re.search(r"command line as --collateral.* collateral=.*machine", str(caught.value))
    assert verify(offer, challenge, collateral=collateral).verified_at == NOW


def with_collateral(**options):
    return attest.TdxCollateral(**tdx.collateral(**options))


def test_the_owners_collateral_comes_before_the_machines():
    challenge, offer = made()
    assert verify(offer, challenge)
    newer = tdx.tcb_info(tcbEvaluationDataNumber=18)
    own = with_collateral(info=newer, identity=tdx.qe_identity(tcbEvaluationDataNumber=18))
    assert verify(offer, challenge, collateral=own).cpu.tcb.evaluation_number == 18
    revoking = with_collateral(pck_crl=tdx.intel().platform_ca.crl([machine().platform.pck]))
    assert "revo" in refuse(offer, challenge, collateral=revoking).evidence
    outdated = tdx.tcb_info(tcbEvaluationDataNumber=18, levels=[tdx.tcb_level(status="OutOfDate")])
    assert refuse(offer, challenge, collateral=with_collateral(info=outdated)).field == "TCB status"
    other = with_collateral(info=tdx.tcb_info(fmspc="00" * 6))
    assert refuse(offer, challenge, collateral=other).field == "fmspc"


def test_collateral_of_the_machine_has_an_age_and_a_number():
    for info, field in (
        (tdx.tcb_info(start=NOW - 31 * DAY), "age of the collateral"),
        (tdx.tcb_info(tcbEvaluationDataNumber=16), "evaluation number"),
    ):
        of = copy.copy(machine())
        of.collateral = with_collateral(info=info)
        assert refuse(*reversed(made(of))).field == field


def test_what_was_verified_shows_the_registers_that_a_policy_lists():
    cpu = verify(*reversed(made())).describe()["cpu"]
    assert [cpu[f"rtmr{number}"] for number in range(4)] == [f"6{number}" * 48 for number in range(4)]


def test_a_machine_in_protected_pcie_mode_gets_the_keys_with_its_switches_alone():
    of = Machine("tdx", 0)
    made_devices = nvidia.protected()
    text = "[gpu]\nmodes = ['PPCIE']\nrequire_manifests = false\nrevocation = 'none'\n"

    def collect(devices, binding):
        reports = [
            nvidia.report(device, nonce=binding.device_nonce(index), fields=fields)
            for index, (device, fields) in enumerate(devices)
        ]
        evidence = tuple(starmap(attest.DeviceEvidence, zip(reports, (one.pem for one, _ in devices), strict=True)))
        return attest.MachineEvidence(of.prove(binding.report_data(evidence)), evidence)

    def exchange(devices, **options):
        challenge = attest.Challenge.generate(now=NOW)
        offer = attest.make_offer(challenge, partial(collect, devices)).to_bytes()
        return verify(offer, challenge, gpus=0, **options)

    assert len(exchange(made_devices, text=text).devices) == 12
    foreign = nvidia.switch(), nvidia.switch_fields()
    for devices in (made_devices[:8], made_devices[4:], [*made_devices[:11], foreign]):
        with pytest.raises(AttestationError):
            exchange(devices, text=text)
    with pytest.raises(AttestationError, match=r"gpu\.modes"):
        exchange(made_devices, text=text.replace("modes = ['PPCIE']", ""))


def test_manifests_that_devices_have_in_common_are_sent_once():
    challenge = attest.Challenge.generate(now=NOW)
    document = json.loads(attest.make_offer(challenge, machine("tdx", 8)).to_bytes())
    assert len(document["manifests"]) == 2
    assert [device["manifests"] for device in document["devices"]] == [[0, 1]] * 8
    document = json.loads(attest.make_offer(challenge, Machine("tdx", 2, own_manifests=True)).to_bytes())
    assert [device["manifests"] for device in document["devices"]] == [[0, 1], [2, 3]]
    of = Machine("tdx", 2)
    of.manifests[1] = of.manifests[1][::-1]
    offer = attest.make_offer(challenge, of)
    document = json.loads(offer.to_bytes())
    assert [device["manifests"] for device in document["devices"]] == [[0, 1], [1, 0]]
    assert verify(offer.to_bytes(), challenge, gpus=2)


def test_an_offer_without_manifests_is_accepted_if_the_policy_says_so():
    of = copy.copy(machine())
    of.manifests = [()]
    challenge, offer = made(of)
    with pytest.raises(AttestationError, match="require_manifests"):
        verify(offer, challenge)
    assert isinstance(verify(offer, challenge, text="require_manifests = false").devices[0], attest.VerifiedGpuReport)


def test_a_driver_without_a_manifest_may_be_pinned_and_the_vbios_is_still_compared():
    values = ", ".join(f"{index} = '{value.hex()}'" for index, value in enumerate(nvidia.MEASUREMENTS))
    name = f"GH100 {nvidia.DRIVER} {nvidia.VBIOS_TEXT}"
    pins = f"measurements = {{ '{name}' = {{ until = '2099-01-31', digests = {{ {values} }} }} }}\n"
    both = machine().manifests[0]
    (vbios,) = (one for one in both if attest.parse_rim(one.data).version == nvidia.VBIOS_TEXT)

    def offered(*manifests):
        of = copy.copy(machine())
        of.manifests = [manifests]
        return reversed(made(of))

    assert refuse(*offered(vbios)).field == "measurements"
    found = verify(*offered(vbios), text=pins)
    assert (found.pinned, found.describe()["devices"][0]["measres"]) == ({found.devices[0].chip_id}, "pinned")
    assert verify(*offered(), text=pins).pinned == found.pinned
    others = nvidia.vbios_rim([b"x" * 48] * 64)
    assert "reference values" in refuse(*offered(replace(vbios, data=others)), text=pins).wanted
    whole = verify(*offered(*both), text=pins.replace(values[5:11], "f" * 6))  # which count for nothing
    assert (whole.pinned, whole.describe()["devices"][0]["measres"]) == (frozenset(), "success")


def test_a_policy_with_gpus_needs_the_roots_of_two_vendors():
    challenge, offer = made()
    assert verify(offer, challenge)
    for vendor in ("intel", "nvidia", "nvidia_rim"):
        assert "pinned" in str(refuse(offer, challenge, roots=replace(roots(), **{vendor: frozenset()})).wanted)
    alone = made(machine("tdx", 0))
    assert refuse(*reversed(alone)).field == "number of GPUs"


# The binding.


def test_the_binding_is_what_it_is_said_to_be():
    from hashlib import sha256, sha384, sha512

    challenge, offer = made()
    text, public = challenge.to_bytes(), offer.recipient.public
    assert len(public) == 1216

    def frame(*parts):
        return b"".join(len(part).to_bytes(4, "big") + part for part in parts)

    device = offer.evidence.devices[0]
    nonce = sha256(b"fastrack/gpu@1" + frame(text, public, (0).to_bytes(4, "big"))).digest()
    assert attest.parse_gpu_report(device.report).nonce == nonce

    def responses(items):
        return b"" if items is None else frame(frame(*items))

    manifests = frame(*(frame(one.data, responses(one.ocsp)) for one in device.manifests))
    inner = frame(device.report, device.chain, responses(device.ocsp), manifests)
    digest = sha384(b"fastrack/gpus@1" + frame(inner)).digest()
    wanted = sha512(b"fastrack/offer@1" + frame(text, public, digest)).digest()
    assert attest.parse_tdx_quote(offer.evidence.cpu.quote).report.report_data == wanted


def test_nonces_differ_by_challenge_key_and_index():
    challenges = [attest.Challenge.generate(now=NOW) for _ in range(2)]
    challenges.append(replace(challenges[0], expires=NOW + MINUTE))
    recipients = [Identity.generate().recipient for _ in range(2)]
    bindings = [attest.OfferBinding(one, other) for one in challenges for other in recipients]
    assert len({binding.device_nonce(index) for binding in bindings for index in range(8)}) == 48
    first, second = attest.DeviceEvidence(b"ab", b"c"), attest.DeviceEvidence(b"a", b"bc")
    lists = [[], [first], [second], [first, second], [replace(first, ocsp=())], [replace(first, ocsp=(b"",))]]
    manifest = attest.ManifestEvidence(b"d")
    manifests = (manifest,), (manifest, manifest), (replace(manifest, ocsp=()),)
    lists += [[replace(first, manifests=some)] for some in manifests]
    assert len({binding.report_data(some) for binding in bindings for some in lists}) == 54


# Wrong offers.


def refuse(offer, challenge, **options):
    with pytest.raises(AttestationError) as caught:
        verify(offer, challenge, **options)
    error = caught.value
    assert error.evidence
    assert error.field
    assert error.wanted is not None
    assert error.found is not None
    return error


def test_an_offer_for_another_challenge_is_refused():
    challenge, offer = made()
    other = attest.Challenge.generate(now=NOW)
    assert refuse(offer, other).field == "challenge"
    for forged in (replace(challenge, nonce=bytes(32)), replace(challenge, expires=NOW + MINUTE)):
        assert refuse(offer, forged).field == "report data"
    assert refuse(replace(offer, challenge_id=other.id), other).field == "report data"


@pytest.mark.parametrize("late", [timedelta(0), MINUTE])
def test_an_offer_after_the_end_of_the_challenge_is_refused(late):
    challenge, offer = made()
    assert verify(offer, challenge, now=challenge.expires - timedelta(seconds=1))
    assert refuse(offer, challenge, now=challenge.expires + late).field == "challenge"


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_an_offer_for_another_key_is_refused(cpu):
    challenge, offer = made(machine(cpu))
    error = refuse(replace(offer, recipient=Identity.generate().recipient), challenge)
    assert (error.evidence, error.field) == ("TDX quote" if cpu == "tdx" else "SNP report", "report data")


def test_an_offer_for_a_key_of_low_order_is_refused():
    challenge, recipient = attest.Challenge.generate(now=NOW), Identity.generate().recipient
    weak = Recipient(recipient.algorithm, recipient.public[:-32] + bytes(32))
    offer = attest.Offer(challenge.id, weak, machine().collect(attest.OfferBinding(challenge, weak)))
    assert refuse(offer.to_bytes(), challenge).field == "public key"


@each("kind", ["dropped", "twice", "swapped", "another chain", "no responses", "no manifest"])
def test_devices_that_the_cpu_does_not_vouch_for_are_refused(kind):
    challenge, offer = made(machine("tdx", 8))
    devices = list(offer.evidence.devices)
    match kind:
        case "dropped":
            devices = devices[:7]
        case "twice":
            devices[1] = devices[0]
        case "swapped":
            devices[:2] = devices[1::-1]
        case "no responses":
            devices[0] = replace(devices[0], ocsp=None)
        case "no manifest":
            devices[0] = replace(devices[0], manifests=())
        case _:
            devices[0] = replace(devices[0], chain=devices[1].chain)
    changed = replace(offer, evidence=replace(offer.evidence, devices=tuple(devices)))
    assert refuse(changed, challenge, gpus=8).field == "report data"


class Liar(Machine):
    """A machine whose CPU vouches for devices that answered something else."""

    def collect(self, binding):
        devices = self.lie(super().collect(binding).devices, binding)
        return attest.MachineEvidence(self.prove(binding.report_data(devices)), devices)


class Swapped(Liar):
    def lie(self, devices, binding):
        return (devices[1], devices[0])


class Twice(Liar):
    def lie(self, devices, binding):
        report = nvidia.report(self.devices[0], nonce=binding.device_nonce(1))
        return (devices[0], replace(devices[0], report=report))


@each(("liar", "wrong"), [(Swapped, ("GPU 0 report", "nonce")), (Twice, ("GPU 1 report", "chip id"))])
def test_a_device_that_answers_for_another_one_is_refused(liar, wrong):
    error = refuse(*reversed(made(liar("tdx", 2))), gpus=2)
    assert (error.evidence, error.field) == wrong


def test_a_machine_that_the_policy_does_not_mean_is_refused():
    challenge, offer = made()
    for text in ("version = 1\n[gpu]\nrevocation = 'none'", policy(0)):
        with pytest.raises(AttestationError):
            attest.verify_offer(offer, challenge, attest.Policy.from_toml(text), now=NOW, roots=roots())
    assert refuse(offer, challenge, gpus=8).field == "number of GPUs"
    assert refuse(offer, challenge, roots=attest.TrustedRoots()).field == "root"
    with pytest.raises(TypeError, match="expected an Offer or its bytes"):
        verify("offer", challenge)
    with pytest.raises(ValueError, match="time zone"):
        verify(offer, challenge, now=NOW.replace(tzinfo=None))


# Flipped bytes. A document has one form for each content, the binding covers everything but the CPU's evidence, and the
# tests of TDX and SEV-SNP flip each byte of that. So a few flips show that the parts are connected.


def flipped(data, step=1, bit=0x01):
    for index in range(0, len(data), step):
        yield index, data[:index] + bytes([data[index] ^ bit]) + data[index + 1 :]


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
@pytest.mark.slow
def test_a_document_with_a_flipped_bit_is_malformed_or_another_offer(cpu):
    offer = short_offer(cpu)
    data = offer.to_bytes()
    other = data.index(b'"cpu":'), data.index(b'"devices":')  # where the offer of another CPU differs
    for bit in (0x01, 0x04, 0x20, 0x80):
        for index, changed in flipped(data, bit=bit):
            if cpu == "snp" and not other[0] <= index < other[1]:
                continue
            try:
                found = attest.Offer.from_bytes(changed)
            except FormatError:
                continue
            assert found != offer, data[max(index - 30, 0) : index + 10]


def short_offer(cpu):
    """Return an offer with every member, in which evidence has few bytes."""
    responses = (b"first", b"second")
    devices = [
        attest.DeviceEvidence(b"report", b"chain", (attest.ManifestEvidence(b"driver", responses),), responses),
        attest.DeviceEvidence(b"other", b"chain", (attest.ManifestEvidence(b"driver"),)),
    ]
    collateral = attest.TdxCollateral(**{name: name.encode() for name in tdx.collateral()})
    proof = (
        attest.TdxEvidence(b"quote", collateral) if cpu == "tdx" else attest.SnpEvidence(b"report", b"a", b"b", b"c")
    )
    challenge, offer = made(small())
    return attest.Offer(challenge.id, offer.recipient, attest.MachineEvidence(proof, tuple(devices)))


@pytest.mark.slow
def test_each_byte_that_the_binding_covers_changes_it():
    challenge, offer = made(small())
    [device] = offer.evidence.devices
    manifest = device.manifests[0]
    binding = attest.OfferBinding(challenge, offer.recipient)
    found = [binding.report_data([device])]
    found += [binding.report_data([replace(device, report=one)]) for _, one in flipped(device.report)]
    found += [binding.report_data([replace(device, chain=one)]) for _, one in flipped(device.chain)]
    found += [binding.report_data([replace(device, ocsp=ocsp)]) for ocsp in with_flips(device.ocsp)]
    manifests = [replace(manifest, data=one) for _, one in flipped(manifest.data)]
    manifests += [replace(manifest, ocsp=ocsp) for ocsp in with_flips(manifest.ocsp)]
    found += [binding.report_data([replace(device, manifests=(one,))]) for one in manifests]
    challenges = [replace(challenge, nonce=one) for _, one in flipped(challenge.nonce)]
    bindings = [attest.OfferBinding(one, offer.recipient) for one in challenges]
    bindings += [attest.OfferBinding(challenge, one) for one in other_recipients(offer.recipient)]
    found += [one.report_data([device]) for one in bindings]
    assert len(found) > 12_000
    assert len(set(found)) == len(found)


def other_recipients(recipient):
    for _, public in flipped(recipient.public):
        with suppress(FormatError):  # which a number beyond ML-KEM's modulus raises
            yield Recipient(recipient.algorithm, public)


def with_flips(parts):
    for number, part in enumerate(parts):
        for _, one in flipped(part):
            yield (*parts[:number], one, *parts[number + 1 :])


def test_flipped_bytes_of_a_whole_offer_are_refused():
    challenge, offer = made(small())
    data = offer.to_bytes()
    assert verify(data, challenge)
    accepted = [index for index, one in flipped(data, step=97) if not is_refused(verify, one, challenge)]
    assert accepted == [], [data[index - 30 : index + 10] for index in accepted[:5]]


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_each_part_that_is_altered_is_refused(cpu):
    challenge, offer = made(machine(cpu))
    data = offer.to_bytes()
    paths = spots(json.loads(data))
    assert len(paths) > 15
    for path in paths:
        for replace_it in (alter_middle, lambda _: "AAAA"):
            assert is_refused(verify, change(data, path, replace_it), challenge), path


def alter_middle(text):
    middle = len(text) // 2
    return text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :]


def test_collateral_of_another_machine_is_refused():
    challenge, offer = made()
    other = attest.TdxCollateral(**tdx.collateral(info=tdx.tcb_info(fmspc="00" * 6)))
    cpu = replace(offer.evidence.cpu, collateral=other)
    assert refuse(replace(offer, evidence=replace(offer.evidence, cpu=cpu)), challenge)


# The documents.


WRONG_CPUS = {"type": "sgx"}, {"quote": ""}, {"quote": "A" * (1 << 17)}
WRONG_MANIFESTS = [0], [1, 0], [0, 1, 2], [0, 1, 1], [0, True], [0.0, 1]


def malformed_offers():
    document = json.loads(made()[1].to_bytes())
    cpu, (device,), public = document["cpu"], document["devices"], document["public"]
    members = {
        "more": [1],
        "version": [2, True, "1"],
        "kind": ["fastrack/challenge"],
        "challenge": ["A" * 32, 5],
        "public": [public[:-4], "*" * 1624],
        "cpu": [None, *(cpu | wrong for wrong in WRONG_CPUS)],
        "devices": [{}, [1], [device] * 33, [device | {"ocsp": ["AAAA"] * 17}]],
        "manifests": [document["manifests"] * 2],
    }
    members["devices"] += [[device | {"manifests": numbers}] for numbers in WRONG_MANIFESTS]
    made_of = {"a list": [document], "nothing": None, "without a key": {**document}}
    del made_of["without a key"]["public"]
    return made_of | {
        f"{name} {number}": document | {name: value}
        for name, values in members.items()
        for number, value in enumerate(values)
    }


@each("document", malformed_offers)
def test_a_malformed_offer_is_refused(document):
    with pytest.raises(FormatError):
        attest.Offer.from_bytes(canonical(document))


@each(
    "alter",
    [
        lambda data: data[:-1],
        lambda data: data + b"\n",
        lambda data: b" " + data,
        lambda data: data.replace(b":1", b":01"),
        lambda data: data.replace(b'"kind"', b'"kin\\u0064"'),
        lambda data: data.replace(b'{"challenge"', b'{"challenge":"","challenge"'),
        lambda data: b"[" * 100_000,
        lambda data: b"\xff" + data,
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: b"NaN\n",
        lambda data: b"",
        lambda data: data + b" " * (8 << 20),
    ],
)
def test_a_document_has_one_form(alter):
    changed = alter(made()[1].to_bytes())
    with pytest.raises(FormatError):
        attest.Offer.from_bytes(changed)


def test_base64_has_one_form():
    data = made()[1].to_bytes()
    text = json.loads(data)["cpu"]["collateral"]["tcb_info_signature"]
    assert text.endswith("==")
    other = text[:-3] + chr(ord(text[-3]) + 1) + "=="
    assert b64decode(other) == b64decode(text)
    for replace_it in (lambda _: other, lambda text: text[:-2], lambda text: f"{text[:8]}\n{text[8:]}"):
        with pytest.raises(FormatError, match="base64"):
            attest.Offer.from_bytes(change(data, ("cpu", "collateral", "tcb_info_signature"), replace_it))


@pytest.mark.parametrize("cpu", ["tdx", "snp"])
def test_documents_survive_a_round_trip(cpu):
    challenge, offer = made(machine(cpu, 8))
    assert attest.Offer.from_bytes(offer.to_bytes()) == offer
    assert attest.Challenge.from_bytes(challenge.to_bytes()) == challenge


def test_numbers_that_no_float_holds_are_refused():
    for number in ("1e999", "-1e999", "NaN", "Infinity"):
        for read in (attest.Offer.from_bytes, attest.Challenge.from_bytes):
            with pytest.raises(FormatError, match="JSON"):
                read(f'{{"version":{number}}}\n'.encode())


@each(
    "change_it",
    [
        {"nonce": b64encode(bytes(31)).decode()},
        {"id": "AB" * 16},
        {"id": "ab"},
        {"expires": "2026-06-01"},
        {"expires": "2026-13-01T00:00:00Z"},
        {"owner": "x"},
    ],
)
def test_a_malformed_challenge_is_refused(change_it):
    document = json.loads(made()[0].to_bytes())
    with pytest.raises(FormatError):
        attest.Challenge.from_bytes(canonical({**document, **change_it}))


def test_challenges_have_bounds():
    with pytest.raises(ValueError, match="time zone"):
        attest.Challenge.generate(now=NOW.replace(tzinfo=None))
    for lifetime in (timedelta(0), timedelta(days=8)):
        with pytest.raises(ValueError, match="lifetime="):
            attest.Challenge.generate(now=NOW, lifetime=lifetime)
    assert len({attest.Challenge.generate(now=NOW).nonce for _ in range(100)}) == 100


# Grants.


@pytest.fixture
def exchanged():
    """Return a pending offer, its verified form, a key and the owner's signer."""
    challenge = attest.Challenge.generate(now=NOW)
    pending = attest.make_offer(challenge, machine())
    return pending, verify(pending.offer, challenge), fastrack.Key.generate(), Signer.generate()


def test_grants_are_unlocked_once_by_the_machine_that_asked(exchanged):
    pending, verified, key, owner = exchanged
    grants = attest.issue_grants(verified, key, signer=owner, now=NOW)
    other = attest.make_offer(attest.Challenge.generate(now=NOW), machine())
    with pytest.raises(AttestationError, match="challenge"):
        other.unlock(grants, owner=owner.verifier, now=NOW)
    foreign = replace(verified, challenge_id=other.offer.challenge_id)
    with pytest.raises(fastrack.GrantError, match="was not granted to"):
        other.unlock(attest.issue_grants(foreign, key, signer=owner, now=NOW), owner=owner.verifier, now=NOW)
    with pytest.raises(fastrack.SignatureError):
        pending.unlock(grants, owner=Signer.generate().verifier, now=NOW)
    with pytest.raises(fastrack.GrantError, match="expired"):
        pending.unlock(grants, owner=owner.verifier, now=NOW + 6 * MINUTE)
    assert "waiting" in repr(pending)
    assert pending.unlock(grants, owner=owner.verifier, now=NOW).first == key
    with pytest.raises(fastrack.ClosedError, match="Make a new offer"):
        pending.unlock(grants, owner=owner.verifier, now=NOW)
    assert "done" in repr(pending)


@pytest.mark.slow
def test_each_altered_byte_of_grants_is_refused(exchanged):
    pending, verified, key, owner = exchanged
    grants = attest.issue_grants(verified, key, signer=owner, now=NOW)
    identity, signed = pending._identity, signed_parts(grants)
    for _, changed in flipped(grants):
        try:
            ring = pending.unlock(changed, owner=owner.verifier, now=NOW)
        except (FormatError, AttestationError, fastrack.SignatureError, fastrack.GrantError):
            continue
        assert (ring.first, signed_parts(changed)) == (key, signed)  # "keyid" is a hint, which no signature is over
        pending._identity = identity
    assert pending.unlock(grants, owner=owner.verifier, now=NOW).first == key


def signed_parts(grants):
    envelope = json.loads(b64decode(json.loads(grants)["grants"][0]))
    return envelope["payload"], envelope["payloadType"], envelope["signatures"][0]["sig"]


def test_grants_need_a_verified_offer_that_is_still_valid(exchanged):
    pending, verified, key, owner = exchanged
    with pytest.raises(TypeError, match="verify it first"):
        attest.issue_grants(pending.offer, key, signer=owner, now=NOW)
    for now in (NOW - MINUTE, NOW + 6 * MINUTE):
        with pytest.raises(AttestationError, match="validity"):
            attest.issue_grants(verified, key, signer=owner, now=now)
    with pytest.raises(ValueError, match="1 to 1024 keys"):
        attest.issue_grants(verified, [], signer=owner, now=NOW)
    with pytest.raises(ValueError, match="lifetime="):
        attest.issue_grants(verified, key, signer=owner, now=NOW, lifetime=timedelta(0))


def test_documents_without_grants_are_refused(exchanged):
    pending, verified, key, owner = exchanged
    document = json.loads(attest.issue_grants(verified, key, signer=owner, now=NOW))
    with pytest.raises(FormatError, match="one or more"):
        pending.unlock(canonical({**document, "grants": []}), owner=owner.verifier)
    envelope = b64encode(Grants.issue(key, [Identity.generate().recipient], signer=owner).envelope).decode()
    with pytest.raises(fastrack.GrantError):
        pending.unlock(canonical({**document, "grants": [envelope]}), owner=owner.verifier)


def test_the_secret_key_stays_in_its_process(exchanged):
    pending, verified, key, owner = exchanged
    for action in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="stays in its process"):
            action(pending)
    grants = attest.issue_grants(verified, key, signer=owner, now=NOW)

    def attempt():
        try:
            return pending.unlock(grants, owner=owner.verifier, now=NOW).first.id
        except fastrack.ClosedError as error:
            return str(error)

    assert "stayed in the parent process" in in_forked_child(attempt)
    assert pending.unlock(grants, owner=owner.verifier, now=NOW).first == key


def test_no_document_has_a_secret(exchanged):
    pending, verified, key, owner = exchanged
    grants = attest.issue_grants(verified, key, signer=owner, now=NOW)
    secret = bytes(key.material())
    identity = pending._identity._key.secret
    for text in (grants, pending.to_bytes(), repr(pending).encode(), repr(verified).encode()):
        for hidden in (secret, identity):
            assert hidden.hex().encode() not in text
            assert b64encode(hidden)[:-4] not in text
