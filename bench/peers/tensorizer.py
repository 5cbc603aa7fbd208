"""tensorizer with encryption.

Features: docs/encryption.md of tensorizer: chunks of up to 2 MiB in XSalsa20-Poly1305, authenticated one by one, which
"does not protect against reordering or truncation of chunks", with metadata "neither encrypted nor authenticated".
Poly1305 commits to no key. Tensors can be had one by one (lazy_load). libsodium decrypts in host memory. Tried: two
tensors whose names are swapped open as each other.
"""

from bench.peers.peer import Features, Peer, as_torch


class Tensorizer(Peer):
    """A random key, which its documentation prefers; reading with as many threads as it chooses."""

    name, package = "tensorizer", "tensorizer"
    settings = (
        "EncryptionParams.random, TensorSerializer.write_state_dict; TensorDeserializer, which chooses the number of "
        "readers; plaid_mode has no effect in this version"
    )
    features = Features(
        "tensors", "not protected, it says", "no", "tensor by tensor", "no", "no", "in the clear, not authenticated"
    )

    def __init__(self):
        import tensorizer

        self._tensorizer = tensorizer
        self._key = tensorizer.EncryptionParams.random()

    def seal(self, arrays, path):
        serializer = self._tensorizer.TensorSerializer(path, encryption=self._key)
        serializer.write_state_dict(as_torch(arrays))
        serializer.close()

    def open(self, path):
        key = self._tensorizer.DecryptionParams.from_key(self._key.key)
        with self._tensorizer.TensorDeserializer(path, device="cpu", encryption=key) as tensors:
            return {name: tensors[name].detach() for name in tensors.keys()}  # noqa: SIM118 - it iterates otherwise
