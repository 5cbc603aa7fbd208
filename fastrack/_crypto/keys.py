"""Generate keys, store them in key files, and find them by their ids.

A key file has two lines of ASCII. It is read only if it has exactly this form (the final newline is optional), the id
is that of the key, and the file grants no rights to its group or to others::

    # fastrack key, 256 bits, id 3f0c...      (32 hexadecimal digits)
    fastrack-key-1:9d41...                    (64 of them; 32 for a 128-bit key)
"""

from __future__ import annotations

import hmac
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, Self, TypeAlias, Union

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from fastrack._util.atomic import is_trusted_owner, new_file
from fastrack._util.public import public
from fastrack._util.regular_file import open_regular
from fastrack.errors import ClosedError, FormatError, KeyPermissionError, UnknownKeyError

KEY_FILE_VARIABLE = "FASTRACK_KEY_FILE"
"""The environment variable that names the key file to use where no ``keys=`` is given."""

Bytes = bytes | bytearray | memoryview
KeyLike: TypeAlias = Union["Key", str, os.PathLike[str]]
"""The type of ``key=``: a key, or the path of a key file."""
KeySource: TypeAlias = Union["Key", "KeyRing", str, os.PathLike[str], "Iterable[KeySource]"]
"""The type of ``keys=``: a key, the path of a key file, a ring, or any iterable of these."""

_SIZES = (16, 32)  # bytes of a key
_ID_SIZE = 16
_ID_LABEL = b"fastrack/key-id@1\0"
_FILE_PATTERN = re.compile(
    rb"# fastrack key, (?P<bits>128|256) bits, id (?P<id>[0-9a-f]{32})\n"
    rb"fastrack-key-1:(?P<secret>[0-9a-f]{32}|[0-9a-f]{64})\n?"
)
_FILE_LIMIT = 256
_LOOKS_SECRET = re.compile(
    r".*fastrack-key-1:.*"  # a key file's second line, or all of it
    r"|(?:0x)?(?:[0-9a-f]{2}[:\s-]?){16,}"  # hexadecimal
    r"|[a-z0-9+/_-]{22}==|[a-z0-9+/_-]{43}=",  # base64 of 16 or 32 bytes
    re.DOTALL | re.IGNORECASE,
)
_HEX_DIGITS = b"0123456789abcdef"
_HEX_VALUES = {digit: value for value, digit in enumerate(_HEX_DIGITS)}


class _Secret(bytearray):
    """The bytes of a key, overwritten when the object is deleted.

    A view keeps the object alive, so no view outlives the bytes. `__del__` binds the type `bytes` in advance, since the
    interpreter may have deleted all global names when it is called.
    """

    def __del__(self, zeros: type[bytes] = bytes) -> None:
        self[:] = zeros(self.__len__())


@public
class Key:
    """A secret that seals and unseals tensors. `generate`, `load` and `from_bytes` make one.

    A key stays in its process: it can be neither pickled nor copied. Its secret is overwritten by `wipe`, or when the
    object is deleted.

    Parameters
    ----------
    secret : bytes-like
        16 bytes for AES-128, 32 bytes for AES-256. Copied; the caller should overwrite the original.

    Raises
    ------
    FormatError
        If it has another length, or is all zeros, like an overwritten key.
    TypeError
        If it is text or a path.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import fastrack
    >>> key = fastrack.Key.generate()
    >>> key.bits
    256
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "owner.key"
    ...     key.save(path)
    ...     fastrack.Key.load(path) == key
    True
    >>> key.wipe()
    >>> key.is_wiped
    True
    """

    __slots__ = ("_id", "_secret", "_wiped")

    def __init__(self, secret: Bytes) -> None:
        if isinstance(secret, (str, os.PathLike)):
            raise TypeError("expected the bytes of a secret, got text or a path; Key.load reads a key file")
        view = memoryview(secret).cast("B")
        self._wiped = False
        self._id = ""
        self._secret = _Secret(len(view))
        if len(view) not in _SIZES:
            raise FormatError(f"expected a key of 16 or 32 bytes, got {len(view)}; Key.generate() makes one")
        if hmac.compare_digest(view, self._secret):
            raise FormatError(
                "making a key failed: expected random bytes, got zeros only, as a wiped key leaves; load it again"
            )
        # Through a view: assigning to a slice of a bytearray makes a copy that cannot be wiped.
        memoryview(self._secret)[:] = view
        self._id = _derive_id(self._secret)

    @classmethod
    def generate(cls, bits: int = 256) -> Self:
        """Generate a new key from the random numbers of the operating system.

        Parameters
        ----------
        bits : {256, 128}
            The size of the AES key.

        Raises
        ------
        ValueError
            If it is neither.
        """
        if bits not in {8 * size for size in _SIZES}:
            raise ValueError(f"expected a key of 256 or 128 bits, got {bits!r}")
        return cls(os.urandom(bits // 8))

    @classmethod
    def from_bytes(cls, secret: Bytes) -> Self:
        """Make a key of bytes from another source, such as a key broker: 16 or 32 bytes, copied.

        Raises
        ------
        FormatError
            If it has another length, or is all zeros.
        """
        return cls(secret)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a key file that `save` or ``fastrack keygen`` wrote.

        Raises
        ------
        FormatError
            If it is not an intact key file, or if `path` looks like a key itself; the message does not repeat it.
        KeyPermissionError
            If its group or others have any permission, or its owner is neither this user nor root. Not checked on
            systems without such permissions.
        OSError
            If it cannot be read.
        """
        if looks_secret(path):
            raise FormatError(_NOT_A_PATH) from None
        path = Path(path)
        buffer = bytearray(_FILE_LIMIT + 1)
        try:
            with open_regular(path) as file:
                _refuse_if_shared(file, path)
                size = _read_into(file, buffer)
            return cls._parse(buffer, size, path)
        finally:
            buffer[:] = bytes(len(buffer))

    @classmethod
    def _parse(cls, buffer: bytearray, size: int, path: Path) -> Self:
        match = _FILE_PATTERN.fullmatch(buffer, 0, size)
        # Digit by digit, by index: a group of the match would be a copy that cannot be wiped.
        start, end = match.span("secret") if match else (0, 0)
        if match is None or int(match["bits"]) != 4 * (end - start):
            raise FormatError(f"{path} is not a fastrack key file; `fastrack keygen {path}.new` makes one")
        secret = bytearray((end - start) // 2)
        try:
            for index in range(len(secret)):
                high, low = buffer[start + 2 * index], buffer[start + 2 * index + 1]
                secret[index] = _HEX_VALUES[high] << 4 | _HEX_VALUES[low]
            key = cls(secret)
        finally:
            secret[:] = bytes(len(secret))
        if key.id != match["id"].decode():
            key.wipe()
            raise FormatError(f"{path} was damaged: its key does not have its id; restore the file from a copy")
        return key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new key file that only its owner may read (mode 0600), atomically. No file is ever replaced.

        Raises
        ------
        FileExistsError
            If `path` exists. It is left as it was.
        ClosedError
            If the key has been wiped.
        OSError
            If it cannot be written.
        """
        text = self._format()
        try:
            with new_file(Path(path), mode=0o600, overwrite=False) as file:
                file.write(text)
        finally:
            text[:] = bytes(len(text))

    def _format(self) -> bytearray:
        secret = self.material()
        head = b"# fastrack key, %d bits, id %s\nfastrack-key-1:" % (self.bits, self.id.encode())
        text = bytearray(len(head) + 2 * len(secret) + 1)
        text[: len(head)] = head
        for index, byte in enumerate(secret):
            text[len(head) + 2 * index] = _HEX_DIGITS[byte >> 4]
            text[len(head) + 2 * index + 1] = _HEX_DIGITS[byte & 15]
        text[-1:] = b"\n"
        return text

    @property
    def id(self) -> str:
        """The public id of the key: 32 hexadecimal digits that reveal nothing about the secret."""
        return self._id

    @property
    def bits(self) -> int:
        """The size of the AES key: 128 or 256."""
        return 8 * len(self._secret)

    @property
    def is_wiped(self) -> bool:
        """True after the secret was overwritten."""
        return self._wiped

    @classmethod
    def of(cls, key: Key | str | os.PathLike[str]) -> Key:
        """Return the key of a ``key=`` argument: the key itself, or that of the key file at a path.

        Raises
        ------
        TypeError
            If it is neither.
        FormatError, KeyPermissionError, OSError
            As `load` does.
        """
        if isinstance(key, Key):
            return key
        if isinstance(key, (str, os.PathLike)):
            return cls.load(key)
        raise TypeError(f"key= takes a Key or the path of a key file, got {type(key).__name__}")

    def material(self) -> memoryview:
        """Return a read-only view of the secret. Not public: for key derivation inside the package.

        The view keeps the secret alive, but `wipe` overwrites it all the same. Raise ClosedError if it has done so.
        """
        if self._wiped:
            raise ClosedError(f"key {self._id} was wiped; load it again")
        return memoryview(self._secret).toreadonly()

    def wipe(self) -> None:
        """Overwrite the secret with zeros. The key cannot be used from then on; its id stays."""
        self._wiped = True
        self._secret[:] = bytes(len(self._secret))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key stays in its process and cannot be pickled or copied; save it with key.save(path) and pass the "
            f"path where it is needed, as keys=path or in {KEY_FILE_VARIABLE}"
        )

    def __repr__(self) -> str:
        return f"<Key {self.bits}-bit id={self._id}{' wiped' if self._wiped else ''}>"


@public
class KeyRing:
    """An ordered collection of keys, by the ids that sealed tensors name. The first key seals.

    A subclass may fetch keys on demand, such as from a key broker, with its own ``__getitem__`` that takes an id and
    returns a `Key`. ``keys=`` uses such a ring directly, without a copy. Pass it alone: from a ring among other keys,
    only the keys that it holds are taken.

    Parameters
    ----------
    keys : KeySource
        A key, the path of a key file, a ring, or any iterable of these. Duplicates are dropped.

    Raises
    ------
    FormatError, KeyPermissionError, OSError
        If a key file cannot be used, as `Key.load` says.
    TypeError
        If `keys` contains anything else.

    Examples
    --------
    >>> import fastrack
    >>> first, second = fastrack.Key.generate(), fastrack.Key.generate(bits=128)
    >>> ring = fastrack.KeyRing([first, second])
    >>> ring[second.id] == second
    True
    >>> ring.first == first
    True
    >>> len(ring)
    2
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: KeySource = ()) -> None:
        self._keys: dict[str, Key] = {}
        for key in _flatten(keys):
            known = self._keys.get(key.id)
            if known is None or known.is_wiped:
                self._keys[key.id] = key

    @classmethod
    def resolve(cls, keys: KeySource | None = None) -> KeyRing:
        """Return the ring of a ``keys=`` argument, or that of the key file that ``FASTRACK_KEY_FILE`` names.

        Raises
        ------
        UnknownKeyError
            If neither is given.
        FormatError, KeyPermissionError, OSError, TypeError
            As `KeyRing` does.
        """
        if isinstance(keys, KeyRing):
            return keys
        if keys is not None:
            return cls(keys)
        path = os.environ.get(KEY_FILE_VARIABLE)
        if not path:
            raise UnknownKeyError(
                f"no key was given: pass keys= (a Key or the path of a key file), or set {KEY_FILE_VARIABLE}"
            )
        try:
            return cls(path)
        except Exception as error:
            error.add_note(f"it came from {KEY_FILE_VARIABLE}")
            raise

    @property
    def first(self) -> Key:
        """The key that seals.

        Raises
        ------
        UnknownKeyError
            If the ring is empty.
        """
        for key in self:
            return key
        raise UnknownKeyError("expected a key to seal with, got an empty key ring")

    def __getitem__(self, key_id: str) -> Key:
        try:
            return self._keys[key_id]
        except KeyError:
            pass
        given = ", ".join(self._keys) or "none"
        raise UnknownKeyError(f"key {key_id} is needed but was not given (given: {given}); add it to keys=")

    def __contains__(self, key: object) -> bool:
        """Return whether the ring holds this key, or a key with this id."""
        if isinstance(key, Key):
            return self._keys.get(key.id) == key
        return key in self._keys

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<KeyRing {', '.join(self._keys) or 'empty'}>"


_NOT_A_PATH = (
    "reading a key failed: expected the path of a key file, got what looks like a key itself, which is not repeated "
    "here. Put the key into a file with Key.save or `fastrack keygen`, and pass the path of that file"
)


def looks_secret(path: str | os.PathLike[str]) -> bool:
    """Return whether a path has the form of a key and names no file."""
    text = os.fsdecode(path)
    return _LOOKS_SECRET.fullmatch(text.strip(" \t\r\n'\"")) is not None and not os.path.lexists(text)


def _derive_id(secret: bytearray) -> str:
    # HKDF-Expand (RFC 5869, section 2.3) with a label that no message key uses, so that an id is independent of them.
    # The size is part of the label since HMAC pads a short key with zeros.
    label = _ID_LABEL + bytes([len(secret)])
    return HKDFExpand(SHA512(), _ID_SIZE, label).derive(secret).hex()


def _flatten(keys: object) -> Iterator[Key]:
    if isinstance(keys, Key):
        yield keys
    elif isinstance(keys, (str, os.PathLike)):
        if not os.fspath(keys):
            raise TypeError(
                "keys= takes the path of a key file, got an empty string; omit it to use the path in "
                f"{KEY_FILE_VARIABLE}"
            )
        yield Key.load(keys)
    elif isinstance(keys, Mapping):
        raise TypeError("keys= takes keys, got a mapping; pass its values")
    elif isinstance(keys, (bytes, bytearray, memoryview)):
        raise TypeError("keys= takes no bytes: Key.from_bytes() makes a key of them")
    elif isinstance(keys, Iterable):
        for key in keys:
            yield from _flatten(key)
    else:
        raise TypeError(
            f"keys= takes a Key, the path of a key file, or an iterable of these, got {type(keys).__name__}"
        )


def _refuse_if_shared(file: io.FileIO, path: Path) -> None:
    status = os.fstat(file.fileno())
    mode = status.st_mode
    if not is_trusted_owner(status):
        raise KeyPermissionError(
            f"{path} belongs to another user: expected an owner with uid {os.geteuid()} or 0, got {status.st_uid}. "
            "That user may know the key; generate another one, or copy the file"
        )
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyPermissionError(
            f"{path} may be used by others on this machine (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        )


def _read_into(file: io.FileIO, buffer: bytearray) -> int:
    size = 0
    with memoryview(buffer) as view:
        while size < len(buffer) and (count := file.readinto(view[size:])):
            size += count
    return size
