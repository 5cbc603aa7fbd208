"""Reference paths, for measurement only: transfers of sealed data as they are done without fastrack.

On the bounce path the host decrypts what the owner sealed, encrypts it again under the session key into a bounce
buffer, copies that to the device, and the device decrypts it. Each step ends before the next begins. The path is as
fast as it can be: every buffer is allocated and touched beforehand, all threads copy, and a message is one AES-GCM
ciphertext, which OpenSSL opens faster than a chunked one.
"""

from __future__ import annotations

import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto.base import Bytes, Engine, HostMemory
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.engine import get_engine
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.workers import default_threads
from fastrack._devices.base import Device, Messages, Operation, Segment, Slab
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import Driver
from fastrack._tensors import arrays
from fastrack.errors import AuthenticationError
from fastrack.format import NONCE_SIZE, TAG_SIZE, ciphertext_size

_PARALLEL_THRESHOLD = 2 << 20  # bytes below which one thread has copied before another has woken up
_ALTERED = "the message on the bounce path was altered"
_ONE_BLOCK = 1e-9  # a share of one thread block


class BouncePath:
    """The bounce path with whole messages, OpenSSL and one thread; and `direct`, the same without its detour.

    The device is host memory. A tensor has at most 2 GiB less 17 bytes, which is what one call of OpenSSL takes.
    """

    def __init__(self, nbytes: int, bits: int = 256) -> None:
        self._owner = AESGCM(AESGCM.generate_key(bits))
        self._session = AESGCM(AESGCM.generate_key(bits))
        self._plain = touched(nbytes)
        self._bounce = touched(nbytes + TAG_SIZE + NONCE_SIZE)
        self._device = touched(nbytes + TAG_SIZE + NONCE_SIZE)

    def seal(self, plain: Bytes) -> Bytes:
        """Return `plain` as one AES-GCM message, sealed by the owner, with its nonce behind it."""
        message = touched(plain.size + TAG_SIZE + NONCE_SIZE)
        _encrypt(self._owner, plain, message)
        return message

    def open(self, message: Bytes) -> Bytes:
        """Return the plaintext of a message from the device, in memory that the next call of any method overwrites."""
        _decrypt(self._owner, message, self._plain)
        return self._plain

    def sealed_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move a message of the owner into `out`."""
        _decrypt(self._owner, message, self._plain)
        self.plain_to_device(self._plain, out)

    def plain_to_device(self, plain: Bytes, out: Bytes) -> None:
        """Move a plain tensor into `out`."""
        _encrypt(self._session, plain, self._bounce)
        self._deliver(out)

    def _deliver(self, out: Bytes) -> None:
        copy(self._device, self._bounce)
        _decrypt(self._session, self._device, out)

    def to_host(self, tensor: Bytes) -> Bytes:
        """Move a tensor of the device into a fresh message for the owner."""
        _encrypt(self._session, tensor, self._device)
        copy(self._bounce, self._device)
        _decrypt(self._session, self._bounce, self._plain)
        message = arrays.empty_bytes(self._bounce.size)
        _encrypt(self._owner, self._plain, message)
        return message

    def direct_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move a message of the owner into `out` as it is: the device opens it."""
        copy(self._device, message)
        _decrypt(self._owner, self._device, out)

    def direct_to_host(self, tensor: Bytes) -> Bytes:
        """Move a tensor that the device seals for the owner into a fresh message."""
        _encrypt(self._owner, tensor, self._device)
        message = arrays.empty_bytes(self._device.size)
        copy(message, self._device)
        return message


class _ChunkedPath:
    """Messages in chunks, without a header, sealed and opened by one of fastrack's engines."""

    def __init__(self, nbytes: int, bits: int, engine: Engine) -> None:
        self._bits = bits
        self._engine = engine
        self._owner = new_key(bits)
        self._plain = touched(nbytes)

    def seal(self, plain: Bytes) -> Bytes:
        """Return `plain` in chunks, sealed by the owner under a new key."""
        message = touched(ciphertext_size(plain.size))
        self._owner = new_key(self._bits)
        self._seal(self._owner, plain, message)
        return message

    def _seal(self, key: MessageKey, plain: Bytes, message: Bytes) -> None:
        schedule = self._engine.expand_key(key)
        self._engine.seal_run(schedule, plain, message, 0)
        schedule.wipe()

    def _open(self, key: MessageKey, message: Bytes, plain: Bytes) -> None:
        schedule = self._engine.expand_key(key)
        bad = self._engine.open_run(schedule, message, plain, 0)
        schedule.wipe()
        if bad is not None:
            raise AuthenticationError(_ALTERED, chunk=bad)


class ParallelBouncePath(_ChunkedPath):
    """The bounce path in chunks, on all threads, with fastrack's engine, so that only the detour differs."""

    def __init__(self, nbytes: int, bits: int = 256) -> None:
        super().__init__(nbytes, bits, get_engine())
        self._bounce = touched(ciphertext_size(nbytes))
        self._device = touched(ciphertext_size(nbytes))

    def sealed_to_device(self, message: Bytes, out: Bytes) -> None:
        """Move a message of the owner into `out`."""
        self._open(self._owner, message, self._plain)
        self.plain_to_device(self._plain, out)

    def plain_to_device(self, plain: Bytes, out: Bytes) -> None:
        """Move a plain tensor into `out`."""
        self._session = new_key(self._bits)
        self._seal(self._session, plain, self._bounce)
        self._deliver(out)

    def _deliver(self, out: Bytes) -> None:
        copy(self._device, self._bounce)
        self._open(self._session, self._device, out)


class OneSlab:
    """A device that copies all of a message before it opens any of it. It is closed with this object.

    It reads chunks from `sealed`, and writes them to it, which is page-locked on a GPU.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        size = ciphertext_size(nbytes)
        self._nbytes = nbytes
        self._buffer = device.staging_buffer(size)
        self._work = (None, None) if device.in_place else (Slab([Segment(0, 0, 0, nbytes, size)], size), self._buffer)
        self.sealed = self._buffer.memory
        self.sealed.fill(0)

    def open(self, key: MessageKey, target: object) -> None:
        """Copy `sealed` to the device and open it into `target`, a view, or an array in host memory."""
        if isinstance(target, np.ndarray):
            target = HostMemory.of(target, writable=True)
        operation = self._begin(key, target)
        try:
            operation.open(*self._work)
        finally:
            operation.finish()
        bad = operation.result()
        if bad is not None:
            self._device.clear(target)
            raise AuthenticationError(f"chunk {bad.chunk} of the message was altered", chunk=bad.chunk)

    def seal(self, key: MessageKey, memory: object) -> None:
        """Seal `memory`, a view, on the device and copy it to `sealed`."""
        operation = self._begin(key, memory)
        try:
            operation.seal(*self._work)
        finally:
            operation.finish()
        self._buffer.wait()
        operation.result()

    def _begin(self, key: MessageKey, memory: object) -> Operation:
        sealed = HostMemory.of(self.sealed, writable=True) if self._device.in_place else None
        if isinstance(memory, np.ndarray):
            memory = HostMemory.of(memory, writable=memory.flags.writeable)
        return self._device.begin(Messages(MessageKeys.of([key]), [self._nbytes], [memory], [sealed], [None], [None]))

    def close(self) -> None:
        """Wipe the memory and close the device."""
        self._buffer.wipe()
        self._device.close()


class OneBlockPath(_ChunkedPath):
    """`BouncePath` to a GPU, on which no kernel opens one long chain. Targets are views of arrays there.

    Chunks that are processed in order stand for a chain: on the host by fastrack's engine on one thread, on the GPU by
    one thread block.
    """

    def __init__(self, driver: Driver, nbytes: int, bits: int = 256) -> None:
        super().__init__(nbytes, bits, get_engine(threads=1))
        self._remote = OneSlab(CudaDevice(driver, share=_ONE_BLOCK), nbytes)

    def open(self, message: Bytes) -> Bytes:
        self._open(self._owner, message, self._plain)
        return self._plain

    def sealed_to_device(self, message: Bytes, out: object) -> None:
        self._open(self._owner, message, self._plain)
        session = new_key(self._bits)
        self._seal(session, self._plain, self._remote.sealed)
        self._remote.open(session, out)

    def direct_to_device(self, message: Bytes, out: object) -> None:
        copy(self._remote.sealed, message)
        self._remote.open(self._owner, out)

    def to_host(self, tensor: object) -> Bytes:
        session = new_key(self._bits)
        self._remote.seal(session, tensor)
        self._open(session, self._remote.sealed, self._plain)
        message = arrays.empty_bytes(self._remote.sealed.size)
        self._owner = new_key(self._bits)
        self._seal(self._owner, self._plain, message)
        return message

    def direct_to_host(self, tensor: object) -> Bytes:
        self._owner = new_key(self._bits)
        self._remote.seal(self._owner, tensor)
        message = arrays.empty_bytes(self._remote.sealed.size)
        copy(message, self._remote.sealed)
        return message

    def close(self) -> None:
        """Close the GPU."""
        self._remote.close()


def copy(target: Bytes, source: Bytes) -> None:
    """Copy with all threads from 2 MiB on, and with one below."""
    if source.size < _PARALLEL_THRESHOLD:
        np.copyto(target, source)
    else:
        from fastrack._crypto import memcpy

        memcpy.copy(target, source, default_threads())


def touched(size: int) -> Bytes:
    """Return memory that was touched, so that the first touch is not timed."""
    memory = arrays.empty_bytes(size)
    memory.fill(0)
    return memory


def new_key(bits: int) -> MessageKey:
    """Return a fresh message key, one for each message, so that no nonce is used twice under it."""
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
