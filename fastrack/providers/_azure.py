"""Keys wrapped by Azure Key Vault or Managed HSM."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from fastrack._keys.wrapped import WrappedKey, import_client, require_algorithm
from fastrack._util.shown import shown
from fastrack.providers._cloud import CloudKey

_ALGORITHM = "RSA-OAEP-SHA256"
_KEY = re.compile(r"https://(?P<host>[a-z0-9.-]{1,255})(?::[0-9]{1,5})?/keys/[A-Za-z0-9-]{1,127}(?:/[0-9a-f]{32})?")
_CLOUDS = (
    *(".vault.azure.net", ".vault.azure.cn", ".vault.usgovcloudapi.net"),
    *(".managedhsm.azure.net", ".managedhsm.azure.cn", ".managedhsm.usgovcloudapi.net"),
)
_REASONS = {
    "ClientAuthenticationError": "the credentials are wrong or were not found; run `az login`",
    "CredentialUnavailableError": "no credentials were found; run `az login`",
    "ResourceNotFoundError": "there is no such key; check its name and version",
    "ServiceRequestError": "the vault could not be reached; check its name and the network",
}
_STATUS = {
    400: "the file was altered, or another key encrypted it; restore it from a copy",
    401: "the credentials are wrong or have expired; run `az login`",
    403: "the credentials lack the rights get, wrapKey and unwrapKey, or the firewall of the vault refuses",
    429: "the vault is throttled; try again later",
}


class AzureKeyVault(CloudKey):
    """An RSA key of Azure Key Vault or Managed HSM, by the client azure-keyvault-keys.

    Credentials come from ``azure.identity.DefaultAzureCredential``. The key encrypts by RSA-OAEP with SHA-256, and
    needs the rights *get*, *wrapKey* and *unwrapKey*.

    Parameters
    ----------
    key : str
        The URL of the key: ``https://VAULT.vault.azure.net/keys/NAME``, perhaps with a version.
    client : azure.keyvault.keys.crypto.CryptographyClient, optional
        A client to use. By default one is made when it is first needed.

    Raises
    ------
    ValueError
        If the URL has another form.

    Examples
    --------
    >>> from fastrack.providers import AzureKeyVault
    >>> AzureKeyVault("https://acme.vault.azure.net/keys/owner")
    <AzureKeyVault https://acme.vault.azure.net/keys/owner>
    """

    provider: ClassVar[str] = "azure-keyvault"
    _pattern = _KEY
    _wanted = "https://VAULT.vault.azure.net/keys/NAME, or with a version"

    @classmethod
    def _check_file(cls, key: str) -> None:
        match = _KEY.fullmatch(key)
        if match is None or not match["host"].endswith(_CLOUDS):
            raise ValueError(f"expected the URL of a key of Azure, unless an AzureKeyVault is passed, got {shown(key)}")

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        answer = self._ask("wrap_key", bytes(secret))
        key = answer.key_id
        if not isinstance(key, str) or _KEY.fullmatch(key) is None:
            raise self._failure("expected the URL of the key in the answer, got another text")
        return _ALGORITHM, bytes(answer.encrypted_key), {"key": key}

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        require_algorithm(wrapped, _ALGORITHM)
        secret: bytes = self._ask("unwrap_key", wrapped.ciphertext).key
        return secret

    def _ask(self, operation: str, content: bytes) -> Any:
        crypto = import_client("azure.keyvault.keys.crypto", "azure")
        errors = import_client("azure.core.exceptions", "azure")
        try:
            return getattr(self._get_client(), operation)(crypto.KeyWrapAlgorithm.rsa_oaep_256, content)
        except (errors.AzureError, ValueError, NotImplementedError) as error:
            name, status = type(error).__name__, getattr(error, "status_code", None)
            reason = _REASONS.get(name) or _STATUS.get(status or 0, "check that it is an RSA key that is enabled")
            refusal = status == 401 or name in {"ClientAuthenticationError", "CredentialUnavailableError"}
            raise self._failure(f"{name} {status or ''}".rstrip() + f", {reason}", refusal=refusal) from None

    def _make_client(self) -> Any:
        identity = import_client("azure.identity", "azure")
        crypto = import_client("azure.keyvault.keys.crypto", "azure")
        return crypto.CryptographyClient(self._key, identity.DefaultAzureCredential())
