"""Keys wrapped by the transit engine of HashiCorp Vault or OpenBao."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from fastrack._keys.wrapped import KeyWrapper, WrappedKey, import_client, require_algorithm, require_parameters
from fastrack._util.shown import shown
from fastrack.errors import FormatError, ProviderError

ADDRESS_VARIABLE = "VAULT_ADDR"
_ALGORITHM = "transit"
_MOUNT = r"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"


class VaultTransit(KeyWrapper):
    """The transit engine of a HashiCorp Vault or OpenBao server, by the client hvac.

    The address and the token come from the environment: ``VAULT_ADDR``, ``VAULT_TOKEN`` or ``~/.vault-token``, and
    ``VAULT_CACERT`` and ``VAULT_NAMESPACE`` if need be. Plain HTTP is refused, except on this machine, where proxies of
    the environment are ignored. The token needs the right to update ``MOUNT/encrypt/NAME`` and
    ``MOUNT/decrypt/NAME``.

    Parameters
    ----------
    name : str
        The name of the key in Vault.
    mount : str
        The path of the engine.
    client : hvac.Client, optional
        A client to use. By default one is made when it is first needed.

    Raises
    ------
    ValueError
        If a name has another form.

    Examples
    --------
    >>> from fastrack.providers import VaultTransit
    >>> VaultTransit("owner")
    <VaultTransit transit/owner>
    """

    provider: ClassVar[str] = "vault-transit"

    def __init__(self, name: str, *, mount: str = "transit", client: Any = None) -> None:
        if re.fullmatch(_NAME, name) is None or re.fullmatch(_MOUNT, mount) is None:
            raise ValueError(
                f"expected the path of a mount and the name of a key of Vault's transit engine, got {shown(mount)} and "
                f"{shown(name)}"
            )
        self._name = name
        self._mount = mount
        self._client = client

    @classmethod
    def from_uri(cls, uri: str) -> Self:
        """Make a wrapper from ``vault-transit:MOUNT/NAME`` or ``vault-transit:NAME``."""
        mount, _, name = uri.removeprefix(f"{cls.provider}:").rpartition("/")
        return cls(name, mount=mount or "transit")

    @classmethod
    def from_wrapped(cls, wrapped: WrappedKey) -> Self:
        """Make a wrapper from the parameters of a file and the environment."""
        parameters = require_parameters(wrapped, frozenset({"mount", "name"}))
        try:
            return cls(parameters["name"], mount=parameters["mount"])
        except ValueError as error:
            raise FormatError(f"the wrapped file of key {wrapped.key_id} is wrong: {error}; restore it") from None

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        encrypt = self._get_client().secrets.transit.encrypt_data
        plaintext = base64.b64encode(secret).decode()
        ciphertext = self._ask("ciphertext", encrypt, name=self._name, mount_point=self._mount, plaintext=plaintext)
        if not ciphertext.isascii():
            raise ProviderError(
                f"wrapping key {key_id} by {self!r} failed: expected ASCII as ciphertext, got other text"
            )
        return _ALGORITHM, ciphertext.encode(), {"mount": self._mount, "name": self._name}

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        require_algorithm(wrapped, _ALGORITHM)
        decrypt = self._get_client().secrets.transit.decrypt_data
        ciphertext = wrapped.ciphertext.decode("ascii", "replace")
        text = self._ask("plaintext", decrypt, name=self._name, mount_point=self._mount, ciphertext=ciphertext)
        try:
            return bytearray(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise ProviderError(f"unwrapping by {self!r} failed: expected base64, got other text") from None

    def _ask(self, member: str, function: Callable[..., Any], **arguments: str) -> str:
        hvac_errors = import_client("hvac.exceptions", "vault")
        request_errors = import_client("requests.exceptions", "vault")
        reasons = {
            hvac_errors.Forbidden: "the token is wrong, has expired, or lacks the right to update this path",
            hvac_errors.InvalidPath: "there is no such mount or key; check them, and VAULT_NAMESPACE",
            hvac_errors.InvalidRequest: "the key is missing, or did not encrypt this ciphertext",
            hvac_errors.VaultDown: "Vault is sealed or in maintenance; try again later",
            request_errors.ConnectionError: f"the server was not reached; check {ADDRESS_VARIABLE} and VAULT_CACERT",
            request_errors.Timeout: "the server did not answer in time; try again",
        }
        try:
            answer = function(**arguments)
        except (hvac_errors.VaultError, request_errors.RequestException) as error:
            matching = (reason for kind, reason in reasons.items() if isinstance(error, kind))
            reason = next(matching, "look into the log of the server")
            raise ProviderError(f"asking {self!r} failed: {type(error).__name__}, {reason}") from None
        try:
            value = answer["data"][member]
        except (TypeError, KeyError):
            value = None
        if not isinstance(value, str):
            raise ProviderError(
                f"asking {self!r} failed: expected an answer with a {member}, got another; check {ADDRESS_VARIABLE}"
            )
        return value

    def _get_client(self) -> Any:
        if self._client is None:
            address = os.environ.get(ADDRESS_VARIABLE)
            if not address:
                raise ProviderError(
                    f"reaching Vault failed: expected its address in {ADDRESS_VARIABLE}, got none; set it"
                )
            if not _is_private(address):
                raise ProviderError(
                    "reaching Vault failed: expected an https address, got one over which keys would travel in the "
                    f"clear. Correct {ADDRESS_VARIABLE}"
                )
            hvac = import_client("hvac", "vault")
            session = None
            if urlsplit(address).scheme == "http":
                session = import_client("requests", "vault").Session()
                session.trust_env = False  # a proxy would read the token and the key over plain HTTP
            client = hvac.Client(
                url=address,
                namespace=os.environ.get("VAULT_NAMESPACE") or None,
                allow_redirects=False,
                session=session,
            )
            if not client.token:
                raise ProviderError(
                    "reaching Vault failed: expected a token in VAULT_TOKEN or ~/.vault-token, got none. Set it, or "
                    "run `vault login`"
                )
            self._client = client
        return self._client

    def __repr__(self) -> str:
        return f"<VaultTransit {self._mount}/{self._name}>"


def _is_private(address: str) -> bool:
    """Return whether an address uses HTTPS, or is on this machine."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        return parts.scheme == "https" or (
            parts.scheme == "http" and (host == "localhost" or ip_address(host).is_loopback)
        )
    except ValueError:
        return False
