"""Anchors: files that remember the newest version of a set that was seen, so that no older one is accepted again."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from fastrack._documents.canonical import parsing, require
from fastrack._documents.fields import DIGEST, ID, NUMBER, Fields, Form, or_none
from fastrack._keys.signing import VERIFIER, Verifier
from fastrack._sealed.contexts import Edition
from fastrack._sets.entries import SUFFIX, PlainEntry, SealedEntry
from fastrack._sets.manifest import HISTORY_LIMIT, Manifest, load_manifest
from fastrack._util.atomic import new_file
from fastrack._util.locations import locate_local, require_path
from fastrack._util.public import public
from fastrack._util.rights import new_own_file, open_own
from fastrack._util.shown import shown
from fastrack.errors import RollbackError

FOLDER_MANIFEST = f"fastrack{SUFFIX}"
_LIMIT = 8192  # bytes of an anchor
_FIELDS: Fields = {"owner": VERIFIER, "lineage": or_none(ID), "version": NUMBER, "digest": or_none(DIGEST)}
_FORM = Form(_FIELDS, {"anchor": 1}, _LIMIT, b"\n")


@public
class Anchor:
    """The newest version of a set of files that was seen, kept in a file of its own.

    Functions that open files take an anchor, or its path, as ``anchor=``. They then open only files in the owner's
    newest manifest. The anchor moves forward when a file of a newer version was opened, and never
    back. `create` makes one; keep it where an attacker who can replace the data cannot write.

    One object stays at the version of the manifest that it read first, so that all files opened with it are of one
    version. A path stands for a new object in each call.

    Parameters
    ----------
    path : path
        The anchor file.
    manifest : path, optional
        The manifest. By default ``NAME.manifest`` next to the file, else the ``fastrack.manifest`` in its folder or in
        the nearest one above. A file is known by its path relative to the folder of the manifest.

    Raises
    ------
    FormatError
        If it is no anchor.
    KeyPermissionError
        If another user owns it, may write to it or replace it, and so could choose the owner that is trusted.
    OSError
        If it cannot be read. A missing anchor is never recreated: it would remember nothing.

    Attributes
    ----------
    owner : Verifier
        The public key of the owner of the set.
    lineage : str or None
        The id of the set; None before the first manifest.
    version : int
        The newest version that was seen; before the first manifest the least one that is accepted.
    digest : str or None
        The digest of the manifest of that version.

    Examples
    --------
    >>> import numpy as np
    >>> import fastrack
    >>> from fastrack.grants import Signer
    >>> key, owner = fastrack.Key.generate(), Signer.generate()
    >>> fastrack.save_file({"x": np.arange(3)}, "data.safetensors", key)
    >>> _ = fastrack.publish("data.safetensors", signer=owner)
    >>> _ = fastrack.Anchor.create("data.anchor", owner=owner.verifier)
    >>> with fastrack.load_file("data.safetensors", anchor="data.anchor") as file:
    ...     x = fastrack.unseal(file["x"], key)
    >>> fastrack.Anchor("data.anchor").version
    1
    """

    def __init__(self, path: str | os.PathLike[str], *, manifest: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(require_path(path))
        self._state = _read(self.path)
        self._manifest_path = None if manifest is None else Path(manifest)
        self._manifest: Manifest | None = None

    @property
    def owner(self) -> Verifier:
        return self._state.owner

    @property
    def lineage(self) -> str | None:
        return self._state.lineage

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def digest(self) -> str | None:
        return self._state.digest

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        owner: Verifier,
        lineage: str | None = None,
        least_version: int = 0,
    ) -> Self:
        """Write a new anchor, which accepts the first manifest of its owner. No file is ever replaced.

        Parameters
        ----------
        path : path
            The anchor file.
        owner : Verifier
            The public key of the owner, from `fastrack.grants`.
        lineage : str, optional
            The id of the set, by default from the first manifest. `fastrack.grants.Grants` may have one.
        least_version : int
            The least version that is accepted.

        Raises
        ------
        ValueError
            If the lineage is not 32 hexadecimal digits, or the version negative.
        OSError
            If the file exists or cannot be written.
        """
        if lineage is not None and not ID.takes(lineage):
            raise ValueError(f"lineage=: expected 32 hexadecimal digits, got {shown(lineage, 50)}")
        if least_version < 0:
            raise ValueError(f"least_version=: expected 0 or more, got {least_version}")
        state = _State(owner, lineage, least_version, None)
        with new_own_file(path) as file:
            file.write(_FORM.write(state))
        return cls(path)

    @classmethod
    def resolve(cls, anchor: Anchor | str | os.PathLike[str]) -> Anchor:
        """Return an anchor, opened if it is given by its path."""
        return anchor if isinstance(anchor, Anchor) else cls(anchor)

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """Read a file of the set that is not sealed, such as a configuration, and compare it with the manifest.

        Raises
        ------
        RollbackError
            If it is no file of the set, or is sealed.
        AuthenticationError, SignatureError, FormatError, OSError
            As from `verify`.
        """
        path = locate_local(path)
        entry = self._find(path)
        if not isinstance(entry, PlainEntry):
            raise RollbackError(
                f"{path}: expected a file in which nothing is sealed, got one that {entry.manifest} lists as sealed. "
                "Open it with load_file",
                path=path,
            )
        content = entry.read(path)
        self.advance()
        return content

    def verify(self, folder: str | os.PathLike[str]) -> Manifest:
        """Compare a folder with its manifest, like `Manifest.verify`, and move the anchor forward.

        Raises
        ------
        RollbackError
            As from `Manifest.verify`, or if the manifest is missing, or older than the anchor.
        AuthenticationError, SignatureError, FormatError, OSError
            As from `Manifest.verify` and `load_manifest`.
        """
        folder = locate_local(folder)
        manifest = self._load(folder / FOLDER_MANIFEST if self._manifest_path is None else self._manifest_path)
        manifest.verify(folder)
        self.advance()
        return manifest

    def sealed_entry(self, path: str | os.PathLike[str]) -> SealedEntry:
        """Return the description of a sealed file of the set."""
        path = locate_local(path)
        entry = self._find(path)
        if not isinstance(entry, SealedEntry):
            raise RollbackError(
                f"{path}: expected a sealed file, got one that {entry.manifest} lists as having nothing sealed. Read "
                "it with Anchor.read",
                path=path,
            )
        return replace(entry, edition=self.edition)

    @property
    def edition(self) -> Edition | None:
        """Lineage and version of the manifest that this object stays at; None before one was read. Not public."""
        return None if self._manifest is None else (self._manifest.lineage, self._manifest.version)

    def names_in(self, folder: Path) -> list[str]:
        """Return the paths, relative to a folder, of the files of the set that lie in it or below it."""
        manifest_path = self._find_manifest(folder)
        manifest = self._load(manifest_path)
        prefix = name_in_set(folder, manifest_path) + "/"
        if self._manifest_path is None:
            _refuse_moved(folder, manifest_path, lambda name: any(key.startswith(f"{name}/") for key in manifest.files))
        if prefix == "./":
            return list(manifest.files)
        return [name.removeprefix(prefix) for name in manifest.files if name.startswith(prefix)]

    def require_file(self, path: Path) -> None:
        """Raise `RollbackError` unless a file that the manifest lists is there."""
        if not path.exists():
            raise self._load(self._find_manifest(path)).missing(path)

    def accept(self, manifest: Manifest, path: Path) -> None:
        """Make this manifest the present one; refuse one that is older than the anchor or forked from it."""
        self._state = self._reread()
        self._state.require_before(manifest, path, self.path)
        self._manifest = manifest

    def advance(self) -> None:
        """Write the present manifest into the anchor file, unless the file is newer already."""
        manifest = self._manifest
        assert manifest is not None
        state = _State(self.owner, manifest.lineage, manifest.version, manifest.digest)
        if _read(self.path) != state:
            with _locked(self.path):
                stored = self._reread()
                if stored.version <= state.version:
                    stored.require_before(manifest, self.path, self.path)
                    with new_file(self.path, succeeds=lambda old: _State.parse(old, self.path) == stored) as file:
                        file.write(_FORM.write(state))
        self._state = state

    def _reread(self) -> _State:
        """Read the anchor file again, since another process may have moved it forward."""
        stored = _read(self.path)
        if stored.owner != self.owner:
            raise RollbackError(
                f"{self.path}: expected the anchor of owner {self.owner.id}, got that of {stored.owner.id}; it was "
                "replaced while it was in use. Make the Anchor again",
                path=self.path,
            )
        return stored

    def _find(self, path: Path) -> SealedEntry | PlainEntry:
        manifest_path = self._find_manifest(path)
        manifest = self._load(manifest_path)
        if self._manifest_path is None:
            _refuse_moved(path, manifest_path, manifest.files.__contains__)
        return manifest.entry(name_in_set(path, manifest_path), path)

    def _find_manifest(self, path: Path) -> Path:
        """Return the manifest that was named, or that of a file or a folder: its own, or the nearest one above."""
        if self._manifest_path is not None:
            return self._manifest_path
        manifest = manifest_path(path)
        if manifest.exists():
            return manifest
        for folder in Path(os.path.abspath(path)).parents:  # noqa: PTH100 - `resolve` would follow links
            if (folder / FOLDER_MANIFEST).exists():
                return folder / FOLDER_MANIFEST
        raise FileNotFoundError(errno.ENOENT, _MISSING, str(manifest))

    def _load(self, path: Path) -> Manifest:
        if self._manifest is None:
            try:
                manifest = load_manifest(path, owner=self.owner)
            except FileNotFoundError:
                raise FileNotFoundError(errno.ENOENT, _MISSING, str(path)) from None
            self.accept(manifest, path)
        assert self._manifest is not None
        return self._manifest

    def __repr__(self) -> str:
        return f"<Anchor {str(self.path)!r}: version {self.version} of lineage {self.lineage}>"


_MISSING = "no such manifest; `fastrack publish` writes one, and Anchor(manifest=) names one elsewhere"


def manifest_path(path: Path) -> Path:
    """Return the manifest of a folder or a file that has one of its own."""
    return path / FOLDER_MANIFEST if path.is_dir() else path.with_name(path.name + SUFFIX)


def name_in_set(path: Path, manifest: Path) -> str:
    """Return the name that a file has in the set of this manifest."""
    return Path(os.path.relpath(path, manifest.parent)).as_posix()


def _refuse_moved(path: Path, manifest: Path, is_listed: Callable[[str], bool]) -> None:
    """Refuse a path that ends with a longer name of the set than its path relative to the manifest.

    Storage that copies a manifest into a folder of its set would otherwise rename the files.
    """
    parts = Path(os.path.abspath(path)).parts[1:]  # noqa: PTH100 - `resolve` would follow links
    expected = Path(name_in_set(path, manifest)).parts
    for count in range(len(expected) + 1, len(parts) + 1):
        name = "/".join(parts[-count:])
        if is_listed(name):
            raise RollbackError(
                f"{path}: expected the manifest in the folder that has {name!r:.200}, which it lists, got {manifest}; "
                "it was moved. Put it back, or name it by Anchor(manifest=)",
                path=path,
            )


@dataclass(frozen=True, slots=True)
class _State:
    """The content of an anchor file."""

    owner: Verifier
    lineage: str | None
    version: int
    digest: str | None

    def require_before(self, manifest: Manifest, path: Path, anchor: Path) -> None:
        """Raise `RollbackError` unless this manifest is the present one, or a later one of the same history."""
        gap = manifest.version - self.version
        problem = None
        if self.lineage is not None and manifest.lineage != self.lineage:
            problem = f"lineage {self.lineage}, got lineage {manifest.lineage}; it is of another set"
        elif gap < 0:
            problem = f"version {self.version} or later, got version {manifest.version}; it is an older one"
        elif self.digest is not None and gap > HISTORY_LIMIT:
            problem = (
                f"a version up to {self.version + HISTORY_LIMIT}, got version {manifest.version}; whether it follows "
                "cannot be told. Open a version between the two first"
            )
        elif self.digest is not None and self.digest != (manifest.digest, *manifest.history)[gap]:
            problem = (
                f"a manifest that has or follows the digest {self.digest:.32}… of version {self.version}, got version "
                f"{manifest.version}, which does not; it is forked"
            )
        if problem is not None:
            raise RollbackError(f"{path}: expected by {anchor} {problem}. Get the newest one from its owner", path=path)

    @classmethod
    def parse(cls, content: bytes, path: Path) -> Self:
        """Return the state in the content of an anchor file, which has one form only."""
        with parsing(f"{path} is not an anchor", "restore it from a copy"):
            state = cls(**_FORM.parse(content))
            require(state.digest is None or (state.lineage is not None and state.version > 0), "digest")
            return state


def _read(path: Path) -> _State:
    try:
        file = open_own(path)
    except FileNotFoundError:
        advice = "no such anchor; Anchor.create or `fastrack anchor --owner` makes one, which trusts the next manifest"
        raise FileNotFoundError(errno.ENOENT, advice, str(path)) from None
    with file:
        return _State.parse(file.read(_LIMIT + 1), path)


@contextmanager
def _locked(path: Path) -> Iterator[io.FileIO]:
    """Lock a file that a holder of the lock may replace."""
    while True:
        with io.FileIO(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return
