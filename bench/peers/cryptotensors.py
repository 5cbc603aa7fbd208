"""cryptotensors, with its keys given as its documentation gives them.

Features: FORMAT.md of cryptotensors (chunks of 2 MiB with counted nonces and their tags in a header that an Ed25519 key
signs; data keys wrapped with AES-GCM, which commits to no key), and slices like safetensors. Tried: a header
with another name, dtype or shape and a file with two chunks swapped are refused. Every run
shows its memory when it seals: all of the file.
"""

import base64
import secrets

from bench.peers.peer import Features, Peer, as_torch


class Cryptotensors(Peer):
    """AES-256-GCM, which its documentation recommends, in the chunks it has by default."""

    name, package = "cryptotensors", "cryptotensors"
    settings = "aes256gcm and ed25519 keys as JWK, format 2 with chunks of 2 MiB; torch.save_file, torch.load_file"
    features = Features("slices", "refused", "no", "reading, not writing", "no", "no", "signed")

    def __init__(self):
        import cryptotensors.torch
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._files = cryptotensors.torch
        signer = Ed25519PrivateKey.generate()
        private, public = signer.private_bytes_raw(), signer.public_key().public_bytes_raw()
        self._keys = {
            "enc_key": {"kty": "oct", "alg": "aes256gcm", "kid": "seal", "k": _text(secrets.token_bytes(32))},
            "sign_key": {"kty": "okp", "alg": "ed25519", "kid": "sign", "d": _text(private), "x": _text(public)},
        }
        cryptotensors.register_direct_key_provider(keys=list(self._keys.values()))

    def seal(self, arrays, path):
        self._files.save_file(as_torch(arrays), path, config=self._keys)

    def open(self, path):
        return self._files.load_file(path)


def _text(data):
    return base64.b64encode(data).decode()
