"""Memory of parsers for prepared documents: in proportion to the document, and little where the gate refuses."""

import itertools
import string
import tracemalloc

import pytest

from fastrack._keys.signing import read_unverified_payload
from fastrack._util import gate
from fastrack.attest import parse_rim
from fastrack.attest._formats import xml
from fastrack.attest._formats.wire import Reader
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


def test_an_envelope_of_many_signatures_or_escapes_takes_less_than_four_times_its_size():
    for document in (
        b'{"payload":"","payloadType":"","signatures":[' + b'{"sig":""},' * (20 << 10) + b'{"sig":""}]}',
        b'{"payload":"\\ud83d\\ude00' + b"A" * (256 << 10) + b'","payloadType":"","signatures":[]}',
    ):
        assert _refused_in(read_unverified_payload, document) <= 4 * len(document)
