import re
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha384

import pytest
from helpers.cases import each
from helpers.foundry import nvidia as foundry
from helpers.foundry.authority import LONG, NOW, Authority, flips, is_refused
from helpers.foundry.nvidia import DSIG, SWID, resource
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError, attest
from fastrack.attest._gpus import rim as _rim

WHEN = datetime(2026, 6, 1, tzinfo=UTC)


def verify(data=None, *, now=NOW, roots=None, **options):
    data = foundry.rim() if data is None else data
    return attest.verify_rim(data, now=now, roots=roots or foundry.rim_signer().roots, **options)


# Good ones.


def test_a_good_manifest_is_verified():
    verified = verify()
    assert type(verified) is attest.VerifiedRim
    rim = verified.rim
    assert (rim.product, rim.edition, rim.version, rim.tag_id) == ("GH100", "GPU", "580.159.03", "8aa5c875")
    assert [one.index for one in rim.measurements] == list(range(64))
    assert [one.index for one in rim.active] == [7, 23, 35]
    values = bytes(48), foundry.MEASUREMENTS[23]
    assert rim.measurements[23] == attest.RimMeasurement(23, "Measurement_23", True, values)
    assert verified.signer == "HCC RIM L4 Signer"
    assert (verified.verified_at, verified.valid_until) == (NOW, NOW + LONG)
    assert verified.revocation_checked_at is None


def test_parsing_alone_does_not_look_at_the_signature():
    data = foundry.rim(key=foundry.new_key())
    assert attest.parse_rim(data).version == "580.159.03"
    with pytest.raises(AttestationError, match="signature"):
        verify(data)


def test_a_parsed_manifest_is_parsed_again_from_its_bytes():
    rim = attest.parse_rim(foundry.rim())
    assert verify(replace(rim, version="1", measurements=())).rim == rim


def test_a_manifest_is_verified_once_for_all_devices(monkeypatch):
    data = foundry.rim()
    verify(data)
    monkeypatch.setattr(_rim, "canonicalize", None)  # so that a second time would fail
    assert verify(data).rim.product == "GH100"
    with pytest.raises(AttestationError, match="validity"):  # but the time is looked at each time
        verify(data, now=NOW + 2 * LONG)
    with pytest.raises(AttestationError, match="root"):
        verify(data, roots=attest.NVIDIA_RIM_ROOTS)


def test_a_manifest_may_start_with_an_xml_declaration_and_end_in_white_space():
    data = b'<?xml version="1.0" encoding="UTF-8"?>\n' + foundry.rim() + b"\n \n"
    assert verify(data).rim.product == "GH100"


def test_revocation_is_checked_where_responses_are_passed():
    chain = foundry.rim_signer().chain
    responses = foundry.statuses(chain)
    verified = verify(ocsp=responses)
    assert verified.revocation_checked_at == NOW - foundry.DAY
    assert verified.valid_until == NOW + foundry.DAY
    with pytest.raises(AttestationError, match="none among 2"):
        verify(ocsp=responses[1:])
    bad = foundry.status(chain[0], chain[1], good=False)
    with pytest.raises(AttestationError, match="expected good, got revoked"):
        verify(ocsp=[bad, *responses[1:]])


# Signatures that are wrong.


def other_signers():
    own = foundry.rim_signer().chain
    stranger = Authority("NVIDIA CoRIM signing Root CA", key=foundry.new_key())

    def leaf(issuer=own[1], **options):
        return Authority("HCC RIM L4 Signer", issuer, **{"key": foundry.new_key(), "ca": False, **options})

    upper = Authority("NVIDIA Reference Value GH100 CA", stranger, key=foundry.new_key())
    return {
        "its root is another one": (leaf(upper), upper, stranger),
        "its leaf was issued by another authority": (leaf(upper), *own[1:]),
        "its leaf has expired": (leaf(end=NOW - foundry.DAY), *own[1:]),
        "its leaf is not valid yet": (leaf(start=NOW + foundry.DAY), *own[1:]),
        "its leaf is an authority": (own[1], *own[2:]),
        "its leaf is of another curve": (leaf(key=Authority("x").key), *own[1:]),
        "its root is missing": own[:-1],
        "a leaf issued it": (leaf(own[0]), *own),
    }


@each("signer", other_signers)
def test_a_manifest_is_refused_if(signer):
    with pytest.raises(AttestationError):
        verify(foundry.rim(signer=foundry.Signer(signer)))


def test_a_chain_in_another_order_is_refused():
    chain = foundry.rim_signer().chain
    certificates = [foundry.b64(one.der) for one in (chain[0], chain[2], chain[1], chain[3])]
    with pytest.raises(AttestationError, match="certificates"):
        verify(foundry.rim(certificates=certificates))


def test_a_manifest_without_certificates_is_refused():
    with pytest.raises(FormatError, match="X509Certificate"):
        verify(foundry.rim(certificates=[]))
    one = foundry.b64(foundry.rim_signer().chain[0].der)
    with pytest.raises(FormatError, match="X509Certificate"):
        verify(foundry.rim(certificates=[one] * 11))


def test_a_digest_of_another_size_and_text_that_is_no_base64_are_refused():
    with pytest.raises(FormatError, match="48 bytes as its content of <ds:DigestValue>"):
        verify(foundry.rim(digest=bytes(47)))
    with pytest.raises(FormatError, match="base64 as its content of <ds:X509Certificate>"):
        verify(foundry.rim(certificates=["A"]))
    with pytest.raises(FormatError, match="expected text as its content"):
        verify(foundry.rim(certificates=["<a></a>"]))


def test_another_digest_is_refused():
    with pytest.raises(AttestationError, match="digest of the driver RIM") as caught:
        verify(foundry.rim(digest=bytes(48)), evidence="driver RIM")
    assert (caught.value.evidence, caught.value.field) == ("driver RIM", "digest")


PROFILES = {
    "another canonical form": {"c14n": "http://www.w3.org/2001/10/xml-exc-c14n#"},
    "a form with comments": {"c14n": "http://www.w3.org/2006/12/xml-c14n11#WithComments"},
    "another algorithm": {"method": "ecdsa-sha256"},
    "an HMAC": {"method": "hmac-sha384"},
    "a reference to an element": {"uri": "#payload"},
    "a reference to a file": {"uri": "file:///etc/passwd"},
    "no transform": {"transforms": ()},
    "one transform": {"transforms": (f"{DSIG}enveloped-signature",)},
    "two enveloped transforms": {"transforms": (f"{DSIG}enveloped-signature",) * 2},
    "transforms in another order": {"transforms": (foundry.C14N, f"{DSIG}enveloped-signature")},
    "an XPath": {"transforms": (f"{DSIG}enveloped-signature", "http://www.w3.org/TR/1999/REC-xpath-19991116")},
    "an XSLT": {"transforms": (f"{DSIG}enveloped-signature", "http://www.w3.org/TR/1999/REC-xslt-19991116")},
    "a second reference": {"reference": '<ds:Reference URI=""></ds:Reference>'},
    "an object": {"reference": "<ds:Object></ds:Object>"},
    "text": {"reference": "text"},
}


@each("name", PROFILES)
def test_a_signature_of_another_profile_is_refused_with(name):
    with pytest.raises(FormatError):
        verify(foundry.rim(info=PROFILES[name]))


# Signature wrapping: what is read must be what was signed.


def wrapped():
    good = foundry.rim().decode().strip()
    signature = re.search(r"<ds:Signature .*</ds:Signature>", good, re.DOTALL)[0]
    forged = foundry.rim(version="9.9").decode().strip()
    forged_signature = re.search(r"<ds:Signature .*</ds:Signature>", forged, re.DOTALL)[0]
    bare = forged.replace(forged_signature, "")
    inner = signature.replace("</ds:Signature>", f"<ds:Object>{good}</ds:Object></ds:Signature>")
    return {
        "the signed tag is inside of the signature": bare.replace("</SoftwareIdentity>", f"{inner}</SoftwareIdentity>"),
        "the signed tag is inside of another": f"<SoftwareIdentity {foundry.NAMESPACES}>{good}</SoftwareIdentity>",
        "the signed tag is beside the payload": forged.replace(forged_signature, f"{good}{signature}"),
        "the signature is of another tag": forged.replace(forged_signature, signature),
        "there are two signatures": good.replace(signature, signature * 2),
        "the signature is first": good.replace(signature, "").replace("    <ns0:Entity", f"{signature}    <ns0:Entity"),
        "the signature is inside of the payload": good.replace(signature, "").replace(
            "    </ns0:Payload>", f"{signature}    </ns0:Payload>"
        ),
        "there is another payload": good.replace("    <ns0:Payload", "    <ns0:Payload/>\n    <ns0:Payload"),
        "there is another meta": good.replace("    <ns0:Meta", '    <ns0:Meta product="GB100"/>\n    <ns0:Meta'),
        "another element is of signatures": good.replace("></ns0:Entity>", f"><ds:X xmlns:ds='{DSIG}'/></ns0:Entity>"),
        "there is no signature": good.replace(signature, ""),
        "the signature has an id": good.replace("<ds:Signature ", "<ds:Signature Id='a' "),
        "a key value is there": good.replace("<ds:KeyInfo>", "<ds:KeyInfo><ds:KeyValue/>"),
        "a comment hides a character": good.replace("580.159", "580.<!-- -->159"),
        "a measurement was added": good.replace("    </ns0:Payload>", f"{resource(64, [bytes(48)])}    </ns0:Payload>"),
        "white space was added": good.replace("    </ns0:Payload>", "     </ns0:Payload>"),
        "a namespace was added": good.replace("<ns0:Payload ", "<ns0:Payload xmlns:x='urn:x' "),
    }


@each("text", wrapped)
def test_a_wrapped_signature_is_refused_if(text):
    assert is_refused(verify, text.encode())


def test_a_rewritten_manifest_with_the_same_canonical_form_is_the_same():
    data = foundry.rim().replace(b'corpus="false" name="GH100"', b"name='GH100'\n  corpus='false'")
    assert verify(data).rim.product == "GH100"


# Content that is wrong, though it was signed.


def wrong_contents():
    values = [bytes(48)]
    return {
        "root": {"tag": "Other"},
        "supplemental": {"supplemental": "true"},
        "PayloadType": {"payload_type": "indirect"},
        "index twice": {"resources": [resource(3, values)] * 2},
        "index": {"resources": [resource("x", values)]},
        "index from 256": {"resources": [resource(256, values)]},
        "index with a zero": {"resources": [resource("07", values)]},
        "active": {"resources": [resource(3, values, active="true")]},
        "alternatives, fewer": {"resources": [resource(3, values * 2, alternatives=1)]},
        "alternatives, more": {"resources": [resource(3, values, alternatives=2)]},
        "no value": {"resources": [resource(3, [], alternatives="0")]},
        "size": {"resources": [resource(3, values, size=32)]},
        "short value": {"resources": [resource(3, [bytes(47)])]},
        "another type": {"resources": [resource(3, values, kind="MinSvn")]},
        "text": {"resources": ["text"]},
        "another element": {"resources": ["<ns0:File name='x' type='Measurement'></ns0:File>"]},
        "an unknown part": {"extra": "<ns0:Evidence></ns0:Evidence>"},
    }


@each("content", wrong_contents)
def test_the_content_of_a_manifest_is_refused_for(content):
    with pytest.raises(FormatError):
        attest.parse_rim(foundry.rim(**content))


@each("name", ["tagId", "product", "edition", "colloquialVersion", "index", "active", "size", "name"])
def test_an_attribute_that_is_absent_is_told(name):
    data = foundry.rim([resource(3, [bytes(48)])])
    absent = re.sub(rf'(<ns0:Resource[^>]*|<ns0:Meta[^>]*|<SoftwareIdentity[^>]*) {name}="[^"]*"', r"\1", data.decode())
    with pytest.raises(FormatError, match=f"attribute {name} of <.*> in line"):
        attest.parse_rim(absent.encode())


# Every byte.


@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_byte_of_a_manifest_counts(step):
    data = foundry.rim([resource(7, [foundry.MEASUREMENTS[7]])])
    verify(data)
    accepted = [index for index, bad in flips(data, step=step) if not is_refused(verify, bad)]
    assert accepted == []


def test_unused_bits_of_base64_are_refused():
    data = foundry.rim()
    for padded in re.findall(rb"[A-Za-z0-9+/](?:==?)\n", data):
        alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        other = alphabet[alphabet.index(padded[:1]) | 1 : (alphabet.index(padded[:1]) | 1) + 1] + padded[1:]
        assert other == padded or is_refused(verify, data.replace(padded, other))


# Garbage.


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100), st.integers(0, 4000), st.integers(0, 200))
def test_garbage_is_refused(garbage, start, size):
    data = foundry.rim([resource(7, [foundry.MEASUREMENTS[7]])])
    bad = data[:start] + garbage + data[start + size :]
    with suppress(FormatError):
        attest.parse_rim(garbage)
    with suppress(FormatError):
        attest.parse_rim(bad)
    with suppress(FormatError, AttestationError):  # white space around the root, or inside of tags, changes nothing
        assert replace(verify(bad).rim, data=data) == attest.parse_rim(data)


# Manifests of NVIDIA.


def test_a_real_driver_manifest_holds(evidence):
    data = (evidence / "nvidia" / "rim_driver_gh100_550.144.03.xml").read_bytes()
    verified = attest.verify_rim(data, now=WHEN)
    assert (verified.rim.product, verified.rim.edition, verified.rim.version) == ("GH100", "GPU", "550.144.03")
    assert (len(verified.rim.measurements), len(verified.rim.active)) == (64, 21)
    assert len(verified.rim.measurements[35].values) == 4
    assert verified.valid_until.date().isoformat() == "2026-12-30"
    for now in (datetime(2026, 12, 31, tzinfo=UTC), datetime(2024, 12, 29, tzinfo=UTC)):
        with pytest.raises(AttestationError, match="validity of 'HCC RIM L4 Signer'"):
            attest.verify_rim(data, now=now)


def test_real_manifests_that_were_altered_are_refused(evidence):
    bad = (evidence / "nvidia" / "rim_bad_signature.xml").read_bytes()
    with pytest.raises(AttestationError, match="signature of the RIM"):
        attest.verify_rim(bad, now=WHEN)
    bad = (evidence / "nvidia" / "switch_rim_mismatch.xml").read_bytes()
    with pytest.raises(AttestationError, match="digest of the RIM"):
        attest.verify_rim(bad, now=datetime(2025, 6, 1, tzinfo=UTC))


def test_the_foundry_signs_as_it_says():
    """The digest and SignedInfo are made without the code under test."""
    data = foundry.rim().decode()
    digest = re.search("<ds:DigestValue>(.*?)<", data)[1]
    before, end = foundry.rim_text(foundry.driver_resources())
    assert b64encode(sha384((before + end).encode()).digest()).decode() == digest
    assert SWID in before
