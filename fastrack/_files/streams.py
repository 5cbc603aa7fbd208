"""Sealing from and to streams, such as standard input and output, without plaintext on disk.

A stream of bytes is read into memory before it is sealed, because a sealed file begins with its sizes. If the caller
gives the format as .npy or .safetensors, its header has the sizes, and tensors are sealed while they are read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Literal

import numpy as np

from fastrack._files.importers import open_plain, read_array_header, refuse_malformed, sealed_already
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile
from fastrack._files.seal_file import name_tensor
from fastrack._files.unseal_file import Unsealer, choose
from fastrack._files.writer import Progress, plain_names, write_sealed
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._keys.keys import Key
from fastrack._sealed.file_header import parse_header
from fastrack._sealed.storage import HEADER_LIMIT, HEADER_PREFIX
from fastrack._tensors import dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location
from fastrack.errors import FormatError

_NAME = "stdin"  # default name of the tensor, and of the stream in errors
_PIECE = 1 << 20  # bytes
StreamForm = Literal["npy", "safetensors"]


def seal_stream(
    source: Path | IO[bytes],
    target: Location | IO[bytes],
    key: Key,
    *,
    plain: Iterable[str] = (),
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = True,
    progress: Progress | None = None,
    form: StreamForm | None = None,
) -> None:
    """Seal a file or a stream into another, like `seal_file`. After an error a stream is cut short.

    A stream has the tensors of its `form`; without one it is bytes, whatever they look like.
    """
    in_order = not isinstance(source, Path)
    with open_plain(source) if isinstance(source, Path) else _open_stream(source, form) as (tensors, stored):
        named, names = name_tensor(tensors, name, _NAME if in_order else str(source)), plain_names(plain)
        chosen = stored if metadata is None else metadata
        write_sealed(named, target, key, names, chosen, progress, overwrite=overwrite, in_order=in_order)


def unseal_to_stream(
    file: SealedFile,
    target: IO[bytes],
    keys: KeySource,
    *,
    names: Iterable[str] | None = None,
    plain: Iterable[str] = (),
    progress: Progress | None = None,
) -> None:
    """Decrypt a sealed file into a stream: one vector of bytes unchanged, and other tensors as a safetensors file.

    Each slab is authenticated before it is written. An altered slab fails after earlier ones were written.
    """
    Unsealer(file, KeyRing.resolve(keys), choose(file, names, plain_names(plain)), True, progress).write_out(target)


@contextlib.contextmanager
def _open_stream(
    stream: IO[bytes], form: StreamForm | None
) -> Iterator[tuple[Mapping[str, PlainTensor], dict[str, str]]]:
    if form == "npy":
        yield {_NAME: _read_array(stream)}, {}
    elif form == "safetensors":
        yield _read_tensors(stream)
    else:
        content = bytearray()
        while piece := stream.read(_PIECE):
            content += piece
        yield {_NAME: PlainTensor.of(np.frombuffer(content, np.uint8))}, {}


def _read(stream: IO[bytes], size: int) -> bytes:
    """Read exactly `size` bytes of a stream, or fewer at its end."""
    pieces = []
    while size > 0 and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _read_array(stream: IO[bytes]) -> PlainTensor:
    path = Path(f"{_NAME}.npy")
    with refuse_malformed(path):
        array, shape, order = read_array_header(stream)
    dtype = dtypes.from_numpy(array)
    nbytes = dtypes.nbytes(dtype, shape)
    if order == "C":
        return PlainTensor(dtype, shape, lambda: _reader(stream, nbytes, path, is_last=True))
    content = _read(stream, nbytes + 1)  # sealed in C order
    if len(content) != nbytes:
        raise _wrong_length(path)
    return PlainTensor.of(np.frombuffer(content, array).reshape(shape, order="F"))


def _read_tensors(stream: IO[bytes]) -> tuple[dict[str, PlainTensor], dict[str, str]]:
    path = Path(f"{_NAME}.safetensors")
    prefix = _read(stream, HEADER_PREFIX)
    metadata, stored = parse_header(
        prefix + _read(stream, min(int.from_bytes(prefix, "little"), HEADER_LIMIT)), None, path
    )
    if "fastrack.version" in metadata:
        raise sealed_already(path)
    tensors: dict[str, PlainTensor] = {}
    for number, (name, (dtype, shape, start, stop)) in enumerate(stored.items(), 1):
        load = functools.partial(_reader, stream, stop - start, path, is_last=number == len(stored))
        tensors[name] = PlainTensor(dtype, shape, load)
    return tensors, metadata


def _reader(stream: IO[bytes], nbytes: int, path: Path, *, is_last: bool) -> Callable[[int, int], Bytes]:
    def read(start: int, stop: int) -> Bytes:
        data = _read(stream, stop - start)
        if len(data) != stop - start or (is_last and stop == nbytes and stream.read(1)):
            raise _wrong_length(path)
        return np.frombuffer(data, np.uint8)

    return read


def _wrong_length(path: Path) -> FormatError:
    return FormatError(f"{path}: expected as many bytes as its header says, got fewer or more. Send it again")
