"""Sealed safetensors files, which are read lazily.

A sealed file is an ordinary safetensors file. A sealed tensor is a `U8` vector in it that holds a Cobblestone message;
the file's metadata gives its dtype and shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

from fastrack._sealed.contexts import Edition
from fastrack._sealed.file_header import StoredTensor
from fastrack._sealed.metadata import read_contents
from fastrack._sealed.storage import Extent, Storage, StoredBytes, open_storage, read_head
from fastrack._sealed.tensor import SealedTensor, set_up
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location, locate
from fastrack._util.pickles import unpickle
from fastrack._util.public import public
from fastrack._util.shown import list_names, shown
from fastrack.errors import AuthenticationError, ClosedError, FormatError


def opened_file(source: SealedFile | str | os.PathLike[str]) -> AbstractContextManager[SealedFile]:
    """Open a file for the ``with`` block if it is given by its path. An open file is left open."""
    return nullcontext(source) if isinstance(source, SealedFile) else SealedFile(source)


class Pins(Protocol):
    """The part of a manifest that describes a file: `SealedEntry` of `fastrack._sets.entries`."""

    @property
    def plain(self) -> Mapping[str, Any]: ...
    @property
    def edition(self) -> Edition | None: ...
    def check(self, file: SealedFile) -> None: ...
    def header(self, name: str) -> bytes: ...
    def check_plain(self, name: str, content: Bytes, path: Location) -> None: ...


@public
class SealedFile(Mapping[str, SealedTensor]):
    """Lazy mapping of names to the sealed tensors of a file. `load_file` makes it.

    Unencrypted tensors are only in `plain`, so that none can take the place of a sealed one. A tensor that was taken
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
    kind : {"tensor", "checkpoint", "folder", "index"}
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

    _entry: Pins | None
    edition: Edition | None = None  # of the set that lists the file, if an anchor was given. Not public

    def __init__(
        self, path: str | os.PathLike[str], file_id: str | None = None, mapped: bool = True, entry: Pins | None = None
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
        self._entry = entry  # after `check`, which reads the tensors of this file
        self.edition = None if entry is None else entry.edition

    def _read(self, storage: Storage, head: bytes, file_id: str | None) -> None:
        self._expected_id = file_id
        self._entry = None
        self._storage: Storage | None = storage
        contents = self._contents = read_contents(head, storage.size, self.path)
        self._stored, self._layouts = contents.stored, contents.layouts
        self.metadata = contents.metadata
        self.file_id, self.key_id, self.kind = contents.file_id, contents.key_id, contents.kind
        if file_id is not None and file_id != self.file_id:
            raise AuthenticationError(
                f"{self.path}: expected file id {shown(file_id, 50, may_be_id=True)}, got {self.file_id}; it is an "
                "older or another file. Get the one with the expected id",
                path=self.path,
            )
        self.names = tuple(self._stored)
        self.plain: Mapping[str, Any] = _PlainTensors(self, [name for name in self.names if name not in self._layouts])

    def __getitem__(self, name: str) -> SealedTensor:
        if name not in self._layouts:
            if name in self._stored:
                raise KeyError(f"{shown(name)} is stored unencrypted; file.plain[{shown(name)}] returns it")
            raise KeyError(f"{self.path} has no sealed tensor {shown(name, 200)}; {list_names(name, self._layouts)}")
        assert self.key_id is not None
        context, binding = self._contents.context(name)
        header = None if self._entry is None else self._entry.header(name)
        stored = self._stored[name]
        extent = Extent(self._open_storage(), stored.start, stored.stop)
        scale = None if context.scale is None else self[context.scale.name]
        tensor = SealedTensor.__new__(SealedTensor)
        set_up(tensor, context, extent, self.key_id, binding, self.path, header, self.edition, scale)
        return tensor

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._open_storage().size

    def describe(self, name: str) -> StoredTensor:
        """Return the header entry of a stored tensor. A sealed tensor is stored as a `U8` vector."""
        return self._stored[name]

    def stored(self, name: str) -> tuple[str, tuple[int, ...], Bytes]:
        """Return the stored dtype, shape and bytes of a tensor. A sealed tensor is stored as a `U8` vector.

        If a manifest lists a plain tensor, its bytes are an authenticated copy, which no process can write to.
        """
        dtype, shape, start, stop = self._stored[name]
        memory = self._open_storage().view(start, stop)
        if self._entry is not None and name in self._entry.plain:
            memory = memory.copy()  # before it is checked: the file may be written to meanwhile
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


def file_in_memory(content: Bytes, label: str) -> SealedFile:
    """Open a sealed file in memory, which errors call by a label. It cannot be pickled."""
    file = SealedFile.__new__(SealedFile)
    file.path, file._is_mapped = Path(label), False  # noqa: SLF001 - of this module
    storage = StoredBytes(content)
    file._read(storage, read_head(storage.read, storage.size), None)  # noqa: SLF001
    return file


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
