"""Sealed safetensors files: reading them lazily, and checking them.

A sealed file is an ordinary safetensors file. A sealed tensor is a `U8` vector in it that holds a Cobblestone message;
the file's metadata says what it decrypts to.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.keyring import KeyRing, KeySource
from fastrack._sealed.container import Layout, StoredTensor, is_shape, parse_header, parse_layouts, unique
from fastrack._sealed.contexts import Binding, Edition, Kind, MessageContext
from fastrack._sealed.messages import OpenMessage, bad_chunk
from fastrack._sealed.storage import Extent, Storage, StoredBytes, open_storage, read_head
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location, locate
from fastrack._util.names import list_names
from fastrack._util.pickles import unpickle
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import AuthenticationError, ClosedError, FormatError, UnknownKeyError

if TYPE_CHECKING:
    from fastrack._sealed.anchor import Anchor
    from fastrack._sealed.entries import SealedEntry

FORMAT_VERSION = "1"
FORMAT_MARK = (
    "sealed by fastrack: "  # before the `format` of the owner, so that a loader of plain weights that asks stops
)
_HEX_ID = re.compile(r"[0-9a-f]{32}")
_MEMBERS = {"dtype", "shape"}
_HEX_HEADER = re.compile(r"[0-9a-f]{112}")
_VERIFY_RUN = 32 << 20  # bytes of plaintext between two calls of `progress`


@public
def load_file(
    path: str | os.PathLike[str],
    *,
    file_id: str | None = None,
    mapped: bool = True,
    anchor: Anchor | str | os.PathLike[str] | None = None,
) -> SealedFile:
    """Open a sealed file. Only its header is read; nothing is decrypted, and no key is needed.

    Parameters
    ----------
    path : path or URL
        The sealed file. Of one on a server, such as ``s3://bucket/name``, ranges are read and kept on the local disk.
    file_id : str, optional
        Expected file id, kept in a trusted place since the file was sealed. Every file has its own, so an older or
        another file of the same key is refused.
    mapped : bool
        Map the file into memory. If False, all of it is read now, so that a file that is truncated later, or a network
        file system that fails, cannot end the process.
    anchor : Anchor or path, optional
        The file has to be as its owner's newest manifest lists it, which `Anchor` explains. Its plain tensors are then
        authenticated as well, and so is its metadata.

    Returns
    -------
    SealedFile
        Mapping of names to `SealedTensor`. Unencrypted tensors are in its `plain`. Close it, or use it in a ``with``
        statement.

    Raises
    ------
    FormatError
        If it is not a safetensors file, or its fastrack metadata is malformed.
    AuthenticationError
        If it has another id than `file_id`, or a message has not the digest in its manifest.
    RollbackError
        If it, or its manifest, is older than the anchor, or another one.
    SignatureError
        If the manifest was altered, or the owner has not signed it.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(3), "y": np.ones(2)}, "data.safetensors", key)
    >>> with fastrack.load_file("data.safetensors") as file:
    ...     print(sorted(file), file["x"].shape)
    ...     x = fastrack.unseal(file["x"], key, framework="numpy")
    ['x', 'y'] (3,)
    >>> x
    array([0, 1, 2])
    """
    anchor = resolve_anchor(anchor)
    if anchor is None:
        return SealedFile(path, file_id, mapped)
    file = SealedFile(path, file_id, mapped, anchor.sealed_entry(path))
    anchor.advance()
    return file


def resolve_anchor(anchor: Anchor | str | os.PathLike[str] | None) -> Anchor | None:
    """Return one object for an ``anchor=`` argument, for files that have to be of one version."""
    if anchor is None:
        return None
    from fastrack._sealed.anchor import Anchor

    return Anchor.resolve(anchor)


def opened_file(source: SealedFile | str | os.PathLike[str]) -> AbstractContextManager[SealedFile]:
    """Open a file for the ``with`` block if it is given by its path. An open file is left open."""
    return nullcontext(source) if isinstance(source, SealedFile) else load_file(source)


@public
class SealedFile(Mapping[str, SealedTensor]):
    """Lazy mapping of names to the sealed tensors of a file. `load_file` makes it.

    Unencrypted tensors are in `plain` alone, so that none can take the place of a sealed one. A tensor that was taken
    out stays usable after `close`, as does the memory map under it.

    Attributes
    ----------
    path : pathlib.Path or URL
        Path of the file, or its URL.
    names : tuple of str
        Names of all tensors, sealed and plain, in the order of the file.
    plain : mapping of str to numpy.ndarray
        Unencrypted and unauthenticated tensors, as read-only arrays on the map.
    metadata : dict of str to str
        Metadata of the file without fastrack's own. Neither encrypted nor authenticated.
    file_id : str or None
        Id that the sealed tensors are bound to: 32 hexadecimal digits; None if nothing is sealed.
    key_id : str or None
        Id of the key that sealed them; None if nothing is sealed.
    kind : {"tensor", "checkpoint", "folder"}
        Use that the tensors were sealed for. They do not open as another kind.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(3), "labels": np.ones(2)}, "data.safetensors", key, plain=["labels"])
    >>> file = fastrack.load_file("data.safetensors")
    >>> file
    <SealedFile 'data.safetensors': 1 sealed, 1 plain>
    >>> list(file), list(file.plain), file.key_id == key.id
    (['x'], ['labels'], True)
    >>> file.close()
    """

    _entry: SealedEntry | None
    edition: Edition | None = None  # of the set that an anchor has found the file in. Not public
    stored_metadata: dict[str, str]  # with `FORMAT_MARK`. Not public

    def __init__(
        self,
        path: str | os.PathLike[str],
        file_id: str | None = None,
        mapped: bool = True,
        entry: SealedEntry | None = None,
    ) -> None:
        self.path: Location = path if isinstance(path, Path) else locate(path)
        self._is_mapped = mapped
        try:
            self._read(*open_storage(self.path, mapped=mapped), file_id)
            if entry is not None:
                entry.check(self)
        except FormatError as error:
            error.path = self.path
            raise
        self._entry = entry  # after its check, which looks at what is in the file
        self.edition = None if entry is None else entry.edition

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read a file whose bytes are in memory."""
        file = cls.__new__(cls)
        file.path = Path("<bytes>")
        file._is_mapped = False  # noqa: SLF001 - its own
        storage = StoredBytes(np.frombuffer(data, np.uint8))
        file._read(storage, read_head(storage.read, storage.size), None)  # noqa: SLF001 - its own
        return file

    def _read(self, storage: Storage, head: bytes, file_id: str | None) -> None:
        self._expected_id = file_id
        self._entry = None
        self._storage: Storage | None = storage
        metadata, self._stored = parse_header(head, storage.size, self.path)
        fields = {key: value for key, value in metadata.items() if key.startswith("fastrack.")}
        self.stored_metadata = {key: value for key, value in metadata.items() if key not in fields}
        self.metadata = dict(self.stored_metadata)
        if fields and "format" in metadata:
            self.metadata["format"] = metadata["format"].removeprefix(FORMAT_MARK)
        self.file_id: str | None = None
        self.key_id: str | None = None
        self.kind: Kind = "tensor"
        self._layouts: dict[str, Layout] = {}
        self._bindings: dict[str, tuple[str, Binding]] = {}
        if fields:
            self._read_fields(fields)
        if file_id is not None and file_id != self.file_id:
            raise AuthenticationError(
                f"{self.path}: expected file id {shown(file_id, 50, may_be_id=True)}, got {self.file_id}; it is an "
                "older or another file. Get the one with the expected id",
                path=self.path,
            )
        self.names = tuple(self._stored)
        self.plain: Mapping[str, Any] = _PlainTensors(self, [name for name in self.names if name not in self._layouts])

    def _read_fields(self, fields: dict[str, str]) -> None:
        version = fields.get("fastrack.version")
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{self.path}: expected fastrack format {FORMAT_VERSION!r}, got {version!r:.20}. Update fastrack"
            )
        self.file_id = _hex_id(fields.get("fastrack.file"), "fastrack.file", self.path)
        self.key_id = _hex_id(fields.get("fastrack.key"), "fastrack.key", self.path)
        kind = fields.get("fastrack.kind")
        if kind not in {None, "checkpoint", "folder"}:
            raise FormatError(
                f"{self.path}: expected no fastrack.kind, or checkpoint or folder, got {kind!r:.20}. Update fastrack"
            )
        self.kind = cast(Kind, kind or "tensor")
        listed = fields.get("fastrack.tensors")
        self._layouts = parse_layouts(listed or "") or self._read_layouts(listed, self.file_id)
        for name, layout in self._layouts.items():
            stored = self._stored.get(name)
            if stored is None:
                raise FormatError(
                    f"{self.path} lists a sealed tensor {shown(name)} that it lacks; the file was altered"
                )
            expected = cobblestone.message_size(layout.nbytes)
            if stored.dtype != "U8" or stored.shape != (expected,):
                raise FormatError(
                    f"{self.path}: {shown(name, 200)} of {layout.dtype} {list(layout.shape)}: expected a U8 vector of "
                    f"{expected} bytes, got {stored.dtype} {list(stored.shape)}; the metadata or the file was altered"
                )

    def _read_layouts(self, text: str | None, file_id: str) -> dict[str, Layout]:
        """Read any JSON that lists tensors, as `parse_layouts` does that of fastrack, and the bindings in it."""
        layouts: dict[str, Layout] = {}
        for name, entry in _read_json(text, self.path).items():
            if isinstance(entry, dict) and "binding" in entry:
                self._bindings[name] = _take_binding(name, entry, file_id, self.path)
            layouts[name] = _read_layout(name, entry, self.path)
        return layouts

    def __getitem__(self, name: str) -> SealedTensor:
        layout = self._layouts.get(name)
        if layout is None:
            if name in self._stored:
                raise KeyError(f"{shown(name)} is stored unencrypted; file.plain[{shown(name)}] returns it")
            raise KeyError(f"{self.path} has no sealed tensor {shown(name, 200)}; {list_names(name, self._layouts)}")
        assert self.key_id is not None
        assert self.file_id is not None
        file_id, binding = self._bindings.get(name) or (self.file_id, None)
        context = MessageContext(name, layout.dtype, layout.shape, file_id, self.kind)
        header = None if self._entry is None else self._entry.header(name)
        stored = self._stored[name]
        extent = Extent(self._open_storage(), stored.start, stored.stop)
        return SealedTensor(context, extent, self.key_id, binding, self.path, header, self.edition)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._open_storage().size

    def describe(self, name: str) -> StoredTensor:
        """Return what the header says of a tensor as it is stored. A sealed tensor is stored as a `U8` vector."""
        return self._stored[name]

    def stored(self, name: str) -> tuple[str, tuple[int, ...], Bytes]:
        """Return the stored dtype, shape and bytes of a tensor. A sealed tensor is stored as a `U8` vector.

        If a manifest lists a plain tensor, its bytes are an authenticated copy, which no process can write to.
        """
        dtype, shape, start, stop = self._stored[name]
        storage = self._open_storage()
        fetched = storage.fetch([(start, stop)])
        memory = storage.view(start, stop)
        del fetched  # which was needed until the view was there
        if self._entry is not None and name in self._entry.plain:
            memory = memory.copy()
            memory.flags.writeable = False
            self._entry.check_plain(name, memory, self.path)
        return dtype, shape, memory

    def __contains__(self, name: object) -> bool:
        return name in self._layouts

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def close(self) -> None:
        """Stop returning tensors. The memory map is released with the last tensor that was taken out."""
        self._storage = None

    def _open_storage(self) -> Storage:
        if self._storage is None:
            raise ClosedError(f"{self.path} was closed; load_file opens it again")
        return self._storage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        pinned = () if self._entry is None else (self._entry,)
        return unpickle, ("SealedFile", os.fspath(self.path), self._expected_id, self._is_mapped, *pinned)

    def __repr__(self) -> str:
        return f"<SealedFile {str(self.path)!r}: {len(self)} sealed, {len(self.plain)} plain>"


def read_one_tensor(data: bytes) -> SealedTensor:
    """Return the tensor of a sealed file that holds one, for `SealedTensor.from_bytes`."""
    with SealedFile.from_bytes(data) as file:
        if len(file) != 1 or len(file.names) != 1 or file.kind != "tensor":
            raise FormatError(
                f"expected a sealed file of one tensor, got a {file.kind} file of {len(file)} sealed and "
                f"{len(file.plain)} plain. Write it to disk, and open it with load_file or load_checkpoint"
            )
        return file[file.names[0]]


class _PlainTensors(Mapping[str, Any]):
    """Lazy mapping of names to the unencrypted tensors of a file."""

    def __init__(self, file: SealedFile, names: Sequence[str]) -> None:
        self._file = file
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            path = self._file.path
            raise KeyError(f"{path} has no unencrypted tensor {shown(name, 200)}; {list_names(name, self._names)}")
        dtype, shape, memory = self._file.stored(name)
        return arrays.from_bytes(memory, dtype, shape, "numpy")

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<plain tensors: {', '.join(self._names) or 'none'}>"


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """Result of `check_file` for one sealed tensor. `error` is None if every chunk is authentic."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    error: AuthenticationError | UnknownKeyError | None


@public
def verify_file(
    source: SealedFile | str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Authenticate every chunk of every sealed tensor of a file. No plaintext is returned, and nothing is written.

    Parameters
    ----------
    source : path or SealedFile
        The sealed file, by its path or opened by `load_file`.
    keys : KeySource, optional
        As for `unseal`.
    progress : callable, optional
        Called with the number of plaintext bytes checked since the previous call.

    Raises
    ------
    AuthenticationError
        If a tensor was altered. All tensors are checked first; the error names the first altered one and its first
        altered chunk, and its notes name the others.
    UnknownKeyError
        If the key is not among `keys`.
    FormatError
        If it is not a sealed file, or nothing in it is sealed.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(3)}, "data.safetensors", key)
    >>> fastrack.verify_file("data.safetensors", key)
    >>> with open("data.safetensors", "r+b") as file:
    ...     _ = file.seek(-8, 2)
    ...     _ = file.write(b"altered!")
    >>> fastrack.verify_file("data.safetensors", key)
    Traceback (most recent call last):
        ...
    fastrack.AuthenticationError: data.safetensors: tensor 'x', chunk 0: ...
    """
    errors = [check.error for check in check_file(source, keys, progress=progress) if check.error is not None]
    for error in errors[:1]:
        for other in errors[1:]:
            error.add_note(str(other))
        raise error


def check_file(
    source: SealedFile | str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[TensorCheck]:
    """Authenticate a file as `verify_file` does, and return one `TensorCheck` per sealed tensor, in file order."""
    ring = KeyRing.resolve(keys)
    with opened_file(source) as file:
        if not file:
            raise FormatError(f"{file.path}: expected a sealed tensor, got none; there is nothing to verify")
        return [
            TensorCheck(name, sealed.dtype, sealed.shape, sealed.nbytes, _verify(sealed, ring, progress))
            for name, sealed in file.items()
        ]


def _verify(
    sealed: SealedTensor, keys: KeyRing, progress: Callable[[int], None] | None
) -> AuthenticationError | UnknownKeyError | None:
    try:
        opened = OpenMessage(sealed, keys)
    except (AuthenticationError, UnknownKeyError) as error:
        return error
    with opened:
        for first, size in cobblestone.iter_segments(sealed.nbytes, _VERIFY_RUN):
            bad = opened.verify_run(first, size)
            if bad is not None:
                return bad_chunk(sealed.name, bad, path=sealed.path)
            if progress is not None:
                progress(size)
    return None


# Metadata of fastrack. All values are untrusted.


def _hex_id(value: str | None, name: str, path: Location) -> str:
    if value is None or not _HEX_ID.fullmatch(value):
        raise FormatError(
            f"{path}: {name}: expected 32 hexadecimal digits, got {value!r:.50}; the metadata was altered"
        )
    return value


def _read_json(text: str | None, path: Location) -> dict[str, Any]:
    try:
        value = json.loads(text or "", object_pairs_hook=unique)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FormatError(
            f"{path}: fastrack.tensors: expected a JSON object that has each member once, got {text!r:.50}; the "
            "metadata was altered"
        )
    return value


def _take_binding(name: str, entry: dict[str, Any], file: str, path: Location) -> tuple[str, Binding]:
    """Remove its own file id and its binding from the entry of a tensor that was sealed earlier, and return them."""
    own_id, header = entry.pop("file", None), entry.pop("binding")
    if not isinstance(own_id, str) or not isinstance(header, str) or not _HEX_HEADER.fullmatch(header):
        raise FormatError(
            f"{path}: binding of {shown(name)}: expected {2 * cobblestone.HEADER_SIZE} hexadecimal digits beside a "
            f"file id, got {header!r:.80}; the metadata was altered"
        )
    return _hex_id(own_id, f"file of {shown(name)}", path), Binding(file, bytes.fromhex(header))


def _read_layout(name: str, entry: Any, path: Location) -> Layout:
    if type(entry) is dict and entry.keys() == _MEMBERS:
        dtype, shape = entry["dtype"], entry["shape"]
        if type(dtype) is str and is_shape(shape):
            return Layout(dtype, tuple(shape), dtypes.nbytes(dtype, shape))
    raise FormatError(
        f"{path}: entry of {shown(name)}: expected a dtype and a shape, got {entry!r:.80}; the metadata was altered"
    )
