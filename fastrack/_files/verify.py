"""Check sealed files: every chunk of every sealed tensor is authenticated, and no plaintext is kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastrack._crypto import cobblestone
from fastrack._files.reader import SealedFile, opened_file
from fastrack._keys.keyring import KeyRing, KeySource
from fastrack._sealed.messages import OpenMessage, bad_chunk
from fastrack._sealed.tensor import SealedTensor
from fastrack._util.public import public
from fastrack.errors import AuthenticationError, FormatError, UnknownKeyError

_VERIFY_RUN = 32 << 20  # bytes of plaintext between two calls of `progress`


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
    raise_first(check.error for check in check_file(source, keys, progress=progress))


def raise_first(errors: Iterable[Exception | None]) -> None:
    """Raise the first of some errors, with notes of the others."""
    failures = [error for error in errors if error is not None]
    for other in failures[1:]:
        failures[0].add_note(str(other))
    if failures:
        raise failures[0]


@public
def check_file(
    source: SealedFile | str | os.PathLike[str],
    keys: KeySource | None = None,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[TensorCheck]:
    """Authenticate a file like `verify_file`, and return the result for each sealed tensor, in file order.

    Parameters
    ----------
    source, keys, progress
        As for `verify_file`.

    Returns
    -------
    list
        For each tensor its ``name``, ``dtype``, ``shape``, ``nbytes`` and ``error``, which is None if every chunk is
        authentic, or the `AuthenticationError` or `UnknownKeyError` that opening it would raise.

    Raises
    ------
    FormatError, OSError
        As from `verify_file`.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> fastrack.save_file({"x": np.arange(3), "y": np.arange(4)}, "data.safetensors", key)
    >>> [(check.name, check.error) for check in fastrack.check_file("data.safetensors", key)]
    [('x', None), ('y', None)]
    """
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
