"""`open_bytes`: a file object that reads a sealed vector of bytes."""

from __future__ import annotations

import errno
import io
import operator
import os
import threading
from typing import Any

import numpy as np

from fastrack._crypto.gather import EvenRanges
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.tensor import SealedTensor
from fastrack._util.fork import per_process
from fastrack._util.public import public

_BUFFER = 128 << 10  # bytes of plaintext; eight chunks


@public
def open_bytes(sealed: SealedTensor, keys: KeySource | None = None) -> io.BufferedReader:
    """Open a sealed vector of bytes as a binary file for reading.

    `seal_file` seals any file without tensors as such a vector. Libraries that take a file object can then read the
    sealed file like the original: ``pyarrow.parquet.ParquetFile``, ``PIL.Image.open``, `tarfile`, `zipfile`.
    A read decrypts the chunks that it needs, and authenticates each chunk before it returns its bytes.

    Parameters
    ----------
    sealed : SealedTensor
        U8 tensor of one dimension.
    keys : KeySource, optional
        As for `unseal`.

    Returns
    -------
    io.BufferedReader
        The file. Threads may share it. It holds a key until it is closed.

    Raises
    ------
    TypeError
        If `sealed` is not such a tensor.
    AuthenticationError, UnknownKeyError
        As for `unseal`. Methods that read raise AuthenticationError for an altered chunk, and return nothing of it.

    Examples
    --------
    >>> import pathlib
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> _ = pathlib.Path("notes.txt").write_bytes(b"first, second")
    >>> fastrack.seal_file("notes.txt", "notes.safetensors", key)
    >>> sealed = fastrack.load_file("notes.safetensors")["notes.txt"]
    >>> with fastrack.open_bytes(sealed, key) as file:
    ...     _ = file.seek(7)
    ...     print(file.read())
    b'second'
    """
    if not isinstance(sealed, SealedTensor):
        raise TypeError(
            f"open_bytes: expected a SealedTensor, got {type(sealed).__name__}. Take one out of load_file(path)"
        )
    if sealed.dtype != "U8" or len(sealed.shape) != 1:
        raise TypeError(
            f"open_bytes: {sealed.name!r:.200}: expected U8 in one dimension, got {sealed.dtype} {list(sealed.shape)}. "
            "Open it with unseal"
        )
    return io.BufferedReader(_SealedBytes(sealed, KeyRing.resolve(keys)), _BUFFER)


class _SealedBytes(io.RawIOBase):
    """Unbuffered file over the plaintext of a message."""

    def __init__(self, sealed: SealedTensor, keys: KeyRing) -> None:
        self.name = sealed.name
        self._size = sealed.nbytes
        self._position = 0
        self._lock = per_process(self, "_lock", threading.Lock)  # `close` wipes the key only between reads
        self._message = OpenMessage(sealed, keys)

    def readable(self) -> bool:
        self._require_open()
        return True

    def seekable(self) -> bool:
        self._require_open()
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._require_open()
        offset, whence = operator.index(offset), operator.index(whence)
        with self._lock:
            starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
            position = starts[whence] + offset if whence in starts else -1
            if not 0 <= position < 1 << 63:  # the error of `io.FileIO`, by which `zipfile` sees that a file is short
                wanted = "expected a whence of 0, 1 or 2 and a position of 0 or more"
                raise OSError(errno.EINVAL, f"seek: {wanted}, got offset {offset}, whence {whence}")
            self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        with self._lock:
            self._require_open()
            target = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
            start = self._position
            memory = target[: max(0, self._size - start)]
            if memory.size:
                self._message.gather(EvenRanges(np.array([start]), 1, memory.size), memory)
                self._position = start + memory.size
            return memory.size

    def close(self) -> None:
        """Wipe the key."""
        with self._lock:
            message = self.__dict__.pop("_message", None)  # `__init__` may have raised before it was set
            if message is not None:
                message.__exit__()
            super().close()

    def _require_open(self) -> None:
        if self.closed:
            raise ValueError("reading from a closed file. Open it again with open_bytes")
