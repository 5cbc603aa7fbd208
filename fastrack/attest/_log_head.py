"""The head of a broker's log, which a machine is told with its keys, and tells when it asks again."""

from __future__ import annotations

import re
from typing import NamedTuple

from fastrack.attest._errors import malformed

HEADER = "Fastrack-Head"
QUARANTINE = "quarantine"  # the field of a refusal that ends a lease at once

_TEXT = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")


class Head(NamedTuple):
    """The number and the hash of an entry. The hash is over all entries before too, so it tells logs apart."""

    number: int
    hash: bytes

    def __str__(self) -> str:
        return f"{self.number}:{self.hash.hex()}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Parse the value of the header. Raise FormatError if it is another text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise malformed("head of a log", "text", None, wanted="a number, a colon and a hash", found="another one")
        return cls(int(match[1]), bytes.fromhex(match[2]))
