"""A second reader of wrapped key files, from docs/format.md alone: the standard library and cryptography."""

from __future__ import annotations

import base64
import json

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap


def read_wrapped(content):
    """Return the members of a wrapped key file."""
    document = json.loads(content)
    assert document["version"] == 1
    return document


def unwrap(document, wrapping_key):
    """Return the bytes of the key: `wrapping_key` is an RSA private key, or the bytes of an AES key."""
    ciphertext = base64.b64decode(document["ciphertext"])
    if document["algorithm"] == "AES-KW":
        return aes_key_unwrap(wrapping_key, ciphertext)
    used = {"RSA-OAEP-SHA256": hashes.SHA256, "RSA-OAEP-SHA1": hashes.SHA1}[document["algorithm"]]()
    return wrapping_key.decrypt(ciphertext, OAEP(MGF1(used), used, None))
