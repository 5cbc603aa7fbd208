"""Sealing of files of tensors into sealed files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from fastrack._files.importers import open_plain
from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.writer import Progress, plain_names, write_sealed
from fastrack._keys.keyring import KeyLike, sealing_key
from fastrack._util.locations import locate
from fastrack._util.public import public
from fastrack.errors import FormatError


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
