"""Keys wrapped by the transit engine of HashiCorp Vault or OpenBao."""

from __future__ import annotations

import base64
import os
import re
from contextlib import suppress
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from fastrack._keys.wrapped import KeyWrapper, WrappedKey, import_client, require_algorithm, require_parameters
from fastrack._net.addresses import is_loopback
from fastrack._util.shown import shown
from fastrack.errors import FormatError

ADDRESS_VARIABLE = "VAULT_ADDR"
_ALGORITHM = "transit"
_MOUNT = r"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_OTHER = f"the server is a standby, or names another. Name the active one, or a load balancer, in {ADDRESS_VARIABLE}"
_DENIED = "the token is wrong, has expired, or lacks the right to update this path"
_UNREACHED = "a proxy or a standby did not reach the active server; try again, or see `vault status`"
# https://developer.hashicorp.com/vault/api-docs#http-status-codes has the statuses, Vault's keysutil the texts.
_BY_STATUS = {
    **dict.fromkeys((301, 302, 307, 308, 472, 473), _OTHER),
    400: "the key is missing, or did not encrypt this ciphertext",
    **dict.fromkeys((401, 403), _DENIED),
    404: "there is no such mount or key; check them, and VAULT_NAMESPACE",
    412: "the server does not know the token or the key yet; try again",
    429: "the server limits the rate of requests; try again later, or have its quota raised",
    **dict.fromkeys((502, 504), _UNREACHED),
    503: "the server is sealed, in maintenance or overloaded; try again later, or see `vault status`",
}
_BY_TEXT = {
    "invalid token": "the token is wrong, has expired or was revoked; run `vault login`",
    "disallowed by policy": "an older version of the key encrypted this file; lower its min_decryption_version",
    "version is too new": "a later version of the key encrypted this file than the server has; restore it there",
    "message authentication failed": "the key did not encrypt this ciphertext",
    "cluster node not found": "the servers have no active one; see `vault status`",
    "Vault is sealed": "the server is sealed; have it unsealed",
}


class VaultTransit(KeyWrapper):
    """The transit engine of a HashiCorp Vault or OpenBao server, by the client hvac.

    The address and the token come from the environment: ``VAULT_ADDR``, ``VAULT_TOKEN`` or ``~/.vault-token``, and
    ``VAULT_CACERT`` and ``VAULT_NAMESPACE`` if need be. Plain HTTP is refused, except on this machine, where proxies of
    the environment are ignored. The token needs the right to update ``MOUNT/encrypt/NAME`` and ``MOUNT/decrypt/NAME``.

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
        ciphertext = self._ask("encrypt", "ciphertext", plaintext=base64.b64encode(secret).decode())
        if not ciphertext.isascii():
            raise self._failure("expected ASCII as ciphertext, got other text")
        return _ALGORITHM, ciphertext.encode(), {"mount": self._mount, "name": self._name}

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        require_algorithm(wrapped, _ALGORITHM)
        text = self._ask("decrypt", "plaintext", ciphertext=wrapped.ciphertext.decode("ascii", "replace"))
        try:
            return bytearray(base64.b64decode(text, validate=True))
        except ValueError:
            raise self._failure("expected base64, got other text") from None

    def _ask(self, operation: str, member: str, **arguments: str) -> str:
        """Return a member of the answer. By hvac's adapter, as an error of hvac does not tell each status."""
        client, errors = self._get_client(), import_client("requests.exceptions", "vault")
        path = f"/v1/{self._mount}/{operation}/{self._name}"
        sent = tuple(map(str, (client.url, client.adapter.namespace, path, client.token)))
        if self._was_refused(*sent):
            reason = "the token was refused before, and is not sent again. Get another, or a right and start anew"
            raise self._failure(reason, refusal=True)
        try:
            answer = client.adapter.post(path, json=arguments, raise_exception=False)
        except errors.RequestException as error:
            reason = f"the server was not reached, or not in time; check {ADDRESS_VARIABLE} and VAULT_CACERT"
            raise self._failure(f"{type(error).__name__}, {reason}") from None
        status = getattr(answer, "status_code", 200)  # of an answer that is no document
        if status != 200:
            if refusal := status in {401, 403}:
                self._note_refusal(*sent)
            raise self._failure(f"status {status}, {_reason(status, answer)}", refusal=refusal)
        with suppress(TypeError, KeyError):
            if isinstance(value := answer["data"][member], str):
                return value
        raise self._failure(f"expected an answer with a {member}, got another; check {ADDRESS_VARIABLE}")

    def _get_client(self) -> Any:
        if self._client is None:
            address = os.environ.get(ADDRESS_VARIABLE)
            if not address:
                raise self._failure(f"expected its address in {ADDRESS_VARIABLE}, got none; set it")
            if not _is_private(address):
                reason = "expected an https address, got one over which keys would travel in the clear"
                raise self._failure(f"{reason}. Correct {ADDRESS_VARIABLE}")
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
            client.token = (client.token or "").strip()  # a line's end is no part of it, and would be sent
            if not client.token:
                reason = "expected a token in VAULT_TOKEN or ~/.vault-token, got none. Set it, or run `vault login`"
                raise self._failure(reason, refusal=True)
            return client  # not kept: the next one reads the token anew
        return self._client

    def __repr__(self) -> str:
        return f"<VaultTransit {self._mount}/{self._name}>"


def _reason(status: int, answer: Any) -> str:
    """Return the reason of a failure by the errors in the answer, else by its status. Nothing of it is repeated."""
    told = ""
    with suppress(TypeError, KeyError, ValueError, RecursionError):
        told = str(answer.json()["errors"])
    by_text = (reason for text, reason in _BY_TEXT.items() if text in told)
    return next(by_text, _BY_STATUS.get(status, "look into the log of the server"))


def _is_private(address: str) -> bool:
    """Return whether an address uses HTTPS, or is on this machine."""
    with suppress(ValueError):
        parts = urlsplit(address)
        is_local = parts.hostname == "localhost" or is_loopback(parts.hostname or "")
        return parts.scheme == "https" or (parts.scheme == "http" and is_local)
    return False
