"""Azure Key Vault, against the documented wire format (HTTPS on loopback), not the real service."""

import base64
import dataclasses
import datetime as dt
import ipaddress
import ssl
import time
from types import SimpleNamespace

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
from helpers.by_hand.keys import read_wrapped, unwrap
from helpers.cases import each

import fastrack
from fastrack.errors import FormatError, ProviderError
from fastrack.providers import AzureKeyVault, WrappedKey

crypto = pytest.importorskip("azure.keyvault.keys.crypto")
errors = pytest.importorskip("azure.core.exceptions")

TOKEN = "dG9rZW4tb2YtdGhlLXRlc3Q"
VERSION = "0123456789abcdef" * 2
PADDING = OAEP(MGF1(hashes.SHA256()), hashes.SHA256(), None)


class Credential:
    def get_token(self, *_, **__):
        from azure.core.credentials import AccessToken

        return AccessToken(TOKEN, int(time.time()) + 3600)


@pytest.fixture(scope="module")
def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder, key = tmp_path_factory.mktemp("tls"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "certificate.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(*form))
    return folder


def to_text(data):
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_text(text):
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


@pytest.fixture
def vault(serve, certificate, rsa_key):
    """Start a vault, and return a function that makes a provider of a key in it."""

    def answer(method, path, headers, document):
        path = path.partition("?")[0]
        kid = f"{server.address.replace('http:', 'https:')}/keys/owner/{VERSION}"
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            challenge = 'Bearer authorization="https://login.example/tenant", resource="https://vault.example"'
            return 401, {"error": {"code": "Unauthorized", "message": "no"}}, {"WWW-Authenticate": challenge}
        if path in {"/keys/owner/", f"/keys/owner/{VERSION}"} and method == "GET":
            numbers = rsa_key.public_key().public_numbers()
            jwk = {"kid": kid, "kty": "RSA", "key_ops": ["wrapKey", "unwrapKey"], "e": to_text(b"\1\0\1")}
            jwk["n"] = to_text(numbers.n.to_bytes(256, "big"))
            return 200, {"key": jwk, "attributes": {"enabled": True}}, {}
        if path == f"/keys/owner/{VERSION}/unwrapkey" and method == "POST":
            assert document["alg"] == "RSA-OAEP-256"
            try:
                secret = rsa_key.decrypt(from_text(document["value"]), PADDING)
            except ValueError:
                return 400, {"error": {"code": "BadParameter", "message": "no"}}, {}
            return 200, {"kid": kid, "value": to_text(secret)}, {}
        return 404, {"error": {"code": "KeyNotFound", "message": "no"}}, {}

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "certificate.pem", certificate / "key.pem")
    server = serve(answer, lambda socket: context.wrap_socket(socket, server_side=True))

    def make(name="owner"):
        key = f"https://127.0.0.1:{server.server_port}/keys/{name}"
        options = {"connection_verify": str(certificate / "certificate.pem"), "retry_total": 0}
        client = crypto.CryptographyClient(key, Credential(), verify_challenge_resource=False, **options)
        return AzureKeyVault(key, client=client)

    return make


@pytest.mark.parametrize("bits", [128, 256])
def test_a_key_that_the_vault_wrapped_opens_what_it_sealed(vault, rsa_key, tmp_path, bits):
    key, provider = fastrack.Key.generate(bits), vault()
    path = tmp_path / "owner.key.wrapped"
    provider.wrap(key).save(path)
    wrapped = WrappedKey.load(path, wrapper=vault(f"owner/{VERSION}"))
    assert wrapped.parameters["key"].endswith(f"/keys/owner/{VERSION}")
    sealed = fastrack.seal(np.arange(5), wrapped)
    assert fastrack.unseal(sealed, keys=wrapped, framework="numpy").tolist() == [0, 1, 2, 3, 4]
    assert unwrap(read_wrapped(path.read_bytes()), rsa_key) == bytes(key.material())


def test_an_altered_file_is_refused(vault, key):
    provider = vault()
    wrapped = provider.wrap(key)
    altered = bytes(256)
    with pytest.raises(ProviderError, match="400, the file was altered"):
        provider.unwrap(dataclasses.replace(wrapped, ciphertext=altered))
    with pytest.raises(ProviderError, match="altered"):
        provider.unwrap(dataclasses.replace(wrapped, key_id="0" * 32))
    with pytest.raises(FormatError, match="expected the URL of a key of Azure"):
        wrapped.unwrap()  # a file names no host outside Azure
    with pytest.raises(ProviderError, match="there is no such key"):
        vault("other").wrap(key)


def test_a_vault_that_is_not_there_is_named(key):
    url = "https://127.0.0.1:9/keys/owner"
    client = crypto.CryptographyClient(url, Credential(), retry_total=0)
    with pytest.raises(ProviderError, match="ServiceRequestError, the vault could not be reached"):
        AzureKeyVault(url, client=client).wrap(key)


@each("status", [401, 403, 404, 429])
def test_refused_credentials_end_a_run(key, status):
    def wrap_key(*_):
        raise errors.HttpResponseError(response=SimpleNamespace(status_code=status, reason="no"))

    with pytest.raises(ProviderError, match=f"HttpResponseError {status}, ") as caught:
        AzureKeyVault("https://acme.vault.azure.net/keys/k", client=SimpleNamespace(wrap_key=wrap_key)).wrap(key)
    assert caught.value.is_refusal == (status == 401)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.vault.azure.net/keys/k", "https://a.vault.azure.net/secrets/k", "https://u@a.vault.azure.net/keys/k",
        "https://a.vault.azure.net/keys/k/v", "https://evil.example/keys/k", "https://vault.azure.net.evil.example/keys/k",
    ],
)  # fmt: skip
def test_a_file_names_a_host_of_azure(url):
    with pytest.raises(FormatError, match="URL of a key of Azure"):
        WrappedKey("azure-keyvault", "RSA-OAEP-SHA256", "0" * 32, 256, b"x", {"key": url}).unwrap()
