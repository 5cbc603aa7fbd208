"""Google Cloud KMS, against the documented wire format (gRPC on loopback), not the real service."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.cases import each

import fastrack
from fastrack.errors import FormatError, ProviderError
from fastrack.providers import GcpKms, WrappedKey
from fastrack.providers._gcp import crc32c

KEY = "projects/p/locations/europe-west3/keyRings/r/cryptoKeys/owner"


def test_crc_32c_has_the_value_of_rfc_3720():
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


@pytest.fixture
def serve_kms(box):
    """Start a server that `change` may make lie about a response, and return a client of it."""
    grpc = pytest.importorskip("grpc")
    kms = pytest.importorskip("google.cloud.kms_v1")
    transports = pytest.importorskip("google.cloud.kms_v1.services.key_management_service.transports")
    servers, channels = [], []

    def start(change=lambda response: response):
        def check(request, context):
            if request.name != KEY:
                context.abort(grpc.StatusCode.NOT_FOUND, "no such key")
            data = request.additional_authenticated_data
            assert request.additional_authenticated_data_crc32c == crc32c(data)
            return data

        def encrypt(request, context):
            data = check(request, context)
            assert request.plaintext_crc32c == crc32c(request.plaintext)
            ciphertext = box.encrypt(request.plaintext, data)
            return change(
                kms.EncryptResponse(
                    name=f"{KEY}/cryptoKeyVersions/1",
                    ciphertext=ciphertext,
                    ciphertext_crc32c=crc32c(ciphertext),
                    verified_plaintext_crc32c=True,
                    verified_additional_authenticated_data_crc32c=True,
                )
            )

        def decrypt(request, context):
            secret = box.decrypt(request.ciphertext, check(request, context))
            assert request.ciphertext_crc32c == crc32c(request.ciphertext)
            if secret is None:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "decryption failed")
            return change(kms.DecryptResponse(plaintext=secret, plaintext_crc32c=crc32c(secret)))

        calls = {"Encrypt": (encrypt, "Encrypt"), "Decrypt": (decrypt, "Decrypt")}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                function,
                request_deserializer=getattr(kms, f"{prefix}Request").deserialize,
                response_serializer=getattr(kms, f"{prefix}Response").serialize,
            )
            for name, (function, prefix) in calls.items()
        }
        server = grpc.server(ThreadPoolExecutor(2))
        service = "google.cloud.kms.v1.KeyManagementService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        channels.append(grpc.insecure_channel(f"127.0.0.1:{port}"))
        transport = transports.KeyManagementServiceGrpcTransport(channel=channels[-1])
        return kms.KeyManagementServiceClient(transport=transport)

    yield start
    for channel in channels:
        channel.close()
    for server in servers:
        server.stop(None).wait()


@pytest.mark.parametrize("bits", [128, 256])
def test_a_key_that_kms_wrapped_opens_what_it_sealed(serve_kms, tmp_path, bits):
    key, provider = fastrack.Key.generate(bits), GcpKms(KEY, client=serve_kms())
    path = tmp_path / "owner.key.wrapped"
    provider.wrap(key).save(path)
    wrapped = WrappedKey.load(path, wrapper=provider)
    assert wrapped.parameters == {"key": KEY}
    sealed = fastrack.seal(np.arange(5), wrapped)
    assert fastrack.unseal(sealed, keys=wrapped, framework="numpy").tolist() == [0, 1, 2, 3, 4]


def test_an_altered_file_is_refused(serve_kms, key):
    provider = GcpKms(KEY, client=serve_kms())
    wrapped = provider.wrap(key)
    for members in ({"ciphertext": wrapped.ciphertext[:-1] + b"x"}, {"key_id": "0" * 32}):
        with pytest.raises(ProviderError, match="InvalidArgument, the file was altered"):
            provider.unwrap(dataclasses.replace(wrapped, **members))
    with pytest.raises(ProviderError, match="NotFound, there is no such key"):
        GcpKms(f"{KEY}2", client=serve_kms()).wrap(key)


@pytest.mark.parametrize(
    "member", ["ciphertext_crc32c", "verified_plaintext_crc32c", "verified_additional_authenticated_data_crc32c"]
)
def test_an_answer_that_was_damaged_on_its_way_is_refused(serve_kms, key, member):
    def change(response):
        setattr(response, member, 0)
        return response

    with pytest.raises(ProviderError, match="CRC-32C"):
        GcpKms(KEY, client=serve_kms(change)).wrap(key)


def test_a_plaintext_that_was_damaged_on_its_way_is_refused(serve_kms, key):
    def change(response):
        response.plaintext_crc32c = 5
        return response

    wrapped = GcpKms(KEY, client=serve_kms()).wrap(key)
    with pytest.raises(ProviderError, match="CRC-32C"):
        GcpKms(KEY, client=serve_kms(change)).unwrap(wrapped)


def test_credentials_that_are_missing_are_named(key, monkeypatch, tmp_path):
    pytest.importorskip("google.cloud.kms")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(ProviderError, match="DefaultCredentialsError, no credentials were found"):
        GcpKms(KEY).wrap(key)


@each("name", ["PermissionDenied", "Unauthenticated", "NotFound", "ServiceUnavailable", "RefreshError"])
def test_refused_and_expired_credentials_end_a_run(key, name):
    module = pytest.importorskip("google.auth.exceptions" if name == "RefreshError" else "google.api_core.exceptions")

    def encrypt(**_):
        raise getattr(module, name)("no")

    with pytest.raises(ProviderError, match=f"failed: {name}, ") as caught:
        GcpKms(KEY, client=SimpleNamespace(encrypt=encrypt)).wrap(key)
    assert caught.value.is_refusal == (name in {"Unauthenticated", "RefreshError"})


@each("name", ["owner", f"{KEY}/cryptoKeyVersions/1", f"//host/{KEY}", KEY.replace("p/", "../", 1)])
def test_another_name_is_refused(name):
    with pytest.raises(ValueError, match="expected projects/"):
        GcpKms(name)
    with pytest.raises(FormatError, match="is wrong"):
        WrappedKey("gcp-kms", "GOOGLE_SYMMETRIC_ENCRYPTION", "0" * 32, 256, b"x", {"key": name}).unwrap()
