import json
from contextlib import suppress
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_der_x509_crl
from helpers.cases import each
from helpers.foundry import tdx as foundry
from helpers.foundry.authority import LONG, NOW, Authority, bundle, flips, is_refused
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest
from fastrack.attest import TcbStatus, TdxCollateral
from fastrack.attest._cpu import tdx, tdx_pck

DAY = timedelta(days=1)
PLATFORM = foundry.platform()
QUOTE = foundry.quote(PLATFORM)


def collateral(**options):
    return TdxCollateral(**foundry.collateral(**options))


def verify(quote=None, given=None, *, now=NOW, roots=None):
    return attest.verify_tdx_quote(
        QUOTE if quote is None else quote, given or collateral(), now=now, roots=roots or foundry.intel().roots
    )


@pytest.fixture(params=[(4, 2), (5, 2), (5, 3)], ids=["v4", "v5", "v5 of TDX 1.5"])
def layout(request):
    version, body_type = request.param
    return {"version": version, "body_type": body_type}


# Good ones.


def test_a_good_quote_is_verified(layout):
    verified = verify(foundry.quote(foundry.platform(), **layout))
    assert type(verified) is attest.VerifiedTdxQuote
    report = verified.report
    assert report.mrtd == b"\x22" * 48
    assert report.rtmrs == tuple(bytes([0x60 + number]) * 48 for number in range(4))
    assert verified.report_data == report.report_data == bytes(range(64))
    assert (report.mrservicetd is None) == (layout["body_type"] == 2)
    assert not report.is_debug
    assert not report.is_migratable
    assert verified.tcb.status is TcbStatus.UP_TO_DATE
    assert verified.tcb.advisory_ids == ()
    assert verified.platform.fmspc == foundry.FMSPC
    assert verified.platform.components == foundry.COMPONENTS
    assert verified.platform.pce_svn == foundry.PCE_SVN
    assert verified.verified_at == NOW
    assert verified.collateral_issued_at == NOW - DAY  # all were issued then
    assert verified.valid_until == NOW + 29 * DAY


def test_a_parsed_quote_is_parsed_again_from_its_bytes():
    quote = attest.parse_tdx_quote(QUOTE)
    forged = replace(quote, report=replace(quote.report, mrtd=bytes(48)), signed=b"", version=9)
    assert verify(forged).report == quote.report


def test_a_quote_may_be_padded_with_zeros_alone():
    assert attest.parse_tdx_quote(QUOTE + bytes(100)).data == QUOTE
    verify(QUOTE + bytes(100))
    with pytest.raises(FormatError, match=f"padding at offset {len(QUOTE) + 50}"):
        verify(QUOTE + bytes(50) + b"\1")


@each(("attributes", "is_debug"), [(0, False), (1, True), (2, True), (1 << 8, False), (1 << 28, False)])
def test_the_debug_bit_is_reported_and_not_judged(attributes, is_debug):
    verified = verify(foundry.quote(foundry.platform(), body=foundry.td_report(attributes=attributes)))
    assert verified.report.is_debug is is_debug


def test_a_platform_may_be_issued_by_the_other_authority():
    of = foundry.intel()
    processor = Authority("Intel SGX PCK Processor CA", of.root, path_length=0)
    machine = foundry.platform(issuer=processor)
    given = collateral(pck_crl=processor.crl(), pck_crl_issuer_chain=bundle(processor, of.root))
    verify(foundry.quote(machine), given)
    with pytest.raises(AttestationError):
        verify(foundry.quote(machine))


def test_a_platform_must_be_issued_by_one_of_the_two():
    of = foundry.intel()
    other = Authority("Intel SGX Another CA", of.root, path_length=0)
    given = collateral(pck_crl=other.crl(), pck_crl_issuer_chain=bundle(other, of.root))
    with pytest.raises(AttestationError, match="subjects"):
        verify(foundry.quote(foundry.platform(issuer=other)), given)


# Quotes that are wrong.


def other_key():
    return ec.generate_private_key(ec.SECP256R1())


def header(*, version=4, key=2, tee=0x81, vendor=foundry.VENDOR):
    return foundry.number(version) + foundry.number(key) + foundry.number(tee, 4) + bytes(4) + vendor + bytes(20)


def svn(*numbers):
    """Return the body of a quote with these TEE_TCB_SVNs."""
    return foundry.td_report(tee_tcb_svn=bytes([*numbers, *bytes(13)]))


def wrong_quotes():
    of = foundry.intel()
    stranger = Authority("Intel SGX PCK Platform CA", Authority("Intel SGX Root CA"), path_length=0)
    of_machine = {
        "the QE's report is about another key": {"bound_key": bytes(64)},
        "the QE's report is signed by another key": {"qe_key": other_key()},
        "the QE has another signer": {"qe": {"signer": bytes(32)}},
        "the QE is another product": {"qe": {"product": 1}},
        "the QE has another miscselect": {"qe": {"miscselect": b"\1\0\0\0"}},
        "the QE is a debug enclave": {"qe": {"attributes": b"\x13" + bytes(15)}},
        "the QE is of an unknown version": {"qe": {"svn": 3}},
        "the TDX module has another signer": {"body": foundry.td_report(signer=bytes(48))},
        "the TDX module has other attributes": {"body": foundry.td_report(seam_attributes=b"\1" + bytes(7))},
        "the TDX module is unknown": {"body": svn(5, 7, 2)},
        "the TDX module is too old to be known": {"body": svn(2, 3, 2)},
        "the late microcode is too old": {"body": svn(5, 3, 1)},
        "the chain lacks the root": {"chain": bundle(PLATFORM.pck, of.platform_ca)},
        "the chain is empty": {"chain": b""},
        "bytes follow the PCK chain": {"surplus": b"\0"},
        "bytes follow the certification data": {"after": b"\0"},
        "the certification data is of another type": {"inner_type": 4},
        "the outer certification data is of another type": {"outer_type": 5},
        "the body is an enclave's": {"version": 5, "body": bytes(384), "body_type": 1},
        "the body's size is another type's": {"version": 5, "body": bytes(584), "body_type": 3},
        "the version is 3": {"header": header(version=3)},
        "it is a quote of SGX": {"header": header(tee=0)},
        "the key is of another type": {"header": header(key=3)},
        "the QE is of another vendor": {"header": header(vendor=bytes(16))},
    }
    of_platforms = {
        "the platform is too old to be known": foundry.platform(components=(2, *foundry.COMPONENTS[1:])),
        "the PCE is too old to be known": foundry.platform(pce_svn=10),
        "the platform is of another kind": foundry.platform(fmspc=b"\1" * 6),
        "the PCK certificate has another name": foundry.platform(name="Intel SGX TCB Signing"),
        "the PCK certificate has ended": foundry.platform(end=NOW - DAY),
        "the PCK certificate has no extension": foundry.platform(extension=b""),
        "the PCK certificate has an empty extension": foundry.platform(extension=b"\x30\0"),
        "the chain leads elsewhere": foundry.platform(issuer=stranger),
        "the chain is that of the TCB's signer": foundry.Platform(of.signing, bundle(of.signing, of.root)),
    }
    return {name: foundry.quote(PLATFORM, **options) for name, options in of_machine.items()} | {
        name: foundry.quote(platform) for name, platform in of_platforms.items()
    }


def test_wrong_quotes_are_refused():
    given = collateral()
    for name, quote in wrong_quotes().items():
        assert is_refused(verify, quote, given), name


def test_an_attestation_key_that_is_no_point_is_malformed():
    machine = foundry.platform()
    quote = bytearray(foundry.quote(machine, bound_key=bytes(64)))
    start = 48 + 584 + 4 + 64
    quote[start : start + 64] = bytes(64)
    with pytest.raises(FormatError, match="a point of the curve P-256"):
        verify(bytes(quote))


def test_the_parts_of_two_machines_make_no_quote():
    one, two = foundry.quote(foundry.platform()), foundry.quote(foundry.platform())
    while len(one) != len(two):  # signatures in DER differ in length, and so would the sizes in both
        two = foundry.quote(foundry.platform())
    start = 48 + 584 + 4 + 128  # where the certification data begins
    with pytest.raises(AttestationError, match="report data of the QE report"):
        verify(one[:start] + two[start:])


def test_an_error_names_what_was_wrong():
    with pytest.raises(AttestationError) as error:
        verify(foundry.quote(foundry.platform(), qe={"product": 1}))
    found = error.value
    assert (found.evidence, found.field, found.wanted, found.found) == ("QE report", "ISVPRODID", 2, 1)


# Collateral that is wrong.


ENDED = {"start": NOW - 9 * DAY, "end": NOW - DAY}


def wrong_collateral():
    of = foundry.intel()
    machine = foundry.platform()
    impostor = Authority("Intel SGX TCB Signing", of.root, ca=False)
    root = Authority("Intel SGX Root CA", path_length=1)
    info, identity = foundry.tcb_info, foundry.qe_identity
    return {
        "TCB info signed by another key": {"tcb_info_signature": foundry.raw_signature(impostor.key, info())},
        "QE identity signed by another key": {"qe_identity_signature": foundry.raw_signature(impostor.key, identity())},
        "TCB info signed by a platform": {"signer": machine.pck, "tcb_info_issuer_chain": machine.chain},
        "QE identity signed by a platform": {"qe_signer": machine.pck, "qe_identity_issuer_chain": machine.chain},
        "TCB info signed by another name below the root": {
            "signer": (named := Authority("Intel SGX PCK Certificate", of.root, ca=False)),
            "tcb_info_issuer_chain": bundle(named, of.root),
        },
        "QE identity signed by another name below the root": {
            "qe_signer": named,
            "qe_identity_issuer_chain": bundle(named, of.root),
        },
        "TCB info signed by a name below an authority": {
            "signer": (below := Authority("Intel SGX TCB Signing", of.platform_ca, ca=False)),
            "tcb_info_issuer_chain": bundle(below, of.platform_ca, of.root),
        },
        "TCB info signed by another root": {
            "signer": (foreign := Authority("Intel SGX TCB Signing", root, ca=False)),
            "tcb_info_issuer_chain": bundle(foreign, root),
        },
        "a signature of another size": {"tcb_info_signature": bytes(63)},
        "no signature": {"qe_identity_signature": b""},
        "TCB info and QE identity swapped": {"info": identity(), "identity": info()},
        "TCB info that has ended": {"info": info(**ENDED)},
        "TCB info that has not begun": {"info": info(start=NOW + DAY)},
        "QE identity that has ended": {"identity": identity(**ENDED)},
        "QE identity that has not begun": {"identity": identity(start=NOW + DAY)},
        "TCB info for SGX": {"info": info(id="SGX")},
        "TCB info of another version": {"info": info(version=2)},
        "TCB info of another type": {"info": info(tcbType=1)},
        "TCB info with a number as text": {"info": info(version="3")},
        "TCB info with true for a number": {"info": info(version=True)},
        "TCB info for another platform": {"info": info(fmspc="00" * 6)},
        "TCB info for another PCE": {"info": info(pceId="0001")},
        "TCB info without levels": {"info": info(tcbLevels=[])},
        "TCB info without a date": {"info": info(nextUpdate=None)},
        "TCB info with a date of no form": {"info": info(nextUpdate="2030-01-01")},
        "TCB info with a date that does not exist": {"info": info(nextUpdate="2030-13-01T00:00:00Z")},
        "TCB info without modules": {"info": info(tdxModuleIdentities=[])},
        "TCB info with too few components": {"info": info(levels=[foundry.tcb_level(components=(0,) * 15)])},
        "TCB info with text for an object": {"info": info(levels=[{"tcb": "sgxtcbcomponents"}])},
        "TCB info with a component that is none": {"info": info().replace(b'{"svn":5}', b'{"svm":5}')},
        "TCB info with false for a number": {"info": info(tcbType=False)},
        "TCB info with a component that is text": {"info": info().replace(b'{"svn":5}', b'{"svn":"5"}')},
        "TCB info with a component that is true": {"info": info().replace(b'{"svn":2}', b'{"svn":true}')},
        "TCB info with a component that is too large": {"info": info().replace(b'{"svn":5}', b'{"svn":65536}')},
        "TCB info with a component that is a number": {"info": info().replace(b'{"svn":5}', b"5")},
        "TCB info with components that are no list": {"info": info().replace(b'"tdxtcbcomponents":[', b'"x":[')},
        "TCB info with a negative number": {"info": info(levels=[foundry.tcb_level(pce_svn=-1)])},
        "TCB info with an unknown status": {"info": info(levels=[foundry.tcb_level(status="Fine")])},
        "TCB info with odd hexadecimal": {"info": info(fmspc="B0C06F00000")},
        "TCB info that is a list": {"info": b"[]"},
        "TCB info with a member twice": {"info": info().replace(b'{"id":', b'{"version":3,"id":')},
        "TCB info that is no JSON": {"info": info()[:-1]},
        "TCB info with a number that is none": {"info": info().replace(b'"tcbType":0', b'"tcbType":NaN')},
        "TCB info that is too deep": {"info": b"[" * 100_000 + b"]" * 100_000},
        "advisories that are no list": {"info": info(levels=[foundry.tcb_level(advisories="INTEL-SA-1")])},
        "advisories that are no text": {"info": info(levels=[foundry.tcb_level(advisories=[1])])},
        "QE identity for SGX": {"identity": identity(id="QE")},
        "QE identity of another version": {"identity": identity(version=1)},
        "QE identity of another signer": {"identity": identity(mrsigner="00" * 32)},
        "QE identity without levels": {"identity": identity(tcbLevels=[])},
        "the platform is revoked": {"pck_crl": of.platform_ca.crl(revoked=[PLATFORM.pck])},
        "the platform's authority is revoked": {"root_ca_crl": of.root.crl(revoked=[of.platform_ca])},
        "the TCB's signer is revoked": {"root_ca_crl": of.root.crl(revoked=[of.signing])},
        "a list of revoked platforms that has ended": {"pck_crl": of.platform_ca.crl(**ENDED)},
        "a list of revoked authorities that has ended": {"root_ca_crl": of.root.crl(**ENDED)},
        "the lists swapped": {"root_ca_crl": of.platform_ca.crl(), "pck_crl": of.root.crl()},
        "a list of another root": {"root_ca_crl": root.crl()},
        "no list": {"pck_crl": b""},
        "no chain for the list": {"pck_crl_issuer_chain": b""},
        "another chain for the list": {"pck_crl_issuer_chain": bundle(of.signing, of.root)},
    }


def test_wrong_collateral_is_refused():
    verify(QUOTE)
    for name, options in wrong_collateral().items():
        assert is_refused(verify, QUOTE, collateral(**options)), name


def test_two_trusted_roots_are_not_mixed():
    of = foundry.intel()
    root = Authority("Intel SGX Root CA", path_length=1)
    signing = Authority("Intel SGX TCB Signing", root, ca=False)
    given = collateral(signer=signing, tcb_info_issuer_chain=bundle(signing, root))
    with pytest.raises(AttestationError, match="root"):
        verify(given=given, roots={of.root.fingerprint, root.fingerprint})


def test_the_documents_may_have_different_signers():
    of = foundry.intel()
    signing = Authority("Intel SGX TCB Signing", of.root, ca=False)
    verify(given=collateral(qe_signer=signing))


def test_another_certificate_of_the_authority_s_key_will_do_for_the_list():
    of = foundry.intel()
    again = Authority("Intel SGX PCK Platform CA", of.root, key=of.platform_ca.key, path_length=0)
    verify(given=collateral(pck_crl_issuer_chain=bundle(again, of.root)))


@pytest.mark.parametrize("now", [NOW - 2 * DAY, NOW + 29 * DAY + timedelta(seconds=1), NOW + LONG + DAY])
def test_collateral_at_another_time_is_refused(now):
    with pytest.raises(AttestationError, match="validity"):
        verify(now=now)


@pytest.mark.parametrize("now", [NOW - DAY, NOW + 29 * DAY])
def test_collateral_is_valid_up_to_its_limits(now):
    verify(now=now)


# The state of the platform.


def status_of(*, levels=None, modules=None, qe=None, body=None):
    info = foundry.tcb_info(levels=levels, modules=modules)
    given = collateral(info=info, identity=foundry.qe_identity(levels=qe))
    return verify(foundry.quote(PLATFORM, body=body), given).tcb


def test_the_first_level_that_is_reached_counts():
    newer = foundry.tcb_level(components=(4, *foundry.COMPONENTS[1:]), advisories=["never"])
    old = foundry.tcb_level(pce_svn=5, status="OutOfDate", advisories=["INTEL-SA-2", "INTEL-SA-1"])
    oldest = foundry.tcb_level(pce_svn=4, status="Revoked")
    tcb = status_of(levels=[newer, old, oldest])
    assert tcb.platform.status is tcb.status is TcbStatus.OUT_OF_DATE
    assert tcb.platform.date == datetime(2026, 3, 13, tzinfo=UTC)
    assert tcb.advisory_ids == ("INTEL-SA-1", "INTEL-SA-2")


def test_the_module_s_versions_count_among_the_components_only_if_it_has_no_levels():
    high = foundry.tcb_level(tdx=(9, 9, 2))
    assert status_of(levels=[high]).status is TcbStatus.UP_TO_DATE
    body = svn(5, 0, 2)
    with pytest.raises(AttestationError, match="a known level"):
        status_of(levels=[high], body=body)
    tcb = status_of(levels=[foundry.tcb_level(tdx=(5, 0, 2))], body=body)
    assert tcb.module is None
    assert tcb.status is TcbStatus.UP_TO_DATE


def test_a_module_of_version_0_must_be_signed_all_the_same():
    body = foundry.td_report(tee_tcb_svn=bytes([5, 0, 2, *bytes(13)]), signer=bytes(48))
    with pytest.raises(AttestationError, match="MRSIGNERSEAM"):
        status_of(body=body)


def test_modules_are_found_by_their_version_in_hexadecimal():
    body = svn(5, 0x1F, 2)
    assert status_of(modules=[foundry.module(), foundry.module("TDX_1f")], body=body).module is not None


def test_bits_outside_the_mask_do_not_count():
    body = foundry.td_report(seam_attributes=b"\1" + bytes(7))
    status_of(modules=[foundry.module(mask="FE" + "FF" * 7)], body=body)


OK, HARDEN, CONFIGURE, BOTH, OLD, OLD_CONFIGURE, REVOKED = TcbStatus


@each(
    ("platform", "part", "together"),
    [
        (OK, OK, OK),
        (HARDEN, OK, HARDEN),
        (CONFIGURE, OK, CONFIGURE),
        (BOTH, OK, BOTH),
        (OLD, OK, OLD),
        (OLD_CONFIGURE, OK, OLD_CONFIGURE),
        (OK, OLD, OLD),
        (HARDEN, OLD, OLD),
        (CONFIGURE, OLD, OLD_CONFIGURE),
        (BOTH, OLD, OLD_CONFIGURE),
        (OLD, OLD, OLD),
        (OLD_CONFIGURE, OLD, OLD_CONFIGURE),
        (REVOKED, OK, REVOKED),
        (REVOKED, OLD, REVOKED),
        (OK, REVOKED, REVOKED),
        (CONFIGURE, REVOKED, REVOKED),
    ],
)
def test_the_parts_are_judged_together_as_intel_s_library_does(platform, part, together):
    levels = [foundry.tcb_level(status=platform, advisories=["A"])]
    module = status_of(levels=levels, modules=[foundry.module(levels=[foundry.svn_level(3, part, ["B"])])])
    assert module.status is together
    assert module.advisory_ids == ("A", "B")
    quoting = status_of(levels=levels, qe=[foundry.svn_level(9), foundry.svn_level(6, part, ["C"])])
    assert quoting.status is together
    assert quoting.advisory_ids == ("A", "C")


def test_the_lower_evaluation_number_is_kept():
    given = collateral(info=foundry.tcb_info(tcbEvaluationDataNumber=18))
    assert verify(given=given).tcb.evaluation_number == 17


# The extension of the PCK certificate.


@each(
    "extension",
    [
        foundry.sgx_extension(leave_out=[(4,)]),
        foundry.sgx_extension(leave_out=[(2, 7)]),
        foundry.sgx_extension(leave_out=[(2, 17)]),
        foundry.sgx_extension(twice=[(4,)]),
        foundry.sgx_extension(twice=[(2, 3)]),
        foundry.sgx_extension(fmspc=bytes(5)),
        foundry.sgx_extension(pce_id=bytes(3)),
        foundry.sgx_extension() + b"\0",
        foundry.sgx_extension()[:-1],
        b"\5\0",
    ],
)
def test_a_malformed_extension_is_refused(extension):
    with pytest.raises(FormatError, match="PCK certificate"):
        verify(foundry.quote(foundry.platform(extension=extension)))


def test_unknown_members_of_the_extension_are_ignored():
    assert tdx_pck.read_pck_identity(foundry.platform().pck.certificate).ppid == foundry.PPID


# One file.


def test_collateral_is_read_from_json():
    parts = foundry.collateral()
    given = TdxCollateral.from_json(foundry.as_json(parts))
    assert given == TdxCollateral.from_json(foundry.as_json(parts).encode()) == TdxCollateral(**parts)
    verify(given=given)


@each("change", [{"more": ""}, {"pck_crl": None}, {"pck_crl": 7}, {"tcb_info_signature": "00"}, {"root_ca_crl": "0"}])
def test_a_json_file_with_another_form_is_refused(change):
    with pytest.raises(FormatError, match="TDX collateral"):
        TdxCollateral.from_json(json.dumps(json.loads(foundry.as_json(foundry.collateral())) | change))


def test_collateral_of_other_tools_is_read():
    whole = json.loads(foundry.as_json(foundry.collateral()))
    wanted = verify()
    lists = {name: bytes.fromhex(whole[name]) for name in ("root_ca_crl", "pck_crl")}
    pem = {name: load_der_x509_crl(data).public_bytes(Encoding.PEM).decode() for name, data in lists.items()}
    for other in (
        pem,
        {name: text.encode().hex() for name, text in pem.items()},
        {name: data.hex().encode().hex() for name, data in lists.items()},  # as a PCCS answers, written once more
        {"pck_certificate_chain": None},
        {"pck_certificate_chain": PLATFORM.chain.decode()},
        {"pck_certificate_chain": bundle(*reversed(authorities_of(PLATFORM))).decode()},
        {"tcb_info_issuer_chain": bundle(foundry.intel().root, foundry.intel().signing).decode()},
    ):
        assert verify(given=TdxCollateral.from_json(json.dumps(whole | other))) == wanted, other


def authorities_of(platform):
    return platform.pck, foundry.intel().platform_ca, foundry.intel().root


def test_a_platform_chain_in_collateral_must_be_the_quotes():
    other = foundry.platform()
    for chain in (other.chain, bundle(*authorities_of(PLATFORM)[:2]), bundle(*authorities_of(PLATFORM)[1:])):
        with pytest.raises(AttestationError, match=r"PCK chain of the collateral.*Fetch the collateral for this mach"):
            verify(given=collateral(pck_certificate_chain=chain))
    with pytest.raises(FormatError, match="PCK chain of the collateral"):
        verify(given=collateral(pck_certificate_chain=b""))
    for wrong in (7, ["x"], {}):
        with pytest.raises(FormatError, match="pck_certificate_chain"):
            TdxCollateral.from_json(
                json.dumps(json.loads(foundry.as_json(foundry.collateral())) | {"pck_certificate_chain": wrong})
            )


def test_every_part_of_the_json_file_is_needed():
    whole = json.loads(foundry.as_json(foundry.collateral()))
    for name in whole:
        with pytest.raises(FormatError, match=name):
            TdxCollateral.from_json(json.dumps({key: value for key, value in whole.items() if key != name}))


# Every byte.


@pytest.mark.slow
def test_every_byte_of_a_quote_counts(layout):
    quote, given = foundry.quote(PLATFORM, **layout), collateral()
    # Versions differ in the part that is signed, which the size of the signatures and the first of them follow.
    size = len(quote) if layout["version"] == 4 else len(attest.parse_tdx_quote(quote).signed) + 4 + 64
    for index, data in flips(quote):
        if index < size:
            assert is_refused(verify, data, given), f"byte {index}"


@each("part", [field.name for field in fields(TdxCollateral)])
@pytest.mark.nightly
def test_every_byte_of_collateral_counts(part):
    parts = foundry.collateral() | {"pck_certificate_chain": PLATFORM.chain}
    step = 9 if part == "pck_certificate_chain" else 1  # it is compared, and as long as all others are together
    for index, data in flips(parts[part], step=step):
        assert is_refused(verify, QUOTE, TdxCollateral(**parts | {part: data})), f"byte {index}"


# Garbage.


@settings(max_examples=30)
@given(st.data())
def test_a_quote_with_a_part_replaced_is_refused(data):
    start = data.draw(st.integers(0, len(QUOTE)))
    changed = QUOTE[:start] + data.draw(st.binary(max_size=50)) + QUOTE[data.draw(st.integers(start, len(QUOTE))) :]
    if changed.rstrip(b"\0") != QUOTE.rstrip(b"\0"):
        assert is_refused(verify, changed)


@pytest.mark.slow
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_garbage_is_no_collateral(text):
    with pytest.raises(FormatError):
        TdxCollateral.from_json(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.sampled_from(sorted(json.loads(foundry.tcb_info()))), json_values)
def test_any_value_in_tcb_info_is_read_or_refused(name, value):
    info = json.dumps(json.loads(foundry.tcb_info()) | {name: value}).encode()
    with suppress(AttestationError, FormatError):
        verify(given=collateral(info=info))


@each("status", [one for one in TcbStatus if one.value not in {"UpToDate", "OutOfDate", "Revoked"}])
def test_a_state_of_the_module_or_the_enclave_that_intel_does_not_use_is_refused(status):
    level = [foundry.svn_level(3, status)]
    for parts, name in (
        (collateral(info=foundry.tcb_info(modules=[foundry.module(levels=level)])), "TDX module"),
        (collateral(identity=foundry.qe_identity(levels=level)), "quoting enclave"),
    ):
        with pytest.raises(AttestationError) as caught:
            verify(given=parts)
        assert (caught.value.field, caught.value.found) == (f"status of the {name}", status)


# Real ones.


@pytest.fixture
def real(evidence):
    folder = evidence / "tdx"
    collateral = TdxCollateral.from_json((folder / "quote_v4_collateral.json").read_bytes())
    return (folder / "quote_v4.dat").read_bytes(), collateral


def test_a_real_quote_with_its_collateral_is_verified(real):
    quote, given = real
    verified = attest.verify_tdx_quote(quote, given, now=datetime(2025, 6, 25, tzinfo=UTC))
    assert verified.tcb.status is TcbStatus.UP_TO_DATE
    assert verified.tcb.advisory_ids == ()
    assert verified.platform.fmspc.hex() == "b0c06f000000"
    assert verified.report.tee_tcb_svn[1] == 1
    assert not verified.report.is_debug
    assert verified.valid_until == datetime(2025, 7, 19, 10, 0, 35, tzinfo=UTC)
    text = "".join(f"rtmr{number} = ['{verified.report.rtmrs[number].hex()}']\n" for number in (1, 2))
    text = f"version = 1\n[cpu.tdx]\nmrtd = ['{verified.report.mrtd.hex()}']\n{text}"
    attest.Policy.from_toml(text).check_cpu(verified, now=verified.verified_at)
    other = replace(verified.report, td_attributes=0x40000000)  # those of quote_spr_e4.dat, without SEPT_VE_DISABLE
    with pytest.raises(AttestationError, match="TDATTRIBUTES"):
        attest.Policy.from_toml(text).check_cpu(replace(verified, report=other), now=verified.verified_at)


@pytest.mark.parametrize("day", [datetime(2025, 9, 1, tzinfo=UTC), datetime(2025, 6, 1, tzinfo=UTC)])
def test_a_real_quote_with_collateral_of_another_time_is_refused(real, day):
    with pytest.raises(AttestationError, match="validity"):
        attest.verify_tdx_quote(*real, now=day)


@pytest.mark.parametrize(
    ("name", "day", "version"),
    [("quote_spr_e4.dat", datetime(2025, 1, 1, tzinfo=UTC), 4), ("quote_v5.dat", datetime(2026, 6, 1, tzinfo=UTC), 5)],
)
def test_real_quotes_without_collateral_hold_up_to_the_root(evidence, name, day, version):
    data = (evidence / "tdx" / name).read_bytes()
    if name == "quote_spr_e4.dat":  # has a remark behind it
        with pytest.raises(FormatError, match="padding"):
            attest.parse_tdx_quote(data)
        data = data[:4935]
    quote = attest.parse_tdx_quote(data)
    tdx.verify_signatures(quote, now=day, roots=attest.INTEL_ROOTS)
    assert quote.version == version
    assert (quote.report.td_attributes == 0x40000000) == (name == "quote_spr_e4.dat")
    assert (quote.report.tee_tcb_svn2 is not None) == (version == 5)
    with pytest.raises(AttestationError, match="signature"):
        tdx.verify_signatures(
            attest.parse_tdx_quote(data[:200] + b"\xff" + data[201:]), now=day, roots=attest.INTEL_ROOTS
        )


def test_a_real_quote_does_not_lead_to_another_root(real):
    with pytest.raises(AttestationError, match="root"):
        attest.verify_tdx_quote(*real, now=datetime(2025, 6, 25, tzinfo=UTC), roots=attest.AMD_ROOTS)
