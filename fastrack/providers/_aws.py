"""Keys wrapped by the Key Management Service of AWS."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from fastrack._keys.wrapped import WrappedKey, import_client, require_algorithm
from fastrack._util.shown import shown
from fastrack.providers._cloud import CloudKey

_ALGORITHM = "SYMMETRIC_DEFAULT"
_CONTEXT = "fastrack-key"
_KEY = re.compile(r"[A-Za-z0-9:/_-]{1,2048}")
_ARN = re.compile(r"arn:aws[a-z-]*:kms:([a-z0-9-]+):[0-9]{12}:(?:key|alias)/[A-Za-z0-9/_-]+")
_REASONS = {
    "AccessDeniedException": "the credentials lack the right to use this key",
    "DisabledException": "the key is disabled; enable it",
    "ExpiredTokenException": "the credentials have expired; get new ones",
    "IncorrectKeyException": "another key encrypted this file",
    "InvalidCiphertextException": "the file was altered, or another key encrypted it; restore it from a copy",
    "KMSInvalidStateException": "the key is about to be deleted, or not ready",
    "NotFoundException": "there is no such key in this account and region",
    "UnrecognizedClientException": "the credentials are wrong",
    "InvalidSignatureException": "the secret key is wrong, or the clock of this machine",
}
_REFUSALS = {"ExpiredTokenException", "InvalidSignatureException", "UnrecognizedClientException"}


class AwsKms(CloudKey):
    """A symmetric key of the Key Management Service of AWS, by the client boto3.

    boto3 finds region and credentials in the environment, in ``~/.aws`` or in the role of the machine. They
    need the rights ``kms:Encrypt`` and ``kms:Decrypt``. The encryption context ``fastrack-key`` is the id of the
    wrapped key, which policies may name and CloudTrail logs.

    Parameters
    ----------
    key : str
        The ARN or the id of the key, or an alias such as ``alias/owner``. Other keys of the account do not unwrap.
    client : botocore client, optional
        A client for ``kms`` to use. By default one is made when it is first needed.

    Raises
    ------
    ValueError
        If the name has another form.

    Examples
    --------
    >>> from fastrack.providers import AwsKms
    >>> AwsKms("alias/owner")
    <AwsKms alias/owner>
    """

    provider: ClassVar[str] = "aws-kms"
    _pattern = _KEY
    _wanted = "the ARN, the id or the alias of a key of AWS KMS"

    @classmethod
    def _check_file(cls, key: str) -> None:
        if _ARN.fullmatch(key) is None:
            raise ValueError(f"expected the ARN of a key of AWS KMS, got {shown(key)}")

    def _encrypt(self, secret: memoryview, key_id: str) -> tuple[str, bytes, dict[str, str]]:
        answer = self._ask("encrypt", Plaintext=bytes(secret), EncryptionContext={_CONTEXT: key_id})
        arn, ciphertext = answer.get("KeyId"), answer.get("CiphertextBlob")
        if not isinstance(arn, str) or _ARN.fullmatch(arn) is None or not isinstance(ciphertext, bytes):
            raise self._failure("expected an ARN and a ciphertext, got another answer")
        return _ALGORITHM, ciphertext, {"key": arn}

    def _decrypt(self, wrapped: WrappedKey) -> bytes | bytearray:
        require_algorithm(wrapped, _ALGORITHM)
        context = {_CONTEXT: wrapped.key_id}
        secret = self._ask("decrypt", CiphertextBlob=wrapped.ciphertext, EncryptionContext=context).get("Plaintext")
        if not isinstance(secret, bytes):
            raise self._failure("expected a plaintext, got another answer")
        return secret

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        ask = getattr(self._get_client(), operation)
        errors = import_client("botocore.exceptions", "aws")
        try:
            answer: dict[str, Any] = ask(KeyId=self._key, EncryptionAlgorithm=_ALGORITHM, **arguments)
        except errors.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            reason = _REASONS.get(code, "look the code up in the documentation of AWS KMS")
            code = code if re.fullmatch(r"\w{1,64}", code) else "an unknown code"
            raise self._failure(f"{code}, {reason}", refusal=code in _REFUSALS) from None
        except errors.BotoCoreError as error:
            name = type(error).__name__
            if "Credential" in name or "Token" in name:  # NoCredentialsError, TokenRetrievalError and more
                reason = "boto3 found no credentials that hold. Set AWS_PROFILE, run `aws configure` or `aws sso login`"
                raise self._failure(f"{name}, {reason}", refusal=True) from None
            raise self._failure(f"{name}; check the network and the region") from None
        return answer

    def _make_client(self) -> Any:
        boto3 = import_client("boto3", "aws")
        errors = import_client("botocore.exceptions", "aws")
        arn = _ARN.fullmatch(self._key)
        try:
            return boto3.client("kms", region_name=None if arn is None else arn[1])
        except (errors.BotoCoreError, ValueError) as error:
            reason = f"{type(error).__name__}. Set AWS_DEFAULT_REGION, or name the key by ARN"
            raise self._failure(reason) from None
