"""Writing files, sealed and plain: in one pass, with one slab in memory, and under the final name once complete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np

from fastrack import aead, arrays, cobblestone, dtypes
from fastrack.arrays import Bytes
from fastrack.errors import FormatError
from fastrack.files import SealedFile, load_file
from fastrack.keys import Key, KeyRing, KeySource
from fastrack.sealed import Claim, OpenMessage, SealedRows, SealedTensor, new_file_id

__all__ = ["PlainTensor", "new_file", "open_plain", "save_file", "seal_file", "unseal_file", "write_plaintext"]

Progress = Callable[[int], None]

_UNSOUND = (ArithmeticError, EOFError, SyntaxError, TypeError, ValueError, TokenError, zipfile.BadZipFile, zlib.error)
_SLAB = 32 << 20
_ALIGNMENT = 8
_HEADER_LIMIT = 100_000_000  # bytes; safetensors refuses to read more


def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    key: Key,
    *,
    plain: Iterable[str] = (),
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Seal tensors into a new file.

    The file appears under its name when it is complete and on disk, in place of one that was there; a failure leaves
    what was there before.

    Parameters
    ----------
    tensors : mapping of str to numpy.ndarray or torch.Tensor
        In host memory.
    path : path
        The file to write; a ``.safetensors`` suffix is customary.
    key : Key
        The owner's key.
    plain : iterable of str
        Names of tensors to store as they are, for anyone to read.
    metadata : mapping of str to str, optional
        Notes to go with the file, for anyone to read and neither encrypted nor authenticated.
    progress : callable, optional
        Called with the number of plaintext bytes written since it was last called.

    Raises
    ------
    TypeError
        If a value is no tensor in host memory, or of a dtype that safetensors lacks.
    OSError
        If the file cannot be written. Nothing is left behind then.
    """
    described = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, (SealedTensor, SealedRows)):
            raise TypeError(f"{name!r} is sealed already, and bound to the file it came from; unseal it first")
        described[name] = PlainTensor.of(tensor)
    _write_sealed(described, Path(path), key, _names(plain), metadata or {}, progress)


def seal_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    key: Key,
    *,
    plain: Iterable[str] = (),
    progress: Progress | None = None,
) -> None:
    """Seal what is in a file into a new file. One slab is in memory at a time, so the file may be larger than memory.

    Parameters
    ----------
    source : path
        A ``.safetensors``, ``.npy`` or ``.npz`` file; any other is sealed whole, as one vector of bytes.
    target : path
        The sealed file to write.
    key, plain, progress
        As for `save_file`.

    Raises
    ------
    FormatError
        If the source is not what its name says, or is sealed already.
    OSError
        If a file cannot be read or written. Nothing is left behind then.
    """
    with open_plain(source) as (tensors, metadata):
        _write_sealed(tensors, Path(target), key, _names(plain), metadata, progress)


def unseal_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Decrypt a sealed file into a plain safetensors file, slab by slab, each authenticated before it is written.

    Parameters
    ----------
    source, target : path
        The sealed file, and the plain one to write.
    keys : Key, path or iterable of these, optional
        As for `unseal`.
    names : iterable of str, optional
        The tensors to write; absent, all of them.
    progress : callable, optional
        As for `save_file`.

    Raises
    ------
    AuthenticationError, UnknownKeyError, FormatError
        As for `unseal` and `load_file`. Nothing is left behind then.
    KeyError
        If the file has no tensor of such a name.
    OSError
        If a file cannot be read or written. Nothing is left behind then.
    """
    ring = KeyRing.resolve(keys)
    with load_file(source) as file:
        entries = {name: _described(file, name) for name in (file if names is None else names)}
        order = _by_alignment(entries)
        with new_file(Path(target)) as out:
            out.write(_header({name: entries[name] for name in order}, file.metadata))
            for name in order:
                if name in file.sealed:
                    write_plaintext(file[name], ring, out, progress)
                else:
                    _write_plain(PlainTensor.stored(file, name), out, progress)


def write_plaintext(tensor: SealedTensor, keys: KeyRing, out: BinaryIO, progress: Progress | None = None) -> None:
    """Decrypt one tensor into a file, slab by slab; each is authenticated before it is written."""
    memory = arrays.empty_bytes(min(_SLAB, tensor.nbytes))
    with OpenMessage(tensor, keys) as opened:
        try:
            for first, size in cobblestone.runs(tensor.nbytes, _SLAB):
                opened.read_run(memory[:size], first)
                _write(out, memory[:size], size, progress)
        finally:
            memory.fill(0)


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A plain tensor's type, and a way to its bytes that may be slow and large."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Bytes]

    @classmethod
    def of(cls, array: Any) -> PlainTensor:
        dtype, shape = arrays.describe(array)
        return cls(dtype, shape, lambda: arrays.bytes_of(array))

    @classmethod
    def stored(cls, file: SealedFile, name: str) -> PlainTensor:
        dtype, shape, memory = file.stored(name)
        return cls(dtype, shape, lambda: memory)

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.dtype, self.shape)


def _described(file: SealedFile, name: str) -> tuple[str, tuple[int, ...]]:
    if name in file.sealed:
        sealed = file[name]
        return sealed.dtype, sealed.shape
    return file.stored(name)[:2]


@contextlib.contextmanager
def open_plain(path: str | os.PathLike[str]) -> Iterator[tuple[Mapping[str, PlainTensor], dict[str, str]]]:
    """The plain tensors of a file and its metadata; mapped where its format allows."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        with load_file(path) as file:
            if file.sealed:
                raise FormatError(f"{path} is sealed already; `fastrack unseal` opens it")
            yield {name: PlainTensor.stored(file, name) for name in file}, file.metadata
    elif suffix == ".npy":
        with _sound(path):
            array = np.lib.format.open_memmap(path, mode="r")
        yield {path.stem: PlainTensor.of(array)}, {}
    elif suffix == ".npz":
        with path.open("rb") as raw, _open_archive(raw, path) as archive:
            yield {name: _from_archive(archive, name, path) for name in archive.files}, {}
    else:
        size = path.stat().st_size
        memory = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
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

    dtype, shape = arrays.describe(read())
    # Read again when its turn comes, so that one array is in memory at a time.
    return PlainTensor(dtype, shape, lambda: arrays.bytes_of(read()))


@contextlib.contextmanager
def _sound(path: Path) -> Iterator[None]:
    """What NumPy, zipfile and zlib raise for a file that is not what its name says."""
    try:
        yield
    except _UNSOUND as error:
        raise FormatError(f"{path} is no {path.suffix} file that can be sealed: {error}") from None


# Writing.


def _names(plain: Iterable[str]) -> frozenset[str]:
    if isinstance(plain, str):
        raise TypeError(f"plain= takes names, not one text whose letters would be taken for names; give [{plain!r}]")
    return frozenset(plain)


def _write_sealed(
    tensors: Mapping[str, PlainTensor],
    path: Path,
    key: Key,
    plain: frozenset[str],
    metadata: Mapping[str, str],
    progress: Progress | None,
) -> None:
    texts: list[object] = [*tensors, *metadata, *metadata.values()]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"names and metadata must be text, not {text!r:.80}: safetensors holds nothing else")
    unknown = plain - tensors.keys()
    if unknown:
        raise KeyError(f"plain= names no tensor that is here: {', '.join(sorted(unknown))}")
    marked = sorted(name for name in metadata if name.startswith("fastrack."))
    if marked:
        raise FormatError(f"metadata under 'fastrack.' belongs to the format: {', '.join(marked)}")
    file_id = new_file_id()
    claims = {
        name: Claim(name, tensor.dtype, tensor.shape, file_id) for name, tensor in tensors.items() if name not in plain
    }
    entries = {
        name: ("U8", (cobblestone.message_size(tensor.nbytes),)) if name in claims else (tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    }
    listed = {name: {"dtype": claim.dtype, "shape": list(claim.shape)} for name, claim in claims.items()}
    marks = {
        "fastrack.version": "1",
        "fastrack.file": file_id,
        "fastrack.key": key.id,
        "fastrack.tensors": json.dumps(listed, separators=(",", ":"), ensure_ascii=False),
    }
    order = _by_alignment(entries)
    with new_file(path) as out:
        out.write(_header({name: entries[name] for name in order}, {**metadata, **marks}))
        for name in order:
            if name in claims:
                _write_message(tensors[name], claims[name], key, out, progress)
            else:
                _write_plain(tensors[name], out, progress)


def _write_message(tensor: PlainTensor, claim: Claim, key: Key, out: BinaryIO, progress: Progress | None) -> None:
    salt, message_key = claim.new_key(key)
    engine = aead.engine()
    schedule = engine.prepare(message_key)
    commitment = message_key.commitment
    message_key.wipe()
    try:
        out.write(salt + commitment)
        plain = tensor.load()
        memory = arrays.empty_bytes(cobblestone.raw_size(min(_SLAB, tensor.nbytes)))
        for first, size in cobblestone.runs(tensor.nbytes, _SLAB):
            start = first * cobblestone.CHUNK
            stop = start + size
            sealed = memory[: cobblestone.run_size(first, size, tensor.nbytes)]
            engine.seal_run(schedule, plain[start:stop], sealed, first)
            _write(out, sealed, size, progress)
    finally:
        schedule.wipe()


def _write_plain(tensor: PlainTensor, out: BinaryIO, progress: Progress | None) -> None:
    memory = tensor.load()
    for start in range(0, memory.size, _SLAB):
        piece = memory[start : start + _SLAB]
        _write(out, piece, piece.size, progress)


def _write(out: BinaryIO, data: Bytes, size: int, progress: Progress | None) -> None:
    out.write(data.data)
    if progress is not None:
        progress(size)


def _by_alignment(entries: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """The order of the bytes: wide elements first, so that each tensor lies on a multiple of its element's size."""
    return sorted(entries, key=lambda name: (-dtypes.BITS[entries[name][0]], name))


def _header(entries: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors header: the size of the JSON that follows (8 bytes, little-endian), and that, with spaces after."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, (dtype, shape) in entries.items():
        if name == "__metadata__":
            raise FormatError("a tensor cannot be called '__metadata__': safetensors keeps that name for itself")
        stop = start + dtypes.nbytes(dtype, shape)
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    try:
        text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        wrong = error.object[error.start : error.end]
        raise FormatError(f"names and metadata must be Unicode text, without {wrong!r}") from None
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _HEADER_LIMIT:
        raise FormatError(f"safetensors reads no header of {len(text)} bytes; put fewer tensors into one file")
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends well, and vanishes if it does not."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "this is a directory; name a file in it", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb", buffering=0) as raw:
            yield _Whole(raw)  # type: ignore[misc]
            os.fsync(raw.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: free some space and try again; nothing was left of it",
                str(path),
            ) from error
        raise
    _sync(path.parent)


class _Whole:
    """A raw file whose `write` writes everything."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        done = 0
        while done < len(view):
            done += self._raw.write(view[done:])
        return done

    def flush(self) -> None:
        """Nothing is held back."""


def _sync(directory: Path) -> None:
    """Make the new name last. The file is whole already, so a directory that cannot be synced is no failure."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
