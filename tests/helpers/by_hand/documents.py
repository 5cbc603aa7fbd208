"""JSON documents and the values in them, and the one error of a reader."""

import base64
import json
import re
from datetime import datetime
from functools import wraps

from cryptography.exceptions import UnsupportedAlgorithm


class RefusedError(Exception):
    """A reader refused what it was given; `kind` is the class of the failure in docs/format.md."""

    def __init__(self, kind, reason):
        super().__init__(f"{kind}: {reason}")
        self.kind = kind


def require(holds, reason, kind="format"):
    if not holds:
        raise RefusedError(kind, reason)


def described(read):
    """Refuse what has another form than the one described, whatever the reader stumbled over."""

    @wraps(read)
    def reading(*arguments):
        try:
            return read(*arguments)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, UnsupportedAlgorithm) as error:
            raise RefusedError("format", repr(error)) from error

    return reading


def load(text):
    """Parse JSON in UTF-8, in which no object has a member twice and no string a lone surrogate."""
    document = parse(text if isinstance(text, str) else text.decode())
    json.dumps(document, ensure_ascii=False).encode()  # which no lone surrogate is
    return document


def parse(text):
    return json.loads(text, object_pairs_hook=_each_once, parse_constant=_no_constant, parse_int=_integer)


def _each_once(members):
    require(len(dict(members)) == len(members), "no member twice")
    return dict(members)


def _no_constant(name):
    raise RefusedError("format", f"a number, got {name}")


def _integer(text):
    require(text != "-0", "a number in its one form")
    return int(text)


def canonical(document):
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def load_canonical(content):
    document = load(content)
    require(canonical(document) == content, "JSON in canonical form")
    return document


def load_line(content, limit):
    """Parse a document that is a line of canonical JSON."""
    require(len(content) <= limit, f"{limit} bytes at most")
    require(content[-1:] == b"\n", "a newline at the end")
    return load_canonical(content[:-1])


def members(document, names):
    """Require an object of exactly these members."""
    require(isinstance(document, dict) and document.keys() == set(names.split()), f"the members {names}")
    return document


def read_base64(text, sizes=range(1 << 26)):
    require(isinstance(text, str), "base64")
    content = base64.b64decode(text, validate=True)
    require(base64.b64encode(content).decode() == text, "base64 in canonical form")
    require(len(content) in sizes, f"a size in {sizes}")
    return content


def is_hexadecimal(text, digits):
    return isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", text) is not None


def is_number(value, least=0, end=2**53):
    return type(value) is int and least <= value < end


def read_time(text):
    time = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")  # noqa: DTZ007 - all are in UTC
    require(f"{time.isoformat()}Z" == text, "a time")
    return time
