"""Wrapped key files, and the base class of the wrappers of their keys. ``docs/format.md`` has the format."""

from __future__ import annotations

import hashlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from fastrack._documents.canonical import parsing
from fastrack._documents.fields import (
    BITS,
    ID,
    Fields,
    Form,
    binary,
    checked,
    mapping,
    read_members,
    text,
    write_members,
)
from fastrack._keys.keys import Key
from fastrack._util.registry import WRAPPERS, find
from fastrack._util.regular_file import open_regular
from fastrack._util.rights import new_own_file, open_own
from fastrack.errors import FormatError, ProviderError, UnknownKeyError

_LIMIT = 65536  # bytes of a file
_NAME = text(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", "a name of up to 64 letters, digits, _ and -")
_VALUE = text(r"[ -~]{1,2048}", "up to 2048 printable characters of ASCII")
_DIGEST_SIZE = 16
_digest_key = os.urandom(_DIGEST_SIZE)
# Shared with forked processes, and made here, before a ring is: a place for each first byte needs no lock.
_refused = mmap.mmap(-1, 256 * _DIGEST_SIZE)


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """A key that is encrypted by a token, a TPM or a vault: the content of a wrapped key file.

    It is no secret. It is a key provider with one key, which the wrapper decrypts again at each request; a
    `fastrack.KeyRing` caches the key for some minutes.

    Parameters
    ----------
    provider : str
        The kind of wrapper that decrypts: "passphrase", "pkcs11", "tpm", "vault-transit", "aws-kms", "gcp-kms" or
        "azure-keyvault".
    algorithm : str
        The algorithm that encrypts the key.
    key_id : str
        The id of the key.
    bits : int
        The size of the key: 128 or 256.
    ciphertext : bytes
        The encrypted key.
    parameters : mapping
        The names of the key that decrypts. Secrets, addresses and libraries are in the environment instead.
    wrapper : KeyWrapper, optional
        The object that decrypts. By default made from `provider` and `parameters`. Not in the file.

    Raises
    ------
    FormatError
        If a value is out of range.

    Examples
    --------
    >>> from fastrack.providers import WrappedKey
    >>> wrapped = WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", 32 * "0", 256, b"...", {"key": "alias/owner"})
    >>> WrappedKey.from_bytes(wrapped.to_bytes()) == wrapped
    True
    """

    provider: str
    algorithm: str
    key_id: str
    bits: int
    ciphertext: bytes
    parameters: Mapping[str, str] = field(default_factory=dict, hash=False)
    wrapper: KeyWrapper | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        try:
            read_members(write_members(self, _FIELDS), _FIELDS)
        except (TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"making a wrapped key failed: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, wrapper: KeyWrapper | None = None) -> Self:
        """Read a wrapped key file. Nothing is decrypted yet.

        Parameters
        ----------
        path : path-like
            The file.
        wrapper : KeyWrapper, optional
            The object that decrypts. By default made from the file and the environment.

        Raises
        ------
        FormatError
            If the file is not a wrapped key file.
        KeyPermissionError
            If another user owns the file, or may write to or replace it, and so choose the key that seals.
        ValueError
            If the path is a URL.
        OSError
            If it cannot be read.
        """
        with open_own(path) as file:
            content = file.read(_LIMIT + 1)
        return cls.from_bytes(content, source=str(path), wrapper=wrapper)

    @classmethod
    def from_bytes(cls, content: bytes, *, source: str = "the text", wrapper: KeyWrapper | None = None) -> Self:
        """Make a wrapped key from the content of a file, which must be canonical.

        Raise FormatError if `content` is no wrapped key file.
        """
        with parsing(f"{source} is not a wrapped key file", "`fastrack keygen NEW.key.wrapped --wrap URI` makes one"):
            return cls(**_FORM.parse(content), wrapper=wrapper)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        return _FORM.write(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file, atomically. No file is ever replaced.

        Raise OSError if the file exists or cannot be written.
        """
        mode = 0o600 if self.provider == "passphrase" else 0o644  # a passphrase can be guessed by who has the file
        with new_own_file(path, mode=mode) as file:
            file.write(self.to_bytes())

    def unwrap(self, wrapper: KeyWrapper | None = None) -> Key:
        """Return the key, decrypted by the token, TPM or vault.

        Parameters
        ----------
        wrapper : KeyWrapper, optional
            The object that decrypts. By default the wrapper of `load`, or one made from file and environment.

        Raises
        ------
        ProviderError
            If the token, TPM or vault is absent, not configured, or does not decrypt.
        FormatError
            If the parameters of the file are wrong.
        """
        return (wrapper or self.wrapper or _wrapper_class(self.provider).from_wrapped(self)).unwrap(self)

    def get_key(self, key_id: str) -> Key:
        """Return the key if it has this id.

        Raise UnknownKeyError if it has another id. Raise ProviderError or FormatError from `unwrap`.
        """
        if key_id != self.key_id:
            raise UnknownKeyError(
                f"key {key_id} is needed but was not given (given: {self.key_id}, wrapped); add it to keys="
            )
        return self.unwrap()

    def get_sealing_key(self) -> Key:
        """Return the decrypted key."""
        return self.unwrap()


class KeyWrapper(ABC):
    """The base class of `Passphrase`, `Pkcs11`, `Tpm`, `VaultTransit`, `AwsKms`, `GcpKms` and `AzureKeyVault`."""

    provider: ClassVar[str]
    """The name of the provider in wrapped key files, which is also the scheme of its URIs."""

    def wrap(self, key: Key) -> WrappedKey:
        """Encrypt a key by the token, TPM or vault.

        Parameters
        ----------
        key : Key
            The key to encrypt.

        Raises
        ------
        ProviderError
            If the token, TPM or vault is absent, not configured, or does not encrypt.
        GrantError
            If the key is restricted to some files, which a wrapped key cannot express.
        ClosedError
            If the key has been wiped.
        """
        key.require_unrestricted()
        algorithm, ciphertext, parameters = self._encrypt(key.material(), key.id)
        return WrappedKey(self.provider, algorithm, key.id, key.bits, ciphertext, parameters)

    def unwrap(self, wrapped: WrappedKey) -> Key:
        """Decrypt a wrapped key.

        Parameters
        ----------
        wrapped : WrappedKey
            The key that `wrap` encrypted.

        Raises
        ------
        ProviderError
            If another provider wrapped the key, or it does not decrypt, or its id is not the id in the file.
        """
        if wrapped.provider != self.provider:
            raise ProviderError(
                f"unwrapping key {wrapped.key_id} failed: expected a file of {self.provider}, got one of "
                f"{wrapped.provider}. Pass the provider that wrapped it"
            )
        secret = self._decrypt(wrapped)
        try:
            key = Key(secret)
        except FormatError as error:
            raise ProviderError(f"unwrapping key {wrapped.key_id} failed: {error}") from None
        finally:
            if isinstance(secret, bytearray):
                secret[:] = bytes(len(secret))
        if key.id != wrapped.key_id or key.bits != wrapped.bits:
            key.wipe()
            raise ProviderError(
                f"unwrapping a key failed: expected key {wrapped.key_id} of {wrapped.bits} bits, got key {key.id}. "
                "The file was altered; restore it from a copy"
            )
        return key

    def _failure(self, reason: str, refusal: bool = False) -> ProviderError:
        error = ProviderError(f"asking {self!r} failed: {reason}")
        error.is_refusal = refusal
        return error

    def _was_refused(self, *parts: str) -> bool:
        """Return whether this process or a fork noted these parts: who was asked, and with what credential."""
        place, digest = self._find_refusal(parts)
        return _refused[place] == digest

    def _note_refusal(self, *parts: str) -> None:
        """Note that a credential was refused, as a keyed digest. Of two with one place the later one stays."""
        place, digest = self._find_refusal(parts)
        _refused[place] = digest

    def _find_refusal(self, parts: tuple[str, ...]) -> tuple[slice, bytes]:
        text = "\0".join((self.provider, *parts)).encode(errors="surrogateescape")
        digest = hashlib.blake2b(text, key=_digest_key, digest_size=_DIGEST_SIZE).digest()
        return slice(_DIGEST_SIZE * digest[0], _DIGEST_SIZE * (digest[0] + 1)), digest

    @classmethod
    @abstractmethod
    def from_uri(cls, uri: str) -> Self:
        """Make a wrapper from a URI."""

    @classmethod
    @abstractmethod
    def from_wrapped(cls, wrapped: WrappedKey) -> Self:
        """Make a wrapper from the parameters of a file, which are not trusted, and the environment."""

    @abstractmethod
    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        """Return the algorithm, the ciphertext and the parameters for the file."""

    @abstractmethod
    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        """Return the secret. The caller wipes a bytearray."""


def open_wrapper(uri: str) -> KeyWrapper:
    """Return the wrapper that a URI names, such as ``aws-kms:alias/owner``.

    Parameters
    ----------
    uri : str
        The URI. Its scheme is the name of the provider.

    Raises
    ------
    ValueError
        If `uri` is no such URI. The message does not repeat it, since it might contain a PIN by mistake.

    Examples
    --------
    >>> from fastrack.providers import open_wrapper
    >>> open_wrapper("tpm:sha256:0,7")
    <Tpm sha256:0,7>
    """
    scheme, colon, _ = uri.partition(":")
    if not colon or scheme not in WRAPPERS:
        schemes = ", ".join(WRAPPERS)
        raise ValueError(f"expected a URI that begins with one of {schemes} and a colon, got another text")
    return _wrapper_class(scheme).from_uri(uri)


_FIELDS: Fields = {
    "provider": checked(lambda name: isinstance(name, str) and name in WRAPPERS, "a kind of wrapper"),
    "algorithm": _NAME,
    "key": ID.of("key_id"),
    "bits": BITS,
    "ciphertext": binary(8192),
    "parameters": mapping(_NAME, _VALUE, 16),
}
_FORM = Form(_FIELDS, {"version": 1}, _LIMIT, b"\n")


def open_source(text: str) -> WrappedKey:
    """Return the wrapped key of a source of keys ``URI#PATH``: a wrapper, and the file that it unwraps.

    Raise UnknownKeyError without a path. Raise FormatError if the URI is wrong, or the file is no wrapped key file.
    Raise KeyPermissionError, ValueError or OSError from `WrappedKey.load`.
    """
    uri, _, path = text.partition("#")
    try:
        wrapper = open_wrapper(uri)
    except ValueError as error:
        raise FormatError(f"opening a source of keys failed: {error}") from None
    if not path:
        raise UnknownKeyError(
            f"{uri.partition(':')[0]}: expected a URI, # and the path of a wrapped key file, got no path. The URI "
            "names the key that unwraps; `fastrack keygen NEW.key.wrapped --wrap URI` makes a file"
        )
    return WrappedKey.load(Path(path).expanduser(), wrapper=wrapper)


def wrapped_key_id(path: Path) -> str | None:
    """Return the id of the key in a wrapped key file, or None if the file cannot be read as one."""
    try:
        with open_regular(path) as file:
            return WrappedKey.from_bytes(file.read(_LIMIT + 1)).key_id
    except (FormatError, OSError):
        return None


def import_client(module: str, extra: str) -> Any:
    """Import the package of a vendor, or raise ProviderError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ProviderError(
            f"importing {module} failed: {type(error).__name__}. Install it with pip install 'fastrack-io[{extra}]'"
        ) from error


def require_parameters(
    wrapped: WrappedKey, required: frozenset[str], optional: frozenset[str] = frozenset()
) -> Mapping[str, str]:
    """Return the parameters of a file. Raise FormatError unless they have these names."""
    names = set(wrapped.parameters)
    if not required <= names <= required | optional:
        raise FormatError(
            f"the wrapped file of key {wrapped.key_id} is wrong: expected the parameters "
            f"{', '.join(sorted(required | optional)) or 'none'} of {wrapped.provider}, got others; restore it"
        )
    return wrapped.parameters


def require_algorithm(wrapped: WrappedKey, *expected: str) -> str:
    """Return the algorithm of a file. Raise FormatError unless it is in `expected`."""
    if wrapped.algorithm not in expected:
        raise FormatError(
            f"the wrapped file of key {wrapped.key_id} is wrong: expected the algorithm {' or '.join(expected)} of "
            f"{wrapped.provider}, got {wrapped.algorithm}; restore it, or use a later version of fastrack"
        )
    return wrapped.algorithm


def _wrapper_class(provider: str) -> type[KeyWrapper]:
    wrapper_class: type[KeyWrapper] = find(WRAPPERS[provider])
    return wrapper_class
