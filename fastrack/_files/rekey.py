"""Seal a sealed file under another key, in one pass and without plaintext on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

from fastrack._files.plain_tensor import PlainTensor
from fastrack._files.reader import SealedFile, opened_file
from fastrack._files.unseal_file import choose
from fastrack._files.writer import SLAB, Progress, plain_names, write_sealed
from fastrack._keys.keyring import KeyLike, KeyRing, KeySource, sealing_key
from fastrack._sealed.message_headers import authenticate_headers
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

    The new file has an id of its own. To share a file without rewriting it, grant its key: see `fastrack.grants`.

    Parameters
    ----------
    source, keys, plain, overwrite, progress
        As for `unseal_file`.
    target : path
        The sealed file to write; it may replace the source.
    key : KeyLike, optional
        The new key, as `seal` takes it.

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
    with opened_file(source) as file, ExitStack() as stack:
        authenticate_headers([file[name] for name in file], ring)
        memory = arrays.empty_bytes(min(SLAB, max((tensor.nbytes for tensor in file.values()), default=0)))
        stack.callback(memory.fill, 0)
        current = stack.enter_context(ExitStack())  # the message that is open, at most one

        def reopen(tensor: SealedTensor) -> Callable[[int, int], Bytes]:
            current.close()
            opened = current.enter_context(OpenMessage(tensor, ring))

            def read(start: int, stop: int) -> Bytes:
                slab = memory[: stop - start]
                opened.read(slab, start // CHUNK_SIZE)
                return slab

            return read

        tensors = {}
        for name in choose(file, None, names):
            if name in file:
                sealed = file[name]
                tensors[name] = PlainTensor(sealed.dtype, sealed.shape, partial(reopen, sealed))
            else:
                tensors[name] = PlainTensor.stored(file, name)
        pairs = {name: scale for name in file if (scale := file[name].context.scale) is not None}
        about = file.metadata, progress
        write_sealed(tensors, location, new_key, names, *about, overwrite=overwrite, kind=file.kind, scales=pairs)
