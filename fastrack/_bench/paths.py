"""Reference paths, for measurement only: transfers of sealed data without fastrack.

On the bounce path the host decrypts the owner's message, encrypts it again under the session key into a bounce
buffer, copies that to the device, and the device decrypts it. Each step ends before the next begins. The path is as
fast as possible: every buffer is allocated and touched beforehand, all threads copy, and a message is one AES-GCM
ciphertext, which OpenSSL opens faster than a chunked one.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fastrack._crypto.base import Bytes, Engine, HostMemory, Messages
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.engine import get_engine
from fastrack._crypto.message_keys import MessageKeys
from fastrack._crypto.workers import default_threads
from fastrack._devices.base import Device, DeviceOperation, Segment, Slab
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.cuda.driver import Driver
from fastrack._sealed.messages import bad_chunk
from fastrack._tensors import arrays
from fastrack.errors import AuthenticationError
from fastrack.format import NONCE_SIZE, TAG_SIZE, ciphertext_size

_PARALLEL_THRESHOLD = 2 << 20  # bytes below which one thread has copied before another has woken up
_ALTERED = "the message on the bounce path was altered"
_ONE_BLOCK = 1e-9  # a share of one thread block


class _Path:
    """A path of tensors of one size by way of a bounce buffer, to a device that is host memory."""

    def __init__(self, cipher: _Whole | _Chunks, nbytes: int) -> None:
        self._cipher = cipher
        self._owner = self._session = cipher.new_key()  # of the last message of each
        self._plain = touched(nbytes)
        self._bounce = touched(cipher.size_of(nbytes))

    def seal(self, plain: Bytes) -> Bytes:
        """Return `plain` as a message of the owner, under a new key."""
        message = touched(self._bounce.size)
        self._owner = self._cipher.new_key()
        self._cipher.seal(self._owner, plain, message)
        return message

    def open(self, message: Bytes) -> Bytes:
        """Return the plaintext of a message of the owner, in memory that the next call of any method overwrites."""
        self._cipher.open(self._owner, message, self._plain)
        return self._plain

    def sealed_to_device(self, message: Bytes, out: Any) -> None:
        """Move a message of the owner into `out`."""
        self.plain_to_device(self.open(message), out)

    def plain_to_device(self, plain: Bytes, out: Any) -> None:
        """Move a plain tensor into `out`."""
        self._session = self._cipher.new_key()
        self._cipher.seal(self._session, plain, self._bounce)
        self._deliver(self._session, self._bounce, out)

    def direct_to_device(self, message: Bytes, out: Any) -> None:
        """Move a message of the owner into `out` without opening it on the host: the device opens it."""
        self._deliver(self._owner, message, out)

    def to_host(self, tensor: Any) -> Bytes:
        """Move a tensor of the device into a fresh message for the owner."""
        self._session = self._cipher.new_key()
        self._fetch(self._session, tensor, self._bounce)
        self._cipher.open(self._session, self._bounce, self._plain)
        message = arrays.empty_bytes(self._bounce.size)
        self._owner = self._cipher.new_key()
        self._cipher.seal(self._owner, self._plain, message)
        return message

    def direct_to_host(self, tensor: Any) -> Bytes:
        """Move a tensor that the device seals for the owner into a fresh message."""
        message = arrays.empty_bytes(self._bounce.size)
        self._owner = self._cipher.new_key()
        self._fetch(self._owner, tensor, message)
        return message

    @cached_property
    def _device(self) -> Bytes:
        return touched(self._bounce.size)

    def _deliver(self, key: Any, message: Bytes, out: Any) -> None:
        copy(self._device, message)
        self._cipher.open(key, self._device, out)

    def _fetch(self, key: Any, tensor: Any, message: Bytes) -> None:
        self._cipher.seal(key, tensor, self._device)
        copy(message, self._device)


class BouncePath(_Path):
    """The bounce path with whole messages, OpenSSL and one thread; and `direct`, without the detour over the host.

    A tensor has at most 2 GiB less 17 bytes, the limit of one call of OpenSSL.
    """

    def __init__(self, nbytes: int, bits: int = 256) -> None:
        super().__init__(_Whole(bits), nbytes)


class ParallelBouncePath(_Path):
    """The bounce path in chunks, on all threads, with fastrack's engine, so that only the detour differs."""

    def __init__(self, nbytes: int, bits: int = 256) -> None:
        super().__init__(_Chunks(bits, get_engine()), nbytes)


class OneBlockPath(_Path):
    """`BouncePath` to a GPU, where no kernel opens one long chain. Targets are views of arrays there.

    Chunks that are processed in order stand for a chain: on the host by fastrack's engine on one thread, on the GPU by
    one thread block.
    """

    def __init__(self, driver: Driver, nbytes: int, bits: int = 256) -> None:
        super().__init__(_Chunks(bits, get_engine(threads=1)), nbytes)
        self._remote = OneSlab(CudaDevice(driver, share=_ONE_BLOCK), nbytes)
        self._bounce = self._remote.sealed

    def _deliver(self, key: Any, message: Bytes, out: Any) -> None:
        if message is not self._bounce:
            copy(self._bounce, message)
        self._remote.open(key, out)

    def _fetch(self, key: Any, tensor: Any, message: Bytes) -> None:
        self._remote.seal(key, tensor)
        if message is not self._bounce:
            copy(message, self._bounce)

    def close(self) -> None:
        """Close the GPU."""
        self._remote.close()


class _Whole:
    """Messages that are one AES-GCM ciphertext of OpenSSL, with the nonce behind it."""

    def __init__(self, bits: int) -> None:
        self._key = AESGCM(AESGCM.generate_key(bits))

    def size_of(self, nbytes: int) -> int:
        return nbytes + TAG_SIZE + NONCE_SIZE

    def new_key(self) -> AESGCM:
        return self._key  # nonces are random, so one key is enough

    def seal(self, key: Any, plain: Bytes, message: Bytes) -> None:
        nonce = os.urandom(NONCE_SIZE)
        message[-NONCE_SIZE:] = np.frombuffer(nonce, np.uint8)
        key.encrypt_into(nonce, plain.data, None, message[:-NONCE_SIZE].data)

    def open(self, key: Any, message: Bytes, plain: Bytes) -> None:
        try:
            key.decrypt_into(message[-NONCE_SIZE:].tobytes(), message[:-NONCE_SIZE].data, None, plain.data)
        except InvalidTag:
            plain.fill(0)
            raise AuthenticationError(_ALTERED) from None


class _Chunks:
    """Messages in chunks, without a header, sealed and opened by one of fastrack's engines."""

    def __init__(self, bits: int, engine: Engine) -> None:
        self._bits, self._engine = bits, engine

    def size_of(self, nbytes: int) -> int:
        return ciphertext_size(nbytes)

    def new_key(self) -> MessageKey:
        """Return a fresh message key, one for each message, so that no nonce is used twice under it."""
        return MessageKey.raw(os.urandom(self._bits // 8), os.urandom(NONCE_SIZE))

    def seal(self, key: Any, plain: Bytes, message: Bytes) -> None:
        schedule = self._engine.expand_key(key)
        self._engine.seal_run(schedule, plain, message, 0)
        schedule.wipe()

    def open(self, key: Any, message: Bytes, plain: Bytes) -> None:
        schedule = self._engine.expand_key(key)
        bad = self._engine.open_run(schedule, message, plain, 0)
        schedule.wipe()
        if bad is not None:
            raise AuthenticationError(_ALTERED, chunk=bad)


class OneSlab:
    """A device that copies all of a message before it opens any of it. It is closed with this object.

    It reads chunks from `sealed`, and writes them to it, which is page-locked on a GPU.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        size = ciphertext_size(nbytes)
        self._nbytes = nbytes
        self._buffer = device.staging_buffer(size + device.segment_overhead)
        self._work = (None, None) if device.in_place else (Slab([Segment(0, 0, 0, nbytes, size)], size), self._buffer)
        self.sealed = self._buffer.memory[:size]
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
            raise bad_chunk("the message", bad.chunk)

    def seal(self, key: MessageKey, memory: object) -> None:
        """Seal `memory`, a view, on the device and copy it to `sealed`."""
        operation = self._begin(key, memory)
        try:
            operation.seal(*self._work)
        finally:
            operation.finish()
        self._buffer.wait()
        operation.result()

    def _begin(self, key: MessageKey, memory: object) -> DeviceOperation:
        sealed = HostMemory.of(self.sealed, writable=True) if self._device.in_place else None
        if isinstance(memory, np.ndarray):
            memory = HostMemory.of(memory, writable=memory.flags.writeable)
        keys = MessageKeys.of([key])
        return self._device.begin(Messages(keys, [self._nbytes], [memory], [sealed], [None], [None], [None]))

    def close(self) -> None:
        """Wipe the memory and close the device."""
        self._buffer.wipe()
        self._device.close()


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
