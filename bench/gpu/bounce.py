"""The bounce path with a GPU at its end, at its best: what the host does, and the copy. The GPU's part is left out.

Today's GPUs authenticate one long chain before they decrypt, and here is no kernel that does so. Without it the bounce
path comes off better than it is.
"""

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto import engine as aead
from fastrack._crypto.cobblestone import NONCE_SIZE, TAG_SIZE, MessageKey, ciphertext_size
from fastrack._tensors import arrays


class WholeBounce:
    """As it is: OpenSSL opens the owner's message on one thread, and seals it on one for the GPU; then it is copied."""

    def __init__(self, gpu, stream, size, bits=256):
        self._gpu, self._stream = gpu, stream
        self._owner = AESGCM(AESGCM.generate_key(bits))
        self._session = AESGCM(AESGCM.generate_key(bits))
        self._plain = _touched(size)
        self._bounce = gpu.host(size + TAG_SIZE)
        self._there = gpu.memory(size + TAG_SIZE)

    def seal(self, plain):
        """What the owner does, once."""
        message, nonce = _touched(NONCE_SIZE + plain.size + TAG_SIZE), os.urandom(NONCE_SIZE)
        message[:NONCE_SIZE] = np.frombuffer(nonce, np.uint8)
        self._owner.encrypt_into(nonce, plain.data, None, message[NONCE_SIZE:].data)
        return message

    def move(self, message):
        self._owner.decrypt_into(message[:NONCE_SIZE].tobytes(), message[NONCE_SIZE:].data, None, self._plain.data)
        self._session.encrypt_into(os.urandom(NONCE_SIZE), self._plain.data, None, self._bounce.data)
        self._gpu.upload(self._there.pointer, self._bounce, self._stream)
        self._gpu.wait(self._stream)

    def close(self):
        """Nothing is left to do."""


class ParallelBounce:
    """The same with chunks, all threads and fastrack's engine. What is left is the detour."""

    def __init__(self, gpu, stream, size, bits=256):
        self._gpu, self._stream, self._bits = gpu, stream, bits
        self._engine = aead.get_engine()
        self._owner = self._engine.expand_key(self._key())
        self._plain = _touched(size)
        self._bounce = gpu.host(ciphertext_size(size))
        self._there = gpu.memory(ciphertext_size(size))

    def seal(self, plain):
        message = _touched(ciphertext_size(plain.size))
        self._engine.seal_run(self._owner, plain, message, 0)
        return message

    def move(self, message):
        assert self._engine.open_run(self._owner, message, self._plain, 0) is None
        session = self._engine.expand_key(self._key())
        self._engine.seal_run(session, self._plain, self._bounce, 0)
        session.wipe()
        self._gpu.upload(self._there.pointer, self._bounce, self._stream)
        self._gpu.wait(self._stream)

    def close(self):
        self._owner.wipe()

    def _key(self):
        return MessageKey.raw(os.urandom(self._bits // 8), os.urandom(NONCE_SIZE))


def _touched(size):
    memory = arrays.empty_bytes(size)
    memory.fill(0)
    return memory
