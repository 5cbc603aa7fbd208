"""Text that looks like a key, where a path or a name belongs."""

from __future__ import annotations

import os
import re

from fastrack.errors import FormatError

_BASE64 = r"[A-Za-z0-9+/_-]"
_LOOKS_SECRET = re.compile(
    r"(?i:fastrack-(?:key|secret)-1:)"  # a key file's second line, or all of it
    # Hexadecimal; with a suffix, in a longer name or in a folder it is the name of a file, such as a digest.
    r"|(?:^/|(?<![\w./-]))(?:0[xX])?(?:[0-9A-Fa-f]{2}[:\s-]?){16,}(?![\w./-])"
    rf"|(?<!{_BASE64})(?:{_BASE64}{{22}}==|{_BASE64}{{43}}=)(?![\w=])"  # base64 of 16 or 32 bytes
    # The same without padding, alone or as a value.
    rf"|(?:^|(?<=[\"'=:,\s]))(?=\S*[0-9])(?=\S*[A-Z])(?=\S*[a-z])(?:{_BASE64}{{22}}|{_BASE64}{{43}})(?=$|[\"',}}\s])"
)
_ID = re.compile(r"[0-9a-f]{32}")
# Most paths, which a search for keys would take longer to find innocent: a key in one is hexadecimal, or all of it.
_ORDINARY = re.compile(r"[\w./-]+")
_HEX_DIGITS = re.compile(r"[0-9A-Fa-f-]{32}")
_ALL_BASE64 = {22, 43}  # characters of 16 or 32 bytes without padding
NOT_A_PATH = (
    "reading a key failed: expected the path of a key file, got what looks like a key itself, which is not repeated "
    "here. Put the key into a file with Key.save or `fastrack keygen`, and pass the path of that file"
)


def has_key(text: str, *, may_be_id: bool = False) -> bool:
    """Return whether a text has in it what looks like a key. With `may_be_id` 32 lower-case digits do not."""
    if _ORDINARY.fullmatch(text) and len(text) not in _ALL_BASE64 and not _HEX_DIGITS.search(text):
        return False
    if may_be_id and _ID.fullmatch(text):
        return False
    return _LOOKS_SECRET.search(text.strip(" \t\r\n'\"")) is not None


def looks_secret(path: str | os.PathLike[str], *, may_be_id: bool = False) -> bool:
    """Return whether a path has a key in it and names no file."""
    text = os.fsdecode(path)
    return has_key(text, may_be_id=may_be_id) and not os.path.lexists(text)


def refuse_key_text(path: str | os.PathLike[str], *, may_be_id: bool = False) -> None:
    """Refuse a path that looks like a key itself, which no message is to repeat.

    With `may_be_id` 32 lower-case digits are taken for an id, which files that are written may be called. Raise
    FormatError if it does.
    """
    if looks_secret(path, may_be_id=may_be_id):
        raise FormatError(NOT_A_PATH)
