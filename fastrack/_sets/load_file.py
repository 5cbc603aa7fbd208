"""Open sealed files, with an anchor or without: `load_file`."""

from __future__ import annotations

import os

from fastrack._files.reader import SealedFile
from fastrack._sets.anchor import Anchor
from fastrack._util.public import public


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
        The sealed file. A file on a server, such as ``s3://bucket/name``, is read by ranges and kept on the local disk.
    file_id : str, optional
        Expected file id, kept in a trusted place since the file was sealed. Every file has its own, so an older or
        another file of the same key is refused.
    mapped : bool
        Map the file into memory. If False, all of it is read now, so that a file that is truncated later, or a network
        file system that fails, cannot end the process.
    anchor : Anchor or path, optional
        The file has to match its owner's newest manifest: see `Anchor`. Its plain tensors and its metadata are then
        authenticated as well.

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
    return None if anchor is None else Anchor.resolve(anchor)
