"""Generate keys, and store them in key files.

A key file has two lines of ASCII. It is read only if it has exactly this form (the final newline is optional), the id
matches the key, and group and others have only the rights that ``FASTRACK_KEY_MODE`` allows::

    # fastrack key, 256 bits, id 3f0c...      (32 hexadecimal digits)
    fastrack-key-1:9d41...                    (64 of them; 32 for a 128-bit key)
"""

from __future__ import annotations

import errno
import hmac
import io
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, Self

from cryptography.hazmat.primitives.hashes import SHA512
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from fastrack._crypto.message_keys import MessageKeyCache
from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._util.atomic import is_trusted_owner
from fastrack._util.key_text import KeyText
from fastrack._util.locations import require_path
from fastrack._util.public import public
from fastrack._util.regular_file import open_pipe_or_regular, open_regular
from fastrack._util.rights import new_own_file, require_own
from fastrack._util.shown import shown
from fastrack.errors import ClosedError, FormatError, GrantError, KeyPermissionError

KEY_MODE_VARIABLE = "FASTRACK_KEY_MODE"
"""The environment variable with the allowed mode of key files, for platforms that set it: 0440 or 0444."""

Bytes = bytes | bytearray | memoryview

_SIZES = (16, 32)  # bytes of a key
_ID_SIZE = 16
_ID_LABEL = b"fastrack/key-id@1\0"
_FILE = KeyText(
    "key file",
    rb"# fastrack key, (?:(128)|256) bits, id (?P<id>[0-9a-f]{32})\n"
    rb"fastrack-key-1:(?P<secret>[0-9a-f]{32}(?(1)|[0-9a-f]{32}))\n?",
    ("fastrack key,", "fastrack-key-1:"),
)
# Of a file that Windows changed too: `Key.load` says so.
_ID_PATTERN = re.compile(rb"(?:\xef\xbb\xbf)?# fastrack key, (?:128|256) bits, id (?P<id>[0-9a-f]{32})\r?\n")
_ID_LINE_SIZE = len("# fastrack key, 256 bits, id \r\n") + 32 + 3
_FILE_LIMIT = 256
_MODES = {
    "": 0,
    "0400": 0,
    "0600": 0,
    "0440": stat.S_IRGRP,
    "0640": stat.S_IRGRP,
    "0444": stat.S_IRGRP | stat.S_IROTH,
    "0644": stat.S_IRGRP | stat.S_IROTH,
}
_HEX_DIGITS = b"0123456789abcdef"
_HEX_VALUES = {digit: value for value, digit in enumerate(_HEX_DIGITS)}


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
        If the secret has another length, or is all zeros, like an overwritten key.
    TypeError
        If the secret is text or a path.

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

    __slots__ = ("_bound", "_files", "_id", "_least_version", "_lineage", "_message_keys", "_secret", "_wiped")

    def __init__(self, secret: Bytes) -> None:
        if isinstance(secret, (str, os.PathLike)):
            raise TypeError("expected the bytes of a secret, got text or a path; Key.load reads a key file")
        view = memoryview(secret).cast("B")
        self._wiped = False
        self._files: frozenset[str] | None = None
        self._lineage: str | None = None
        self._least_version = 0
        self._bound: tuple[Sequence[str] | None] | None = None  # to these GPUs, or with None to all confidential ones
        self._id = ""
        self._message_keys: MessageKeyCache | None = None
        self._secret = SecretBytes(len(view))
        if len(view) not in _SIZES:
            raise FormatError(f"expected a key of 16 or 32 bytes, got {len(view)}; Key.generate() makes one")
        if hmac.compare_digest(view, self._secret):
            raise FormatError(
                "making a key failed: expected random bytes, got zeros only, as a wiped key leaves; load it again"
            )
        # Through a view: assigning to a slice of a bytearray makes a copy that cannot be wiped.
        memoryview(self._secret)[:] = view
        self._id = derive_id(self._secret)

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
            If `bits` is neither.
        """
        if bits not in {8 * size for size in _SIZES}:
            raise ValueError(f"expected a key of 256 or 128 bits, got {shown(bits)}")
        return cls(os.urandom(bits // 8))

    @classmethod
    def from_bytes(cls, secret: Bytes) -> Self:
        """Make a key from bytes of another source, such as a key broker: 16 or 32 bytes, copied.

        Raise FormatError if the secret has another length, or is all zeros.
        """
        return cls(secret)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load a key file that `save` or ``fastrack keygen`` wrote.

        Raise FormatError if the file is not an intact key file, or if `path` looks like a key itself; the message does
        not repeat it. Raise KeyPermissionError if group or others have any permission on a key file, or if another user
        than root owns it or may replace it, for example by write access to a folder above it; systems without such
        permissions check none. Raise ValueError if `path` is a URL. Raise OSError if the file cannot be read.
        """
        try:
            with read_private(path, _FILE_LIMIT) as content:
                return cls._parse(content, str(path))
        except KeyPermissionError:
            if Path(path).is_file() and key_file_id(path) is None:  # with any mode it is no key file
                with open_regular(path) as file, _wiped_content(file, _FILE_LIMIT) as content:
                    cls._parse(content, str(path))
            raise

    @classmethod
    def read(cls, descriptor: int) -> Self:
        """Read the text of a key file from a file descriptor, such as a pipe, up to its end. The descriptor stays open.

        Parameters
        ----------
        descriptor : int
            The number of a descriptor that is open for reading; 0 is standard input.

        Raises
        ------
        FormatError
            If its content is not an intact key file.
        OSError
            If it cannot be read.
        """
        name = f"file descriptor {descriptor}" if descriptor else "standard input"
        if descriptor >= 1 << 31:  # no valid descriptor; Python would raise an OverflowError
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), str(descriptor))
        try:
            file = io.FileIO(descriptor, closefd=False)
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from None
        with file, _wiped_content(file, _FILE_LIMIT) as content:
            return cls._parse(content, name)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Make a key from the text of a key file, such as a secret in an environment variable.

        Python's text cannot be overwritten: prefer `load` and `read`, which leave no copy. Raise FormatError if the
        text is no intact key file. The message does not repeat it.
        """
        content = bytearray(text.encode())
        try:
            return cls._parse(content, "the text")
        finally:
            content[:] = bytes(len(content))

    @classmethod
    def _parse(cls, buffer: bytearray, name: str) -> Self:
        match = _FILE.match(buffer, name, f"{_contents_hint(buffer)}; `fastrack keygen NEW.key` makes one")
        # Digit by digit, by index: a group of the match would be a copy that cannot be wiped.
        start, end = match.span("secret")
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
            raise FormatError(f"{name} was damaged: its key does not have its id; restore it from a copy")
        return key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new key file that only its owner may read (mode 0600), atomically. No file is ever replaced.

        Raise FileExistsError if `path` exists, and keep that file. Raise GrantError if the key is restricted to some
        files, which a key file cannot say. Raise ClosedError if the key has been wiped. Raise KeyPermissionError if
        others may replace it, as `load` would. Raise OSError if it cannot be written.
        """
        self.require_unrestricted()
        text = self._format()
        try:
            with new_own_file(path) as file:
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
    def files(self) -> frozenset[str] | None:
        """The ids of the sealed files that the key may open under its grant; None if it is not restricted."""
        return self._files

    @property
    def lineage(self) -> str | None:
        """The lineage of the set whose files the key may open under its grant; None if it is not restricted."""
        return self._lineage

    @property
    def least_version(self) -> int:
        """The least version of a set whose files the key may open under its grant; 0 if it is not restricted."""
        return self._least_version

    @property
    def is_restricted(self) -> bool:
        """True if a grant restricts the files that the key may open, or the GPUs."""
        return (self._bound, self._files, self._lineage, self._least_version) != (None, None, None, 0)

    def restrict(self, files: Iterable[str] | None = None, lineage: str | None = None, least_version: int = 0) -> None:
        """Restrict the key to files with these ids or of a set, permanently. Not public: for grants."""
        if lineage is not None:
            files = files if self._lineage in {None, lineage} else ()  # two lineages share no file
            self._lineage = lineage
        if files is not None:
            files = frozenset(files)
            self._files = files if self._files is None else self._files & files
        self._least_version = max(least_version, self._least_version)

    def require_unrestricted(self) -> None:
        """Raise GrantError if the key is restricted, since an export would lose the restriction. Not public."""
        if self.is_restricted:
            raise GrantError(
                f"storing key {self.id} failed: expected one for all files and GPUs, got one restricted to some. A key "
                "file cannot say so: keep the grant itself, or use the key in the program that was given it"
            )

    @property
    def is_wiped(self) -> bool:
        """True after the secret was overwritten."""
        return self._wiped

    def material(self) -> memoryview:
        """Return a read-only view of the secret. Not public: for key derivation inside the package.

        The view keeps the secret alive, but `wipe` still overwrites it. Raise ClosedError after `wipe`.
        """
        if self._wiped:
            raise ClosedError(f"key {self._id} was wiped; load it again")
        return memoryview(self._secret).toreadonly()

    @property
    def message_keys(self) -> MessageKeyCache:
        """The cache of message keys derived from this key. Not public."""
        if self._message_keys is None:
            self._message_keys = MessageKeyCache()
            if self._wiped:
                self._message_keys.wipe()
        return self._message_keys

    def wipe(self) -> None:
        """Overwrite the secret with zeros. The key cannot be used afterwards, but keeps its id."""
        self._wiped = True
        self._secret.wipe()
        if self._message_keys is not None:
            self._message_keys.wipe()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Key):
            return NotImplemented
        return hmac.compare_digest(self._secret, other._secret) and self._id == other._id  # wiped keys are alike

    def __hash__(self) -> int:
        return hash(self._id)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a key stays in its process and cannot be pickled or copied; save it with key.save(path) and pass the "
            "path where it is needed, as keys=path or in FASTRACK_KEY_FILE"
        )

    def __repr__(self) -> str:
        return f"<Key {self.bits}-bit id={self._id}{' wiped' if self._wiped else ''}>"


def derive_id(secret: bytearray) -> str:
    """Return the public id of a secret."""
    # HKDF-Expand (RFC 5869, section 2.3) with a label that no message key uses, so that an id is independent of them.
    # The size is part of the label since HMAC pads a short key with zeros.
    return HKDFExpand(SHA512(), _ID_SIZE, _ID_LABEL + bytes([len(secret)])).derive(secret).hex()


@contextmanager
def read_private(path: str | os.PathLike[str], limit: int) -> Iterator[bytearray]:
    """Yield up to `limit` + 1 bytes of a file with a secret, and overwrite them when the block ends.

    Raise FormatError if the path looks like a key itself. Raise KeyPermissionError if others own the file, or may use
    or replace it. Raise OSError if the file cannot be read.
    """
    path = Path(require_path(path))
    with open_pipe_or_regular(path) as file:
        _refuse_if_shared(file, path)
        with _wiped_content(file, limit) as content:
            yield content


@contextmanager
def _wiped_content(file: io.FileIO, limit: int) -> Iterator[bytearray]:
    buffer, size = bytearray(limit + 1), 0  # at once: one that grows leaves copies of the secret behind
    with memoryview(buffer) as view:
        while size < len(buffer) and (count := file.readinto(view[size:])):
            size += count
    content = bytearray(size)
    memoryview(content)[:] = memoryview(buffer)[:size]
    try:
        buffer[:] = bytes(len(buffer))
        yield content
    finally:
        content[:] = bytes(len(content))


def _refuse_if_shared(file: io.FileIO, path: Path) -> None:
    status = os.fstat(file.fileno())
    mode = status.st_mode
    is_shared = mode & (stat.S_IRWXG | stat.S_IRWXO) & ~_allowed_mode()
    if os.name == "posix" and is_shared and is_trusted_owner(status):
        advice = (
            "its name is that of a public key. Name the secret file, without .pub"
            if path.suffix == ".pub"
            else f"chmod 600 {path}. Where a container platform sets the mode, allow reading with "
            f"{KEY_MODE_VARIABLE}=0440 or 0444"
        )
        raise KeyPermissionError(
            f"{path} may be used by others on this machine (mode {stat.S_IMODE(mode):04o}): {advice}"
        )
    require_own(path, status)


def _contents_hint(buffer: bytearray) -> str:
    """Return the part of a message that names another kind of key in a file."""
    if len(buffer) in {16, 32}:
        return ", though it has as many bytes as a key, which Key.from_bytes() takes"
    kinds = ((b"fastrack-public-1:", "a public key"), (b"# fastrack secret key, ", "the secret key of a key pair"))
    return "".join(f": it holds {kind}" for beginning, kind in kinds if buffer.startswith(beginning))


def _allowed_mode() -> int:
    """Return the permissions that key files may grant to group and others."""
    text = os.environ.get(KEY_MODE_VARIABLE, "")
    if text not in _MODES:
        modes = ", ".join(filter(None, _MODES))
        raise FormatError(
            f"{KEY_MODE_VARIABLE} is wrong: expected one of {modes}, got another text; correct or unset it"
        )
    return _MODES[text]


def key_file_id(path: str | os.PathLike[str]) -> str | None:
    """Return the id that the first line of a key file names, or None if the file is not a key file."""
    try:
        with open_regular(path) as file:
            match = _ID_PATTERN.match(file.read(_ID_LINE_SIZE))
    except OSError:
        return None
    return None if match is None else match["id"].decode()
