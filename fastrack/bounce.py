"""The reference path, for measurement only: what today's stack does with sealed data on its way to a device.

The host decrypts what the owner sealed, encrypts it again under the session key into a bounce buffer, copies that to
the device, and the device decrypts it. Each step ends before the next begins. As favourable to it as can be: every
buffer is made and touched beforehand, nothing is allocated on the way, and the owner's message is one AES-GCM
ciphertext, which OpenSSL opens faster than a chunked one.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Self

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack import aead, arrays, cobblestone
from fastrack.aead import Bytes
from fastrack.cobblestone import TAG, MessageKey
from fastrack.errors import AuthenticationError

__all__ = ["BouncePath", "ParallelBouncePath"]

_ALTERED = "the message on the bounce path was altered"


class BouncePath:
    """The path as it is: whole messages, one thread, OpenSSL.

    Parameters
    ----------
    nbytes : int
        Bytes of the tensors it will move; at most 2 GiB less 17, which is what one call of OpenSSL takes.
    bits : {256, 128}
        The size of the owner's key and of the session's.
    """

    def __init__(self, nbytes: int, bits: int = 256) -> None:
        self._owner = AESGCM(AESGCM.generate_key(bits))
        self._session = AESGCM(AESGCM.generate_key(bits))
        self._plain = _touched(nbytes)
        self._bounce = _touched(nbytes + TAG)
        self._device = _touched(nbytes + TAG)

    def seal(self, plain: Bytes) -> Bytes:
        """What the owner does, once: `plain` as one AES-GCM message."""
        message = _touched(12 + plain.size + TAG)
        nonce = os.urandom(12)
        message[:12] = np.frombuffer(nonce, np.uint8)
        self._owner.encrypt_into(nonce, plain.data, None, message[12:].data)
        return message

    def sealed_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move what the owner sealed into `out`."""
        _decrypt(self._owner, message[:12].tobytes(), message[12:], self._plain)
        self.plain_to_device(self._plain, out)

    def plain_to_device(self, plain: Bytes, out: Bytes) -> None:
        """Move a plain tensor into `out`: the same without the owner's seal."""
        nonce = os.urandom(12)
        self._session.encrypt_into(nonce, plain.data, None, self._bounce.data)
        np.copyto(self._device, self._bounce)
        _decrypt(self._session, nonce, self._device, out)


class ParallelBouncePath:
    """The same steps made as parallel as ours: chunked, on all threads, with our engine. What is left is the detour.

    Parameters
    ----------
    nbytes : int
        Bytes of the tensors it will move.
    bits : {256, 128}
        The size of the owner's key and of the session's.
    threads : int, optional
        How many threads work; by default as many as there are CPUs.
    """

    def __init__(self, nbytes: int, bits: int = 256, threads: int | None = None) -> None:
        self._bits = bits
        self._engine = aead.engine(threads=threads)
        # The engine has a pool of its own; this one copies.
        self._pool = ThreadPoolExecutor(self._engine.threads)
        self._cuts = [nbytes * part // self._engine.threads for part in range(self._engine.threads + 1)]
        self._owner, self._session = (MessageKey.raw(os.urandom(bits // 8), os.urandom(12)) for _ in range(2))
        self._plain = _touched(nbytes)
        self._bounce = _touched(cobblestone.raw_size(nbytes))
        self._device = _touched(cobblestone.raw_size(nbytes))

    def seal(self, plain: Bytes) -> Bytes:
        """What the owner does, once: `plain` in chunks, without a header."""
        message = _touched(cobblestone.raw_size(plain.size))
        self._seal(self._owner, plain, message)
        return message

    def sealed_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move what the owner sealed into `out`."""
        self._open(self._owner, message, self._plain)
        self.plain_to_device(self._plain, out)

    def plain_to_device(self, plain: Bytes, out: Bytes) -> None:
        """Move a plain tensor into `out`."""
        # One session key a transfer, as the channel has it: no nonce is used twice under it.
        self._session = MessageKey.raw(os.urandom(self._bits // 8), os.urandom(12))
        self._seal(self._session, plain, self._bounce)
        self._copy(self._device, self._bounce)
        self._open(self._session, self._device, out)

    def _seal(self, key: MessageKey, plain: Bytes, message: Bytes) -> None:
        schedule = self._engine.prepare(key)
        self._engine.seal_run(schedule, plain, message, 0)
        schedule.wipe()

    def _open(self, key: MessageKey, message: Bytes, plain: Bytes) -> None:
        schedule = self._engine.prepare(key)
        bad = self._engine.open_run(schedule, message, plain, 0)
        schedule.wipe()
        if bad is not None:
            raise AuthenticationError(_ALTERED, chunk=bad)

    def _copy(self, target: Bytes, source: Bytes) -> None:
        cuts = [*self._cuts[:-1], source.size]
        copies = [self._pool.submit(np.copyto, target[a:b], source[a:b]) for a, b in pairwise(cuts)]
        for copy in copies:
            copy.result()

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _touched(size: int) -> Bytes:
    memory = arrays.empty_bytes(size)
    memory.fill(0)
    return memory


def _decrypt(cipher: AESGCM, nonce: bytes, message: Bytes, out: Bytes) -> None:
    try:
        cipher.decrypt_into(nonce, message.data, None, out.data)
    except InvalidTag:
        out.fill(0)
        raise AuthenticationError(_ALTERED) from None
