"""A stand-in for a vault, in this process: it shows what wrapped key files do, and nothing about any vendor."""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack.errors import ProviderError
from fastrack.providers import KeyWrapper

_AES = AESGCM(os.urandom(32))


class Toy(KeyWrapper):
    """Takes the place of `AwsKms`."""

    provider = "aws-kms"
    asked = 0

    @classmethod
    def from_uri(cls, uri):
        if uri != "aws-kms:alias/owner":
            raise ValueError("expected alias/owner, got another name")
        return cls()

    @classmethod
    def from_wrapped(cls, _):
        return cls()

    def _encrypt(self, secret, key_id):
        return "TOY", _AES.encrypt(bytes(12), bytes(secret), key_id.encode()), {"key": "alias/owner"}

    def _decrypt(self, wrapped):
        Toy.asked += 1
        try:
            return bytearray(_AES.decrypt(bytes(12), wrapped.ciphertext, wrapped.key_id.encode()))
        except InvalidTag:
            raise ProviderError("decrypting failed: expected what was encrypted here, got another file") from None


def install(patch):
    """Have `aws-kms:` keys be of the stand-in."""
    patch.setattr("fastrack.providers._aws.AwsKms", Toy)
