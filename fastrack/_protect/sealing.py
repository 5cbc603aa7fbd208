"""Seal what a library writes as a stream into one vector of bytes, and open such a vector where it stands."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastrack._files.byte_reader import open_bytes
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile, file_in_memory
from fastrack._files.writer import SLAB, write_sealed
from fastrack._keys.keyring import KeyRing
from fastrack._keys.keys import Key
from fastrack._protect.pushed import PushedBytes
from fastrack._sealed.file_header import parse_header
from fastrack._sealed.storage import HEADER_LIMIT, HEADER_PREFIX
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._tensors.mapped_file import map_file
from fastrack._util.locations import Location, locate
from fastrack._util.regular_file import open_regular
from fastrack._util.trial import in_earnest
from fastrack.errors import FastrackError, FormatError

STREAM = "torch.save"
"""The name of the vector of bytes that torch wrote."""
_MARK = b'"fastrack.version"'
Run = Callable[["Sink", bool], None]
"""Write the stream; its checksums may be left out where False is given."""


@dataclass(frozen=True, slots=True)
class Protection:
    """The keys of a protected process."""

    owner: Key
    ring: KeyRing


class Sink:
    """File for torch to write to, which counts the bytes."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        self._write = write
        self.size = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._write(data)
        self.size += size
        return size

    def flush(self) -> None:
        """Do nothing: each write is sealed as it comes."""


def seal_stream(protection: Protection, run: Run, target: Any) -> None:
    """Seal what `run` writes into a new file, or into a file of the caller's. It runs twice, first to be counted."""
    counted = Sink(lambda _: None)
    run(counted, False)

    def push(seal: Callable[[Bytes], None]) -> None:
        pushed = PushedBytes(counted.size, SLAB, seal)
        try:
            run(Sink(pushed.write), True)
            pushed.finish()
        finally:
            pushed.wipe()

    tensor = PlainTensor("U8", (counted.size,), _unread, push)
    sealed_to: Any = locate(target) if is_path(target) else _Whole(target)
    # Small streams keep their content in a rehearsal: in memory or on their way to another process they are read.
    keeping = counted.size <= SLAB and not is_path(target)
    with in_earnest() if keeping else contextlib.nullcontext():
        write_sealed({STREAM: tensor}, sealed_to, protection.owner, frozenset(), {}, None)


def seal_tensors(
    protection: Protection, tensors: dict[str, PlainTensor], target: Location | io.BytesIO, metadata: dict[str, str]
) -> None:
    """Seal tensors into a new file, or into memory, as `fastrack.save_file` does."""
    if [*tensors] == [STREAM]:
        raise FormatError(f"name of a tensor: expected another than {STREAM!r}, which is torch's. Rename the tensor")
    write_sealed(tensors, target, protection.owner, frozenset(), metadata, None)


def is_stream(file: SealedFile) -> bool:
    """Return whether a sealed file has what torch wrote, and not tensors."""
    return [*file] == [STREAM]


def is_path(target: Any) -> bool:
    return isinstance(target, (str, os.PathLike))


def _unread() -> Any:
    raise AssertionError


class _Whole:
    """A file of the caller's, each write to which is whole."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            written = self._file.write(view)
            if not isinstance(written, int) or written >= view.nbytes:
                break
            if not written:
                raise OSError(errno.EIO, "the open file takes no more bytes. Save to a path")
            view = view[written:]


def open_sealed(path: Any) -> SealedFile | None:
    """Open a sealed file by its path. Return None for any other, which the library opens or refuses itself.

    A sealed file that is damaged is refused here: torch would advise to load it as a pickle of any kind.
    """
    try:
        file = SealedFile(locate(path))
    except FormatError:
        if _is_marked(path):
            raise
        return None
    except (OSError, ValueError):
        return None
    return file or None


def find_sealed(source: Any) -> SealedFile | None:
    """Return the sealed file at a path, or where a stream stands. Return None for others."""
    source = os.fsdecode(source) if isinstance(source, bytes) else source  # which is a path where C++ reads
    return open_sealed(source) if is_path(source) else read_sealed(source)


def _is_marked(path: Any) -> bool:
    """Return whether a file on this machine begins like a sealed one."""
    try:
        with open_regular(path) as file:
            return _MARK in _read_head(file)
    except (OSError, ValueError):
        return False


def _read_head(stream: Any) -> bytes:
    """Read the header that begins where a stream stands, if there may be one."""
    prefix: bytes = stream.read(HEADER_PREFIX)
    length = int.from_bytes(prefix, "little") if len(prefix) == HEADER_PREFIX else 0
    return prefix + stream.read(length) if 0 < length <= HEADER_LIMIT else b""


def read_sealed(stream: Any) -> SealedFile | None:
    """Read the sealed file that begins where a stream stands. Return None, and leave the stream there, for another."""
    try:
        start = stream.tell()
        head = _read_head(stream)
        if _MARK not in head:
            stream.seek(start)
            return None
    except (AttributeError, TypeError, ValueError, OSError):  # ValueError: io.UnsupportedOperation is one
        return None
    label = str(getattr(stream, "name", None) or f"<{type(stream).__name__}>")
    _, stored = parse_header(head, None, Path(label))
    stop = max((each.stop for each in stored.values()), default=len(head))
    content = _bytes_of(stream, start, stop)
    stream.seek(start + stop)
    return file_in_memory(content, label)


def _bytes_of(stream: Any, start: int, size: int) -> Bytes:
    """Return bytes of a stream, without a copy if it is a file on disk or a buffer in memory."""
    if type(stream).__module__ == "fsspec.implementations.local":
        stream = stream.f
    if type(stream) is io.BytesIO:
        # Without a copy until the stream changes; of `getbuffer` an error that lives would keep the stream from that.
        return np.frombuffer(stream.getvalue(), np.uint8)[start : start + size]
    if type(stream) in {io.FileIO, io.BufferedReader, io.BufferedRandom}:
        length = os.fstat(stream.fileno()).st_size
        if length >= start + size:
            return map_file(stream.fileno(), length)[start : start + size]
    stream.seek(start)
    content = arrays.empty_bytes(size)
    view, done = content.data, 0
    # Where the stream was cut short, SealedFile says so.
    while done < size and (piece := stream.read(min(size - done, SLAB))):
        view[done : done + len(piece)] = piece
        done += len(piece)
    content.flags.writeable = False
    return content[:done]


def stream_of(protection: Protection, file: SealedFile) -> _Stream:
    """Open what `seal_stream` sealed, as a file that is decrypted as it is read. It holds a key until it is closed."""
    if not is_stream(file):
        got = f"a sealed file of {len(file)} tensors. Open it with safetensors.torch.load_file, or fastrack.load_file"
        if file.kind == "checkpoint":
            got = "a sealed checkpoint. Open it with fastrack.load_checkpoint"
        raise FastrackError(f"{file.path}: expected what torch.save wrote, got {got}")
    return _Stream(open_bytes(file[STREAM], protection.ring).detach(), SLAB >> 6)


@contextlib.contextmanager
def open_stream(protection: Protection, file: SealedFile) -> Iterator[_Stream]:
    """Open what `seal_stream` sealed for the block."""
    with file, stream_of(protection, file) as stream:
        try:
            yield stream
        except Exception as error:
            if isinstance(error, SystemError):  # of C++, where an interrupt met the beginning or the end of a method
                stream.error = stream.error or error.__cause__
            if stream.error is None:
                raise
        if stream.error is not None:
            raise stream.error


# Raises what an earlier call left, which torch reads over. It is bound here and called before any name of an object is
# looked up: where Python has to look through the classes for one, it forgets an error that was left.
_raise_left = ctypes.pythonapi.PyErr_CheckSignals


def _remember(read: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method of `_Stream` of a method that reads."""

    def run(stream: _Stream, *args: Any) -> Any:
        try:
            _raise_left()
            return read(stream, *args)
        except BaseException as error:
            stream.error = stream.error or error
            raise

    return run


class _Stream(io.BufferedReader):
    """File that remembers its first error: torch reads from C++, which raises another one in its place."""

    error: BaseException | None = None
    turn: Any  # a lock, where threads may share an archive
    read = _remember(io.BufferedReader.read)
    readinto = _remember(io.BufferedReader.readinto)
