"""Keys: how they are made, kept in files, and found again by what was sealed under them.

A key file holds two lines of ASCII, and is read only if it says exactly this, the id fits the key, and no one but its
owner may read it (the final newline may be missing)::

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
"""What a ``key=`` takes: a key, or the path of a key file."""
KeySource: TypeAlias = Union["Key", "KeyRing", str, os.PathLike[str], "Iterable[KeySource]"]
"""What a ``keys=`` takes: a key, the path of a key file, a ring, or any iterable of these."""

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
    """Hold the bytes of a key, and overwrite them at the end of their life.

    Every view of them keeps them alive, so a view never outlives what it shows. The type `bytes` is bound beforehand,
    since the interpreter may have taken down all names when the end comes.
    """

    def __del__(self, zeros: type[bytes] = bytes) -> None:
        self[:] = zeros(self.__len__())


@public
class Key:
    """A secret that seals tensors and unseals them. Made by `generate`, `load` or `from_bytes`.

    It stays in this process: it can be neither pickled nor copied. `wipe` overwrites it, and so does its end of life.

    Parameters
    ----------
    secret : bytes-like
        16 bytes for AES-128, 32 bytes for AES-256. Copied; overwriting the original is up to its owner.

    Raises
    ------
    FormatError
        If it has another length, or is zeros only, as what is left of an overwritten key is.
    """

    __slots__ = ("_id", "_secret", "_wiped")

    def __init__(self, secret: Bytes) -> None:
        if isinstance(secret, (str, os.PathLike)):
            raise TypeError("Key takes the bytes of a secret, got text or a path; Key.load reads a key file")
        view = memoryview(secret).cast("B")
        self._wiped = False
        self._id = ""
        self._secret = _Secret(len(view))
        if len(view) not in _SIZES:
            message = f"a key has 16 or 32 bytes, not {len(view)}; Key.generate() makes one"
            raise FormatError(message)
        if hmac.compare_digest(view, self._secret):
            message = "a key was refused: expected random bytes, got zeros only, as a wiped key leaves; load it again"
            raise FormatError(message)
        # Through a view: a slice assigned to a bytearray itself goes through a copy that nobody wipes.
        memoryview(self._secret)[:] = view
        self._id = _derive_id(self._secret)

    @classmethod
    def generate(cls, bits: int = 256) -> Self:
        """Make a new key from the operating system's random numbers.

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
            message = f"a key has 256 or 128 bits, not {bits!r}"
            raise ValueError(message)
        return cls(os.urandom(bits // 8))

    @classmethod
    def from_bytes(cls, secret: Bytes) -> Self:
        """Take a key that came from elsewhere, say from a key broker: 16 or 32 bytes, copied.

        Raises
        ------
        FormatError
            If it has another length, or is zeros only.
        """
        return cls(secret)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a key file that `save` or ``fastrack keygen`` wrote.

        Raises
        ------
        FormatError
            If it is anything but an intact key file, or if `path` looks like a key itself; it is not repeated then.
        KeyPermissionError
            If its group or others have any right to it, or it belongs to another user than this one or root. (Not
            checked where the system has no such rights.)
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
        # By position, digit by digit: a group taken from the match would be a copy that cannot be wiped.
        start, end = match.span("secret") if match else (0, 0)
        if match is None or int(match["bits"]) != 4 * (end - start):
            message = f"{path} is not a fastrack key file; `fastrack keygen {path}.new` makes one"
            raise FormatError(message)
        secret = bytearray((end - start) // 2)
        try:
            for i in range(len(secret)):
                high, low = buffer[start + 2 * i], buffer[start + 2 * i + 1]
                secret[i] = _HEX_VALUES[high] << 4 | _HEX_VALUES[low]
            key = cls(secret)
        finally:
            secret[:] = bytes(len(secret))
        if key.id != match["id"].decode():
            key.wipe()
            message = f"{path} was damaged: the key in it does not have the id in it; restore it from a copy"
            raise FormatError(message)
        return key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a key file that only its owner may read (mode 0600), whole or not at all, and never over another file.

        Raises
        ------
        FileExistsError
            If there is something at that path already. It is left as it was.
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
        for i, byte in enumerate(secret):
            text[len(head) + 2 * i] = _HEX_DIGITS[byte >> 4]
            text[len(head) + 2 * i + 1] = _HEX_DIGITS[byte & 15]
        text[-1:] = b"\n"
        return text

    @property
    def id(self) -> str:
        """What names the key in public: 32 hexadecimal digits that tell nothing about the secret."""
        return self._id

    @property
    def bits(self) -> int:
        """The size of the AES key: 128 or 256."""
        return 8 * len(self._secret)

    @property
    def is_wiped(self) -> bool:
        """Whether the secret was overwritten."""
        return self._wiped

    @classmethod
    def of(cls, key: Key | str | os.PathLike[str]) -> Key:
        """Make a key of a ``key=`` argument: itself, or the one in the key file of that path.

        Raises
        ------
        TypeError
            If it is neither.
        FormatError, KeyPermissionError, OSError
            As for `load`.
        """
        if isinstance(key, Key):
            return key
        if isinstance(key, (str, os.PathLike)):
            return cls.load(key)
        raise TypeError(f"key= takes a Key or the path of a key file, not {type(key).__name__}")

    def material(self) -> memoryview:
        """View the secret itself, in place and read-only. For key derivation inside the package; not public.

        The view keeps the secret alive; `wipe` overwrites it all the same.

        Raises
        ------
        ClosedError
            If the key has been wiped.
        """
        if self._wiped:
            message = f"key {self._id} was wiped; load it again"
            raise ClosedError(message)
        return memoryview(self._secret).toreadonly()

    def wipe(self) -> None:
        """Overwrite the secret with zeros. The key can do nothing from then on; its id stays."""
        self._wiped = True
        self._secret[:] = bytes(len(self._secret))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __reduce__(self) -> NoReturn:
        message = (
            "a key stays in its process and cannot be pickled or copied; save it with key.save(path) and give the "
            f"path where it is needed, as keys=path or in {KEY_FILE_VARIABLE}"
        )
        raise TypeError(message)

    def __repr__(self) -> str:
        return f"<Key {self.bits}-bit id={self._id}{' wiped' if self._wiped else ''}>"


@public
class KeyRing:
    """Keys, found by the id that a sealed tensor names. Ordered; the first is the one that seals.

    A subclass may fetch keys when they are needed, say from a key broker, in a ``__getitem__`` of its own that takes an
    id and returns the `Key`. Wherever ``keys=`` takes a ring, this one is asked, and not copied. Give it
    alone: of a ring among other keys only those that it holds are taken.

    Parameters
    ----------
    keys : KeySource
        A key, the path of a key file, a ring, or any iterable of these. A key that comes twice is kept once.

    Raises
    ------
    FormatError, KeyPermissionError, OSError
        If a key file cannot be used, as `Key.load` says.
    TypeError
        If it holds anything else.
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
        """Make the ring for a ``keys=`` argument: what was given, or else the key file that the environment names.

        Raises
        ------
        UnknownKeyError
            If neither says which key to use.
        FormatError, KeyPermissionError, OSError, TypeError
            As for the ring itself.
        """
        if isinstance(keys, KeyRing):
            return keys
        if keys is not None:
            return cls(keys)
        path = os.environ.get(KEY_FILE_VARIABLE)
        if not path:
            message = f"no key was given: pass keys= (a Key or the path of a key file), or set {KEY_FILE_VARIABLE}"
            raise UnknownKeyError(message)
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
        message = "this key ring is empty; give it a key to seal with"
        raise UnknownKeyError(message)

    def __getitem__(self, key_id: str) -> Key:
        try:
            return self._keys[key_id]
        except KeyError:
            pass
        held = ", ".join(self._keys) or "none"
        message = f"key {key_id} is needed but was not given (given: {held}); add it to keys="
        raise UnknownKeyError(message)

    def __contains__(self, key: object) -> bool:
        """Whether the ring holds this key, or one with this id."""
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
    "here. Put the key into a file with Key.save or `fastrack keygen`, and give the path of that"
)


def looks_secret(path: str | os.PathLike[str]) -> bool:
    """Return whether text that was given as a path is a key rather than the path of any file."""
    text = os.fsdecode(path)
    return _LOOKS_SECRET.fullmatch(text.strip(" \t\r\n'\"")) is not None and not os.path.lexists(text)


def _derive_id(secret: bytearray) -> str:
    # HKDF-Expand (RFC 5869, section 2.3) under a label of our own, so that an id is independent of every message key.
    # The size is part of the label since HMAC pads a short key with zeros.
    label = _ID_LABEL + bytes([len(secret)])
    return HKDFExpand(SHA512(), _ID_SIZE, label).derive(secret).hex()


def _flatten(keys: object) -> Iterator[Key]:
    if isinstance(keys, Key):
        yield keys
    elif isinstance(keys, (str, os.PathLike)):
        if not os.fspath(keys):
            raise TypeError(
                "keys= takes the path of a key file, got an empty text; leave it out to look for the "
                f"path in {KEY_FILE_VARIABLE}"
            )
        yield Key.load(keys)
    elif isinstance(keys, Mapping):
        raise TypeError("keys= takes keys, not a mapping of them; give its values")
    elif isinstance(keys, (bytes, bytearray, memoryview)):
        message = "keys= takes no bytes: Key.from_bytes() makes a key of them"
        raise TypeError(message)
    elif isinstance(keys, Iterable):
        for key in keys:
            yield from _flatten(key)
    else:
        message = f"keys= takes a Key, the path of a key file, or an iterable of these, not {type(keys).__name__}"
        raise TypeError(message)


def _refuse_if_shared(file: io.FileIO, path: Path) -> None:
    status = os.fstat(file.fileno())
    mode = status.st_mode
    if not is_trusted_owner(status):
        message = (
            f"{path} belongs to another user: expected an owner with uid {os.geteuid()} or 0, got {status.st_uid}. "
            "That user may know the key in it; make one of your own, or copy the file"
        )
        raise KeyPermissionError(message)
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        message = f"{path} may be used by others on this machine (mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        raise KeyPermissionError(message)


def _read_into(file: io.FileIO, buffer: bytearray) -> int:
    size = 0
    with memoryview(buffer) as view:
        while size < len(buffer) and (count := file.readinto(view[size:])):
            size += count
    return size
