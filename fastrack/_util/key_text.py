"""Texts of keys: the forms in which they are written, and what looks like a key where a path or a name belongs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from fastrack.errors import FormatError

_BASE64 = r"[A-Za-z0-9+/_-]"
_LOOKS_SECRET = re.compile(
    r"(?i:fastrack-(?:key|secret)-1:)"  # the second line of a key file, or the whole file
    # Hexadecimal; digits with a suffix, in a longer name or in a folder are a file name, such as a digest.
    r"|(?:^/|(?<![\w./-]))(?:0[xX])?(?:[0-9A-Fa-f]{2}[:\s-]?){16,}(?![\w./-])"
    rf"|(?<!{_BASE64})(?:{_BASE64}{{22}}==|{_BASE64}{{43}}=)(?![\w=])"  # base64 of 16 or 32 bytes
    # Base64 without padding, alone or as a value.
    rf"|(?:^|(?<=[\"'=:,\s]))(?=\S*[0-9])(?=\S*[A-Z])(?=\S*[a-z])(?:{_BASE64}{{22}}|{_BASE64}{{43}})(?=$|[\"',}}\s])"
)
_ID = re.compile(r"[0-9a-f]{32}")
# Most paths; a full search would be slower. A key in such a path is hexadecimal, or the whole path.
_ORDINARY = re.compile(r"[\w./-]+")
_HEX_DIGITS = re.compile(r"[0-9A-Fa-f-]{32}")
_ALL_BASE64 = {22, 43}  # characters of 16 or 32 bytes without padding
_CHANGES = {
    b"\0": "it is in UTF-16",
    b"\xef\xbb\xbf": "it begins with a byte order mark",
    b"\r": "its lines end in CRLF",
}
NOT_A_PATH = (
    "reading a key failed: expected the path of a key file, got what looks like a key itself, which is not repeated "
    "here. Put the key into a file with Key.save or `fastrack keygen`, and pass the path of that file"
)


def has_key(text: str, *, may_be_id: bool = False) -> bool:
    """Return whether a text contains a likely key. With `may_be_id`, 32 lower-case hexadecimal digits are an id."""
    if _ORDINARY.fullmatch(text) and len(text) not in _ALL_BASE64 and not _HEX_DIGITS.search(text):
        return False
    if may_be_id and _ID.fullmatch(text):
        return False
    return _LOOKS_SECRET.search(text.strip(" \t\r\n'\"")) is not None


def looks_secret(path: str | os.PathLike[str], *, may_be_id: bool = False) -> bool:
    """Return whether a path contains a likely key and no such file exists."""
    text = os.fsdecode(path)
    if not has_key(text, may_be_id=may_be_id) or os.path.lexists(text):
        return False
    # Base64 has the slash too, and a path may have as many characters. If its first folder is there, it is a path; the
    # root is none, as a key may begin with a slash.
    first = re.match("/?[^/]+/", text)
    return not (first and _HEX_DIGITS.search(text) is None and os.path.lexists(f"{first[0]}."))


def refuse_key_text(path: str | os.PathLike[str], *, may_be_id: bool = False) -> None:
    """Raise FormatError if a path looks like a key itself. The message does not repeat it.

    With `may_be_id`, 32 lower-case hexadecimal digits are taken for an id, which is a valid name for a new file.
    """
    if looks_secret(path, may_be_id=may_be_id):
        raise FormatError(NOT_A_PATH)


@dataclass(frozen=True, slots=True)
class KeyText:
    """The one form in which a kind of key is read. A text with one of `marks` was such a key."""

    kind: str
    pattern: bytes
    marks: tuple[str, ...]
    form: str = "its two lines of ASCII"

    def match(self, content: bytes | bytearray, source: str, advice: str) -> re.Match[bytes]:
        """Return the match of a text. Raise FormatError for another, with what changed it, or else with `advice`."""
        match = re.fullmatch(self.pattern, content)
        if match is not None:
            return match
        if not any(mark.encode(code) in content for mark in self.marks for code in ("ascii", "utf-16-le", "utf-16-be")):
            raise FormatError(f"{source} is not a fastrack {self.kind}{advice}")
        reasons = (f"{change}. Convert it, as dos2unix does" for mark, change in _CHANGES.items() if mark in content)
        cut = f"expected {self.form} as written, got others; restore it from a copy"
        raise FormatError(f"{source} is a damaged {self.kind}: {next(reasons, cut)}")
