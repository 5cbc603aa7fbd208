"""Vault's transit engine, against the documented wire format, not the real service."""

import base64
import dataclasses
import traceback

import numpy as np
import pytest
from helpers.cases import each
from helpers.vault_answers import DOCUMENTED

import fastrack
from fastrack.errors import FormatError, ProviderError
from fastrack.providers import VaultTransit, WrappedKey, open_wrapper

pytest.importorskip("hvac")

TOKEN = "s.dG9rZW4tb2YtdGhlLXRlc3Q"


@pytest.fixture
def vault(serve, box, monkeypatch, tmp_path):
    def answer(_method, path, headers, document):
        if headers.get("X-Vault-Token") != TOKEN:
            return 403, {"errors": ["permission denied"]}, {}
        if path == "/v1/transit/encrypt/owner":
            ciphertext = box.encrypt(base64.b64decode(document["plaintext"], validate=True))
            text = "vault:v1:" + base64.b64encode(ciphertext).decode()
            return 200, {"data": {"ciphertext": text, "key_version": 1}}, {}
        if path == "/v1/transit/decrypt/owner":
            version, _, text = document["ciphertext"].rpartition(":")
            secret = box.decrypt(base64.b64decode(text)) if version == "vault:v1" else None
            if secret is None:
                return 400, {"errors": ["cipher: message authentication failed"]}, {}
            return 200, {"data": {"plaintext": base64.b64encode(secret).decode()}}, {}
        return 404, {"errors": ["no handler for route"]}, {}

    server = serve(answer)
    monkeypatch.setenv("VAULT_ADDR", server.address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", str(tmp_path))
    return server


@pytest.mark.usefixtures("vault")
@pytest.mark.parametrize("bits", [128, 256])
def test_a_key_that_vault_wrapped_opens_what_it_sealed(tmp_path, bits):
    key = fastrack.Key.generate(bits)
    path = tmp_path / "owner.key.wrapped"
    VaultTransit("owner").wrap(key).save(path)
    assert WrappedKey.load(path).parameters == {"mount": "transit", "name": "owner"}
    sealed = fastrack.seal(np.arange(5), path)
    assert fastrack.unseal(sealed, keys=path, framework="numpy").tolist() == [0, 1, 2, 3, 4]
    assert fastrack.unseal(sealed, keys=f"vault-transit:owner#{path}", framework="numpy").tolist() == [0, 1, 2, 3, 4]


def test_a_ring_asks_vault_once(vault, key, tmp_path):
    path = tmp_path / "owner.key.wrapped"
    open_wrapper("vault-transit:transit/owner").wrap(key).save(path)
    ring = fastrack.KeyRing(path)
    assert ring[key.id] == ring[key.id] == key
    assert [path for _, path, *_ in vault.asked].count("/v1/transit/decrypt/owner") == 1


@pytest.mark.usefixtures("vault")
def test_an_altered_ciphertext_is_refused(key):
    wrapped = VaultTransit("owner").wrap(key)
    for ciphertext in (wrapped.ciphertext[:-8] + b"AAAAAAA=", b"vault:v2:" + wrapped.ciphertext[9:], b"\xff"):
        with pytest.raises(ProviderError, match=r"status 400, .* did not encrypt this ciphertext"):
            dataclasses.replace(wrapped, ciphertext=ciphertext).unwrap()


@pytest.mark.usefixtures("vault")
def test_a_wrong_token_is_not_repeated(key, monkeypatch):
    monkeypatch.setenv("VAULT_TOKEN", "s.wrong")
    with pytest.raises(ProviderError, match="the token is wrong") as caught:
        VaultTransit("owner").wrap(key)
    assert "s.wrong" not in str(caught.value)


@pytest.mark.usefixtures("vault")
def test_the_end_of_a_line_is_no_part_of_a_token(key, monkeypatch):
    monkeypatch.setenv("VAULT_TOKEN", f"{TOKEN}\r\n")  # as a secret store may have it
    assert VaultTransit("owner").wrap(key).unwrap() == key


@pytest.mark.usefixtures("vault")
def test_what_is_missing_is_named(key, monkeypatch):
    with pytest.raises(ProviderError, match="no such mount or key"):
        VaultTransit("owner", mount="other").wrap(key)
    monkeypatch.delenv("VAULT_TOKEN")
    with pytest.raises(ProviderError, match="expected a token in VAULT_TOKEN"):
        VaultTransit("owner").wrap(key)
    monkeypatch.delenv("VAULT_ADDR")
    with pytest.raises(ProviderError, match="in VAULT_ADDR, got none; set it"):
        VaultTransit("owner").wrap(key)


@pytest.mark.parametrize("status", [200, 400, 403, 404, 500, 503])
def test_nothing_that_a_server_says_is_repeated(serve, key, monkeypatch, status):
    def answer(_method, _path, headers, document):
        said = [headers["X-Vault-Token"], document["plaintext"]]
        return status, {"errors": said, "data": {"ciphertext": said}}, {}

    monkeypatch.setenv("VAULT_ADDR", serve(answer).address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    with pytest.raises(ProviderError) as caught:
        VaultTransit("owner").wrap(key)
    shown = "".join(traceback.format_exception(caught.value))
    assert TOKEN not in shown
    assert base64.b64encode(key.material()).decode() not in shown


def test_a_server_that_is_not_there_is_named(key, monkeypatch):
    monkeypatch.setenv("VAULT_ADDR", "http://127.0.0.1:9")
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    with pytest.raises(ProviderError, match=r"ConnectionError, .* check VAULT_ADDR"):
        VaultTransit("owner").wrap(key)


def test_plain_http_goes_through_no_proxy(vault, serve, key, monkeypatch):
    proxy = serve(lambda *_: (200, {"data": {"ciphertext": "vault:v1:AAAA"}}, {}))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert VaultTransit("owner").wrap(key).unwrap() == key
    assert (len(vault.asked), proxy.asked) == (2, [])


@pytest.mark.parametrize("address", ["http://vault.example", "http://10.0.0.1", "ftp://127.0.0.1", "http://[", "x"])
def test_a_key_is_sent_to_no_address_without_encryption(key, monkeypatch, address):
    monkeypatch.setenv("VAULT_ADDR", address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    with pytest.raises(ProviderError, match="in the clear"):
        VaultTransit("owner").wrap(key)


@pytest.mark.parametrize(
    "answer",
    [
        (200, {}, {}),
        (200, {"data": None}, {}),
        (200, {"data": {"plaintext": 5, "ciphertext": 5}}, {}),
        (200, [], {}),
        (307, {}, {"Location": "http://127.0.0.1:9/"}),
        (503, {"errors": ["sealed"]}, {}),
        (500, {}, {}),
    ],
)
def test_another_answer_is_refused(serve, key, monkeypatch, answer):
    monkeypatch.setenv("VAULT_ADDR", serve(lambda *_: answer).address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    wrapped = WrappedKey("vault-transit", "transit", key.id, 256, b"vault:v1:", {"mount": "transit", "name": "owner"})
    with pytest.raises(ProviderError):
        wrapped.unwrap()
    with pytest.raises(ProviderError):
        VaultTransit("owner").wrap(key)


def test_a_server_sends_the_token_and_the_key_to_no_other(serve, key, monkeypatch):
    other = serve(lambda *_: (200, {"data": {"ciphertext": "vault:v1:AAAA"}}, {}))
    location = {"Location": f"{other.address}/v1/transit/encrypt/owner"}
    monkeypatch.setenv("VAULT_ADDR", serve(lambda *_: (307, {}, location)).address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    with pytest.raises(ProviderError, match="the server is a standby, or names another"):
        VaultTransit("owner").wrap(key)
    assert other.asked == []


@each("status,errors,reason", DOCUMENTED)
def test_each_documented_answer_has_its_reason(serve, key, monkeypatch, status, errors, reason):
    headers = {"Location": "http://127.0.0.1:9/v1/transit/encrypt/owner"} if status == 307 else {}
    server = serve(lambda *_: (status, {"errors": errors}, headers))
    monkeypatch.setenv("VAULT_ADDR", server.address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    for refused in (False, status == 403):
        with pytest.raises(ProviderError, match="is not sent again" if refused else reason) as caught:
            VaultTransit("owner").wrap(key)
        assert caught.value.is_refusal == (status == 403)
    assert [headers["X-Vault-Token"] for *_, headers, _ in server.asked] == [TOKEN] * (1 if status == 403 else 2)


@pytest.mark.parametrize("plaintext", ["", "!", "AAAA", base64.b64encode(bytes(32)).decode()])
def test_a_plaintext_that_is_no_key_is_refused(serve, key, monkeypatch, plaintext):
    monkeypatch.setenv("VAULT_ADDR", serve(lambda *_: (200, {"data": {"plaintext": plaintext}}, {})).address)
    monkeypatch.setenv("VAULT_TOKEN", TOKEN)
    wrapped = WrappedKey("vault-transit", "transit", key.id, 256, b"vault:v1:", {"mount": "transit", "name": "owner"})
    with pytest.raises(ProviderError, match="expected"):
        wrapped.unwrap()


@pytest.mark.usefixtures("vault")
def test_another_key_than_the_file_names_is_refused(key):
    wrapped = VaultTransit("owner").wrap(key)
    for changed in ({"key_id": "0" * 32}, {"bits": 128}):
        with pytest.raises(ProviderError, match="altered"):
            dataclasses.replace(wrapped, **changed).unwrap()


@pytest.mark.parametrize(
    "parameters", [{}, {"mount": "a"}, {"mount": "a", "name": "../b"}, {"mount": "a/../b", "name": "c"}]
)
def test_parameters_of_a_file_lead_to_no_other_path(vault, key, parameters):
    with pytest.raises(FormatError):
        WrappedKey("vault-transit", "transit", key.id, 256, b"vault:v1:", parameters).unwrap()
    assert vault.asked == []
