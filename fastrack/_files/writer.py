"""Writing of sealed and plain files: in one pass, with one slab in memory, under the final name once complete."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.base import Engine, HostMemory, Scaling
from fastrack._crypto.engine import get_engine
from fastrack._crypto.widening import widen
from fastrack._files.importers import PlainTensor, open_plain, require_safe_member
from fastrack._files.pushed import PushedBytes
from fastrack._files.reader import SealedFile, opened_file
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._keys.keys import Key
from fastrack._sealed.contexts import Binding, Kind, MessageContext, new_file_id
from fastrack._sealed.file_header import ABOUT, encode_header
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.metadata import encode_fields, entry_of
from fastrack._sealed.scales import Scale, grid, scale_of
from fastrack._sealed.tensor import SealedRows, SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util import registry
from fastrack._util.atomic import OwnWriter, new_file
from fastrack._util.locations import Location, Url, locate, locate_local, require_path
from fastrack._util.public import public
from fastrack._util.shown import list_names, shown
from fastrack._util.trial import Trial, current
from fastrack.errors import AuthenticationError, FormatError
from fastrack.format import CHUNK_SIZE, ciphertext_size, message_size

Progress = Callable[[int], None]
SealOnDevice = Callable[[MessageContext, Key], Bytes]
"""Return the message of a tensor, with this context and under this key."""
_Entries = dict[str, tuple[str, tuple[int, ...]]]  # stored dtype and shape of each tensor

SLAB = 8 << 20  # bytes, so that ciphertext is still in the caches when it is written
_PRIVATE = 0o600  # the mode of a file of plaintext
_NOTHING = np.empty(0, np.uint8)


@public
def save_file(
    tensors: Mapping[str, Any],
    path: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    plain: Iterable[str] = (),
    scales: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Seal tensors into a new file.

    The file replaces an existing one when it is complete and on disk. A failure leaves the existing file unchanged.

    Parameters
    ----------
    tensors : mapping of str to numpy.ndarray, torch.Tensor or SealedTensor
        Tensors in host memory, whose values are stored in C order. A `SealedTensor` must have this name and key; it is
        bound to the file and stored without being decrypted, with its scales if it has some.
    path : path or URL
        The file to write; a ``.safetensors`` suffix is customary. A store such as ``s3://`` gets it in parts.
    key : KeyLike, optional
        The owner's key, as for `seal`.
    plain : iterable of str
        Names of tensors to store unencrypted and unauthenticated.
    scales : mapping of str to str, optional
        From names of quantised values to the names of their scales, both tensors of the file, as `seal` takes them.
    metadata : mapping of str to str, optional
        Metadata of the file. It is neither encrypted nor authenticated.
    progress : callable, optional
        Called with the number of plaintext bytes written since the previous call.

    Raises
    ------
    TypeError
        If a value is not a tensor in host memory, or its dtype has no safetensors name.
    ValueError
        If a tensor was sealed under another name or key, or as part of a checkpoint; or if scales do not fit, or are
        other ones than a sealed tensor has.
    AuthenticationError
        If the header of a sealed tensor was altered.
    OSError
        If the file cannot be written. No part of it is left behind then.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> tensors = {"images": np.zeros((10, 28, 28), np.uint8), "labels": np.arange(10)}
    >>> fastrack.save_file(tensors, "train.safetensors", key, plain=["labels"], metadata={"licence": "CC0"})
    >>> with fastrack.load_file("train.safetensors") as file:
    ...     print(file["images"].shape, file.plain["labels"][:3], file.metadata)
    (10, 28, 28) [0 1 2] {'licence': 'CC0'}
    """
    require_path(path, "save_file(tensors, path, key)")
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: expected a mapping of names to tensors, got {type(tensors).__name__}. Name them")
    key, plain = sealing_key(key), plain_names(plain)
    described, sealed = {}, {}
    earlier = (tensor.scale for tensor in tensors.values() if isinstance(tensor, SealedTensor))
    tensors = {**{scale.name: scale for scale in earlier if scale is not None}, **tensors}
    for name, tensor in tensors.items():
        if isinstance(tensor, SealedRows):
            raise TypeError(f"{name!r:.200}: expected a tensor, got SealedRows. Store all of it, or unseal the rows")
        if isinstance(tensor, SealedTensor):
            _require_own(name, tensor, key, plain)
            sealed[name] = tensor
            described[name] = _describe_message(tensor)
            continue
        try:
            described[name] = PlainTensor.of(tensor)
        except TypeError as error:
            raise TypeError(f"{name!r:.80} cannot be saved: {error}") from error
    for tensor in sealed.values():
        scale = tensor.scale
        if scale is not None and (scale.name not in sealed or sealed[scale.name].context != scale.context):
            raise ValueError(
                f"{tensor.name!r:.200}: expected {scale.name!r:.200} to be the scales that it was sealed with, got "
                "others. Leave those out"
            )
    new = {name: tensor for name, tensor in described.items() if name not in sealed and name not in plain}
    pairs = describe_scales(new, scales or {})
    write_sealed(described, locate(path), key, plain, metadata or {}, progress, sealed=sealed, scales=pairs)


def describe_scales(
    tensors: Mapping[str, PlainTensor], scales: Mapping[str, str], block: tuple[int, int] | None = None
) -> dict[str, Scale]:
    """Return the scales of the tensors to seal, whose names are given by the names of the values."""
    for name in (*scales, *scales.values()):
        if name not in tensors or (name in scales and name in scales.values()):
            raise ValueError(f"scales=: expected values and scales to seal, got {shown(name, 200)}. Name other tensors")
    return {
        values: scale_of(
            tensors[values].dtype, tensors[values].shape, tensors[name].dtype, tensors[name].shape, name, block
        )
        for values, name in scales.items()
    }


def _describe_message(tensor: SealedTensor) -> PlainTensor:
    return PlainTensor("U8", (tensor.message_size,), lambda: tensor.read_message)


def _require_own(name: str, tensor: SealedTensor, key: Key, plain: frozenset[str]) -> None:
    """Refuse a sealed tensor of another key or name, or of a checkpoint, and authenticate its header."""
    if tensor.key_id != key.id:
        raise ValueError(
            f"{name!r:.200}: expected a tensor sealed under the key of the file, {key.id}, got one under "
            f"{tensor.key_id}. Give that key"
        )
    if tensor.name != name:
        raise ValueError(
            f"{name!r:.200}: expected a tensor sealed by this name, got {tensor.name!r:.200}, which is authenticated. "
            "Store it by that name"
        )
    if tensor.context.kind != "tensor":
        raise ValueError(f"{name!r:.200} is part of a {tensor.context.kind}, and of no other file. Unseal it first")
    if name in plain:
        raise ValueError(f"plain= names {name!r:.200}, which is sealed. Unseal it first")
    authenticate_headers([tensor], KeyRing(key))


def write_checkpoint(
    tensors: Mapping[str, Any], path: str | os.PathLike[str], key: KeyLike | None, file_id: str | None = None
) -> None:
    """Seal the tensors of a checkpoint into a new file. They open as a checkpoint only. A `file_id` must be new."""
    described = {name: PlainTensor.of(tensor) for name, tensor in tensors.items()}
    write_sealed(described, locate(path), sealing_key(key), frozenset(), {}, None, kind="checkpoint", file_id=file_id)


@public
def seal_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    key: KeyLike | None = None,
    *,
    plain: Iterable[str] = (),
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = True,
    progress: Progress | None = None,
) -> None:
    """Seal the tensors of a file into a new file, slab by slab, so that the file may be larger than memory.

    An array in Fortran order in an ``.npz`` file is read into memory as a whole.

    Parameters
    ----------
    source : path
        A ``.safetensors``, ``.npy`` or ``.npz`` file. Any other file is sealed whole, as one U8 vector.
    target : path or URL
        The sealed file to write.
    key, plain, progress
        As for `save_file`.
    name : str, optional
        Name of the tensor of a source that has one only. By default a ``.npy`` file gives its stem, and a file that is
        sealed whole its name. Names are not encrypted.
    metadata : mapping of str to str, optional
        Metadata in place of the source's, which is copied by default. It is not encrypted.
    overwrite : bool
        Allow `target` to replace an existing file.

    Raises
    ------
    FormatError
        If the source is malformed or sealed already, or has several tensors where `name` is given.
    TypeError
        If the dtype of an array has no safetensors name, such as text, objects or the other byte order.
    OSError
        If a file cannot be read or written, or exists where `overwrite` is False. No part of the target is left behind
        then.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> np.save("images.npy", np.zeros((10, 28, 28), np.uint8))
    >>> fastrack.seal_file("images.npy", "images.safetensors", key)
    >>> with fastrack.load_file("images.safetensors") as file:
    ...     print(list(file), file["images"].dtype, file["images"].shape)
    ['images'] U8 (10, 28, 28)
    """
    with open_plain(source) as (tensors, stored):
        named, owner = name_tensor(tensors, name, os.fspath(source)), sealing_key(key)
        chosen = stored if metadata is None else metadata
        write_sealed(named, locate(target), owner, plain_names(plain), chosen, progress, overwrite=overwrite)


def name_tensor(tensors: Mapping[str, PlainTensor], name: str | None, label: str) -> Mapping[str, PlainTensor]:
    """Return the tensors of a file; `name` renames its only one."""
    if name is not None and len(tensors) != 1:
        raise FormatError(f"{label}: name=: expected a file of one tensor, got {len(tensors)}. Leave name= out")
    return tensors if name is None else {name: next(iter(tensors.values()))}


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
        The sealed file, by its path or opened by `load_file`.
    target : path
        The plain file to write. A ``.safetensors`` or ``.npz`` file takes any number of tensors, a ``.npy`` file one,
        and a file with any other suffix the bytes of one U8 tensor.
    keys : KeySource, optional
        As for `unseal`.
    names : iterable of str, optional
        Names of the tensors to write, all by default.
    plain : iterable of str
        Names of tensors to copy although the file stores them unencrypted and unauthenticated. Others are refused.
    overwrite : bool
        Allow `target` to replace an existing file, whose mode it keeps. A new file gets mode 0600.
    progress : callable, optional
        As for `save_file`.

    Raises
    ------
    AuthenticationError
        As for `unseal`, or if a tensor is stored unencrypted and is not in `plain`.
    UnknownKeyError, FormatError
        As for `unseal` and `load_file`; also if nothing in the file is sealed, or the target cannot hold these tensors.
    KeyError
        If the file has no tensor of such a name.
    OSError
        If a file cannot be read or written, or exists where `overwrite` is False.

    Notes
    -----
    An error leaves no part of the target behind. A ``.safetensors`` target gets the metadata of the source as well,
    which is not authenticated.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(4), "y": np.ones(2)}, "sealed.safetensors", key)
    >>> fastrack.unseal_file("sealed.safetensors", "x.npy", key, names=["x"])
    >>> np.load("x.npy")
    array([0, 1, 2, 3])
    """
    ring = KeyRing.resolve(keys)
    with opened_file(source) as file:
        unsealer = Unsealer(file, ring, choose(file, names, plain_names(plain)), overwrite, progress)
        unsealer.write_to(locate_local(target))


def choose(file: SealedFile, names: Iterable[str] | None, plain: frozenset[str]) -> list[str]:
    """Return the names to copy, all by default; unencrypted tensors must be among `plain`."""
    if not file:
        raise FormatError(f"{file.path}: expected a sealed tensor, got none; there is nothing to unseal")
    chosen = list(dict.fromkeys(file.names if names is None else names))
    unknown = {*chosen, *plain} - set(file.names)
    if unknown:
        absent = min(unknown, key=repr)
        raise KeyError(f"{file.path} has no tensor {shown(absent, 200)}; {list_names(absent, file.names)}")
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
class Unsealer:
    """Decryption of some tensors of a sealed file into a plain file."""

    file: SealedFile
    keys: KeyRing
    names: list[str]
    overwrite: bool
    progress: Progress | None

    def write_to(self, target: Path) -> None:
        authenticate_headers([self.file[name] for name in self.names if name in self.file], self.keys)
        suffix = target.suffix.lower()
        entries = by_alignment({name: self._dtype_and_shape(name) for name in self.names})
        if suffix == ".npz":
            self._write_npz(entries, target)
            return
        if suffix == ".safetensors":
            header = encode_header(entries, self.file.metadata)
        else:
            if len(self.names) != 1:
                raise FormatError(
                    f"{self.file.path}: expected one tensor for this target, got {len(self.names)}: "
                    f"{', '.join(map(repr, self.names)):.200}. Choose one (names=, --tensor), or a .safetensors or "
                    ".npz target for all"
                )
            [(dtype, shape)] = entries.values()
            if suffix != ".npy" and dtype != "U8":
                raise FormatError(
                    f"{self.file.path}: tensor {self.names[0]!r:.200}: expected U8 for a target of plain bytes, got "
                    f"{dtype} {list(shape)}. Give the target a suffix that keeps the dtype: .safetensors, .npz or .npy"
                )
            header = _npy_header(dtype, shape) if suffix == ".npy" else b""
        size = len(header) + sum(dtypes.nbytes(*entry) for entry in entries.values())
        with new_file(target, size, mode=_PRIVATE, overwrite=self.overwrite) as out:
            out.write(header)
            for name in entries:
                self._write(name, out)

    def write_out(self, out: IO[bytes]) -> None:
        """Write one vector of bytes unchanged, and other tensors as a safetensors file."""
        entries = by_alignment({name: self._dtype_and_shape(name) for name in self.names})
        is_bytes = [(dtype, len(shape)) for dtype, shape in entries.values()] == [("U8", 1)]
        out.write(b"" if is_bytes else encode_header(entries, self.file.metadata))
        for name in entries:
            self._write(name, out)
        out.flush()

    def _write_npz(self, entries: _Entries, target: Path) -> None:
        for name in self.names:
            require_safe_member(name, target)
        headers = {name: _npy_header(*entries[name]) for name in self.names}
        with new_file(target, mode=_PRIVATE, overwrite=self.overwrite) as out, zipfile.ZipFile(out, "w") as archive:
            for name, header in headers.items():
                # As in numpy.savez: zipfile learns the size of a member only at its end.
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    member.write(header)
                    self._write(name, member)

    def _write(self, name: str, out: IO[bytes]) -> None:
        if name in self.file:
            write_plaintext(self.file[name], self.keys, out, self.progress)
        else:
            _write_plain(PlainTensor.stored(self.file, name), out, self.progress)

    def _dtype_and_shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        if name in self.file:
            sealed = self.file[name]
            return sealed.dtype, sealed.shape
        return self.file.describe(name)[:2]


def _npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    if dtype not in dtypes.NUMPY:
        raise FormatError(f"NumPy files have no {dtype}. Unseal to a .safetensors file")
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(dtypes.to_numpy(dtype)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def write_plaintext(
    tensor: SealedTensor, keys: KeyRing, out: IO[bytes], progress: Progress | None = None, *, widened: bool = False
) -> None:
    """Decrypt one tensor into a file, slab by slab, each authenticated before it is written.

    With `widened`, quantised values are multiplied by their scales and written as BF16.
    """
    memory, scaling = arrays.empty_bytes(min(SLAB, tensor.nbytes)), _scaling(tensor, keys) if widened else None
    with OpenMessage(tensor, keys) as opened:
        try:
            for first, size in cobblestone.iter_segments(tensor.nbytes, SLAB):
                opened.read(memory[:size], first)
                data = memory[:size]
                if scaling is not None:
                    data = widen(data, first * CHUNK_SIZE, scaling).view(np.uint8)
                _write(out, data, size, progress)
        finally:
            memory.fill(0)


def _scaling(tensor: SealedTensor, keys: KeyRing) -> Scaling:
    scale, described = tensor.scale, tensor.context.scale
    assert scale is not None
    assert described is not None
    memory = arrays.empty_bytes(scale.nbytes)
    with OpenMessage(scale, keys) as opened:
        opened.read(memory)
    _, columns = grid(tensor.shape)
    return Scaling(HostMemory.of(memory), scale.dtype, tensor.dtype, columns, *described.block)


# Sealed files.


def plain_names(plain: Iterable[str]) -> frozenset[str]:
    """Return the names of a ``plain=`` argument."""
    if isinstance(plain, str):
        raise TypeError(f"plain=: expected an iterable of names, got one text. Give [{shown(plain, 200)}]")
    return frozenset(plain)


def write_sealed(
    tensors: Mapping[str, PlainTensor],
    target: Location | IO[bytes],
    key: Key,
    plain: frozenset[str],
    metadata: Mapping[str, str],
    progress: Progress | None,
    *,
    overwrite: bool = True,
    kind: Kind = "tensor",
    sealed: Mapping[str, SealedTensor] | None = None,
    in_order: bool = False,
    sealers: Mapping[str, SealOnDevice] | None = None,
    file_id: str | None = None,
    scales: Mapping[str, Scale] | None = None,
) -> None:
    """Write a new sealed file of these tensors, slab by slab. Messages in `sealed` are copied and bound to it.

    With `in_order`, which excludes plain tensors, tensors are read in the given order. Otherwise they are sorted.
    Functions in `sealers` seal tensors that are not in host memory. A `file_id` must be new. Quantised values are bound
    to their `scales`, which are among the tensors.
    """
    _check_texts(tensors, plain, metadata)
    if (trial := current()) is not None:
        trial.has_sealed = True
        tensors, sealed, sealers, scales = dict.fromkeys(tensors, PlainTensor.of(_NOTHING)), None, None, None
        target = _tried(target, trial)
    file_id = file_id or new_file_id()
    contexts = {
        name: MessageContext(name, tensor.dtype, tensor.shape, file_id, kind, (scales or {}).get(name))
        for name, tensor in tensors.items()
        if name not in plain and name not in (sealed or {})
    }
    entries = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    entries |= {name: ("U8", (message_size(tensors[name].nbytes),)) for name in contexts}
    if not in_order:
        entries = by_alignment(entries)
    elif plain:
        raise ValueError("expected no plain tensors in order, as each has to be aligned. Seal a file")
    sealed_entries: dict[str, Any] = {name: entry_of(context) for name, context in contexts.items()}
    for name, tensor in (sealed or {}).items():
        binding = Binding.new(tensor.context, file_id, key)
        context = tensor.context
        sealed_entries[name] = {**entry_of(context), "file": context.file, "binding": binding.header.hex()}
    fields = encode_fields(file_id, key.id, sealed_entries, kind)
    sealers = sealers or {}
    largest = max((tensors[name].nbytes for name in contexts if name not in sealers), default=0)
    # One buffer for all messages: fresh memory costs more than AES.
    memory = arrays.empty_bytes(ciphertext_size(min(SLAB, largest)))
    is_open = not sealed_entries or kind == "index" or ABOUT in tensors  # any reader may count and copy a data set
    header = encode_header(entries, {**metadata, **fields}, guarded=not is_open)
    size = len(header) + sum(dtypes.nbytes(*entry) for entry in entries.values())
    with open_target(target, size, overwrite=overwrite) as out:
        out.write(header)
        for name in entries:
            if name in sealers:
                _write(out, sealers[name](contexts[name], key), tensors[name].nbytes, progress)
            elif name in contexts:
                _write_message(tensors[name], contexts[name], key, memory, out, progress)
            else:
                _write_plain(tensors[name], out, progress)


def _check_texts(tensors: Mapping[str, PlainTensor], plain: frozenset[str], metadata: Mapping[str, str]) -> None:
    texts: list[object] = [*tensors, *metadata, *metadata.values()]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"names and metadata: expected text, got {shown(text)}; safetensors holds nothing else")
    unknown = plain - tensors.keys()
    if unknown:
        raise KeyError(f"plain= names tensors that are not given: {', '.join(sorted(unknown)):.200}")
    marked = sorted(name for name in metadata if name.startswith("fastrack."))
    if marked:
        raise FormatError(f"metadata: keys that begin with 'fastrack.' are reserved, got {', '.join(marked):.200}")


def _tried(target: Location | IO[bytes], trial: Trial) -> Location | IO[bytes]:
    """Return where a file of a trial goes: nowhere, in the place of a file or an object outside of its folder."""
    if isinstance(target, Url):
        return io.BytesIO()
    if not isinstance(target, Path) or trial.holds(target):
        return target
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))
    return io.BytesIO()


def open_target(target: Location | IO[bytes], size: int, *, overwrite: bool) -> AbstractContextManager[IO[bytes]]:
    """Open a file of ciphertext for writing, on this machine or on a server. An open file stays open."""
    if isinstance(target, Url):
        begun: AbstractContextManager[IO[bytes]] = registry.find(registry.REMOTE["new"])(
            target, size, overwrite=overwrite
        )
        return begun
    if isinstance(target, Path):
        return new_file(target, size, overwrite=overwrite)
    return nullcontext(OwnWriter(target))  # type: ignore[arg-type]


def _write_message(
    tensor: PlainTensor, context: MessageContext, key: Key, memory: Bytes, out: IO[bytes], progress: Progress | None
) -> None:
    engine = get_engine()
    message_key, header = context.new_key(key)
    schedule = engine.expand_key(message_key)
    message_key.wipe()
    try:
        out.write(header.data)
        if tensor.push is not None:
            _push_message(tensor.push, tensor.nbytes, engine, schedule, memory, out, progress)
            return
        read = tensor.load()
        for first, size in cobblestone.iter_segments(tensor.nbytes, SLAB):
            start = first * CHUNK_SIZE
            sealed = memory[: cobblestone.segment_size(first, size, tensor.nbytes)]
            engine.seal_run(schedule, read(start, start + size), sealed, first)
            _write(out, sealed, size, progress)
    finally:
        schedule.wipe()


def _push_message(
    push: Callable[[Any], None],
    nbytes: int,
    engine: Engine,
    schedule: Any,
    memory: Bytes,
    out: IO[bytes],
    progress: Progress | None,
) -> None:
    def seal(slab: Bytes, start: int) -> None:
        first = start // CHUNK_SIZE
        sealed = memory[: cobblestone.segment_size(first, slab.size, nbytes)]
        engine.seal_run(schedule, slab, sealed, first)
        _write(out, sealed, slab.size, progress)

    pushed = PushedBytes(nbytes, SLAB, seal)
    try:
        push(pushed)
        pushed.finish()
    finally:
        pushed.wipe()


def _write_plain(tensor: PlainTensor, out: IO[bytes], progress: Progress | None) -> None:
    read = tensor.load()
    for start in range(0, tensor.nbytes, SLAB):
        piece = read(start, min(start + SLAB, tensor.nbytes))
        _write(out, piece, piece.size, progress)


def _write(out: IO[bytes], data: Bytes, size: int, progress: Progress | None) -> None:
    out.write(data.data)
    if progress is not None:
        progress(size)


def by_alignment(entries: _Entries) -> _Entries:
    """Sort entries by element size, widest first, so that each tensor is aligned to its element size."""
    return dict(sorted(entries.items(), key=lambda entry: (-dtypes.BITS[entry[1][0]], entry[0])))
