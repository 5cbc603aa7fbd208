"""Seal what is sealed under another key, in one pass and without plaintext on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Self

from fastrack._files.importers import PlainTensor
from fastrack._files.reader import SealedFile, opened_file
from fastrack._files.writer import SLAB, Progress, choose, plain_names, write_sealed
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._sealed.headers import authenticate_headers
from fastrack._sealed.messages import OpenMessage
from fastrack._sealed.tensor import SealedTensor
from fastrack._tensors import arrays
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import locate
from fastrack._util.public import public
from fastrack.format import CHUNK_SIZE


@public
def rekey_file(
    source: SealedFile | str | os.PathLike[str],
    target: str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    key: KeyLike | None = None,
    plain: Iterable[str] = (),
    overwrite: bool = True,
    progress: Progress | None = None,
) -> None:
    """Seal the tensors of a sealed file under another key, slab by slab, without plaintext on disk.

    The new file has an id of its own. To let others open a file as it is, grant them its key: see `fastrack.grants`.

    Parameters
    ----------
    source : path or SealedFile
        The sealed file, by its path or opened by `load_file`.
    target : path
        The sealed file to write; it may replace the source.
    keys : KeySource, optional
        The keys of the source, as for `unseal`.
    key : KeyLike, optional
        The new key, as `seal` takes it.
    plain : iterable of str
        Names of tensors to copy although the file stores them unencrypted and unauthenticated. Others are refused.
    overwrite : bool
        Allow `target` to replace an existing file.
    progress : callable, optional
        As for `save_file`.

    Raises
    ------
    AuthenticationError, FormatError, UnknownKeyError, OSError
        As for `unseal_file`. No part of the target is left behind then.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> old, new = fastrack.Key.generate(), fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(4)}, "data.safetensors", old)
    >>> fastrack.rekey_file("data.safetensors", "data.safetensors", old, key=new)
    >>> with fastrack.load_file("data.safetensors") as file:
    ...     fastrack.unseal(file["x"], new, framework="numpy")
    array([0, 1, 2, 3])
    """
    ring, names = KeyRing.resolve(keys), plain_names(plain)
    location, new_key = locate(target), sealing_key(key)
    with opened_file(source) as file, _Reopened(file, ring) as reopened:
        authenticate_headers([file[name] for name in file], ring)
        tensors = {
            name: reopened.describe(file[name]) if name in file else PlainTensor.stored(file, name)
            for name in choose(file, None, names)
        }
        write_sealed(
            tensors,
            location,
            new_key,
            names,
            file.metadata,
            progress,
            overwrite=overwrite,
            kind=file.kind,
        )


class _Reopened:
    """The plaintext of the tensors of a sealed file, one slab at a time."""

    def __init__(self, file: SealedFile, keys: KeyRing) -> None:
        self._keys = keys
        self._memory = arrays.empty_bytes(min(SLAB, max((tensor.nbytes for tensor in file.values()), default=0)))
        self._current = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._current.close()
        self._memory.fill(0)

    def describe(self, tensor: SealedTensor) -> PlainTensor:
        return PlainTensor(tensor.dtype, tensor.shape, lambda: self._open(tensor))

    def _open(self, tensor: SealedTensor) -> Callable[[int, int], Bytes]:
        self._current.close()
        opened = self._current.enter_context(OpenMessage(tensor, self._keys))

        def read(start: int, stop: int) -> Bytes:
            slab = self._memory[: stop - start]
            opened.read(slab, start // CHUNK_SIZE)
            return slab

        return read
