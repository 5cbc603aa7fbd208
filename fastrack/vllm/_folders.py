"""Sealed folders of models: what a server reads of them, besides the weights."""

from __future__ import annotations

import hashlib

from fastrack._documents.canonical import encode
from fastrack._sets.entries import PlainEntry
from fastrack._sets.folder import SealedFolder
from fastrack.errors import FormatError

_CONFIG = "config.json"


def authenticate(folder: SealedFolder) -> None:
    """Authenticate all of a folder but the chunks of its weights: all other files, and the headers of all weights."""
    if not isinstance(folder.files.get(_CONFIG), PlainEntry):
        got = "a sealed one" if _CONFIG in folder.files else "none"
        raise FormatError(
            f"{folder.path}: expected a {_CONFIG} that is not sealed but authenticated, got {got}. Seal the folder "
            "of a model as a whole; plain= names files to leave unsealed"
        )
    for name in folder.plain_names:
        folder.read(name)
    folder.weights()


def digest_of(folder: SealedFolder) -> str:
    """Return the SHA-256 of all files but the sealed ones: weights of another version fit a model with equal files."""
    listed = {name: entry.members() for name, entry in folder.files.items() if isinstance(entry, PlainEntry)}
    return hashlib.sha256(encode(listed)).hexdigest()
