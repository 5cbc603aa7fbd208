"""Key pairs, and their files: text with the name of an algorithm and a key, which is read in one form only.

A secret file has two lines and the permissions of a key file; a public file has one line::

    # fastrack secret key, Ed25519, id 3f0c...       (32 hexadecimal digits)
    fastrack-secret-1:Ed25519:9d41...                (the secret, in hexadecimal)

    fastrack-public-1:Ed25519:wRk0...= alice         (the public key in base64; a name may follow)
"""

from __future__ import annotations

import binascii
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from fastrack._documents.canonical import decode_bytes, encode_bytes
from fastrack._keys.keys import read_private
from fastrack._util.atomic import new_file
from fastrack._util.key_text import KeyText
from fastrack._util.locations import require_path
from fastrack._util.regular_file import open_regular
from fastrack._util.rights import new_own_file
from fastrack._util.shown import shown
from fastrack.errors import FormatError

_PUBLIC_LIMIT = 8192
_NAME = r"[!-~](?:[ -~]{0,62}[!-~])?"  # printable ASCII, up to 64 characters
_PUBLIC = KeyText(
    "public key",
    rf"fastrack-public-1:(?P<algorithm>[A-Za-z0-9_-]+):(?P<key>[A-Za-z0-9+/]+=*)(?: (?P<name>{_NAME}))?\n?".encode(),
    ("fastrack-public-1:",),
    "its one line fastrack-public-1:ALGORITHM:KEY",
)
_SECRET = KeyText(
    "secret key file",
    rb"# fastrack secret key, (?P<algorithm>[A-Za-z0-9_-]+), id (?P<id>[0-9a-f]{32})\n"
    rb"fastrack-secret-1:(?P=algorithm):(?P<secret>(?:[0-9a-f]{2})+)\n?",
    ("# fastrack secret", "fastrack-secret-1:"),
)
_SECRET_LIMIT = 512


class PublicKey:
    """A public key with an id, and a name for people, which is not authenticated. Subclasses define its use."""

    __slots__ = ("_key", "algorithm", "id", "name", "public")

    _readers: ClassVar[Mapping[str, Callable[[bytes], Any]]]
    """The functions that read a public key, by algorithm."""

    _option: ClassVar[str]
    """The option of ``fastrack keygen`` that makes such a key."""

    _open = staticmethod(open_regular)
    """The function that opens a public file."""

    def __init__(self, algorithm: str, public: bytes, name: str = "") -> None:
        if algorithm not in self._readers:
            raise FormatError(f"expected a public key of {' or '.join(self._readers)}, got {shown(algorithm, 40)}")
        try:
            self._key = self._readers[algorithm](public)
        except ValueError as error:
            raise FormatError(f"expected a public key of {algorithm}, got {len(public)} bytes: {error}") from error
        self.algorithm = algorithm
        self.public = public
        self.name = name
        self.id = public_id(algorithm, public)

    @classmethod
    def parse(cls, text: str, *, source: str = "the text") -> Self:
        """Read the line of a public file.

        Raise FormatError if the line is not a public key of this kind.
        """
        content = text.encode(errors="replace")
        hint = "; it holds a secret key, of which the public file is wanted" if b"fastrack-secret-1" in content else ""
        match = _PUBLIC.match(content, source, f": expected one line fastrack-public-1:ALGORITHM:KEY{hint}")
        try:
            public = decode_bytes(match["key"].decode())
        except ValueError as error:
            raise FormatError(f"{source} is not a fastrack public key: {error}; get it again") from None
        algorithm = match["algorithm"].decode()
        if algorithm not in cls._readers:
            raise FormatError(
                f"{source}: expected a public key of {' or '.join(cls._readers)}, got one of {algorithm:.40}; name the "
                f"file of another, which `fastrack keygen {cls._option}` makes"
            )
        return cls(algorithm, public, (match["name"] or b"").decode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a public file that `save` or ``fastrack keygen`` wrote.

        Raise FormatError if the file is no public key of this kind, or if `path` looks like a key itself. Raise OSError
        if the file cannot be read.
        """
        with cls._open(Path(require_path(path))) as file:
            content = file.read(_PUBLIC_LIMIT + 1)
        return cls.parse(content.decode(errors="replace"), source=str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new public file. No file is ever replaced."""
        with new_file(Path(require_path(path)), mode=0o644, overwrite=False) as file:  # which others may not write to
            file.write(f"{self}\n".encode())

    def __str__(self) -> str:
        if self.name and re.fullmatch(_NAME, self.name) is None:
            raise ValueError(
                f"naming a public key failed: expected up to 64 characters of printable ASCII, got {shown(self.name)}"
            )
        end = f" {self.name}" if self.name else ""
        return f"fastrack-public-1:{self.algorithm}:{encode_bytes(self.public)}{end}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and (self.algorithm, self.public) == (other.algorithm, other.public)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.algorithm} id={self.id}{f' {self.name!r}' if self.name else ''}>"


class SecretKey(ABC):
    """A secret key with its public key. It can be neither pickled nor copied. Subclasses define its use."""

    __slots__ = ()

    _readers: ClassVar[Mapping[str, Callable[[bytes], Any]]]
    """The functions that read a secret key, by algorithm."""

    _option: ClassVar[str]
    """The option of ``fastrack keygen`` that makes such a key."""

    @abstractmethod
    def __init__(self, algorithm: str, key: Any, name: str = "") -> None: ...

    @property
    @abstractmethod
    def _public(self) -> PublicKey: ...

    @abstractmethod
    def _secret_bytes(self) -> bytes: ...

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a secret file that `save` or ``fastrack keygen`` wrote.

        Raise FormatError if the file is no secret file of this kind or damaged, or if `path` looks like a key itself.
        Raise KeyPermissionError if others may use the file. Raise OSError if it cannot be read.
        """
        with read_private(path, _SECRET_LIMIT) as content:
            advice = f"; `fastrack keygen {cls._option}` makes one"
            if content.startswith(b"fastrack-public-1:"):
                advice = ": it holds a public key. Name the secret file, without .pub"
            match = _SECRET.match(content, str(path), advice)
            algorithm, key_id = match["algorithm"].decode(), match["id"].decode()
            secret = binascii.unhexlify(match["secret"])
        if algorithm not in cls._readers:
            raise FormatError(
                f"{path}: expected a secret key of {' or '.join(cls._readers)}, got one of {algorithm:.40}; name the "
                f"file of another, which `fastrack keygen {cls._option}` makes"
            )
        try:
            key = cls(algorithm, cls._readers[algorithm](secret))
        except ValueError as error:
            raise FormatError(f"{path} is damaged: expected a secret of {algorithm}; restore it from a copy") from error
        if key._public.id != key_id:
            raise FormatError(f"{path} was damaged: its key does not have its id; restore it from a copy")
        return key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new secret file that only its owner may read (mode 0600). No file is ever replaced."""
        algorithm = self._public.algorithm
        head = f"# fastrack secret key, {algorithm}, id {self._public.id}\nfastrack-secret-1:{algorithm}:"
        with new_own_file(path) as file:
            file.write(head.encode() + binascii.hexlify(self._secret_bytes()) + b"\n")

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} stays in its process and cannot be pickled or copied; save it, and load it there")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._public.algorithm} id={self._public.id}>"


def public_id(algorithm: str, public: bytes) -> str:
    """Return the id of a public key: 32 hexadecimal digits of SHA-256 over a label, the algorithm and the key."""
    return hashlib.sha256(b"fastrack/public-key-id@1\0" + algorithm.encode() + b"\0" + public).hexdigest()[:32]
