"""`BlockFolder`: sealed blocks as files of a folder that several servers may share."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastrack._keys.keyring import KeyLike
from fastrack._tensors.arrays import Bytes, empty_bytes
from fastrack._util.fork import per_process
from fastrack._util.rights import make_own
from fastrack.kv._sealer import BlockContext, BlockSealer, view_of

_SUFFIX, _WRITING = ".kv", ".writing"
_KEPT = 8  # buffers for messages, which more threads than that would have to make anew
_ABANDONED = 600  # seconds without a write after which the file of a killed writer is removed
_numbers = itertools.count()


class BlockFolder:
    """Sealed blocks of KV caches in the files of a folder. Several threads, processes and machines may share it.

    What cannot be read or does not open is a miss; what cannot be written is not stored. Both are counted, and the
    first of each kind is a warning of the logger "fastrack". No method raises for what the folder holds or the disk
    does, so that a server's loop goes on and computes the block anew.

    The names of files tell nothing without the key. Their number, sizes and times can be seen. What does not open is
    removed, and so are files of killed writers, and nothing else: bound the folder by what you have for caches
    (tmpfiles.d, a quota).

    Parameters
    ----------
    path : path
        The folder, which is made if it is missing, for this user alone.
    key : KeyLike, optional
        As for `BlockSealer`.
    threads : int, optional
        As for `BlockSealer`.

    Attributes
    ----------
    sealer : BlockSealer
        Seals and opens the blocks, and has the counts.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.kv import BlockContext, BlockFolder
    >>> folder = BlockFolder("blocks", fastrack.Key.generate())
    >>> here = BlockContext("llama@1", "uint8 [16]", "0 of 1", b"tokens")
    >>> folder.put(here, b"keys and values!"), folder.has(here)
    (True, True)
    >>> block = bytearray(16)
    >>> folder.get(here, block), bytes(block)
    (True, b'keys and values!')
    >>> folder.get(here._replace(hash=b"others"), block), dict(folder.sealer.counts)
    (False, {'sealed': 1, 'opened': 1, 'absent': 1})
    """

    def __init__(self, path: str | os.PathLike[str], key: KeyLike | None = None, *, threads: int | None = None) -> None:
        self.path = Path(path).absolute()
        self.sealer = BlockSealer(key, threads=threads)
        make_own(self.path)
        self._buffers: list[Bytes] = []
        self._lock = per_process(self, "_lock", threading.Lock)
        self._remove_abandoned()

    def put(self, context: BlockContext, block: Any) -> bool:
        """Seal a block into its file, unless there is one of its size, and return whether one is there.

        Parameters
        ----------
        context : BlockContext
            What the block is.
        block : buffer
            Contiguous memory.
        """
        size = self.sealer.sealed_size(view_of(block).size)
        place = self._place(context)
        if _size_of(place) == size:  # another server wrote it; what is wrong with it shows when it is read
            self.sealer.count("present")
            return True
        with self._buffer(size) as message:
            self.sealer.seal(context, block, message)
            return self._write(place, message)

    def get(self, context: BlockContext, target: Any) -> bool:
        """Open a block into memory of its size, or return False, and leave zeros in `target`.

        Parameters
        ----------
        context : BlockContext
            What the block has to be.
        target : buffer
            Contiguous memory of exactly the size of the block.
        """
        plain = view_of(target, writable=True)
        size = self.sealer.sealed_size(plain.size)
        place = self._place(context)
        with self._buffer(size) as message:
            if not self._read(place, message):
                plain.fill(0)
                return False
            is_open = self.sealer.open(context, message, plain)
        if not is_open:
            self.remove(context)  # so that `put` stores it again
        return is_open

    def has(self, context: BlockContext) -> bool:
        """Return whether there is a file for a block. Only `get` says whether it opens."""
        return _size_of(self._place(context)) is not None

    def remove(self, context: BlockContext) -> int:
        """Remove the file of a block, and return its size; 0 if there is none."""
        place, size = self._place(context), 0
        with contextlib.suppress(OSError):
            size = place.lstat().st_size
            place.unlink()
        return size

    def _place(self, context: BlockContext) -> Path:
        name = context.name(self.sealer.key)
        return self.path / name[:2] / f"{name}{_SUFFIX}"

    def _read(self, place: Path, message: Bytes) -> bool:
        """Read a file of exactly the size of a message, into memory: a mapped one may be cut while it is read."""
        try:
            with open(place, "rb", buffering=0, opener=_open_regular) as file:
                size, done = os.fstat(file.fileno()).st_size, 0
                while size == message.size and done < size:
                    count = file.readinto(message.data[done:])
                    size, done = (size, done + count) if count else (done, done)
        except FileNotFoundError:
            self.sealer.count("absent")
            return False
        except OSError as error:
            self.sealer.count("unreadable", f"{self.path}: a block could not be read: {os.strerror(error.errno or 0)}")
            return False
        if size != message.size:
            self.sealer.count("refused", f"{self.path}: a block has another size than its layout")
            with contextlib.suppress(OSError):
                place.unlink()
        return size == message.size

    def _write(self, place: Path, message: Bytes) -> bool:
        """Write a file that has its name when it is whole. It is not forced to the disk: a lost block is a miss."""
        part = place.with_name(f"{place.name}.{os.getpid()}-{next(_numbers)}{_WRITING}")
        try:
            place.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                rest = message.data
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            finally:
                os.close(descriptor)
            part.replace(place)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            self.sealer.count("unstored", f"{self.path}: a block was not stored: {os.strerror(error.errno or 0)}")
            return False
        self.sealer.count("stored")
        return True

    @contextlib.contextmanager
    def _buffer(self, size: int) -> Iterator[Bytes]:
        """Lend memory for a message, which others have touched: fresh memory costs more than the cipher."""
        with self._lock:
            fitting = [each for each in self._buffers if each.size >= size]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._buffers = [each for each in self._buffers if each is not memory]
        if memory is None:
            memory = empty_bytes(size)
        try:
            yield memory[:size]
        finally:
            with self._lock:
                self._buffers = [memory, *self._buffers][:_KEPT]

    def _remove_abandoned(self) -> None:
        limit = time.time() - _ABANDONED
        for part in self.path.glob(f"??/*{_WRITING}"):
            with contextlib.suppress(OSError):
                if part.stat().st_mtime < limit:
                    part.unlink()


def _size_of(place: Path) -> int | None:
    """Return the size of a regular file; None for anything else, and for what the disk does not tell."""
    try:
        status = place.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _open_regular(path: str, flags: int) -> int:
    """Open a file, and nothing that would have to be waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return descriptor
