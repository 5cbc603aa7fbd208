"""The bounce path with a GPU at its end, at its best: what the host does, and the copy. The GPU's part is left out.

Today's GPUs authenticate one long chain before they decrypt, and here is no kernel that does so. Without it the bounce
path comes off better than it is.
"""

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._bench.paths import new_key, touched
from fastrack._crypto.engine import get_engine
from fastrack.format import NONCE_SIZE, TAG_SIZE, ciphertext_size


class _Bounce:
    def __init__(self, gpu, stream, size, sealed_size):
        self._gpu, self._stream, self._plain = gpu, stream, touched(size)
        self._bounce, self._there = gpu.host(sealed_size), gpu.memory(sealed_size)

    def _upload(self):
        self._gpu.upload(self._there.pointer, self._bounce, self._stream)
        self._gpu.wait(self._stream)


class WholeBounce(_Bounce):
    """As it is: OpenSSL opens the owner's message on one thread, and seals it on one for the GPU; then it is copied."""

    def __init__(self, gpu, stream, size):
        super().__init__(gpu, stream, size, size + TAG_SIZE)
        self._owner, self._session = (AESGCM(AESGCM.generate_key(256)) for _ in range(2))

    def seal(self, plain):
        """Do what the owner does, once."""
        message, nonce = touched(NONCE_SIZE + plain.size + TAG_SIZE), os.urandom(NONCE_SIZE)
        message[:NONCE_SIZE] = np.frombuffer(nonce, np.uint8)
        self._owner.encrypt_into(nonce, plain.data, None, message[NONCE_SIZE:].data)
        return message

    def move(self, message):
        self._owner.decrypt_into(message[:NONCE_SIZE].tobytes(), message[NONCE_SIZE:].data, None, self._plain.data)
        self._session.encrypt_into(os.urandom(NONCE_SIZE), self._plain.data, None, self._bounce.data)
        self._upload()


class ParallelBounce(_Bounce):
    """The same with chunks, all threads and fastrack's engine. What is left is the detour."""

    def __init__(self, gpu, stream, size):
        super().__init__(gpu, stream, size, ciphertext_size(size))
        self._engine = get_engine()
        self._owner = self._engine.expand_key(new_key(256))

    def seal(self, plain):
        message = touched(ciphertext_size(plain.size))
        self._engine.seal_run(self._owner, plain, message, 0)
        return message

    def move(self, message):
        assert self._engine.open_run(self._owner, message, self._plain, 0) is None
        session = self._engine.expand_key(new_key(256))
        self._engine.seal_run(session, self._plain, self._bounce, 0)
        session.wipe()
        self._upload()
