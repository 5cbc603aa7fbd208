"""Unsealing of sealed files into plain ones, each slab authenticated before it is written."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from fastrack._crypto import cobblestone
from fastrack._crypto.base import HostMemory, Scaling
from fastrack._crypto.widening import widen
from fastrack._files.importers import require_safe_member
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile, opened_file
from fastrack._files.writer import SLAB, Entries, Progress, by_alignment, plain_names, write_data, write_plain
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.file_header import encode_header
from fastrack._sealed.message_headers import authenticate_headers
from fastrack._sealed.messages import OpenMessage, open_whole
from fastrack._sealed.scales import grid
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays, dtypes
from fastrack._util.atomic import new_file
from fastrack._util.locations import locate_local
from fastrack._util.public import public
from fastrack._util.shown import list_names, shown
from fastrack.errors import AuthenticationError, FormatError
from fastrack.format import CHUNK_SIZE

_PRIVATE = 0o600  # the mode of a file of plaintext


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

    def _write_npz(self, entries: Entries, target: Path) -> None:
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
            write_plain(PlainTensor.stored(self.file, name), out, self.progress)

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
                write_data(out, data, size, progress)
        finally:
            memory.fill(0)


def _scaling(tensor: SealedTensor, keys: KeyRing) -> Scaling:
    scale, described = tensor.scale, tensor.context.scale
    assert scale is not None
    assert described is not None
    _, columns = grid(tensor.shape)
    return Scaling(HostMemory.of(open_whole(scale, keys)), scale.dtype, tensor.dtype, columns, *described.block)
