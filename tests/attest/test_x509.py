from contextlib import suppress
from datetime import datetime, timedelta, timezone

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.serialization import Encoding
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.foundry.authority import NOW, Authority, bundle, flips, is_refused, key_usage, named, rsa_key
from hypothesis import given
from hypothesis import strategies as st

from fastrack import AttestationError, FormatError
from fastrack.attest._formats import x509 as _x509

DAY = timedelta(days=1)
FAR = timedelta(days=4000)


def make(kind, *, root=None, middle=None, leaf=None):
    """Make a root, an authority and a leaf of ECDSA or RSASSA-PSS keys, with what is to be different in each."""
    keys = [None] * 3
    if kind == "pss":
        keys = [rsa_key("root"), rsa_key("middle"), ec.generate_private_key(ec.SECP384R1())]
    first = Authority("Root", **{"key": keys[0], **(root or {})})
    second = Authority("Middle", first, **{"key": keys[1], "path_length": 0, **(middle or {})})
    third = Authority("Leaf", second, **{"key": keys[2], "ca": False, **(leaf or {})})
    return [third, second, first]


def verify(kind, authorities, *, now=NOW, roots=None):
    algorithms = _x509.ECDSA if kind == "ecdsa" else _x509.PSS_SHA384
    chain = [_x509.load_certificate(one.der, evidence="test chain") for one in authorities]
    roots = {authorities[-1].fingerprint} if roots is None else roots
    return _x509.verify_chain(chain, roots=roots, now=now, evidence="test chain", algorithms=algorithms)


@pytest.fixture(params=["ecdsa", "pss"])
def kind(request):
    return request.param


def test_a_chain_to_a_pinned_root_is_accepted(kind):
    authorities = make(kind)
    chain = verify(kind, authorities)
    assert [_x509.fingerprint(one) for one in chain.certificates] == [one.fingerprint for one in authorities]
    assert (chain.leaf, chain.issuer, chain.root) == chain.certificates
    assert chain.verified_at == NOW
    assert chain.valid_until == min(one.certificate.not_valid_after_utc for one in authorities)


def test_certificates_without_a_key_usage_may_be_used_for_anything(kind):
    without = {"usage": None}
    authorities = make(kind, root=without, middle=without, leaf=without)
    verify(kind, authorities)
    _x509.verify_crl(crl_of(authorities[1]), authorities[1].certificate, now=NOW, evidence="list")


def test_any_time_zone_will_do(kind):
    verify(kind, make(kind), now=NOW.astimezone(timezone(timedelta(hours=9))))


def test_a_time_without_a_zone_is_a_mistake_of_the_caller(kind):
    with pytest.raises(ValueError, match="with a time zone"):
        verify(kind, make(kind), now=datetime(2026, 6, 1))  # noqa: DTZ001


def test_another_root_is_refused(kind):
    with pytest.raises(AttestationError, match="roots=") as error:
        verify(kind, make(kind), roots={make(kind)[-1].fingerprint if kind == "ecdsa" else "00" * 32})
    assert (error.value.evidence, error.value.field) == ("test chain", "root")


NAME_CONSTRAINTS = bytes.fromhex("300ba0093007820561 2e636f6d".replace(" ", ""))  # permitted: a.com
UNKNOWN = {"extensions": [("1.2.3.4", b"\5\0")], "critical": {"1.2.3.4"}}
WRONG = {
    "the root has ended": {"root": {"end": NOW - DAY}},
    "the authority has ended": {"middle": {"end": NOW - DAY}},
    "the leaf has ended": {"leaf": {"end": NOW - DAY}},
    "the leaf has not begun": {"leaf": {"start": NOW + DAY}},
    "the authority is none": {"middle": {"ca": False, "usage": key_usage("key_cert_sign")}},
    "the authority does not say that it is one": {"middle": {"basic": False}},
    "the root does not say that it is one": {"root": {"basic": False}},
    "the authority may not sign": {"middle": {"usage": key_usage("crl_sign")}},
    "the leaf is an authority": {"leaf": {"ca": True, "usage": key_usage("digital_signature", "key_cert_sign")}},
    "the leaf may not sign": {"leaf": {"usage": key_usage("key_agreement")}},
    "the leaf has another issuer": {"leaf": {"claimed_issuer": named("Root")}},
    "the root allows no authority below": {"root": {"path_length": 0}},
    "a critical extension is unknown": {"leaf": UNKNOWN},
    "a critical extension above is unknown": {"middle": UNKNOWN},
    "a critical extension of the root is unknown": {"root": UNKNOWN},
    "the names below the authority are constrained": {"middle": {"extensions": [("2.5.29.30", NAME_CONSTRAINTS)]}},
    "the authority's key is on another curve": {"middle": {"key": ec.generate_private_key(ec.SECP256K1())}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_chain_is_refused(kind, wrong):
    with pytest.raises(AttestationError):
        verify(kind, make(kind, **WRONG[wrong]))


@pytest.mark.parametrize("order", [[0, 2], [1, 0, 2], [0, 1, 1, 2], [0], [2], [], [0, 1], [0, 1, 2, 2]])
def test_certificates_that_are_missing_or_too_many_are_refused(kind, order):
    authorities = make(kind)
    chosen = [authorities[index] for index in order]
    with pytest.raises(AttestationError):
        verify(kind, chosen, roots={authorities[-1].fingerprint})


def test_an_authority_of_the_same_name_with_another_key_is_refused(kind):
    authorities = make(kind)
    authorities[1] = make(kind, middle={"key": Authority("x").key if kind == "ecdsa" else rsa_key("other")})[1]
    with pytest.raises(AttestationError):
        verify(kind, authorities)


def test_an_authority_that_is_no_part_of_the_path_is_refused(kind):
    leaf, middle, root = make(kind, middle={"path_length": None})
    other = make(kind, root={"key": root.key}, middle={"path_length": None})[1]
    for chain in ([leaf, middle, other, root], [leaf, other, middle, root]):
        with pytest.raises(AttestationError):
            verify(kind, chain)


def test_a_chain_of_two_is_accepted():
    root = Authority("Root")
    verify("ecdsa", [Authority("Leaf", root, ca=False), root])


@pytest.mark.parametrize(
    "options",
    [
        {"hash_algorithm": hashes.SHA256(), "pss": padding.PSS(padding.MGF1(hashes.SHA256()), 32)},
        {"hash_algorithm": hashes.SHA384(), "pss": padding.PKCS1v15()},
    ],
    ids=["SHA-256", "PKCS #1"],
)
def test_a_pss_chain_has_one_algorithm(options):
    with pytest.raises(AttestationError, match="RSASSA-PSS with SHA-384"):
        verify("pss", make("pss", leaf=options))


@pytest.mark.slow
def test_every_byte_of_a_chain_counts(kind):
    authorities = make(kind)
    roots = {authorities[-1].fingerprint}
    ders = [one.der for one in authorities]
    for place in range(3):
        for index, data in flips(ders[place]):
            changed = [*ders[:place], data, *ders[place + 1 :]]
            assert is_refused(verify_ders, kind, changed, roots), f"byte {index} of certificate {place}"


def verify_ders(kind, ders, roots):
    chain = [_x509.load_certificate(der, evidence="chain") for der in ders]
    algorithms = _x509.ECDSA if kind == "ecdsa" else _x509.PSS_SHA384
    _x509.verify_chain(chain, roots=roots, now=NOW, evidence="chain", algorithms=algorithms)


def test_a_signature_with_unused_bits_is_refused():
    authority = next(one for one in iter(lambda: Authority("a"), None) if one.der[-1] % 2 == 0)
    signature = authority.certificate.signature
    assert authority.der.endswith(b"\0" + signature)
    with pytest.raises(FormatError, match="unused bits"):
        _x509.load_certificate(authority.der.removesuffix(b"\0" + signature) + b"\1" + signature, evidence="leaf")


# Text.


def test_pem_is_read_in_its_strict_form():
    authorities = make("ecdsa")
    text = bundle(*authorities)
    for form in (text, text.removesuffix(b"\n"), text + b"\0", text + b"\n", text.replace(b"\n", b"\r\n")):
        chain = _x509.load_chain(form, evidence="chain")
        assert [_x509.fingerprint(one) for one in chain] == [one.fingerprint for one in authorities]


def test_a_chain_that_begins_with_the_root_is_turned_round():
    authorities = make("ecdsa")
    wanted = _x509.load_chain(bundle(*authorities), evidence="chain")
    assert _x509.load_chain(bundle(*reversed(authorities)), evidence="chain") == wanted
    issuers = authorities[1:]  # as AMD's, without the leaf
    assert _x509.load_chain(bundle(*reversed(issuers)), evidence="chain") == wanted[1:]


def test_a_chain_in_any_other_order_stays_so_and_no_authority_is_to_be_pinned():
    leaf, middle, root = make("ecdsa")
    for order in ([middle, leaf, root], [root, leaf, middle], [middle, root, leaf], [leaf, root, middle]):
        chain = _x509.load_chain(bundle(*order), evidence="chain")
        assert [_x509.fingerprint(one) for one in chain] == [one.fingerprint for one in order]
        with pytest.raises(AttestationError):
            _x509.verify_chain(chain, roots={root.fingerprint}, now=NOW, evidence="chain")
    for order, last in (([leaf, middle], "Middle"), ([root, middle, leaf], "Leaf")):
        with pytest.raises(AttestationError, match=rf"certificate is that of '{last}', which .* issued") as error:
            verify("ecdsa", order, roots={root.fingerprint})
        assert "roots=" not in str(error.value)
    again = Authority("Root", root)  # the same name above and below, so that names do not tell the order
    for order in ([root, again], [again, root]):
        chain = _x509.load_chain(bundle(*order), evidence="chain")
        assert [_x509.fingerprint(one) for one in chain] == [one.fingerprint for one in order]


def test_every_byte_of_pem_counts():
    text = bundle(*make("ecdsa")[:2])
    same = _x509.load_chain(text, evidence="chain")
    for index, data in flips(text):
        with suppress(FormatError):
            assert _x509.load_chain(data, evidence="chain") != same, index


@each(
    "text",
    [
        b"",
        b"-----BEGIN CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        b"x" + Authority("a").pem,
        Authority("a").pem + b"x",
        Authority("a").pem + b"\n" + Authority("b").pem,
        Authority("a").pem * 11,
    ],
)
def test_what_is_no_strict_pem_is_refused(text):
    with pytest.raises(FormatError, match="reading the chain failed"):
        _x509.load_chain(text, evidence="chain")


@given(st.binary(max_size=100))
def test_garbage_is_refused(data):
    for load in (_x509.load_certificate, _x509.load_chain, _x509.load_crl):
        with pytest.raises(FormatError):
            load(data, evidence="thing")


# Revocation.


def crl_of(authority, data=None, **options):
    return _x509.load_crl(authority.crl(**options) if data is None else data, evidence="list")


def test_a_current_list_without_the_certificate_is_accepted(kind):
    leaf, middle, _ = make(kind)
    crl = crl_of(middle, revoked=[Authority("other", middle, ca=False)])
    verified = _x509.verify_crl(crl, middle.certificate, now=NOW, evidence="list")
    assert (verified.issued_at, verified.valid_until) == (NOW - DAY, NOW + 30 * DAY)
    _x509.require_unrevoked(leaf.certificate, verified, evidence="list")


def test_a_revoked_certificate_is_refused(kind):
    leaf, middle, _ = make(kind)
    verified = _x509.verify_crl(crl_of(middle, revoked=[leaf]), middle.certificate, now=NOW, evidence="list")
    with pytest.raises(AttestationError, match="Do not trust this machine") as error:
        _x509.require_unrevoked(leaf.certificate, verified, evidence="list")
    assert error.value.evidence == "list"


def test_a_list_of_another_authority_says_nothing(kind):
    leaf, middle, root = make(kind)
    crl = crl_of(root)
    with pytest.raises(AttestationError):
        _x509.verify_crl(crl, middle.certificate, now=NOW, evidence="list")
    verified = _x509.verify_crl(crl, root.certificate, now=NOW, evidence="list")
    with pytest.raises(AttestationError, match="the list of"):
        _x509.require_unrevoked(leaf.certificate, verified, evidence="list")


@pytest.mark.parametrize(
    "options",
    [{"start": NOW + DAY}, {"start": NOW - 3 * DAY, "end": NOW - DAY}, {"critical": True}, {"name": named("Another")}],
)
def test_a_wrong_list_is_refused(kind, options):
    _, middle, _ = make(kind)
    with pytest.raises(AttestationError):
        _x509.verify_crl(crl_of(middle, **options), middle.certificate, now=NOW, evidence="list")


POINT = x509.DistributionPoint([x509.UniformResourceIdentifier("http://example.com/crl")], None, None, None)
PARTS = {
    "2.5.29.27": x509.DeltaCRLIndicator(3),
    "2.5.29.28": x509.IssuingDistributionPoint(None, None, True, False, None, False, False),
    "2.5.29.46": x509.FreshestCRL([POINT]),
    "2.5.29.44": x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.44"), b"\x30\0"),  # cRLScope
    "2.5.29.59": x509.UnrecognizedExtension(x509.ObjectIdentifier("2.5.29.59"), b"\x30\0"),  # revokedGroups
}
WHOLE = [
    x509.AuthorityKeyIdentifier(b"key", None, None),
    x509.IssuerAlternativeName([x509.DNSName("example.com")]),
    x509.UnrecognizedExtension(x509.ObjectIdentifier("1.3.6.1.4.1.311.21.1"), b"\2\1\0"),  # the version of a CA
]


def test_a_list_that_leaves_revoked_certificates_out_is_refused_though_it_does_not_say_so_critically(kind):
    _, middle, _ = make(kind)
    for oid, extension in PARTS.items():
        with pytest.raises(AttestationError, match=rf"the extension {oid}") as error:
            _x509.verify_crl(crl_of(middle, extensions=[extension]), middle.certificate, now=NOW, evidence="list")
        assert (error.value.evidence, error.value.field) == ("list", "certificates")
    _x509.verify_crl(crl_of(middle, extensions=WHOLE), middle.certificate, now=NOW, evidence="list")


def in_pem(data):
    return x509.load_der_x509_crl(data).public_bytes(Encoding.PEM)


def test_a_list_may_be_text():
    _, middle, _ = make("ecdsa")
    data = middle.crl()
    same = crl_of(middle, data)
    pem, text = in_pem(data), data.hex().encode()
    for form in (pem, pem.rstrip(), pem.replace(b"\n", b"\r\n"), text, text.upper(), text + b"\n"):
        assert crl_of(middle, form) == same
    others = [pem + b"x", b"x" + pem, pem * 2, pem.replace(b"X509 CRL", b"X509  CRL"), pem.replace(b"\n", b"\n\n", 2)]
    others += [text[:-1], text[:2] + b" " + text[2:], text.upper()[:9] + text[9:], b"0x" + text, b"30", b"-----"]
    for form in others:
        with pytest.raises(FormatError, match="reading the list failed"):
            crl_of(middle, form)
    for form in (pem, text):
        for index, altered in flips(form, step=7):
            with suppress(FormatError):
                assert crl_of(middle, altered) != same, index


def test_a_list_by_another_key_of_the_same_name_is_refused():
    _, middle, root = make("ecdsa")
    with pytest.raises(AttestationError, match="signature"):
        _x509.verify_crl(crl_of(Authority("Middle", root)), middle.certificate, now=NOW, evidence="list")


def test_a_list_by_an_authority_of_another_kind_of_key_is_refused():
    other = Authority("Middle", key=ec.generate_private_key(ec.SECP384R1()))
    with pytest.raises(AttestationError, match="signature"):
        _x509.verify_crl(crl_of(other), Authority("Middle", key=rsa_key("root")).certificate, now=NOW, evidence="list")


def test_an_authority_that_may_sign_no_lists_is_refused():
    _, middle, _ = make("ecdsa", middle={"usage": key_usage("key_cert_sign")})
    with pytest.raises(AttestationError, match="cRLSign"):
        _x509.verify_crl(crl_of(middle), middle.certificate, now=NOW, evidence="list")


def test_every_byte_of_a_list_counts():
    leaf, middle, _ = make("ecdsa")
    for index, data in flips(middle.crl(revoked=[leaf])):
        assert is_refused(verify_list, middle, data), f"byte {index}"


def verify_list(authority, data):
    _x509.verify_crl(crl_of(authority, data), authority.certificate, now=NOW, evidence="list")


def test_a_list_whose_signature_has_unused_bits_is_refused():
    authority = Authority("a")
    der = next(der for der in iter(lambda: Authority("a").crl(revoked=[authority]), None) if der[-1] % 2 == 0)
    signature = crl_of(authority, der).signature
    with pytest.raises(FormatError, match="unused bits"):
        crl_of(authority, der.removesuffix(b"\0" + signature) + b"\1" + signature)


def test_a_list_is_verified_at_a_time_with_a_zone():
    authority = Authority("a")
    with pytest.raises(ValueError, match="with a time zone"):
        _x509.verify_crl(crl_of(authority), authority.certificate, now=NOW.replace(tzinfo=None), evidence="list")


# Real ones.


@pytest.mark.parametrize("name", ["milan", "genoa"])
def test_real_authorities_of_amd_are_pinned(evidence, name):
    from fastrack.attest import AMD_ROOTS

    text = (evidence / "snp" / f"{name}_ask_ark_asvk.pem").read_bytes()
    assert _x509.fingerprint(_x509.load_chain(text, evidence="AMD chain")[1]) in AMD_ROOTS


def test_certificates_have_extensions_of_a_usual_size():
    usual = Authority("a", extensions=[("1.2.3.4", bytes(1900))])
    assert _x509.load_certificate(usual.der, evidence="a") == usual.certificate
    for size in (2048, 9000):  # the second is too large to be kept
        with pytest.raises(FormatError, match="a name or extensions of"):
            _x509.load_certificate(Authority("a", extensions=[("1.2.3.4", bytes(size))]).der, evidence="a")


# Warnings, threads and forks.


def test_the_serial_number_of_amd_s_certificates_is_no_warning(recwarn):
    from helpers.foundry import snp

    _x509.load_certificate(snp.chip().leaf, evidence="VCEK certificate")
    assert not recwarn.list


def test_a_name_with_a_country_that_is_too_long_is_malformed():
    with pytest.warns(UserWarning, match="Attribute's length"):
        country = x509.NameAttribute(x509.NameOID.COUNTRY_NAME, "Wonderland", _validate=False)
    authority = Authority(x509.Name([country]), ca=False)
    with pytest.raises(FormatError, match="part of a name"):
        _x509.load_certificate(authority.der, evidence="leaf")


def test_a_forked_child_does_not_wait_for_a_lost_thread():
    der = Authority("a").der
    with _x509._warnings_lock:
        assert in_forked_child(lambda: _x509.load_certificate(der, evidence="a").serial_number, seconds=10)
