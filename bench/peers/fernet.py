"""``cryptography.fernet``.

Features: the Fernet page of the cryptography documentation ("ideal for encrypting data that easily fits in memory") and
the Fernet specification: AES-128-CBC, then HMAC-SHA256 under the other half of the key, so that the tag says nothing of
the half that decrypts.
"""

import numpy as np

from bench.peers import container
from bench.peers.peer import Features, Peer


class Fernet(Peer):
    """One token. Several on two threads took as long when they were tried."""

    name, package = "Fernet", "cryptography"
    settings = "one token of a safetensors header and the arrays; Fernet takes and gives bytes, so copies are its own"
    features = Features("no", "refused", "to half of it", "no", "no", "every Fernet", "encrypted with the rest")

    def __init__(self):
        from cryptography.fernet import Fernet

        self._fernet = Fernet(Fernet.generate_key())

    def seal(self, arrays, path):
        path.write_bytes(self._fernet.encrypt(b"".join(container.pieces(arrays))))

    def open(self, path):
        return container.split(np.frombuffer(self._fernet.decrypt(path.read_bytes()), np.uint8))
