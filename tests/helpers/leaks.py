"""Search for secrets in all that parties send, keep and log: as they are, and inside of hexadecimal and base64."""

import base64
import binascii
import re

_BASE64 = re.compile(rb"[A-Za-z0-9+/]{24,}={0,2}")
_SHORTEST = 16  # bytes of a secret that is searched for


class Search:
    """Collects what others may see. `add` takes it, `find` returns the names of the secrets that are in it."""

    def __init__(self):
        self._seen, self._strings, self._contents = set(), set(), []

    def add(self, content):
        """Take one message, file or line of a log."""
        if content in self._seen:
            return
        self._seen.add(content)
        self._contents.append(content)
        for text in _BASE64.findall(content):
            if text not in self._strings:
                self._strings.add(text)
                # Text that no quotes limit may begin before its base64 does.
                for start in range(1 if len(text) % 4 == 0 else 4):
                    inner = text[start:].rstrip(b"=")
                    try:
                        self.add(base64.b64decode(inner[: len(inner) - (len(inner) % 4 == 1)] + b"=="))
                    except binascii.Error:
                        continue

    def find(self, secrets):
        """Return the names of those secrets, a mapping of name to bytes, that anything contains."""
        if short := [name for name, secret in secrets.items() if len(secret) < _SHORTEST]:
            raise ValueError(f"searching for secrets: expected {_SHORTEST} bytes or more, got less for {short}")
        everything = b"\0".join(self._contents)
        lower = everything.lower()
        return {name for name, secret in secrets.items() if secret in everything or secret.hex().encode() in lower}
