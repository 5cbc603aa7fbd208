"""Memory of parsers for prepared documents: in proportion to the document, and little where the gate refuses."""

import itertools
import string
import tracemalloc
from contextlib import suppress
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from helpers.foundry.authority import NOW

from fastrack._documents.exchange import Reader, decode
from fastrack._keys.signing import read_unverified_payload
from fastrack._util import gate
from fastrack.attest import parse_rim
from fastrack.attest._formats import xml
from fastrack.attest._formats.x509 import load_chain, load_crl
from fastrack.errors import FormatError

_NAMES = ["".join(letters).encode() for letters in itertools.product(string.ascii_lowercase, repeat=3)]
_JSON_KINDS = [kind for kind, most in gate.LIMITS.items() if "values" in most and most.get("bytes", 0) > 8 << 10]
_TINY = {"lists": b"[],", "objects": b"{},", "texts": b'"",', "floats": b"1e9,", "members": b'"a":1,', "deep": b"[[]],"}


def _peak(read, document):
    tracemalloc.start()
    try:
        read(document)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def _refused_in(read, document):
    def refuse(text):
        with pytest.raises(FormatError):
            read(text)

    return _peak(refuse, document)


def _bound(document):
    return 16 * len(document) + (1 << 20)


@pytest.mark.parametrize("unit", _TINY.values(), ids=_TINY)
@pytest.mark.parametrize("kind", _JSON_KINDS)
def test_json_of_tiny_values_takes_less_than_four_times_its_size(kind, unit):
    document = b'{"challenge":[' + unit * ((256 << 10) // len(unit)) + b"0]}\n"
    assert _refused_in(lambda text: Reader.parse(text, kind), document) <= 4 * len(document)


@pytest.mark.parametrize("kind", _JSON_KINDS)
def test_json_of_as_many_values_as_a_kind_may_have_takes_less_than_the_bound(kind):
    most = gate.LIMITS[kind]["values"] - 8
    for document in (
        b"[" + b"[[]]," * (most // 3) + b"0]",
        b"[" + b",".join(b'{"%s":1}' % name for name in _NAMES[: most // 3]) + b"]",
        b"{" + b",".join(b'"%s":1' % name for name in _NAMES[: most // 2]) + b"}",
        b"{" + b",".join(b'"%s":{}' % name for name in _NAMES[: most // 3]) + b"}",
        b'["' + "\N{GRINNING FACE}".encode() + b"A" * (32 << 10) + b'"]',  # one that quadruples the others
    ):
        assert _peak(lambda text: Reader.parse(text, kind), document) <= _bound(document)


@pytest.mark.parametrize("character", [b"\x7f", "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()])
def test_a_document_that_is_longer_in_its_canonical_form_is_not_brought_into_it(character):
    document = b'{"id":"%s","kind":"fastrack/tour-begin","version":1}\n' % (character * (64 << 10))
    assert _refused_in(lambda text: decode(text, "fastrack/tour-begin", 1, ("id",)), document) <= 4 * len(document)


def _manifest(count):
    """Return a manifest whose elements each have a namespace of their own, under a root that has as many."""
    declared = " ".join(f'xmlns:p{number}="u"' for number in range(count))
    return (f"<r {declared}>" + '<a xmlns:z="q"/>' * count + "</r>").encode()


def test_a_manifest_of_many_namespaces_takes_less_than_four_times_its_size():
    document = _manifest(3750)  # 120 kB
    assert _refused_in(parse_rim, document) <= 4 * len(document)


def test_a_manifest_of_as_much_as_it_may_have_takes_less_than_the_bound():
    most = gate.LIMITS["RIM"]
    root = b'<r xmlns="u" xmlns:h="v">%s</r>'
    attributes = b" ".join(b'h:%s=""' % name for name in _NAMES[: most["attributes"] - 2])
    declared = b" ".join(b'xmlns:p%d="%s"' % (number, b"u" * 9000) for number in range(16))
    for document in (
        root % (b"<a/> " * (most["tags"] - 2)),
        root % (b"<a %s/>" % attributes),
        root % ("\N{GRINNING FACE}".encode() + b"A" * (256 << 10)),
        b"<r %s>%s</r>" % (declared, b'<a xmlns:p0="q"/>' * 16),
    ):
        assert _peak(lambda text: xml.canonicalize(xml.parse(text, "RIM")), document) <= _bound(document)


def test_an_envelope_of_many_signatures_takes_less_than_four_times_its_size():
    document = b'{"payload":"","payloadType":"","signatures":[' + b'{"sig":""},' * (20 << 10) + b'{"sig":""}]}'
    assert _refused_in(read_unverified_payload, document) <= 4 * len(document)


@pytest.mark.parametrize(
    "character", [b"\\ud83d\\ude00", "\N{GRINNING FACE}".encode(), "\N{GRINNING FACE}\\u0041".encode()]
)
def test_one_character_that_quadruples_an_envelope_takes_less_than_the_bound(character):
    document = b'{"payload":"' + character + b"A" * (1 << 20) + b'","payloadType":"","signatures":[]}'
    assert _refused_in(read_unverified_payload, document) <= _bound(document)


_KEY = ec.generate_private_key(ec.SECP256R1())


def _certificate(subject, *extensions):
    """Return a certificate in PEM, whose subject has these attributes."""
    attributes = [x509.NameAttribute(x509.ObjectIdentifier("1.2.3"), text) for text in subject]
    builder = x509.CertificateBuilder(x509.Name([]), x509.Name(attributes), _KEY.public_key(), 1)
    builder = builder.not_valid_before(NOW).not_valid_after(NOW + timedelta(days=1))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(_KEY, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize("count", [300, 2000])
@pytest.mark.parametrize(
    "make",
    [
        lambda count: _certificate(["a"] * (count // 2)),
        lambda count: _certificate([], x509.SubjectAlternativeName([x509.DNSName("")] * (2 * count))),
        lambda count: _certificate([], x509.ExtendedKeyUsage([x509.ObjectIdentifier("1.2")] * count)),
        lambda count: _certificate(
            [],
            *(x509.UnrecognizedExtension(x509.ObjectIdentifier(f"1.2.{number}"), b"") for number in range(count // 2)),
        ),
    ],
    ids=["name", "other names", "usages", "extensions"],
)
def test_certificates_of_many_small_parts_take_less_than_the_bound(make, count):
    certificate = make(count)
    chain = certificate * min((64 << 10) // len(certificate), 10)

    def read(text):
        with suppress(FormatError):
            load_chain(text, evidence="chain")

    assert _peak(read, chain) <= (4 * len(chain) if count > 1000 else _bound(chain))


def test_a_revocation_list_of_many_small_parts_is_refused():
    builder = x509.CertificateRevocationListBuilder(x509.Name([])).last_update(NOW)
    builder = builder.next_update(NOW + timedelta(days=1))
    for number in range(1000):  # of which a list may have any number
        entry = x509.RevokedCertificateBuilder(number + 1, NOW).build()
        builder = builder.add_revoked_certificate(entry)
    crl = builder.sign(_KEY, hashes.SHA256()).public_bytes(Encoding.DER)
    assert len(load_crl(crl, evidence="list")) == 1000
    extension = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), bytes(2048))
    crl = builder.add_extension(extension, critical=False).sign(_KEY, hashes.SHA256()).public_bytes(Encoding.DER)
    with pytest.raises(FormatError, match="a name or extensions of 2"):
        load_crl(crl, evidence="list")
