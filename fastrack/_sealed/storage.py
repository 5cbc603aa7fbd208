"""Storage of sealed files: mapped files, possibly more than the kernel has maps for, and bytes in memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fastrack._crypto.base import HostMemory
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._tensors.mapped_file import map_file
from fastrack._util import registry
from fastrack._util.locations import Url
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

MAP_LIMIT = 16_384  # maps of this process that `MappedFile` keeps: a quarter of Linux's default `vm.max_map_count`


HEADER_PREFIX = 8  # bytes at the start of a file: the size of the header, little-endian
HEADER_LIMIT = 100_000_000  # bytes of a header, as in the safetensors library
_FIRST_READ = 4096  # bytes, which is more than most headers have
_ATTEMPTS = 100


class Storage(Protocol):
    """The unauthenticated bytes of one version of a sealed file, in memory, on disk or on a server.

    Tensors from a file keep its storage alive: it is released with the last tensor.
    """

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        ...

    @property
    def is_remote(self) -> bool:
        """Tell whether this is a `RemoteStorage`."""
        ...

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> int:
        """Begin to fetch ranges of bytes (start, stop), and return the number of bytes missing on this machine.

        `read`, `view` and `memory` fetch on demand.
        """
        ...

    def discard(self, ranges: Sequence[tuple[int, int]]) -> bool:
        """Discard wrong bytes from the cache of a remote file. Return False if none are cached."""
        ...

    def read(self, start: int, stop: int) -> bytes:
        """Return a copy of a range of bytes. It is shorter if the file was truncated."""
        ...

    def view(self, start: int, stop: int) -> Bytes:
        """Return a range of bytes without a copy, as a read-only array that keeps the bytes valid."""
        ...

    def memory(self, start: int, stop: int) -> HostMemory:
        """Return the address and size of a range of bytes, for native code."""
        ...


Ranges = Callable[[], NDArray[np.int64]]
"""Returns ranges of bytes, a row of start and stop each, in any order; only called for a file that is not complete."""


class RemoteStorage(Storage, Protocol):
    """A file on a server, whose bytes are downloaded when they are needed. Such storages are keys of dicts."""

    @staticmethod
    def fetch_files(wanted: Mapping[RemoteStorage, Ranges]) -> Mapping[RemoteStorage, Bytes]:
        """Download the missing bytes of files, in parallel. Return the files, with these bytes present."""
        ...

    @staticmethod
    def prefetch_files(wanted: Mapping[RemoteStorage, Ranges]) -> int:
        """Begin to download missing bytes of files, without waiting, and return their number."""
        ...


def open_storage(path: str | os.PathLike[str], *, mapped: bool = True) -> tuple[Storage, bytes]:
    """Open a safetensors file: map it, or read all of it now. Return its storage and its header, of one version."""
    if isinstance(path, Url):
        remote, read = registry.find(registry.REMOTE["open"])(path)
        header = read_head(read, remote.size)
        return remote if mapped else StoredBytes(np.frombuffer(remote.read(0, remote.size), np.uint8)), header
    for _ in range(_ATTEMPTS):
        with _open_file(path) as file:
            version = _version_of(file)
            storage: Storage = MappedFile(path, file) if mapped else StoredBytes(_read_whole(file))
            # The header is not read from the map: a concurrent truncation of the file would end the process.
            read = functools.partial(_pread, file.fileno()) if mapped else storage.read
            header = read_head(read, storage.size)
            if _version_of(file) == version:
                return storage, header
    raise FormatError(f"{os.fspath(path)} keeps changing; wait until it is written, and open it again")


def _open_file(path: str | os.PathLike[str]) -> io.FileIO:
    try:
        return open_regular(path)
    except IsADirectoryError:
        advice = "expected a file, got a folder. load_folder opens a sealed one, SealedDataset one of samples"
        raise IsADirectoryError(errno.EISDIR, advice, os.fspath(path)) from None


def read_head(read: Callable[[int, int], bytes], size: int) -> bytes:
    """Return the header of a safetensors file. `read` returns a range of the file; its first 8 bytes have the length.

    A shorter file returns less.
    """
    head = read(0, min(size, _FIRST_READ))
    stop = HEADER_PREFIX + int.from_bytes(head[:HEADER_PREFIX], "little")
    if len(head) < stop <= min(size, HEADER_LIMIT):  # for a larger claim nothing is read: it is refused
        head += read(len(head), stop)
    return head[:stop]


class Extent(NamedTuple):
    """A range of bytes of a storage."""

    storage: Storage
    start: int
    stop: int


class _Present:
    """The methods of `Storage` that do nothing if all bytes are on this machine."""

    __slots__ = ()
    is_remote = False

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> int:
        return 0

    def discard(self, ranges: Sequence[tuple[int, int]]) -> bool:
        return False


class StoredBytes(_Present):
    """Bytes in memory: of a file, or of one message."""

    __slots__ = ("_array", "_memory", "_parts", "size")

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self._memory: HostMemory | None = None
        self._parts: dict[int, HostMemory] = {}
        self.size = array.size

    def read(self, start: int, stop: int) -> bytes:
        return self._array[start:stop].tobytes()

    def view(self, start: int, stop: int) -> Bytes:
        return self._array[start:stop]

    def memory(self, start: int, stop: int) -> HostMemory:
        part = self._parts.get(start)
        if part is None or part.size != stop - start:
            if self._memory is None:
                self._memory = HostMemory.of(self._array)
            part = self._parts[start] = self._memory.part(start, stop)
        return part


class MappedFile(_Present):
    """A regular file, mapped without a descriptor. Beyond `MAP_LIMIT`, files used least recently are unmapped.

    The map stays on the first file, even if another file takes its name. Mapping it again requires a file of that name
    with an unchanged inode, size and time of modification.
    """

    __slots__ = ("__weakref__", "_mapped", "_path", "_version", "is_recent", "size")

    def __init__(self, path: str | os.PathLike[str], file: io.FileIO) -> None:
        name = os.fspath(path)
        self._path = name if name.startswith("/") else str(Path(name).absolute())
        self._version = _version_of(file)
        self.size = self._version[0]
        self.is_recent = False  # used since it was last considered for unmapping
        self._mapped: StoredBytes | None = None
        self._map(file)

    def read(self, start: int, stop: int) -> bytes:
        self.is_recent = True
        array = (self._mapped or self._map_again())._array  # noqa: SLF001 - of this module
        return array[start:stop].tobytes()  # of a header, a call takes as long as the copy

    def view(self, start: int, stop: int) -> Bytes:
        self.is_recent = True
        return (self._mapped or self._map_again()).view(start, stop)

    def memory(self, start: int, stop: int) -> HostMemory:
        self.is_recent = True
        return (self._mapped or self._map_again()).memory(start, stop)

    def unmap(self) -> None:
        """Release the map, which ends with the last array on it."""
        self._mapped = None

    def _map_again(self) -> StoredBytes:
        with open_regular(self._path) as file:
            if _version_of(file) != self._version:
                error = FormatError(
                    f"{self._path} was replaced or changed since it was opened. Open it, or the dataset, again"
                )
                error.path = Path(self._path)
                raise error
            return self._map(file)

    def _map(self, file: io.FileIO) -> StoredBytes:
        mapped = self._mapped = StoredBytes(_map(file, self.size))
        _mapped[weakref.ref(self, _forget)] = None
        while len(_mapped) > MAP_LIMIT and _unmap_one():
            pass
        return mapped


_mapped: OrderedDict[weakref.ref[MappedFile], None] = OrderedDict()  # in the order of their mapping

_forget = functools.partial(_mapped.pop, default=None)  # in C: what a signal's handler raises in Python here is lost


def _unmap_one() -> bool:
    """Unmap the first file that was not used since it was last considered."""
    while _mapped:
        with contextlib.suppress(KeyError):  # another thread took the last one
            reference, _ = _mapped.popitem(last=False)
            file = reference()
            if file is not None and file.is_recent:
                file.is_recent = False
                _mapped[reference] = None
            elif file is not None:
                file.unmap()
                return True
    return False


def _map(file: io.FileIO, size: int) -> Bytes:
    if not size:
        return np.empty(0, np.uint8)
    with contextlib.suppress(OSError):
        return map_file(file.fileno(), size)
    for _ in range(1 + len(_mapped) // 2):  # the limit of maps, or of memory, is lower than usual
        _unmap_one()
    try:
        return map_file(file.fileno(), size)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise OSError(error.errno, error.strerror, str(file.name)) from None
        advice = "too many maps or too much memory is in use; raise vm.max_map_count, or open fewer files at once"
        raise OSError(errno.ENOMEM, advice, str(file.name)) from None


def _read_whole(file: io.FileIO) -> Bytes:
    array = arrays.empty_bytes(os.fstat(file.fileno()).st_size)
    done = 0
    while done < array.size and (count := file.readinto(array[done:].data)):
        done += count
    array.flags.writeable = False
    return array[:done]


def _pread(descriptor: int, start: int, stop: int) -> bytes:
    return os.pread(descriptor, stop - start, start)


def _version_of(file: io.FileIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
