"""Manifests: one signed description of a set of files. ``docs/format.md`` has the format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastrack._documents.canonical import NUMBER_LIMIT, parsing, require
from fastrack._documents.fields import DIGEST, ID, TIME, Field, Form, integer, list_of
from fastrack._files.reader import SealedFile
from fastrack._keys.signing import Signer, Verifier, open_canonical, sign_envelope
from fastrack._sets.entries import Entry, PlainEntry, SealedEntry, sha256_of, walk
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import FormatError, RollbackError

PAYLOAD_TYPE = "application/vnd.fastrack.manifest.v1+json"
HISTORY_LIMIT = 1024
_LIMIT = 64 << 20  # bytes of a manifest: some 200,000 tensors
_NAME_LIMIT = 1024  # characters in the name of a file
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\\\ud800-\udfff]|\A/|(?:\A|/)\.{0,2}(?:/|\Z)")  # lone surrogates, empty names


@public
@dataclass(frozen=True, slots=True)
class Manifest:
    """The verified content of a manifest: one signed description of a set of files. `load_manifest` makes it.

    Attributes
    ----------
    lineage : str
        The id of the set through all its versions: 32 hexadecimal digits.
    version : int
        The version of the set, counted from 1.
    issued : datetime.datetime
        The time when it was signed, in UTC.
    files : mapping of str to entries
        The files of the set, by their paths relative to the folder of the manifest.
    history : tuple of str
        The digests of the versions before, from the last one back, 1024 at most.
    digest : str
        The SHA-256 of the signed content, in hexadecimal.
    envelope : bytes
        The signed document.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> from fastrack.grants import Signer
    >>> key, owner = fastrack.Key.generate(), Signer.generate()
    >>> fastrack.save_file({"x": np.arange(3)}, "data.safetensors", key)
    >>> manifest = fastrack.publish("data.safetensors", signer=owner)
    >>> manifest.version, list(manifest.files)
    (1, ['data.safetensors'])
    >>> fastrack.load_manifest("data.safetensors.manifest", owner=owner.verifier) == manifest
    True
    """

    lineage: str
    version: int
    issued: datetime
    files: Mapping[str, Entry]
    history: tuple[str, ...]
    digest: str
    envelope: bytes

    __hash__ = object.__hash__

    @classmethod
    def from_bytes(
        cls, content: bytes, *, owner: Verifier | Iterable[Verifier], source: str = "the manifest"
    ) -> Manifest:
        """Read the content of a manifest. Raises the errors of `load_manifest`."""
        if len(content) > _LIMIT:
            raise FormatError(
                f"{source}: expected a signed manifest of at most {_LIMIT} bytes, got more. Get it again from its owner"
            )
        payload, _ = open_canonical(content, PAYLOAD_TYPE, owner, source=source)
        return cls(**_parse(payload, source), digest=sha256_of(payload), envelope=content)

    @property
    def log_entry(self) -> bytes:
        """The text to enter in a transparency log. fastrack itself asks no log."""
        return f"fastrack/manifest@1\n{self.lineage}\n{self.version}\n{self.digest}\n".encode()

    def verify(self, folder: str | os.PathLike[str]) -> None:
        """Compare a folder with the set. This needs no key: it shows which messages are there, not that they open.

        Files whose names begin with a dot are left out, as are manifests, proofs and grants.

        Parameters
        ----------
        folder : path
            The folder of the manifest, or a copy of it.

        Raises
        ------
        RollbackError
            If a file is missing, is no part of the set, or has messages of another version.
        AuthenticationError
            If a plain file or plain tensor was altered.
        FormatError, OSError
            As from `load_file`.
        """
        folder = Path(folder)
        paths = walk(folder)
        for name in self.files:
            if name not in paths:
                raise self.missing(folder / name)
        for name, path in paths.items():
            self.check(name, path)

    def check(self, name: str, path: str | os.PathLike[str]) -> None:
        """Compare one file with the set. Raises the errors of `verify`.

        Parameters
        ----------
        name : str
            Its name in the set.
        path : path
            The file.
        """
        path = Path(path)
        entry = self.entry(name, path)
        if isinstance(entry, PlainEntry):
            entry.check(path)
            return
        with SealedFile(path, entry=entry) as file:
            for plain in file.plain:
                file.stored(plain)  # compares its bytes

    def missing(self, path: Path) -> RollbackError:
        """Return the error for a file of the set that is not there."""
        return RollbackError(
            f"{path}: expected this file by version {self.version} of lineage {self.lineage}, got none. Get the files "
            "of that version",
            path=path,
        )

    def entry(self, name: str, path: Path) -> Entry:
        """Return the description of a file; `path` is for errors."""
        entry = self.files.get(name)
        if entry is None:
            raise RollbackError(
                f"{path}: expected a file of version {self.version} of lineage {self.lineage}, got {name!r:.200}, "
                "which is none. Remove it, or name the manifest that it belongs to",
                path=path,
            )
        return entry


@public
def load_manifest(path: str | os.PathLike[str], *, owner: Verifier | Iterable[Verifier]) -> Manifest:
    """Read a manifest, and verify that its owner signed it. An `Anchor` also notices that it is an older one.

    Parameters
    ----------
    path : path
        The manifest.
    owner : Verifier or iterable of Verifier
        The public keys of the owners that are trusted, from `fastrack.grants`.

    Returns
    -------
    Manifest
        The verified content.

    Raises
    ------
    SignatureError
        If it was altered, or signed by another key. Nothing of it was used.
    FormatError
        If it is not a manifest.
    OSError
        If it cannot be read.

    Examples
    --------
    >>> import fastrack
    >>> from fastrack.grants import Signer
    >>> owner = Signer.generate()
    >>> with open("vocabulary.txt", "w") as file:
    ...     _ = file.write("a b c")
    >>> _ = fastrack.publish("vocabulary.txt", signer=owner)
    >>> manifest = fastrack.load_manifest("vocabulary.txt.manifest", owner=owner.verifier)
    >>> manifest.check("vocabulary.txt", "vocabulary.txt")
    """
    with open_regular(path) as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, _LIMIT) + 1)
    return Manifest.from_bytes(content, owner=owner, source=str(path))


def sign_manifest(
    files: Mapping[str, Entry],
    signer: Signer,
    lineage: str | None = None,
    history: tuple[str, ...] = (),
    version: int = 1,
) -> bytes:
    """Return a signed manifest of these files. `publish` gives it its lineage, history and version."""
    lineage = os.urandom(16).hex() if lineage is None else lineage
    payload = _FORM.write(Manifest(lineage, version, datetime.now(UTC), files, history, "", b""))
    envelope = sign_envelope(payload, PAYLOAD_TYPE, [signer])
    if len(envelope) > _LIMIT:
        raise FormatError(f"signing a manifest failed: expected at most {_LIMIT} bytes, got {len(envelope)}")
    return envelope


# Parsing. The owner has signed the payload, but the owner's program may have been faulty.


def _parse(payload: bytes, source: str) -> dict[str, Any]:
    """Return the fields of `Manifest` in a payload, which must be in canonical form."""
    with parsing(f"{source} is not a manifest", "get it again from its owner"):
        values = _FORM.parse(payload)
        version, files = values["version"], values["files"]
        require(len(values["history"]) == min(version - 1, HISTORY_LIMIT), "history")
        label = f"version {version} of {source}"
        return values | {"files": {name: parse_entry(name, members, label) for name, members in files.items()}}


_FORM = Form(
    {
        "version": integer(1, NUMBER_LIMIT - 1),
        "history": list_of(DIGEST, HISTORY_LIMIT),
        "lineage": ID,
        "issued": TIME,
        "files": Field(lambda files: files, lambda files: {name: entry.members() for name, entry in files.items()}),
    },
    {"format": 1},
)


def parse_entry(name: str, members: Mapping[str, Any], manifest: str) -> Entry:
    """Return the description of a file in these members of a JSON object."""
    require(is_name(name), "name of a file")
    kind: type[SealedEntry | PlainEntry] = SealedEntry if "sealed" in members else PlainEntry
    return kind.parse(members, manifest)


def is_name(name: str) -> bool:
    """Return True if a manifest may have a file of this name: a relative path with slashes, in its normal form."""
    return len(name) <= _NAME_LIMIT and _UNSAFE.search(name) is None
