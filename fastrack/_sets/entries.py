"""Entries of a manifest: the description of each file, and the comparison of open files with it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fastrack._documents import fields
from fastrack._documents.canonical import NUMBER_LIMIT, encode, encode_bytes, require
from fastrack._documents.fields import Field, Fields
from fastrack._sealed.contexts import Edition, Kind
from fastrack._tensors.arrays import Bytes
from fastrack._util.locations import Location, Url
from fastrack._util.pickles import unpickle
from fastrack._util.regular_file import not_found, open_regular
from fastrack.errors import AuthenticationError, FormatError, RollbackError
from fastrack.format import HEADER_SIZE

if TYPE_CHECKING:
    from fastrack._files.reader import SealedFile

SUFFIX = ".manifest"
PROOF_SUFFIX = ".tlog-proof"  # of proofs of transparency logs, which earlier versions read next to a manifest
_LEFT_OUT = re.compile(rf"\..*|.*({re.escape(SUFFIX)}|{re.escape(PROOF_SUFFIX)}|\.grants)", re.DOTALL)
_HEADER_LENGTH = 4 * -(-HEADER_SIZE // 3)  # of its base64, whose last character has two bits that are zero
_HEADERS = re.compile(rf"(?:[A-Za-z0-9+/]{{{_HEADER_LENGTH - 2}}}[AEIMQUYcgkosw048]=)*")
_DIGESTS = re.compile(r"(?:[0-9a-f]{64})*")
_DTYPE = fields.text(r"[A-Z0-9_]{1,16}", "a dtype")
_SHOWN = 32  # hexadecimal digits of a salt in an error

_Tensors = Mapping[str, list[Any]]  # from names to [dtype, shape, header or SHA-256]


@dataclass(frozen=True, slots=True)
class SealedEntry:
    """The part of a manifest that describes one sealed file.

    sealed : from names to [dtype, shape, header of the message]; plain : with the SHA-256 of the bytes in its place
    origins : file ids of messages that were sealed for another file; digests : SHA-256 of messages, if they were hashed
    manifest : version and name of the manifest, for errors; edition : lineage and version, if an anchor accepted them
    """

    file: str
    key: str
    kind: Kind
    metadata: str
    sealed: _Tensors
    plain: _Tensors
    origins: Mapping[str, str]
    digests: Mapping[str, str]
    manifest: str = field(compare=False, default="the manifest")
    edition: Edition | None = field(compare=False, default=None)

    @classmethod
    def of(cls, file: SealedFile, *, digests: bool = False) -> Self:
        """Describe an open file. Plain tensors are hashed, and with `digests` the messages of sealed ones too."""
        assert file.file_id is not None
        assert file.key_id is not None
        tensors = dict(file)
        return cls(
            file.file_id,
            file.key_id,
            file.kind,
            _digest_of_metadata(file.metadata),
            {
                name: [tensor.context.dtype, list(tensor.shape), encode_bytes(tensor.header)]
                for name, tensor in tensors.items()
            },
            {name: _describe_plain(*file.stored(name)) for name in file.plain},
            {name: tensor.context.file for name, tensor in tensors.items() if tensor.context.file != file.file_id},
            {name: sha256_of(tensor.message) for name, tensor in tensors.items()} if digests else {},
        )

    @classmethod
    def parse(cls, members: Mapping[str, Any], manifest: str) -> Self:
        """Return the entry that has these members of a JSON object."""
        entry = cls(**fields.read_members(members, _SEALED), manifest=manifest)
        sealed, origins = entry.sealed.keys(), entry.origins
        require(not sealed & entry.plain.keys(), "names of sealed and of plain tensors")
        require(origins.keys() <= sealed and entry.file not in origins.values(), "origins")
        require(entry.digests.keys() in (set(), sealed), "digests")
        return entry

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object that `parse` reads."""
        return fields.write_members(self, _SEALED)

    def check(self, file: SealedFile) -> None:
        """Compare an open file with this description. Contents of plain tensors are compared when they are read.

        Raise RollbackError for another file, and AuthenticationError for metadata or a message of another digest.
        """
        if file.file_id != self.file:
            raise self._other(file, f"file id {self.file}", file.file_id)
        if (file.key_id, file.kind) != (self.key, self.kind):
            raise self._other(file, f"a {self.kind} file under key {self.key}", f"{file.kind}, {file.key_id}")
        for name in file.names:
            if name not in self.sealed and name not in self.plain:
                raise self._other(file, "no such tensor", "one", name)
        for name, expected in self.sealed.items():
            self._check_sealed(file, name, *expected)
        for name, (dtype, shape, _) in self.plain.items():
            if name not in file.plain:
                raise self._other(file, "it to be stored unencrypted", "a sealed one" if name in file else "none", name)
            found_dtype, found_shape, *_ = file.describe(name)
            if (found_dtype, list(found_shape)) != (dtype, shape):
                raise self._other(file, f"{dtype} {shape}", f"{found_dtype} {list(found_shape)}", name)
        if _digest_of_metadata(file.metadata) != self.metadata:
            raise AuthenticationError(
                f"{file.path}: expected metadata with the SHA-256 {self.metadata} by {self.manifest}, got others; they "
                "were altered, or are of another version. Get the files of that version",
                path=file.path,
            )

    def _check_sealed(self, file: SealedFile, name: str, dtype: str, shape: list[int], header: str) -> None:
        tensor = file.get(name)
        if tensor is None:
            raise self._other(file, "it to be sealed", "an unencrypted one" if name in file.plain else "none", name)
        context, origin = tensor.context, self.origins.get(name, self.file)
        if (context.dtype, list(context.shape), context.file) != (dtype, shape, origin):
            actual = f"{context.dtype} {list(context.shape)} of file {context.file}"
            raise self._other(file, f"{dtype} {shape} of file {origin}", actual, name)
        if encode_bytes(tensor.header) != header:
            listed, actual = (salt.hex()[:_SHOWN] for salt in (self.header(name), tensor.header))
            raise self._other(file, f"the message whose salt begins with {listed}", actual, name)
        if name in self.digests and sha256_of(tensor.message) != self.digests[name]:
            raise self._altered(file.path, name)

    def header(self, name: str) -> bytes:
        """Return the header of the message of a sealed tensor."""
        return base64.b64decode(self.sealed[name][2])

    def check_plain(self, name: str, content: Bytes, path: Location) -> None:
        """Raise `AuthenticationError` if these are not the bytes of a plain tensor."""
        if sha256_of(content) != self.plain[name][2]:
            raise self._altered(path, name)

    def _other(self, file: SealedFile, expected: str, found: object, tensor: str | None = None) -> RollbackError:
        about = f"{file.path}: " if tensor is None else f"{file.path}: tensor {tensor!r:.200}: "
        return RollbackError(
            f"{about}expected {expected} by {self.manifest}, got {found!s:.200}; it is an older or another one, or was "
            "altered. Get the files of that version",
            tensor=tensor,
            path=file.path,
        )

    def _altered(self, path: Location, tensor: str) -> AuthenticationError:
        return AuthenticationError(
            f"{path}: tensor {tensor!r:.200}: its bytes do not have the SHA-256 in {self.manifest}; it was altered, or "
            "is of another version. Get the files of that version",
            tensor=tensor,
            path=path,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("SealedEntry", encode(self.members()), self.manifest, self.edition)


def restore_entry(members: bytes, manifest: str, edition: Edition | None = None) -> SealedEntry:
    """Return the entry that a pickle describes."""
    return replace(SealedEntry.parse(json.loads(members), manifest), edition=edition)


@dataclass(frozen=True, slots=True)
class PlainEntry:
    """The part of a manifest that describes a file without sealed tensors, by its size and SHA-256."""

    size: int
    sha256: str
    manifest: str = field(compare=False, default="the manifest")

    @classmethod
    def of(cls, path: Path) -> Self:
        """Describe a file, which is read to its end."""
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(file.tell(), digest.hexdigest())

    @classmethod
    def parse(cls, members: Mapping[str, Any], manifest: str) -> Self:
        """Return the entry that has these members of a JSON object."""
        return cls(**fields.read_members(members, _PLAIN), manifest=manifest)

    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object that `parse` reads."""
        return fields.write_members(self, _PLAIN)

    def check(self, path: Path) -> None:
        """Raise `AuthenticationError` if a file has other content."""
        if self.of(path) != self:
            raise self._altered(path)

    def read(self, path: Location) -> bytes:
        """Return the content of the file, or raise `AuthenticationError` if it differs."""
        if isinstance(path, Url):
            return self._read_remote(path)
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size != self.size:
                raise self._altered(path)
            content = file.read(self.size + 1)
        if sha256_of(content) != self.sha256:
            raise self._altered(path)
        return content

    def _read_remote(self, url: Url) -> bytes:
        from fastrack._remote.remote_file import open_remote

        remote, _ = open_remote(url)
        if remote.size == self.size:
            for _ in range(2):  # the cached copy may be wrong once
                content = remote.read(0, self.size)
                if sha256_of(content) == self.sha256:
                    return content
                remote.discard([(0, self.size)])
        raise self._altered(url)

    def _altered(self, path: Location) -> AuthenticationError:
        return AuthenticationError(
            f"{path}: expected {self.size} bytes with the SHA-256 {self.sha256} by {self.manifest}, got others; it was "
            "altered, or is of another version. Get the files of that version",
            path=path,
        )


Entry = SealedEntry | PlainEntry


def walk(folder: Path) -> dict[str, Path]:
    """Return the files in a folder tree by their relative paths, without manifests, proofs and grants."""
    paths = {}
    for here, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if (Path(here) / name).is_symlink():
                raise FormatError(f"{Path(here) / name}: expected no link to a folder in a set. Copy the folder")
        for name in files:
            if _LEFT_OUT.fullmatch(name) is None:
                paths[(Path(here) / name).relative_to(folder).as_posix()] = Path(here) / name
    return paths


def _raise(error: OSError) -> None:
    raise not_found(error.filename) if isinstance(error, FileNotFoundError) else error


def sha256_of(content: Any) -> str:
    return hashlib.sha256(content).hexdigest()


def _digest_of_metadata(metadata: Mapping[str, str]) -> str:
    return sha256_of(encode(dict(metadata)))


def _describe_plain(dtype: str, shape: tuple[int, ...], content: Bytes) -> list[Any]:
    return [dtype, list(shape), sha256_of(content)]


def _read_tensors(tensors: Any, form: re.Pattern[str], size: int, member: str) -> _Tensors:
    """Check the dtypes, shapes and pins (headers or digests) of tensors, in bulk because there may be many."""
    "".join(tensors).encode()  # refuses lone surrogates
    require({(type(entry), len(entry)) for entry in tensors.values()} <= {(list, 3)}, member)
    if tensors:
        found_dtypes, shapes, pins = zip(*tensors.values(), strict=True)
        require(all(_DTYPE.takes(dtype) for dtype in set(found_dtypes)), member)
        require({len(pin) for pin in pins} == {size}, member)
        require(form.fullmatch("".join(pins)), member)
        require({type(shape) for shape in shapes} == {list}, member)
        extents = [extent for shape in shapes for extent in shape]
        require({type(extent) for extent in extents} <= {int}, member)
        require(all(0 <= extent < NUMBER_LIMIT for extent in set(extents)), member)
    return dict(tensors)


_SEALED: Fields = {
    "file": fields.ID,
    "key": fields.ID,
    "kind": fields.one_of("tensor", "checkpoint", "folder", "index"),
    "metadata": fields.DIGEST,
    "sealed": Field(lambda tensors: _read_tensors(tensors, _HEADERS, _HEADER_LENGTH, "sealed")),
    "plain": Field(lambda tensors: _read_tensors(tensors, _DIGESTS, 64, "plain")),
    "origins": fields.mapping(fields.TEXT, fields.ID),
    "digests": fields.mapping(fields.TEXT, fields.DIGEST),
}
_PLAIN: Fields = {"sha256": fields.DIGEST, "size": fields.NUMBER}
