"""The reference paths, for measurement only: what others do with sealed data on its way to a device and back.

On the bounce path the host decrypts what the owner sealed, encrypts it again under the session key into a bounce
buffer, copies that to the device, and the device decrypts it. Each step ends before the next begins. As favourable to
it as can be: every buffer is made and touched beforehand, copies are made by all threads, and a message is one AES-GCM
ciphertext, which OpenSSL opens faster than a chunked one.
"""

from __future__ import annotations

import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto import cobblestone
from fastrack._crypto import engine as aead
from fastrack._crypto.base import Bytes, Engine
from fastrack._crypto.cobblestone import NONCE_SIZE, TAG_SIZE, MessageKey
from fastrack._crypto.workers import default_threads
from fastrack._devices.base import Device, Slab
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import Driver
from fastrack._tensors import arrays
from fastrack.errors import AuthenticationError

_ALONE = 8 << 20  # bytes up to which one thread copies as fast as several, mostly within a cache
_ALTERED = "the message on the bounce path was altered"
_ONE_BLOCK = 1e-9  # a share that leaves a GPU one thread block


class BouncePath:
    """Whole messages, one thread, OpenSSL; the device is host memory. And the same path without its detour: `direct`.

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
        self._plain = touched(nbytes)
        self._bounce = touched(nbytes + TAG_SIZE + NONCE_SIZE)
        self._device = touched(nbytes + TAG_SIZE + NONCE_SIZE)

    def seal(self, plain: Bytes) -> Bytes:
        """What the owner does, once: `plain` as one AES-GCM message, its nonce behind it."""
        message = touched(plain.size + TAG_SIZE + NONCE_SIZE)
        _encrypt(self._owner, plain, message)
        return message

    def open(self, message: Bytes) -> Bytes:
        """What the owner does with what came from the device. Good until the next call of anything."""
        _decrypt(self._owner, message, self._plain)
        return self._plain

    def sealed_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move what the owner sealed into `out`."""
        _decrypt(self._owner, message, self._plain)
        self.plain_to_device(self._plain, out)

    def plain_to_device(self, plain: Bytes, out: Bytes) -> None:
        """Move a plain tensor into `out`: the same without the owner's seal."""
        _encrypt(self._session, plain, self._bounce)
        copy(self._device, self._bounce)
        _decrypt(self._session, self._device, out)

    def to_host(self, there: Bytes) -> Bytes:
        """Move a tensor of the device into a fresh message for the owner."""
        _encrypt(self._session, there, self._device)
        copy(self._bounce, self._device)
        _decrypt(self._session, self._bounce, self._plain)
        message = arrays.empty_bytes(self._bounce.size)
        _encrypt(self._owner, self._plain, message)
        return message

    def direct_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move what the owner sealed into `out` as it is: the device opens it."""
        copy(self._device, message)
        _decrypt(self._owner, self._device, out)

    def direct_to_host(self, there: Bytes) -> Bytes:
        """Move a tensor that the device seals for the owner into a fresh message."""
        _encrypt(self._owner, there, self._device)
        message = arrays.empty_bytes(self._device.size)
        copy(message, self._device)
        return message


class ParallelBouncePath:
    """The same steps made as parallel as ours: chunked, on all threads, with our engine. What is left is the detour.

    Parameters
    ----------
    nbytes : int
        Bytes of the tensors it will move.
    bits : {256, 128}
        The size of the owner's key and of the session's.
    """

    def __init__(self, nbytes: int, bits: int = 256) -> None:
        self._bits = bits
        self._engine = aead.get_engine()
        self._owner = new_key(bits)
        self._plain = touched(nbytes)
        self._bounce = touched(cobblestone.ciphertext_size(nbytes))
        self._device = touched(cobblestone.ciphertext_size(nbytes))

    def seal(self, plain: Bytes) -> Bytes:
        """What the owner does, once: `plain` in chunks, without a header."""
        message = touched(cobblestone.ciphertext_size(plain.size))
        _seal_chunks(self._engine, self._owner, plain, message)
        return message

    def sealed_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move what the owner sealed into `out`."""
        _open_chunks(self._engine, self._owner, message, self._plain)
        self.plain_to_device(self._plain, out)

    def plain_to_device(self, plain: Bytes, out: Bytes) -> None:
        """Move a plain tensor into `out`."""
        self._session = new_key(self._bits)
        _seal_chunks(self._engine, self._session, plain, self._bounce)
        copy(self._device, self._bounce)
        _open_chunks(self._engine, self._session, self._device, out)


class OneSlab:
    """A device to which a message goes in one piece: all of it is copied before any of it is opened.

    Parameters
    ----------
    device : Device
        Any. It is closed with this.
    nbytes : int
        Bytes of the tensors it will move.

    Attributes
    ----------
    sealed : numpy.ndarray
        Where the device takes chunks from, and puts them: page-locked where that means something.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self._slab = Slab(0, 0, nbytes, cobblestone.ciphertext_size(nbytes))
        self._slot = device.staging_buffer(self._slab.sealed_size)
        self.sealed = self._slot.memory
        self.sealed.fill(0)

    def open(self, key: MessageKey, target: object) -> None:
        """Bring what is in `sealed` to the device and open it into `target`, a view."""
        work = self._device.begin(key, target)
        try:
            work.open(self._slab, self.sealed, self._slot)
        finally:
            work.finish()
        bad = work.result()
        if bad is not None:
            self._device.clear(target)
            raise AuthenticationError(f"chunk {bad} of the message was altered", chunk=bad)

    def seal(self, key: MessageKey, memory: object) -> None:
        """Seal what is in `memory`, a view, and bring it to `sealed`."""
        work = self._device.begin(key, memory)
        try:
            work.seal(self._slab, self.sealed, self._slot)
        finally:
            work.finish()
        self._slot.wait()
        work.result()

    def close(self) -> None:
        """Wipe the memory and let go of the device."""
        self._slot.wipe()
        self._device.close()


class OneBlockPath:
    """`BouncePath` to a GPU, on which no kernel opens one long chain.

    A chain is stood for by chunks that are worked in order: on the host by fastrack's engine on one thread, on the GPU
    by one thread block. Targets are views of arrays there.
    """

    def __init__(self, driver: Driver, nbytes: int, bits: int = 256) -> None:
        self._bits = bits
        self._engine = aead.get_engine(threads=1)
        self._owner = new_key(bits)
        self._plain = touched(nbytes)
        self._there = OneSlab(CudaDevice(driver, share=_ONE_BLOCK), nbytes)

    def seal(self, plain: Bytes) -> Bytes:
        message = touched(cobblestone.ciphertext_size(plain.size))
        self._owner = new_key(self._bits)
        _seal_chunks(self._engine, self._owner, plain, message)
        return message

    def open(self, message: Bytes) -> Bytes:
        _open_chunks(self._engine, self._owner, message, self._plain)
        return self._plain

    def sealed_to_device(self, message: Bytes, out: object) -> None:
        _open_chunks(self._engine, self._owner, message, self._plain)
        session = new_key(self._bits)
        _seal_chunks(self._engine, session, self._plain, self._there.sealed)
        self._there.open(session, out)

    def direct_to_device(self, message: Bytes, out: object) -> None:
        copy(self._there.sealed, message)
        self._there.open(self._owner, out)

    def to_host(self, there: object) -> Bytes:
        session = new_key(self._bits)
        self._there.seal(session, there)
        _open_chunks(self._engine, session, self._there.sealed, self._plain)
        message = arrays.empty_bytes(self._there.sealed.size)
        self._owner = new_key(self._bits)
        _seal_chunks(self._engine, self._owner, self._plain, message)
        return message

    def direct_to_host(self, there: object) -> Bytes:
        self._owner = new_key(self._bits)
        self._there.seal(self._owner, there)
        message = arrays.empty_bytes(self._there.sealed.size)
        copy(message, self._there.sealed)
        return message

    def close(self) -> None:
        """Let go of the GPU."""
        self._there.close()


def copy(target: Bytes, source: Bytes) -> None:
    """Copy by all threads, where that is quicker than by one."""
    if source.size < _ALONE:
        np.copyto(target, source)
    else:
        from fastrack._crypto import memcpy as packing  # imports numba, a third of a second: when first used

        packing.copy(target, source, default_threads())


def touched(size: int) -> Bytes:
    """Memory whose first touch lies behind it."""
    memory = arrays.empty_bytes(size)
    memory.fill(0)
    return memory


def new_key(bits: int) -> MessageKey:
    """A key of its own for every message, so that no nonce is used twice under it."""
    return MessageKey.raw(os.urandom(bits // 8), os.urandom(NONCE_SIZE))


def _encrypt(cipher: AESGCM, plain: Bytes, message: Bytes) -> None:
    nonce = os.urandom(NONCE_SIZE)
    message[-NONCE_SIZE:] = np.frombuffer(nonce, np.uint8)
    cipher.encrypt_into(nonce, plain.data, None, message[:-NONCE_SIZE].data)


def _decrypt(cipher: AESGCM, message: Bytes, out: Bytes) -> None:
    try:
        cipher.decrypt_into(message[-NONCE_SIZE:].tobytes(), message[:-NONCE_SIZE].data, None, out.data)
    except InvalidTag:
        out.fill(0)
        raise AuthenticationError(_ALTERED) from None


def _seal_chunks(engine: Engine, key: MessageKey, plain: Bytes, message: Bytes) -> None:
    schedule = engine.expand_key(key)
    try:
        engine.seal_run(schedule, plain, message, 0)
    finally:
        schedule.wipe()


def _open_chunks(engine: Engine, key: MessageKey, message: Bytes, plain: Bytes) -> None:
    schedule = engine.expand_key(key)
    try:
        bad = engine.open_run(schedule, message, plain, 0)
    finally:
        schedule.wipe()
    if bad is not None:
        raise AuthenticationError(_ALTERED, chunk=bad)
