"""Plain tensors that are about to be sealed, from memory and from files of every kind that holds some."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from fastrack import arrays, dtypes
from fastrack.arrays import Bytes
from fastrack.errors import FormatError
from fastrack.files import SealedFile, load_file
from fastrack.regular_file import open_regular, require_end

try:
    from lzma import LZMAError
except ImportError:  # some Pythons are built without it; then zipfile unpacks nothing with it either
    LZMAError = zlib.error  # type: ignore[assignment, misc]

__all__ = ["PlainTensor", "open_plain"]

_UNSOUND = (
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,  # a header claims more than there can be
    RuntimeError,  # an archive that is encrypted, or compressed in a way that zipfile does not know
    SyntaxError,
    TypeError,
    ValueError,
    TokenError,
    LZMAError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A plain tensor's type, and a way to its bytes.

    `load` may be slow and take memory; what it returns gives the bytes from a start to a stop, on multiples of 16 KiB.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Callable[[int, int], Bytes]]

    @classmethod
    def of(cls, array: Any) -> PlainTensor:
        """A tensor in memory, or mapped."""
        dtype, shape = arrays.describe(array)
        return cls(dtype, shape, lambda: arrays.reader(array))

    @classmethod
    def stored(cls, file: SealedFile, name: str) -> PlainTensor:
        """A tensor as a file has it."""
        dtype, shape, memory = file.stored(name)
        return cls(dtype, shape, lambda: arrays.reader(memory))

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.dtype, self.shape)


@contextlib.contextmanager
def open_plain(path: str | os.PathLike[str]) -> Iterator[tuple[Mapping[str, PlainTensor], dict[str, str]]]:
    """The plain tensors of a file and its metadata; mapped where its format allows."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        with load_file(path) as file:
            if file:
                raise FormatError(f"{path} is sealed already; `fastrack unseal` opens it")
            yield {name: PlainTensor.stored(file, name) for name in file.names}, file.metadata
    elif suffix == ".npy":
        open_regular(path).close()  # NumPy opens what has this name, and would wait for a pipe
        with _sound(path):
            array = np.lib.format.open_memmap(path, mode="r")
        yield {path.stem: PlainTensor.of(array)}, {}
    elif suffix == ".npz":
        with io.BufferedReader(open_regular(path)) as raw, _open_archive(raw, path) as archive:
            yield {name: _from_archive(archive, name, path) for name in archive.files}, {}
    else:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            require_end(file, size, path)
            memory = np.memmap(file, np.uint8, "r", shape=(size,)) if size else np.empty(0, np.uint8)
        yield {path.name: PlainTensor.of(memory)}, {}


def _open_archive(file: BinaryIO, path: Path) -> Any:
    with _sound(path):
        archive = np.load(file, allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise FormatError(f"{path} is no .npz file: it holds a single array; rename it to {path.stem}.npy")
    return archive


def _from_archive(archive: Any, name: str, path: Path) -> PlainTensor:
    def read() -> Any:
        with _sound(path):
            return archive[name]

    try:
        dtype, shape = arrays.describe(read())
    except TypeError as error:
        raise TypeError(f"{name!r:.80} cannot be sealed: {error}") from error
    # Read again when its turn comes, so that one array is in memory at a time.
    return PlainTensor(dtype, shape, lambda: arrays.reader(read()))


@contextlib.contextmanager
def _sound(path: Path) -> Iterator[None]:
    """What NumPy, zipfile and what it unpacks with raise for a file that is not what its name says."""
    try:
        yield
    except (*_UNSOUND, OSError) as error:
        # From bz2, and for a place before the start of the file. Any other tells of the disk.
        if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:
            raise
        raise FormatError(f"{path} is no {path.suffix} file that can be sealed: {error!s:.300}") from None
