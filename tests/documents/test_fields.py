"""A field reads the values that it may have, and names the place of any other."""

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from fastrack._documents import exchange, fields, toml
from fastrack.errors import FormatError

NOON = datetime(2027, 1, 31, 12, tzinfo=UTC)
VALUES = [  # a field, values in a document, and what they are read as
    (fields.TEXT, "é", "é"),
    (fields.BOOLEAN, False, False),
    (fields.ID, "0f" * 16, "0f" * 16),
    (fields.NUMBER, 2**53 - 1, 2**53 - 1),
    (fields.integer(1), 10**30, 10**30),
    (fields.BITS, 128, 128),
    (fields.TIME, "2027-01-31T12:00:00Z", NOON),
    (fields.binary(3), "YWJj", b"abc"),
    (fields.binary(3, least=0), "", b""),
    (fields.hexadecimal(2), "0aff", b"\x0a\xff"),
    (fields.or_none(fields.ID), None, None),
    (fields.list_of(fields.NUMBER, 2), [1, 2], (1, 2)),
    (fields.mapping(fields.ID, fields.NUMBER, 1), {"0f" * 16: 1}, {"0f" * 16: 1}),
]
WRONG = [  # a field, a value that it does not take, and the path to what is wrong
    (fields.TEXT, b"a", ""),
    (fields.BOOLEAN, 0, ""),
    (fields.ID, "0F" * 16, ""),
    (fields.ID, "0f" * 16 + "\n", ""),
    (fields.NUMBER, 2**53, ""),
    (fields.NUMBER, -1, ""),
    (fields.NUMBER, True, ""),
    (fields.NUMBER, 1.0, ""),
    (fields.BITS, 192, ""),
    (fields.BITS, 128.0, ""),
    (fields.BITS, [], ""),
    (fields.TIME, "2027-02-30T12:00:00Z", ""),
    (fields.TIME, "2027-01-31T12:00:00+00:00", ""),
    (fields.TIME, "٢027-01-31T12:00:00Z", ""),
    (fields.binary(3), "YWJjZA==", ""),
    (fields.binary(3), "YWJ", ""),
    (fields.binary(3), "YWK=", ""),
    (fields.binary(3), "", ""),
    (fields.binary(3, 3), "YWI=", ""),
    (fields.hexadecimal(2), "0aff00", ""),
    (fields.hexadecimal(None), "0af", ""),
    (fields.hexadecimal(None), "0ag0", ""),
    (fields.list_of(fields.NUMBER, 2), [1, 2, 3], ""),
    (fields.list_of(fields.NUMBER, 2), (1, 2), ""),
    (fields.list_of(fields.list_of(fields.NUMBER)), [[], [1, -1]], "[1][1]"),
    (fields.mapping(fields.ID, fields.NUMBER), {"a": 1}, ""),
    (fields.mapping(fields.TEXT, fields.NUMBER), {"a": -1}, "a"),
    (fields.mapping(fields.TEXT, fields.NUMBER, 1), {"a": 1, "b": 2}, ""),
    (fields.member_of("a", fields.NUMBER), {"a": -1, "b": 2}, "a"),
    (fields.member_of("a", fields.NUMBER), {"b": 2}, ""),
    (fields.member_of("a", fields.NUMBER), [], ""),
]


@dataclass
class Pair:
    first: int
    rest: tuple[str, ...] = ()


PAIR = {"one": fields.NUMBER.of("first"), "rest": fields.list_of(fields.TEXT)}
FORM = fields.Form(PAIR, {"format": 1}, limit=100, end=b"\n")


@pytest.mark.parametrize(("field", "value", "read"), VALUES)
def test_a_field_reads_its_values_and_writes_them_as_they_were(field, value, read):
    assert field.takes(value)
    assert field.read(value) == read
    assert field.write(field.read(value)) == value


@pytest.mark.parametrize(("field", "value", "path"), WRONG)
def test_any_other_value_is_refused_with_its_place(field, value, path):
    assert not field.takes(value)
    with pytest.raises(fields.FieldError) as caught:
        field.read(value)
    assert caught.value.path == path
    assert "got another value" in str(caught.value)


def test_a_form_has_its_members_and_no_others():
    content = FORM.write(Pair(3, ("a",)))
    assert content == b'{"format":1,"one":3,"rest":["a"]}\n'
    assert Pair(**FORM.parse(content)) == Pair(3, ("a",))
    for wrong in (
        b'{"format":2,"one":3,"rest":["a"]}\n',
        b'{"format":1,"one":3}\n',
        b'{"format":1,"more":1,"one":3,"rest":["a"]}\n',
        b'{"format":1,"one":3,"rest":["a",1]}\n',
        b'{"format":1,"one":3,"rest":["a"] }\n',
        b'{"format":1,"one":3,"rest":["%s"]}\n' % (b"a" * 100),
    ):
        with pytest.raises(ValueError, match=r"expected|canonical|others|format"):
            FORM.parse(wrong)


def test_a_member_may_be_absent_only_where_it_may():
    assert fields.read_members({"one": 1}, PAIR, {"rest"}) == {"first": 1}
    with pytest.raises(fields.FieldError, match="the members one, rest"):
        fields.read_members({"rest": []}, PAIR, {"rest"})
    assert fields.write_members(Pair(1, None), PAIR, {"rest"}) == {"one": 1}


def test_a_reader_names_the_path_from_the_document():
    reader = exchange.Reader.parse(b'{"a":{"b":[{"c":[1]},{"c":[2,"x"]}]}}', "fastrack challenge")
    field = fields.list_of(fields.member_of("c", fields.list_of(fields.INTEGER)))
    with pytest.raises(FormatError, match=r"an integer from 0 to 65535 as its a\.b\[1\]\.c\[1\], got x"):
        reader.member("a").read("b", field)


def test_a_table_names_the_key_and_what_it_should_be():
    table = toml.Table.parse(b'a = ["x"]\n[b]\nc = 1\n[[d]]\n', "settings")
    assert table.needed("a", toml.filled(fields.TEXT, "words", tuple)) == ("x",)
    assert table.read("absent", fields.TEXT) is None
    assert table.section("b", {"c": fields.NUMBER.of("count"), "e": fields.TEXT}) == {"count": 1}
    for read, told in (
        (lambda: table.needed("absent", fields.TEXT), "expected a string as absent, got none"),
        (
            lambda: table.read("a", toml.filled(fields.NUMBER, "numbers")),
            r"expected numbers, not empty as a, got \['x'\]",
        ),
        (lambda: table.section("b", {"e": fields.TEXT}), r"expected one of the keys e as b\.c, got an unknown one"),
        (lambda: table.tables("a"), "expected an array of tables as a"),
        (table.done, "expected one of the keys a, absent, b as d"),
        (lambda: toml.Table.parse(b"\xff", "settings"), "expected TOML"),
        (lambda: toml.Table.parse("a = " + 5000 * "[", "settings"), "expected TOML"),
    ):
        with pytest.raises(FormatError, match=told):
            read()
