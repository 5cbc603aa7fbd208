"""AWS KMS, against the documented wire format, not the real service."""

import base64
import dataclasses
import json
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.cases import each

import fastrack
from fastrack.errors import FormatError, ProviderError
from fastrack.providers import AwsKms, WrappedKey

boto3 = pytest.importorskip("boto3")
errors = pytest.importorskip("botocore.exceptions")

ARN = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"


@pytest.fixture
def kms(serve, box, monkeypatch, tmp_path):
    def fail(code):
        return 400, {"__type": code, "message": "no"}, {"x-amzn-errortype": code}

    def answer(_method, _path, headers, document):
        if not headers.get("Authorization", "").startswith("AWS4-HMAC-SHA256 Credential=AKIDTEST/"):
            return fail("UnrecognizedClientException")
        context = json.dumps(document.get("EncryptionContext", {}), sort_keys=True).encode()
        if document["KeyId"] not in {ARN, "alias/owner"}:
            return fail("NotFoundException")
        base = {"KeyId": ARN, "EncryptionAlgorithm": document["EncryptionAlgorithm"]}
        if headers["X-Amz-Target"] == "TrentService.Encrypt":
            ciphertext = box.encrypt(base64.b64decode(document["Plaintext"]), context)
            return 200, base | {"CiphertextBlob": base64.b64encode(ciphertext).decode()}, {}
        secret = box.decrypt(base64.b64decode(document["CiphertextBlob"]), context)
        if secret is None:
            return fail("InvalidCiphertextException")
        return 200, base | {"Plaintext": base64.b64encode(secret).decode()}, {}

    server = serve(answer)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", server.address)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "c2VjcmV0LW9mLXRoZS10ZXN0")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it remembers credentials
    return server


@pytest.mark.parametrize("bits", [128, 256])
@pytest.mark.usefixtures("kms")
def test_a_key_that_kms_wrapped_opens_what_it_sealed(tmp_path, bits):
    key = fastrack.Key.generate(bits)
    path = tmp_path / "owner.key.wrapped"
    AwsKms("alias/owner").wrap(key).save(path)
    assert WrappedKey.load(path).parameters == {"key": ARN}
    sealed = fastrack.seal(np.arange(5), path)
    assert fastrack.unseal(sealed, keys=path, framework="numpy").tolist() == [0, 1, 2, 3, 4]


def test_the_context_names_the_key_and_the_file_pins_the_wrapping_key(kms, key):
    AwsKms("alias/owner").wrap(key).unwrap()
    encrypted, decrypted = (document for *_, document in kms.asked)
    assert encrypted["EncryptionContext"] == decrypted["EncryptionContext"] == {"fastrack-key": key.id}
    assert (encrypted["KeyId"], decrypted["KeyId"]) == ("alias/owner", ARN)


@pytest.mark.usefixtures("kms")
def test_an_altered_file_is_refused(key):
    wrapped = AwsKms("alias/owner").wrap(key)
    for changed in ({"ciphertext": wrapped.ciphertext[:-1] + b"x"}, {"key_id": "0" * 32}):
        with pytest.raises(ProviderError, match="InvalidCiphertextException, the file was altered"):
            dataclasses.replace(wrapped, **changed).unwrap()
    with pytest.raises(ProviderError, match="altered"):
        dataclasses.replace(wrapped, bits=128).unwrap()


@pytest.mark.usefixtures("kms")
def test_what_is_missing_is_named(key, monkeypatch):
    with pytest.raises(ProviderError, match="NotFoundException, there is no such key"):
        AwsKms("alias/other").wrap(key)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOTHER")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(ProviderError, match="UnrecognizedClientException, the credentials are wrong"):
        AwsKms(ARN).wrap(key)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(ProviderError, match="boto3 found no credentials"):
        AwsKms(ARN).wrap(key)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(ProviderError, match=r"NoRegionError. Set AWS_DEFAULT_REGION"):
        AwsKms("alias/owner").wrap(key)


@each(
    "error,is_refusal",
    [
        ("AccessDeniedException", False), ("ExpiredTokenException", True), ("UnrecognizedClientException", True),
        ("InvalidSignatureException", True), ("ThrottlingException", False), ("NotFoundException", False),
        (errors.NoCredentialsError(), True), (errors.UnauthorizedSSOTokenError(), True),
        (errors.CredentialRetrievalError(provider="x", error_msg="y"), True),
        (errors.EndpointConnectionError(endpoint_url="x"), False),
    ],
)  # fmt: skip
def test_refused_missing_and_expired_credentials_end_a_run(key, error, is_refusal):
    def encrypt(**_):
        raise errors.ClientError({"Error": {"Code": error}}, "Encrypt") if isinstance(error, str) else error

    with pytest.raises(ProviderError) as caught:
        AwsKms(ARN, client=SimpleNamespace(encrypt=encrypt)).wrap(key)
    assert caught.value.is_refusal == is_refusal
    assert ("check the network" in str(caught.value)) == isinstance(error, errors.EndpointConnectionError)


def test_nothing_that_a_server_says_is_repeated(serve, kms, key, monkeypatch):
    def answer(_method, _path, _headers, document):
        return 400, {"__type": document["Plaintext"], "message": document["Plaintext"]}, {}

    assert kms.asked == []
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", serve(answer).address)
    with pytest.raises(ProviderError, match="asking <AwsKms") as caught:
        AwsKms(ARN).wrap(key)
    shown = "".join(traceback.format_exception(caught.value))
    assert base64.b64encode(key.material()).decode().rstrip("=") not in shown


@pytest.mark.usefixtures("kms")
def test_a_service_that_is_not_there_is_named(key, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_KMS", "http://127.0.0.1:9")
    with pytest.raises(ProviderError, match=r"EndpointConnectionError; check the network"):
        AwsKms(ARN).wrap(key)


@pytest.mark.parametrize("name", ["alias/owner", "arn:aws:kms:evil.example/:123456789012:key/1", "arn:aws:s3:::bucket"])
def test_a_file_names_its_key_by_an_arn(kms, key, name):
    with pytest.raises(FormatError, match="ARN"):
        WrappedKey("aws-kms", "SYMMETRIC_DEFAULT", key.id, 256, b"x", {"key": name}).unwrap()
    assert kms.asked == []
