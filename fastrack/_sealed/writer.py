"""Writing files, sealed and plain: in one pass, with one slab in memory, and under the final name once complete."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto import engine as aead
from fastrack._crypto.keys import Key, KeyLike, KeyRing, KeySource
from fastrack._sealed.importers import PlainTensor, open_plain, require_safe_member
from fastrack._sealed.reader import FORMAT_VERSION, SealedFile, opened_file
from fastrack._sealed.tensor import Binding, Kind, MessageContext, OpenMessage, SealedRows, SealedTensor, new_file_id
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.atomic import new_file
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError

Progress = Callable[[int], None]

_SLAB = 8 << 20  # of ciphertext that is still in the caches when it is written
_ALIGNMENT = 8
_PRIVATE = 0o600  # the mode of a file of plaintext
_HEADER_LIMIT = 100_000_000  # bytes; safetensors refuses to read more


@public
def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    key: KeyLike,
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
    tensors : mapping of str to numpy.ndarray, torch.Tensor or SealedTensor
        In host memory. What is sealed already, under this key and by this name, is stored as it is and bound to the
        file; nothing of it is decrypted.
    path : path
        The file to write; a ``.safetensors`` suffix is customary.
    key : Key or path
        The owner's key, or its key file.
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
    ValueError
        If a tensor was sealed under another name or another key, or as part of a checkpoint.
    AuthenticationError
        If the header of a sealed tensor is not what its owner wrote.
    OSError
        If the file cannot be written. Nothing is left behind then.
    """
    key, plain = Key.of(key), _names(plain)
    described, sealed = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, SealedRows):
            raise TypeError(f"{name!r}: rows of a sealed tensor cannot be stored; store all of it, or unseal them")
        if isinstance(tensor, SealedTensor):
            _require_own(name, tensor, key, plain)
            sealed[name] = tensor
            described[name] = PlainTensor.of(np.frombuffer(tensor.message, np.uint8))
            continue
        try:
            described[name] = PlainTensor.of(tensor)
        except TypeError as error:
            raise TypeError(f"{name!r:.80} cannot be saved: {error}") from error
    _write_sealed(described, Path(path), key, plain, metadata or {}, progress, sealed=sealed)


def _require_own(name: str, tensor: SealedTensor, key: Key, plain: frozenset[str]) -> None:
    """Refuse a sealed tensor that cannot be stored in a file of that key, by that name."""
    if tensor.key_id != key.id:
        raise ValueError(
            f"{name!r} was sealed under the key {tensor.key_id}, and a file has one key, here {key.id}; give that key"
        )
    if tensor.name != name:
        raise ValueError(f"{name!r} was sealed by the name {tensor.name!r}, which is authenticated; store it by that")
    if tensor.context.kind != "tensor":
        raise ValueError(f"{name!r} is part of a {tensor.context.kind}, and of no other file; unseal it first")
    if name in plain:
        raise ValueError(f"plain= names {name!r}, which is sealed; unseal it first")
    tensor.open_header(KeyRing(key)).wipe()


def write_checkpoint(tensors: Mapping[str, Any], path: str | os.PathLike[str], key: KeyLike) -> None:
    """Seal the tensors of a checkpoint into a new file, so that they open as those of a checkpoint alone."""
    described = {name: PlainTensor.of(tensor) for name, tensor in tensors.items()}
    _write_sealed(described, Path(path), Key.of(key), frozenset(), {}, None, kind="checkpoint")


@public
def seal_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    key: KeyLike,
    *,
    plain: Iterable[str] = (),
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = True,
    progress: Progress | None = None,
) -> None:
    """Seal what is in a file into a new file. One slab is in memory at a time, so the file may be larger than memory.

    Of an ``.npz`` file an array in Fortran order is in memory as a whole.

    Parameters
    ----------
    source : path
        A ``.safetensors``, ``.npy`` or ``.npz`` file; any other is sealed whole, as one vector of bytes.
    target : path
        The sealed file to write.
    key, plain, progress
        As for `save_file`.
    name : str, optional
        What to call the tensor of a source that has one only. Absent, a ``.npy`` file and one that is sealed whole give
        it their own name, which anyone can then read.
    metadata : mapping of str to str, optional
        Notes in place of the source's. Absent, those are copied, for anyone to read.
    overwrite : bool
        Whether a file that has the name of the target may be replaced.

    Raises
    ------
    FormatError
        If the source is not what its name says, is sealed already, or has several tensors where `name` is given.
    TypeError
        If an array in it is of a dtype that safetensors lacks, such as text, objects or the other byte order.
    OSError
        If a file cannot be read or written. Nothing is left behind then.
    """
    with open_plain(source) as (present, stored_metadata):
        tensors = present if name is None else {name: _only_tensor(present, source)}
        chosen_metadata = stored_metadata if metadata is None else metadata
        _write_sealed(tensors, Path(target), Key.of(key), _names(plain), chosen_metadata, progress, overwrite=overwrite)


def _only_tensor(tensors: Mapping[str, PlainTensor], source: str | os.PathLike[str]) -> PlainTensor:
    if len(tensors) != 1:
        raise FormatError(
            f"{os.fspath(source)}: expected one tensor, to be given a name, got {len(tensors)}; leave name= out"
        )
    return next(iter(tensors.values()))


@public
def unseal_file(
    source: SealedFile | str | os.PathLike[str],
    target: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    names: Iterable[str] | None = None,
    plain: Iterable[str] = (),
    overwrite: bool = True,
    progress: Progress | None = None,
) -> None:
    """Decrypt a sealed file into a plain file, slab by slab, each authenticated before it is written.

    Parameters
    ----------
    source : path or SealedFile
        The sealed file, or one that `load_file` opened.
    target : path
        The plain file to write. A ``.safetensors`` or ``.npz`` file takes any number of tensors, a ``.npy`` file one,
        and a file with any other suffix the bytes of one U8 tensor.
    keys : Key, path or iterable of these, optional
        As for `unseal`.
    names : iterable of str, optional
        The tensors to write; absent, all of them.
    plain : iterable of str
        Names of tensors that may be copied although the file stores them in plain: unauthenticated, so that anyone who
        could write to the file may have put them there. Other plain tensors are refused.
    overwrite : bool
        Whether a file that has the name of the target may be replaced. It keeps its mode; a new one gets mode 0600.
    progress : callable, optional
        As for `save_file`.

    Raises
    ------
    AuthenticationError
        As for `unseal`, or if a tensor is stored in plain and not in `plain`. Nothing is left behind then.
    UnknownKeyError, FormatError
        As for `unseal` and `load_file`; also if nothing in the file is sealed, or the target cannot hold these tensors.
        Nothing is left behind then.
    KeyError
        If the file has no tensor of such a name.
    OSError
        If a file cannot be read or written. Nothing is left behind then.

    Notes
    -----
    A ``.safetensors`` target gets the metadata of the source as well, which is not authenticated.
    """
    ring = KeyRing.resolve(keys)
    with opened_file(source) as file:
        unsealer = _Unsealer(file, ring, _choose(file, names, _names(plain)), overwrite, progress)
        unsealer.write_to(Path(target))


def _choose(file: SealedFile, names: Iterable[str] | None, plain: frozenset[str]) -> list[str]:
    if not file:
        raise FormatError(f"{file.path}: nothing in it is sealed, so there is nothing to unseal")
    chosen = list(dict.fromkeys(file.names if names is None else names))
    unknown = {*chosen, *plain} - set(file.names)
    if unknown:
        raise KeyError(f"{file.path} has no tensor {', '.join(sorted(map(repr, unknown)))}")
    for name in chosen:
        if name in file.plain and name not in plain:
            raise AuthenticationError(
                f"{file.path} stores {name!r:.80} unencrypted and unauthenticated; refusing to copy it. Get the file "
                "sealed, or let that tensor in by name (plain=, --plain)",
                tensor=name,
                path=file.path,
            )
    return chosen


@dataclass(frozen=True, slots=True)
class _Unsealer:
    """Some tensors of a sealed file on their way to a plain one."""

    file: SealedFile
    keys: KeyRing
    names: list[str]
    overwrite: bool
    progress: Progress | None

    def write_to(self, target: Path) -> None:
        suffix = target.suffix.lower()
        if suffix == ".safetensors":
            self._write_safetensors(target)
        elif suffix == ".npz":
            self._write_npz(target)
        elif suffix == ".npy":
            name = self._only_name()
            self._write_one(name, _npy_header(*self._describe(name)), target)
        else:
            name = self._only_name()
            dtype, shape = self._describe(name)
            if dtype != "U8":
                raise FormatError(
                    f"tensor {name!r} is {dtype} {list(shape)}, no plain bytes; give the target a suffix that keeps "
                    "its type: .safetensors, .npz or .npy"
                )
            self._write_one(name, b"", target)

    def _write_safetensors(self, target: Path) -> None:
        entries = {name: self._describe(name) for name in self.names}
        order = _by_alignment(entries)
        header = _header({name: entries[name] for name in order}, self.file.metadata)
        size = len(header) + sum(dtypes.nbytes(*entry) for entry in entries.values())
        with self._new_file(target, size) as out:
            out.write(header)
            for name in order:
                self._write(name, out)

    def _write_npz(self, target: Path) -> None:
        for name in self.names:
            require_safe_member(name, target)
        headers = {name: _npy_header(*self._describe(name)) for name in self.names}
        with self._new_file(target) as out, zipfile.ZipFile(out, "w") as archive:
            for name in self.names:
                # numpy.savez does the same: the size of a member is known only in its end.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    member.write(headers[name])
                    self._write(name, member)

    def _write_one(self, name: str, header: bytes, target: Path) -> None:
        with self._new_file(target) as out:
            out.write(header)
            self._write(name, out)

    def _new_file(self, target: Path, size: int = 0) -> AbstractContextManager[BinaryIO]:
        return new_file(target, size, mode=_PRIVATE, overwrite=self.overwrite)

    def _write(self, name: str, out: IO[bytes]) -> None:
        if name in self.file:
            write_plaintext(self.file[name], self.keys, out, self.progress)
        else:
            _write_plain(PlainTensor.stored(self.file, name), out, self.progress)

    def _describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self.file:
            sealed = self.file[name]
            return sealed.dtype, sealed.shape
        return self.file.stored(name)[:2]

    def _only_name(self) -> str:
        if len(self.names) != 1:
            raise FormatError(
                f"the target takes one tensor, and {self.file.path} gives {len(self.names)}: "
                f"{', '.join(map(repr, self.names)):.200}; choose one (names=, --tensor), or a "
                ".safetensors or .npz target for all"
            )
        return self.names[0]


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    try:
        kind = dtypes.to_numpy(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.isbuiltin != 1:
        raise FormatError(f"NumPy files have no {dtype}; unseal to a .safetensors file")
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def write_plaintext(tensor: SealedTensor, keys: KeyRing, out: IO[bytes], progress: Progress | None = None) -> None:
    """Decrypt one tensor into a file, slab by slab; each is authenticated before it is written."""
    memory = arrays.empty_bytes(min(_SLAB, tensor.nbytes))
    with OpenMessage(tensor, keys) as opened:
        try:
            for first, size in cobblestone.iter_segments(tensor.nbytes, _SLAB):
                opened.read_run(memory[:size], first)
                _write(out, memory[:size], size, progress)
        finally:
            memory.fill(0)


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
    *,
    overwrite: bool = True,
    kind: Kind = "tensor",
    sealed: Mapping[str, SealedTensor] | None = None,
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
    contexts = {
        name: MessageContext(name, tensor.dtype, tensor.shape, file_id, kind)
        for name, tensor in tensors.items()
        if name not in plain and name not in (sealed or {})
    }
    entries = {
        name: ("U8", (cobblestone.message_size(tensor.nbytes),)) if name in contexts else (tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
    }
    sealed_entries: dict[str, Any] = {name: _entry(context) for name, context in contexts.items()}
    for name, tensor in (sealed or {}).items():
        binding = Binding.new(tensor.context, file_id, key)
        sealed_entries[name] = {**_entry(tensor.context), "file": tensor.context.file, "binding": binding.header.hex()}
    fields = _fields(file_id, key.id, sealed_entries)
    if kind != "tensor":
        fields["fastrack.kind"] = kind
    order = _by_alignment(entries)
    largest = max((tensors[name].nbytes for name in contexts), default=0)
    memory = arrays.empty_bytes(
        cobblestone.ciphertext_size(min(_SLAB, largest))
    )  # for all: fresh memory costs more than AES
    header = _header({name: entries[name] for name in order}, {**metadata, **fields})
    size = len(header) + sum(dtypes.nbytes(*entry) for entry in entries.values())
    with new_file(path, size, overwrite=overwrite) as out:
        out.write(header)
        for name in order:
            if name in contexts:
                _write_message(tensors[name], contexts[name], key, memory, out, progress)
            else:
                _write_plain(tensors[name], out, progress)


def _entry(context: MessageContext) -> dict[str, Any]:
    return {"dtype": context.dtype, "shape": list(context.shape)}


def _fields(file_id: str, key_id: str, sealed_entries: Mapping[str, Any]) -> dict[str, str]:
    return {
        "fastrack.version": FORMAT_VERSION,
        "fastrack.file": file_id,
        "fastrack.key": key_id,
        "fastrack.tensors": json.dumps(sealed_entries, separators=(",", ":"), ensure_ascii=False),
    }


def encode_one_tensor(tensor: SealedTensor) -> bytes:
    """Return a sealed file of one tensor, under that tensor's own file id. As `SealedTensor.to_bytes` says."""
    context = tensor.context
    if context.kind != "tensor":
        raise ValueError(f"{context.name!r} is part of a {context.kind}, and of no other file; unseal it first")
    fields = _fields(context.file, tensor.key_id, {context.name: _entry(context)})
    return _header({context.name: ("U8", (tensor.message.nbytes,))}, fields) + bytes(tensor.message)


def _write_message(
    tensor: PlainTensor, context: MessageContext, key: Key, memory: Bytes, out: IO[bytes], progress: Progress | None
) -> None:
    engine = aead.get_engine()
    salt, message_key = context.new_key(key)
    schedule = engine.expand_key(message_key)
    commitment = message_key.commitment
    message_key.wipe()
    try:
        out.write(salt + commitment)
        read = tensor.load()
        for first, size in cobblestone.iter_segments(tensor.nbytes, _SLAB):
            start = first * cobblestone.CHUNK_SIZE
            sealed = memory[: cobblestone.segment_size(first, size, tensor.nbytes)]
            engine.seal_run(schedule, read(start, start + size), sealed, first)
            _write(out, sealed, size, progress)
    finally:
        schedule.wipe()


def _write_plain(tensor: PlainTensor, out: IO[bytes], progress: Progress | None) -> None:
    read = tensor.load()
    for start in range(0, tensor.nbytes, _SLAB):
        piece = read(start, min(start + _SLAB, tensor.nbytes))
        _write(out, piece, piece.size, progress)


def _write(out: IO[bytes], data: Bytes, size: int, progress: Progress | None) -> None:
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
