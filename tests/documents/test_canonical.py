"""Documents have one form each, and what has another is refused."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from fastrack._documents import canonical as documents
from fastrack._documents.fields import TIME
from fastrack.errors import FormatError

DOCUMENT = {"b": [1, {"é": None}], "a": 1}
CONTENT = b'{"a":1,"b":[1,{"\\u00e9":null}]}\n'


def decode(content, **more):
    return documents.decode(content, {"a", "b"}, {"a": 1}, end=b"\n", **more)


def test_a_document_has_one_form():
    assert documents.encode(DOCUMENT, end=b"\n") == CONTENT
    assert decode(CONTENT, limit=len(CONTENT)) == DOCUMENT


def test_another_form_of_the_same_document_is_refused():
    for content in (
        CONTENT[:-1],
        CONTENT + b"\n",
        b" " + CONTENT,
        CONTENT.replace(b":", b": "),
        CONTENT.replace(b"\\u00e9", "é".encode()),
        CONTENT.replace(b"\\u00e9", b"\\u00E9"),
        b'{"b":[1,{"\\u00e9":null}],"a":1}\n',
        b'{"a":1,"a":1,"b":[1,{"\\u00e9":null}]}\n',
        b'{"a":1,"b":[1,{"\\u00e9":null,"\\u00e9":null}]}\n',
        CONTENT.decode().encode("utf-16"),
    ):
        with pytest.raises(ValueError, match=r"canonical|no JSON"):
            decode(content)


def test_a_number_that_is_no_json_is_neither_read_nor_written():
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        with pytest.raises(ValueError, match=r"no JSON|JSON compliant"):
            decode(f'{{"a":1,"b":{number}}}\n'.encode())
        with pytest.raises(ValueError, match="JSON compliant"):
            documents.encode({"a": [float(number.replace("1e999", "inf"))]})


def test_another_document_is_refused():
    for content in (b"", b"{", b"\xff", b"[]\n", b'"a"\n', b"null\n", b'{"a":1}\n', b'{"a":1,"b":1,"c":1}\n'):
        with pytest.raises(ValueError, match=r"no JSON|others"):
            decode(content)
    for value in (b"2", b"true", b"1.0", b'"1"', b"null"):
        with pytest.raises(ValueError, match="'a'"):
            decode(b'{"a":%s,"b":1}\n' % value)
    with pytest.raises(ValueError, match=f"at most {len(CONTENT) - 1} bytes"):
        decode(CONTENT, limit=len(CONTENT) - 1)


def test_content_that_is_nested_too_deep_is_malformed():
    with pytest.raises(FormatError, match="it is not a list"), documents.parsing("it is not a list", "look again"):
        decode(b'{"a":1,"b":' + 100_000 * b"[" + 100_000 * b"]" + b"}\n")


def test_what_the_use_of_malformed_members_raises_is_told_and_other_errors_are_not():
    for error in (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        with (
            pytest.raises(FormatError, match=r"no list: .*why.*; look again"),
            documents.parsing("no list", "look again"),
        ):
            raise error("why")
    with pytest.raises(OSError, match="why"), documents.parsing("no list", "look again"):
        raise OSError("why")


def test_base64_and_times_have_one_form_too():
    assert documents.decode_bytes(documents.encode_bytes(b"abcd")) == b"abcd"
    for text in ("YWJjZA", "YWJjZB==", "YWJj ZA==", "YWJjZA==\n", "é"):
        with pytest.raises(ValueError, match=r"base64|data|[Pp]adding"):
            documents.decode_bytes(text)
    noon = datetime(2027, 1, 31, 12, tzinfo=UTC)
    assert documents.encode_time(noon.astimezone(timezone(timedelta(hours=5)))) == "2027-01-31T12:00:00Z"
    assert TIME.read("2027-01-31T12:00:00Z") == noon
    for text in ("2027-1-31T12:00:00Z", "2027-01-31T12:00:00", "2027-02-30T12:00:00Z", "2027-01-31T12:00:00+01:00"):
        with pytest.raises(ValueError, match="a time in UTC"):
            TIME.read(text)
