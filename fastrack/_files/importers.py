"""Plain tensors to be sealed, from memory and from safetensors, NumPy and other files."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import locate_local
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError

_ESCAPES_FOLDER = re.compile(r"^([/\\]|[a-z]:)|(^|[/\\])\.\.([/\\]|$)", re.IGNORECASE)  # on Windows, too


@contextlib.contextmanager
def open_plain(path: str | os.PathLike[str]) -> Iterator[tuple[Mapping[str, PlainTensor], dict[str, str]]]:
    """Open the plain tensors of a file and its metadata. They are mapped if the format allows it."""
    path = locate_local(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        with SealedFile(path) as file:
            if file:
                raise sealed_already(path)
            yield {name: PlainTensor.stored(file, name) for name in file.names}, file.metadata
    elif suffix == ".npy":
        with open_regular(path) as file, refuse_malformed(path):
            dtype, shape, order = read_array_header(file)
            array = np.memmap(file, dtype, "r", file.tell(), shape, order)
        yield {path.stem: PlainTensor.of(array)}, {}
    elif suffix == ".npz":
        with io.BufferedReader(open_regular(path)) as raw:
            with refuse_malformed(path):
                if raw.read(len(np.lib.format.MAGIC_PREFIX)) == np.lib.format.MAGIC_PREFIX:
                    raise FormatError(f"expected an .npz archive, got a single array; rename it to {path.stem}.npy")
                archive = zipfile.ZipFile(raw)
            yield _read_members(archive, path), {}
    else:
        yield {path.name: whole_file(path)}, {}


def whole_file(path: Path) -> PlainTensor:
    """Map the content of a file as one vector of bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(size)
        if file.read(1):  # of /proc, say, or it grows
            message = f"expected {size} bytes as its size says, got more; copy it, and use the copy"
            raise OSError(errno.EINVAL, message, str(path))
        memory = np.memmap(file, np.uint8, "r", shape=(size,)) if size else np.empty(0, np.uint8)
    return PlainTensor.of(memory)


def sealed_already(path: Path) -> FormatError:
    """Return the error for a file that is to be sealed, and is a sealed one."""
    return FormatError(f"{path} is sealed already; `fastrack unseal` opens it")


def require_safe_member(name: str, path: Path) -> None:
    """Refuse a member of an archive whose name leads out of the folder that it is unpacked into."""
    if "\0" in name or _ESCAPES_FOLDER.search(name):
        raise FormatError(
            f"{path}: name of a member: expected one inside the folder that the archive is unpacked into, got "
            f"{name!r:.80}. Use a .safetensors file, or rename the tensor"
        )


def _read_members(archive: zipfile.ZipFile, path: Path) -> dict[str, PlainTensor]:
    """Read the header of each array of an archive."""
    tensors: dict[str, PlainTensor] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(".npy")
        require_safe_member(name, path)
        if name in tensors or name == member.filename:
            problem = "is there twice" if name in tensors else "is not an .npy file"
            raise FormatError(f"{path} is not an .npz file that can be sealed: {member.filename!r:.80} {problem}")
        with refuse_malformed(path), archive.open(member) as file:
            array, shape, order = read_array_header(file)
            start = file.tell()
        try:
            dtype = dtypes.from_numpy(array)
        except TypeError as error:
            raise TypeError(f"{name!r:.80} cannot be sealed: {error}") from error
        with refuse_malformed(path):
            if start + dtypes.nbytes(dtype, shape) != member.file_size:
                raise ValueError(f"{member.filename!r:.80} is not as long as its header says")
        load = _from_stream if order == "C" else _from_whole
        tensors[name] = PlainTensor(dtype, shape, functools.partial(load, archive, member, path))
    return tensors


def _from_stream(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Callable[[int, int], Bytes]:
    """Unpack an array while it is read, from start to end."""
    with refuse_malformed(path):
        file = archive.open(member)
        read_array_header(file)

    def read(start: int, stop: int) -> Bytes:
        with refuse_malformed(path):
            data = file.read(stop - start)
            at_end = file.tell() == member.file_size
            if len(data) != stop - start or (at_end and file.read(1)):  # the read at the end compares the checksum
                raise ValueError(f"{member.filename!r:.80} is not as long as the archive says")
        return np.frombuffer(data, np.uint8)

    return read


def _from_whole(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Callable[[int, int], Bytes]:
    """Unpack an array in Fortran order as a whole, since it is sealed in C order."""
    with refuse_malformed(path), archive.open(member) as file:
        return arrays.reader(np.lib.format.read_array(file, allow_pickle=False))


def read_array_header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    """Read the header of an .npy file, up to its first element. NumPy raises many types for malformed ones."""
    try:
        version = np.lib.format.read_magic(file)
    except ValueError:  # its text repeats bytes of the file
        raise ValueError("expected the magic number of the format, got none") from None
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise ValueError(f"version {version} of the .npy format, which only records need, cannot be sealed")
    if dtype.hasobject:
        raise ValueError("expected numbers, got Python objects")
    return dtype, shape, "F" if is_fortran and sum(extent != 1 for extent in shape) > 1 else "C"


@contextlib.contextmanager
def refuse_malformed(path: Path) -> Iterator[None]:
    """Turn the errors of NumPy, zipfile and its decompressors for a malformed file into `FormatError`.

    They have no class in common: a header may give a SyntaxError or a MemoryError, and each decompressor has its own.
    """
    try:
        yield
    except Exception as error:
        # bz2 sets no errno, and a negative offset gives EINVAL. Any other errno is a failure of the disk.
        if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:
            raise
        raise FormatError(f"{path} is not an {path.suffix} file that can be sealed: {error!s:.300}") from None
