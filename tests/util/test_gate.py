"""Counts before parsers: what each kind of document may hold."""

import tracemalloc

import pytest

from fastrack._util import gate
from fastrack.errors import FormatError

_FLOODS = {
    "members": (b'"a":0,',),
    "lists": (b"[],", b"{},", b"["),
    "values": (b"[],", b"{},", b'"",', b"1e9,", b'"a":1,', b"["),
    "lines": (b"\n", b"\r\n"),
    "certificates": (b"-----BEGIN CERTIFICATE-----\n",),
    "tags": (b"<a/>",),
    "attributes": (b'a="" ',),
    "namespaces": (b'xmlns:a="u" ',),
}


@pytest.mark.parametrize("kind", gate.LIMITS)
def test_a_flood_of_what_a_kind_has_little_of_is_refused_without_a_copy(kind):
    floods = {counted: _FLOODS[counted] for counted in gate.LIMITS[kind] if counted != "bytes"}
    for counted, units in floods.items():
        for unit in units:
            document = unit * (gate.LIMITS[kind][counted] + 1)
            tracemalloc.start()
            with pytest.raises(FormatError, match="expected at most"):
                gate.admit(document, kind)
            assert tracemalloc.get_traced_memory()[1] < 16 << 10
            tracemalloc.stop()


def test_a_document_is_named_in_the_error():
    with pytest.raises(FormatError, match="reading the issuers failed: expected at most 10 certificates, got 11"):
        gate.admit(b"-----BEGIN CERTIFICATE-----" * 11, "certificates", name="issuers")


def test_a_kind_without_limits_is_not_admitted():
    with pytest.raises(KeyError):
        gate.admit(b"", "another")
