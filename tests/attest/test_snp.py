import pickle
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from helpers.cases import each
from helpers.foundry import snp as foundry
from helpers.foundry.authority import LONG, NOW, Authority, bundle, flips, is_refused, rsa_key
from helpers.foundry.tdx import integer, octets
from hypothesis import given
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import SnpProduct, SnpTcb
from fastrack.attest._formats.x509 import load_chain

DAY = timedelta(days=1)
PRODUCTS = sorted(foundry.PRODUCTS)
MILAN = foundry.chip()
P256 = foundry.chip(key=ec.generate_private_key(ec.SECP256R1()))  # its signatures are shorter, and have room


def verify(machine=MILAN, report=None, *, leaf=None, issuers=None, now=NOW, roots=None, crl=None):
    return attest.verify_snp_report(
        foundry.report(machine) if report is None else report,
        machine.leaf if leaf is None else leaf,
        machine.issuers if issuers is None else issuers,
        now=now,
        roots=roots or foundry.amd(machine.product).roots,
        crl=crl,
    )


# Good ones.


@each("is_vlek", [False, True], ids=["VCEK", "VLEK"])
@each("version", [3, 4, 5])
@each("product", PRODUCTS)
def test_a_good_report_is_verified(product, version, is_vlek):
    machine = foundry.chip(product, is_vlek=is_vlek)
    verified = verify(machine, foundry.report(machine, version=version))
    assert type(verified) is attest.VerifiedSnpReport
    assert verified.product == verified.report.product == product
    assert verified.provider == ("Cloud" if is_vlek else None)
    assert verified.verified_at == NOW
    assert verified.revocation_checked_at is None
    assert verified.valid_until == NOW + LONG
    report = verified.report
    fmc = 2 if product == "Turin" else None
    assert report.reported_tcb == SnpTcb(bootloader=3, tee=0, snp=8, microcode=115, fmc=fmc)
    assert report.current_tcb == SnpTcb(bootloader=3, tee=0, snp=8, microcode=206, fmc=fmc)
    assert report.reported_tcb == report.committed_tcb == report.launch_tcb
    assert (report.current_version, report.committed_version) == ((1, 52, 4), (1, 51, 3))
    assert report.signing_key == ("VLEK" if is_vlek else "VCEK")
    assert report.chip_id.rstrip(b"\0") == machine.chip_id
    assert (report.launch_mitigations, report.current_mitigations) == ((5, 7) if version == 5 else (None, None))
    assert verified.report_data == report.report_data == bytes(range(64))
    assert (report.measurement, report.host_data, report.vmpl) == (b"\x22" * 48, b"\x33" * 32, 0)


@pytest.mark.parametrize("product", ["Milan", "Genoa"])
def test_a_report_of_version_2_has_its_product_from_the_certificates(product):
    machine = foundry.chip(product)
    verified = verify(machine, foundry.report(machine, version=2))
    assert verified.report.product is None
    assert verified.product == product


def test_a_parsed_report_is_parsed_again_from_its_bytes():
    report = attest.parse_snp_report(foundry.report(MILAN))
    assert verify(report=replace(report, measurement=bytes(48), chip_id=b"")).report == report


@each("version", [2, 3, 5])
@each("product", PRODUCTS)
def test_a_chip_id_that_the_host_masks_is_that_of_the_certificate(product, version):
    if (product, version) == ("Turin", 2):
        return  # whose levels have another layout
    machine = foundry.chip(product)
    verified = verify(machine, foundry.report(machine, version=version, chip_id=b""))
    assert verified.report.chip_id == bytes(64)
    assert verified.chip_id == verify(machine).chip_id == machine.chip_id.ljust(64, b"\0")


def test_a_vlek_has_no_chip_id_but_the_one_that_its_report_tells():
    machine = foundry.chip(is_vlek=True)
    assert verify(machine).chip_id == foundry.CHIP_ID
    assert verify(machine, foundry.report(machine, chip_id=b"")).chip_id is None


def test_a_masked_chip_id_does_not_excuse_another_certificate():
    other = foundry.chip(chip_id=b"\7" * 64)
    for options in (
        {"leaf": other.leaf},
        {"leaf": foundry.chip(is_vlek=True).leaf},
        {"machine": foundry.chip(leave_out=["4"])},
        {"machine": foundry.chip(chip_id=bytes(63))},
    ):
        machine = options.get("machine", MILAN)
        report = foundry.report(machine, chip_id=b"")
        assert is_refused(lambda options=options, report=report: verify(**{"report": report} | options)), options


@each("bit", [16, 17, 18, 19])
def test_bits_of_the_policy_are_reported_and_not_judged(bit):
    report = verify(report=foundry.report(MILAN, policy=1 << bit)).report
    assert (report.is_debug, report.is_migratable, report.allows_smt) == (bit == 19, bit == 18, bit == 16)


@each("state", [0, 1, 32])
def test_bits_of_the_platform_are_reported(state):
    report = attest.parse_snp_report(foundry.report(MILAN, platform_info=state))
    assert (report.has_smt, report.is_alias_checked) == (state == 1, state == 32)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_chip_id_may_be_wrapped_in_an_octet_string(product):
    verify(foundry.chip(product, wrapped=True))


def test_the_leaf_may_be_given_in_pem():
    from cryptography import x509

    with pytest.warns(Warning, match="serial number"):
        pem = x509.load_der_x509_certificate(MILAN.leaf).public_bytes(Encoding.PEM)
    verify(leaf=pem)
    with pytest.raises(FormatError, match="one certificate"):
        verify(leaf=pem * 2)


def test_the_issuers_may_begin_with_the_root():
    of = foundry.amd("Milan")
    assert verify(issuers=bundle(of.ark, of.ask)) == verify()


@each(
    ("family", "model", "product"),
    [(0x19, 0x0F, "Milan"), (0x19, 0x10, "Genoa"), (0x19, 0xA1, "Genoa"), (0x1A, 0x11, "Turin")],
)
def test_products_are_told_by_family_and_model(family, model, product):
    assert attest.parse_snp_report(foundry.report(MILAN, cpu=(family, model))).product is SnpProduct(product)


@each("cpu", [(0x17, 0x31), (0x19, 0x20), (0x1A, 0x12), (0x1A, 0x50), (0, 0)])
def test_other_processors_are_refused(cpu):
    with pytest.raises(FormatError, match="Milan, Genoa or Turin"):
        attest.parse_snp_report(foundry.report(MILAN, cpu=cpu))


# Wrong ones.


def wrong():
    of, genoa = foundry.amd("Milan"), foundry.amd("Genoa")
    other = foundry.chip(chip_id=b"\7" * 64)
    vlek = foundry.chip(is_vlek=True)
    foreign = Authority("ARK-Milan", key=rsa_key("foreign"))
    impostor = Authority("SEV-Milan", foreign, key=rsa_key("impostor"), path_length=0)
    stranger = foundry.chip(issuer=impostor)
    return (
        {
            "another key": {"report": foundry.report(MILAN, key=ec.generate_private_key(ec.SECP384R1()))},
            "the certificate of another chip": {"leaf": other.leaf},
            "another chip's id": {"report": foundry.report(MILAN, chip_id=b"\7" * 64)},
            "other patch levels": {"report": foundry.report(MILAN, tcb={"microcode": 116})},
            "a VLEK's certificate for a VCEK": {"leaf": vlek.leaf, "issuers": vlek.issuers},
            "a VCEK that says it is a VLEK": {"report": foundry.report(MILAN, signing_key=1)},
            "a VLEK issued by the VCEKs' authority": {"machine": foundry.chip(is_vlek=True, issuer=of.ask)},
            "no signing key": {"report": foundry.report(MILAN, signing_key=7)},
            "a CPU of another product": {"report": foundry.report(MILAN, cpu=foundry.PRODUCTS["Genoa"])},
            "the chain of another product": {"issuers": bundle(genoa.ask, genoa.ark), "roots": genoa.roots},
            "the authority twice": {"issuers": bundle(of.ask, of.ask)},
            "the authorities of two kinds in the wrong order": {"issuers": bundle(of.ark, of.ask, of.asvk)},
            "only the root": {"issuers": bundle(of.ark)},
            "only the authority": {"issuers": bundle(of.ask)},
            "one certificate too many": {"issuers": bundle(of.ask, of.ark, of.asvk)},
            "a root that is not pinned": {"leaf": stranger.leaf, "issuers": bundle(impostor, foreign)},
            "a certificate that has ended": {"machine": foundry.chip(end=NOW - DAY)},
            "a certificate of another name": {"machine": foundry.chip(name="SEV-VLEK")},
            "a key on another curve": {"machine": P256},
            "an algorithm that is unknown": {"report": foundry.report(MILAN, algorithm=2)},
            "version 1": {"report": foundry.report(MILAN, version=1)},
            "version 6": {"report": foundry.report(MILAN, version=6)},
            "bytes in the reserved part": {"report": foundry.report(MILAN, tail=bytes(367) + b"\1")},
            "a byte too many": {"report": foundry.report(MILAN) + b"\0"},
            "no certificate": {"leaf": b""},
            "no issuers": {"issuers": b""},
            "Turin's without the level of its FMC": {"machine": foundry.chip("Turin", leave_out=["3.9"])},
            "Turin's with another level of its FMC": {
                "machine": (turin := foundry.chip("Turin")),
                "report": foundry.report(turin, tcb={"fmc": 1}),
            },
            "Turin's with a longer chip id": {"machine": foundry.chip("Turin", chip_id=bytes(range(64)))},
            "Turin's with more in the report's chip id": {
                "machine": turin,
                "report": foundry.report(turin, chip_id=turin.chip_id + b"\1"),
            },
            "Turin's of version 2": {"machine": turin, "report": foundry.report(turin, version=2)},
            "a chip id of a wrong size": {"machine": foundry.chip(chip_id=bytes(63))},
            "a wrapped chip id of a wrong size": {"machine": foundry.chip(chip_id=bytes(63), wrapped=True)},
            "a byte behind a patch level": {"machine": foundry.chip(replaced={"3.8": integer(115) + b"\0"})},
            "a byte behind a wrapped id": {"machine": foundry.chip(replaced={"4": octets(foundry.CHIP_ID) + b"\0"})},
            "a patch level that is no integer": {"machine": foundry.chip(replaced={"3.8": octets(b"\x73")})},
            "a provider that is not ASCII": {"machine": foundry.chip(is_vlek=True, provider="Wölke")},
        }
        | {
            f"a certificate without the extension {name}": {"machine": foundry.chip(leave_out=[name])}
            for name in ("3.1", "3.2", "3.3", "3.8", "4")
        }
        | {"a VLEK without its provider": {"machine": foundry.chip(is_vlek=True, leave_out=["5"])}}
    )


def test_what_is_wrong_is_refused():
    for name, options in wrong().items():
        assert is_refused(lambda options=options: verify(**options)), name


@pytest.mark.parametrize("now", [NOW - LONG - DAY, NOW + LONG + DAY])
def test_another_time_is_refused(now):
    with pytest.raises(AttestationError, match="validity"):
        verify(now=now)


def test_an_error_says_what_was_wanted():
    with pytest.raises(AttestationError, match="Fetch the certificate for the chip id") as raised:
        verify(report=foundry.report(MILAN, tcb={"snp": 9}))
    error = raised.value
    assert (error.evidence, error.field) == ("SNP report", "REPORTED_TCB")
    assert (error.wanted.snp, error.found.snp) == (8, 9)
    assert pickle.loads(pickle.dumps(error)).wanted == error.wanted


# Revocation.


def test_a_current_revocation_list_is_recorded():
    verified = verify(crl=foundry.amd("Milan").ark.crl())
    assert verified.revocation_checked_at == NOW - DAY
    assert verified.valid_until == NOW + 30 * DAY


def test_a_revoked_authority_is_refused():
    of = foundry.amd("Milan")
    with pytest.raises(AttestationError, match="revoked"):
        verify(crl=of.ark.crl(revoked=[of.ask]))
    verify(crl=of.ark.crl(revoked=[of.asvk]))


@pytest.mark.parametrize("make", [lambda of: of.ask.crl(), lambda of: of.ark.crl(start=NOW + DAY), lambda of: b""])
def test_a_wrong_revocation_list_is_refused(make):
    with pytest.raises((AttestationError, FormatError)):
        verify(crl=make(foundry.amd("Milan")))


# Every byte.


@pytest.mark.slow
@pytest.mark.parametrize("product", ["Milan", "Turin"])
def test_every_byte_of_a_report_counts(product):
    machine = foundry.chip(product)
    for index, data in flips(foundry.report(machine, version=5)):
        assert is_refused(verify, machine, data), f"byte {index}"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["leaf", "issuers"])
def test_every_byte_of_the_certificates_counts(part):
    report = foundry.report(MILAN)
    for index, data in flips(getattr(MILAN, part)):
        assert is_refused(lambda data=data: verify(report=report, **{part: data})), f"byte {index}"


@pytest.mark.slow
def test_every_byte_of_a_revocation_list_counts():
    for index, data in flips(foundry.amd("Milan").ark.crl()):
        assert is_refused(lambda data=data: verify(crl=data)), f"byte {index}"


# Garbage.


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_garbage_is_no_certificate(leaf, issuers):
    assert is_refused(lambda: verify(leaf=leaf))
    assert is_refused(lambda: verify(issuers=issuers))


# Real ones.


@pytest.fixture
def real(evidence):
    folder = evidence / "snp"

    def read(product):
        parts = load_chain((folder / f"{product}_ask_ark_asvk.pem").read_bytes(), evidence="chain")
        return b"".join(part.public_bytes(Encoding.PEM) for part in parts[:2])

    return (folder / "report_v2.bin").read_bytes(), folder, read


def test_a_real_report_is_verified(real):
    report, folder, read = real
    now = datetime(2025, 6, 25, tzinfo=UTC)
    verified = attest.verify_snp_report(report, (folder / "vcek.der").read_bytes(), read("milan"), now=now)
    assert verified.product is SnpProduct.MILAN
    assert verified.report.version == 2
    assert verified.report.reported_tcb == SnpTcb(bootloader=3, tee=0, snp=8, microcode=115)
    assert not verified.report.is_debug
    text = f"version = 1\n[cpu.snp]\nmeasurement = ['{verified.report.measurement.hex()}']\nrevocation = 'none'\n"
    text += "min_tcb = { bootloader = 3, snp = 8, microcode = %d }"
    attest.Policy.from_toml(text % 115).check_cpu(verified, now=now)
    with pytest.raises(AttestationError, match="microcode"):
        attest.Policy.from_toml(text % 116).check_cpu(verified, now=now)


def test_a_real_revocation_list_is_good_until_its_end(evidence):
    folder = evidence / "wire" / "amd" / "genoa"
    if not folder.is_dir():
        pytest.skip("no evidence of Genoa")
    report, leaf, issuers, crl = (
        (folder / name).read_bytes() for name in ("hcl_report_azure.bin", "vcek_azure.der", "ask_ark.pem", "crl.der")
    )
    report = report[32 : 32 + 1184]
    text = "version = 1\n[cpu.snp]\nmeasurement = 'any'\nmin_tcb = 'any'\nrevocation = 'required'\n"
    for now in (datetime(2025, 7, 1, tzinfo=UTC), datetime(2025, 11, 1, tzinfo=UTC)):
        verified = attest.verify_snp_report(report, leaf, issuers, now=now, crl=crl)
        attest.Policy.from_toml(text).check_cpu(verified, now=now)
    with pytest.raises(AttestationError, match="revocation list"):
        attest.verify_snp_report(report, leaf, issuers, now=datetime(2026, 1, 1, tzinfo=UTC), crl=crl)


@pytest.mark.parametrize(("leaf", "product"), [("vcek_invalid.der", "milan"), ("vcek.der", "genoa")])
def test_a_real_report_with_other_certificates_is_refused(real, leaf, product):
    report, folder, read = real
    with pytest.raises(AttestationError):
        attest.verify_snp_report(
            report, (folder / leaf).read_bytes(), read(product), now=datetime(2025, 6, 25, tzinfo=UTC)
        )
