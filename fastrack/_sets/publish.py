"""Write manifests: `publish`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastrack._files.reader import SealedFile
from fastrack._keys.signing import Signer
from fastrack._sets.anchor import Anchor, manifest_path, name_in_set
from fastrack._sets.entries import Entry, PlainEntry, SealedEntry, walk
from fastrack._sets.manifest import HISTORY_LIMIT, Manifest, is_name, load_manifest, sign_manifest
from fastrack._util.atomic import new_file
from fastrack._util.key_text import refuse_key_text
from fastrack._util.locations import locate_local, several
from fastrack._util.public import public
from fastrack._util.shown import shown
from fastrack.errors import FormatError, RollbackError


@public
def publish(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    signer: Signer,
    manifest: str | os.PathLike[str] | None = None,
    digests: bool = False,
    anchor: Anchor | str | os.PathLike[str] | None = None,
) -> Manifest:
    """Sign a manifest of files, as the next version of the set if there is a manifest already.

    It lists sealed files by the headers of their messages, without a key and without reading the messages, and plain
    files and tensors by their SHA-256. One process at a time may publish a set: two would fork it.

    Parameters
    ----------
    paths : path or sequence of paths
        A folder, a file, or several. The set has all files of a folder, except files whose names begin with a
        dot, manifests, proofs and grants.
    signer : Signer
        The owner's signing key, from `fastrack.grants`.
    manifest : path, optional
        The manifest to write, in a folder that holds all the files. By default ``fastrack.manifest`` in a folder, and
        ``NAME.manifest`` next to a file. It replaces the previous version.
    digests : bool
        List the SHA-256 of all messages as well, which reads them. A header pins a message against all but holders of
        the key, and its digest against them too.
    anchor : Anchor or path, optional
        The owner's own anchor: the previous version must not be older than it.

    Returns
    -------
    Manifest
        The signed manifest.

    Raises
    ------
    ValueError
        If there is no file, a file is not in the folder of the manifest, or several paths are given without `manifest`.
    SignatureError
        If another key signed the previous version.
    RollbackError
        If the previous version is older than the anchor, forked from it, or missing.
    FormatError
        If a sealed file is malformed, or the manifest would be too large.
    OSError
        If a file cannot be read or written.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> from fastrack.grants import Signer
    >>> key, owner = fastrack.Key.generate(), Signer.generate()
    >>> for version in (1, 2):
    ...     fastrack.save_file({"x": np.arange(3)}, "data.safetensors", key)
    ...     manifest = fastrack.publish("data.safetensors", signer=owner)
    >>> manifest.version
    2
    """
    if not isinstance(signer, Signer):
        raise TypeError(f"signer=: expected a Signer, got {type(signer).__name__}. Signer.load(path) reads one")
    chosen = list(map(locate_local, several(paths)))
    if not chosen or (manifest is None and len(chosen) != 1):
        raise ValueError(f"publishing failed: expected one path, or manifest=, got {len(chosen)} paths")
    target = manifest_path(chosen[0]) if manifest is None else locate_local(manifest)
    anchored = None if anchor is None else Anchor.resolve(anchor)
    previous = _previous(target, signer, anchored)
    files = {name: describe(path, digests=digests) for name, path in sorted(_members(chosen, target).items())}
    if previous is not None:
        history = (previous.digest, *previous.history)[:HISTORY_LIMIT]
        envelope = sign_manifest(files, signer, previous.lineage, history, previous.version + 1)
    else:
        envelope = sign_manifest(files, signer, None if anchored is None else anchored.lineage)
    signed = Manifest.from_bytes(envelope, owner=signer.verifier, source=str(target))
    if anchored is not None:
        anchored.accept(signed, target)
    with new_file(target) as file:
        file.write(envelope)
    if anchored is not None:
        anchored.advance()
    return signed


def describe(path: Path, *, digests: bool = False) -> Entry:
    """Return the entry of a file. A file without sealed tensors is hashed."""
    try:
        file = SealedFile(path)
    except FormatError:
        if path.suffix == ".safetensors":
            raise
        return PlainEntry.of(path)
    with file:
        return PlainEntry.of(path) if file.file_id is None else SealedEntry.of(file, digests=digests)


def _members(given: Iterable[Path], manifest: Path) -> dict[str, Path]:
    """Return all files by their names in the set."""
    members = {}
    for path in given:
        refuse_key_text(path)
        for file in walk(path).values() if path.is_dir() else [path]:
            name = name_in_set(file, manifest)
            if name.split("/")[0] == ".." or not is_name(name):
                raise ValueError(
                    f"{file}: expected a file in the folder of {manifest}, with a name without control "
                    f"characters and backslashes, got {shown(name, 200)}. Rename it, or name another manifest"
                )
            members[name] = file
    if not members:
        raise ValueError(f"publishing {manifest} failed: expected a file, got none. Name files, or a folder of them")
    return members


def _previous(target: Path, signer: Signer, anchor: Anchor | None) -> Manifest | None:
    """Return the previous version, if there is one."""
    if anchor is not None and anchor.owner != signer.verifier:
        raise ValueError(f"{anchor.path}: expected an anchor of {signer.verifier!r}, got one of {anchor.owner!r}")
    try:
        manifest = load_manifest(target, owner=signer.verifier)
    except FileNotFoundError:
        if anchor is not None and anchor.digest is not None:
            raise RollbackError(
                f"{target}: expected version {anchor.version} by {anchor.path}, got no manifest. Restore it",
                path=target,
            ) from None
        return None
    if anchor is not None:
        anchor.accept(manifest, target)
    return manifest
