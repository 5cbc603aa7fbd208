from contextlib import suppress

import pytest
from helpers.cases import each
from hypothesis import given
from hypothesis import strategies as st

from fastrack import FormatError
from fastrack.attest._formats import binary, der


def test_fields_are_read_in_order():
    cursor = binary.Cursor(bytes(range(1, 20)), "thing")
    assert cursor.u8("a") == 1
    assert cursor.u16("b") == 0x0302
    assert cursor.u24("c") == 0x060504
    assert cursor.u32("d") == 0x0A090807
    assert cursor.u64("e") == 0x1211100F0E0D0C0B
    assert cursor.rest("f") == b"\x13"
    cursor.done()


@each(
    ("read", "said"),
    [
        (lambda c: c.take(5, "nonce"), "5 bytes as its nonce at offset 100, got 4 that are left"),
        (lambda c: c.take(-1, "nonce"), "as its nonce at offset 100"),
        (lambda c: c.u64("svn"), "8 bytes as its svn at offset 100"),
        (lambda c: (c.u8("a"), c.done()), "no byte as its end at offset 101, got 3 more"),
        (lambda c: c.expect(b"\1\2\4", "magic"), "expected 010204 as its magic at offset 100, got 010203"),
        (lambda c: (c.u8("a"), c.zeros(2, "reserved")), "zeros only as its reserved at offset 101, got 02"),
        (lambda c: (c.u8("a"), c.part(2, "part").take(3, "b")), "reading the part failed: .* at offset 101"),
    ],
)
def test_an_error_names_structure_field_and_offset(read, said):
    with pytest.raises(FormatError, match=said) as error:
        read(binary.Cursor(b"\1\2\3\4", "thing", start=100))
    assert str(error.value).startswith("reading the ")


def test_zeros_may_only_be_zeros():
    cursor = binary.Cursor(bytes(7), "thing")
    cursor.zeros(7, "reserved")
    cursor.done()


def element(tag, content):
    if len(content) < 0x80:
        return bytes([tag, len(content)]) + content
    size = len(content).to_bytes((len(content).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + content


@given(st.integers(0, 2**80))
def test_an_integer_is_read_as_it_was_written(number):
    content = number.to_bytes(number.bit_length() // 8 + 1, "big")
    assert der.read_integer(binary.Cursor(element(0x02, content), "thing"), "a") == number


@each("size", [0, 1, 127, 128, 255, 256, 70000])
def test_every_length_is_read(size):
    cursor = binary.Cursor(element(0x04, bytes(size)), "thing")
    assert der.read_bytes(cursor, der.OCTET_STRING, "a") == bytes(size)
    cursor.done()


@each(
    ("content", "dotted"),
    [
        ("2a864886f84d010d01", "1.2.840.113741.1.13.1"),
        ("678105050401", "2.23.133.5.4.1"),
        ("8837", "2.999"),
        ("00", "0.0"),
    ],
)
def test_an_object_identifier_is_read(content, dotted):
    assert der.read_oid(binary.Cursor(element(0x06, bytes.fromhex(content)), "thing"), "a") == dotted


@each(
    ("data", "read"),
    [
        ("020105", lambda c: der.read(c, der.OCTET_STRING, "a")),  # another tag
        ("0203", lambda c: der.read_integer(c, "a")),  # cut short
        ("0200", lambda c: der.read_integer(c, "a")),  # no digits
        ("0201ff", lambda c: der.read_integer(c, "a")),  # negative
        ("02020001", lambda c: der.read_integer(c, "a")),  # longer than need be
        ("04810105", lambda c: der.read_bytes(c, 4, "a")),  # a longer length than need be
        ("0482008005", lambda c: der.read_bytes(c, 4, "a")),
        ("048005", lambda c: der.read_bytes(c, 4, "a")),  # an indefinite length
        ("0485000000000105", lambda c: der.read_bytes(c, 4, "a")),
        ("1f0105", lambda c: der.read_element(c, "a")),  # a tag of several bytes
        ("0600", lambda c: der.read_oid(c, "a")),
        ("06028001", lambda c: der.read_oid(c, "a")),
        ("060281", lambda c: der.read_oid(c, "a")),
        ("060181", lambda c: der.read_oid(c, "a")),
    ],
)
def test_what_is_no_der_is_refused(data, read):
    with pytest.raises(FormatError, match="reading the thing"):
        read(binary.Cursor(bytes.fromhex(data), "thing"))


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data):
    for read in (der.read_element, der.read_integer, der.read_oid):
        with suppress(FormatError):
            read(binary.Cursor(data, "thing"), "a")
