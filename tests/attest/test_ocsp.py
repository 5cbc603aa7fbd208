from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from helpers.cases import each
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import NOW, Authority, flips, is_refused, key_usage, rsa_key
from helpers.foundry.nvidia import DAY
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest

CHAIN = foundry.hopper().chain
ABOUT, ISSUER = CHAIN[2], CHAIN[3]


def verify(response=None, about=ABOUT, issuer=ISSUER, *, now=NOW, **options):
    response = foundry.status(ABOUT, ISSUER) if response is None else response
    return attest.verify_ocsp_response(response, about.certificate, issuer.certificate, now=now, **options)


OCSP_SIGNING = (
    x509.ExtensionOID.EXTENDED_KEY_USAGE.dotted_string,
    x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.OCSP_SIGNING]).public_bytes(),
)
UNKNOWN = ("1.2.3", b"\5\0")


# Good ones.


@each("by_name", [False, True], ids=["by key", "by name"])
@each("is_delegated", [False, True], ids=["by the issuer", "delegated"])
@each("certid", [hashes.SHA1(), hashes.SHA256(), hashes.SHA384()], ids=lambda one: one.name)
def test_a_good_response_is_verified(by_name, is_delegated, certid):
    by = foundry.responder(ISSUER) if is_delegated else None
    verified = verify(foundry.status(ABOUT, ISSUER, by=by, by_name=by_name, certid=certid))
    assert type(verified) is attest.VerifiedOcspResponse
    assert verified.serial_number == ABOUT.certificate.serial_number
    assert (verified.this_update, verified.next_update) == (NOW - DAY, NOW + DAY)
    assert (verified.verified_at, verified.valid_until) == (NOW, NOW + DAY)
    assert verified.age == DAY


def test_a_response_may_be_signed_with_rsa():
    issuer = Authority("CA", key=rsa_key("ocsp"))
    leaf = Authority("Leaf", issuer, ca=False)
    verified = verify(foundry.status(leaf, issuer, algorithm=hashes.SHA256()), leaf, issuer)
    assert verified.serial_number == leaf.certificate.serial_number
    assert isinstance(issuer.key, rsa.RSAPrivateKey)


def test_a_stored_response_carries_its_age():
    response = foundry.status(ABOUT, ISSUER, end=NOW + 30 * DAY)
    assert verify(response, now=NOW + 20 * DAY).age == 21 * DAY
    with pytest.raises(AttestationError, match="validity"):
        verify(response, now=NOW + 31 * DAY)


def test_a_response_is_valid_no_longer_than_its_responder():
    by = foundry.responder(ISSUER, end=NOW + timedelta(hours=1))
    assert verify(foundry.status(ABOUT, ISSUER, by=by)).valid_until == NOW + timedelta(hours=1)


def test_a_nonce_is_compared_where_one_is_expected():
    response = foundry.status(ABOUT, ISSUER, nonce=b"n" * 32)
    verify(response, nonce=b"n" * 32)
    verify(response)
    for bad in (response, foundry.status(ABOUT, ISSUER)):
        with pytest.raises(AttestationError, match="nonce"):
            verify(bad, nonce=b"m" * 32)


# Wrong ones.


def wrong_responses():
    def of(**options):
        return foundry.status(ABOUT, ISSUER, **options)

    def delegated(**options):
        return of(by=foundry.responder(ISSUER, **options))

    def leaf(**options):
        return Authority("OCSP Responder", ISSUER, ca=False, key=foundry.new_key(), **options)

    stranger, responder = Authority(ISSUER.subject, key=foundry.new_key()), foundry.responder(ISSUER)
    return {
        "status of 'NVIDIA GH100 Provisioner ICA 1' revoked": of(good=False),
        "status of 'NVIDIA GH100 Provisioner ICA 1' unknown": of(unknown=True),
        "certificate": foundry.status(CHAIN[1], CHAIN[2], by=ISSUER),
        "certificate of another issuer": foundry.status(ABOUT, stranger, by=ISSUER),
        "validity, stale": of(start=NOW - 3 * DAY, end=NOW - DAY),
        "validity, early": of(start=NOW + DAY, end=NOW + 3 * DAY),
        "validity, no end": of(end=None),
        "responder of another name": of(by=stranger, sent=()),
        "responder that is absent": of(by=foundry.responder(ISSUER), sent=()),
        "responder of another issuer": of(by=foundry.responder(stranger)),
        "responder below another authority": of(by=foundry.responder(CHAIN[4])),
        "responder without the purpose": delegated(usages=()),
        "responder with another purpose": delegated(usages=(x509.ExtendedKeyUsageOID.SERVER_AUTH,)),
        "responder that is a leaf": of(by=leaf()),
        "responder that has expired": delegated(end=NOW - DAY),
        "responder that is not valid yet": delegated(start=NOW + DAY),
        "responder that is an authority": delegated(ca=True, usage=key_usage("digital_signature")),
        "responder that issues certificates": delegated(ca=True),
        "responder that has an unknown extension": of(by=leaf(extensions=[OCSP_SIGNING, UNKNOWN], critical=["1.2.3"])),
        "responder that may not sign": delegated(usage=key_usage("key_agreement")),
        "signature by another key, delegated": of(by=responder, sent=[foundry.responder(ISSUER)], by_name=True),
        "signature by another key": of(by=stranger, by_name=True, sent=()),
        "extensions": of(nonce=b"n" * 32, critical=True),
        "signature algorithm": of(algorithm=hashes.SHA224()),
    }


@each(("name", "response"), wrong_responses)
def test_a_response_is_refused_for_its(name, response):
    field = name.split(",")[0].rsplit(" revoked")[0].rsplit(" unknown")[0] if "status" in name else name.split(",")[0]
    field = field.split(" of another")[0].split(" that ")[0].split(" below")[0].split(" with")[0].split(" by ")[0]
    with pytest.raises(AttestationError) as caught:
        verify(response, evidence="OCSP response for the RIM")
    assert caught.value.evidence == "OCSP response for the RIM"
    assert caught.value.field == field


def test_a_response_about_another_certificate_of_the_issuer_is_refused():
    sibling = Authority("NVIDIA GH100 Provisioner ICA 2", ISSUER, key=foundry.new_key())
    with pytest.raises(AttestationError, match="Fetch the response for this certificate"):
        verify(about=sibling)


def test_a_response_that_is_an_error_is_refused():
    """Such as tryLater, which has no signature."""
    with pytest.raises(AttestationError, match="expected a successful response, got TRY_LATER"):
        verify(bytes.fromhex("30030a0103"))


def test_a_response_must_have_one_status_without_critical_extensions():
    def of(change):
        return foundry.status(ABOUT, ISSUER, change=lambda data: foundry.with_statuses(data, change))

    def with_extension(statuses, *, critical):
        single = statuses[foundry.header_size(statuses) :]
        flag = foundry.der(0x01, b"\xff") if critical else b""
        extension = foundry.der(0x30, b"\x06\x02\x2a\x03", flag, foundry.der(0x04, b"\5\0"))
        extensions = foundry.der(0xA1, foundry.der(0x30, extension))
        return foundry.der(0x30, foundry.der(0x30, single[foundry.header_size(single) :], extensions))

    verify(of(lambda statuses: statuses))
    verify(of(lambda statuses: with_extension(statuses, critical=False)))
    with pytest.raises(AttestationError, match=r"extensions .*1\.2\.3"):
        verify(of(lambda statuses: with_extension(statuses, critical=True)))
    for times in (0, 2):
        with pytest.raises(FormatError, match="number of statuses"):
            verify(of(lambda found, n=times: foundry.der(0x30, found[foundry.header_size(found) :] * n)))


def test_unused_bits_of_the_signature_are_refused():
    made = (foundry.status(ABOUT, ISSUER, nonce=bytes([number])) for number in range(99))
    even = next(response for response in made if response[-1] % 2 == 0)  # whose last bit may be unused
    for response in (even, foundry.status(ABOUT, ISSUER, by=foundry.responder(ISSUER))):
        verify(response)
        ends = [index for index in range(len(response) - 3) if response[index : index + 1] == b"\0"]
        for index in ends:
            assert is_refused(verify, response[:index] + b"\1" + response[index + 1 :])


# Every byte, and garbage.


@pytest.mark.slow
@pytest.mark.parametrize("is_delegated", [False, True], ids=["by the issuer", "delegated"])
def test_every_byte_of_a_response_counts(is_delegated):
    response = foundry.status(ABOUT, ISSUER, by=foundry.responder(ISSUER) if is_delegated else None, nonce=b"n" * 32)
    verify(response)
    accepted = [index for index, bad in flips(response) if not is_refused(verify, bad)]
    assert accepted == []


def test_a_byte_after_a_response_is_refused():
    with pytest.raises(FormatError):
        verify(foundry.status(ABOUT, ISSUER, by=foundry.responder(ISSUER)) + b"\0")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100), st.integers(0, 400), st.integers(0, 50))
def test_garbage_is_refused(garbage, start, size):
    response = foundry.status(ABOUT, ISSUER)
    bad = response[:start] + garbage + response[start + size :]
    assert is_refused(verify, garbage)
    assert bad == response or is_refused(verify, bad)
