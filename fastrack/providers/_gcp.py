"""Keys wrapped by the Key Management Service of Google Cloud."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

from fastrack._keys.wrapped import WrappedKey, import_client, require_algorithm
from fastrack.providers._cloud import CloudKey

_ALGORITHM = "GOOGLE_SYMMETRIC_ENCRYPTION"
_PART = r"[A-Za-z0-9_-][A-Za-z0-9_.:-]{0,127}"
_KEY = re.compile(rf"projects/{_PART}/locations/{_PART}/keyRings/{_PART}/cryptoKeys/{_PART}")
_REASONS = {
    "DefaultCredentialsError": "no credentials were found; run `gcloud auth application-default login`",
    "RefreshError": "the credentials have expired; run `gcloud auth application-default login`",
    "InvalidArgument": "the file was altered, or another key encrypted it; restore it from a copy",
    "NotFound": "there is no such key; check its name",
    "FailedPrecondition": "the key is disabled or of another purpose; expected ENCRYPT_DECRYPT",
    "PermissionDenied": "the credentials lack the role roles/cloudkms.cryptoKeyEncrypterDecrypter on this key",
    "Unauthenticated": "the credentials are wrong",
}
_REFUSALS = {"DefaultCredentialsError", "RefreshError", "Unauthenticated"}


class GcpKms(CloudKey):
    """A symmetric key of the Key Management Service of Google Cloud, by the client google-cloud-kms.

    Google's client library finds the credentials. CRC-32C values guard requests and responses. The additional
    authenticated data is ``fastrack-key:`` and the id of the wrapped key.

    Parameters
    ----------
    key : str
        The resource name: ``projects/P/locations/L/keyRings/R/cryptoKeys/K``.
    client : google.cloud.kms.KeyManagementServiceClient, optional
        A client to use. By default one is made when it is first needed.

    Raises
    ------
    ValueError
        If the name has another form.

    Examples
    --------
    >>> from fastrack.providers import GcpKms
    >>> GcpKms("projects/p/locations/eu/keyRings/r/cryptoKeys/owner")
    <GcpKms projects/p/locations/eu/keyRings/r/cryptoKeys/owner>
    """

    provider: ClassVar[str] = "gcp-kms"
    _pattern = _KEY
    _wanted = "projects/P/locations/L/keyRings/R/cryptoKeys/K of GCP"

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        encrypt = self._get_client().encrypt
        answer = self._ask(encrypt, key_id, plaintext=bytes(secret), plaintext_crc32c=crc32c(secret))
        verified = answer.verified_plaintext_crc32c and answer.verified_additional_authenticated_data_crc32c
        self._check_crc(verified and crc32c(answer.ciphertext) == answer.ciphertext_crc32c)
        return _ALGORITHM, bytes(answer.ciphertext), {"key": self._key}

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        require_algorithm(wrapped, _ALGORITHM)
        ciphertext, decrypt = wrapped.ciphertext, self._get_client().decrypt
        answer = self._ask(decrypt, wrapped.key_id, ciphertext=ciphertext, ciphertext_crc32c=crc32c(ciphertext))
        secret: bytes = answer.plaintext
        self._check_crc(crc32c(secret) == answer.plaintext_crc32c)
        return secret

    def _ask(self, function: Callable[..., Any], key_id: str, **fields: Any) -> Any:
        data = f"fastrack-key:{key_id}".encode()
        fields |= {"additional_authenticated_data": data, "additional_authenticated_data_crc32c": crc32c(data)}
        return self._guarded(lambda: function(request={"name": self._key, **fields}))

    def _guarded(self, function: Callable[[], Any]) -> Any:
        api_errors = import_client("google.api_core.exceptions", "gcp")
        auth_errors = import_client("google.auth.exceptions", "gcp")
        try:
            return function()
        except (api_errors.GoogleAPIError, auth_errors.GoogleAuthError) as error:
            name = type(error).__name__
            reason = _REASONS.get(name, "check the network, and the audit log of the project")
            raise self._failure(f"{name}, {reason}", refusal=name in _REFUSALS) from None

    def _check_crc(self, holds: object) -> None:
        if not holds:
            raise self._failure("expected CRC-32C values that match, got others; try again")

    def _make_client(self) -> Any:
        kms = import_client("google.cloud.kms", "gcp")
        return self._guarded(kms.KeyManagementServiceClient)


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C (RFC 3720, appendix B.4) of some bytes."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF
