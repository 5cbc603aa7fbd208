"""Wrapped key files, with a stand-in for the vault."""

import dataclasses
import json
import pickle
import stat
import sys

import numpy as np
import pytest
from helpers.cases import each
from helpers.commands import invoke
from helpers.processes import run_python
from helpers.toy_wrapper import Toy, install

import fastrack
from fastrack._documents import canonical as documents
from fastrack.errors import FormatError, KeyPermissionError, ProviderError, UnknownKeyError
from fastrack.providers import WrappedKey, open_wrapper


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    install(monkeypatch)


@pytest.fixture
def wrapped(key):
    return Toy().wrap(key)


@pytest.fixture
def path(wrapped, tmp_path):
    path = tmp_path / "owner.key.wrapped"
    wrapped.save(path)
    return path


def changed(wrapped, **members):
    document = json.loads(wrapped.to_bytes())
    document |= members
    return documents.encode({name: value for name, value in document.items() if value is not ...}, end=b"\n")


def test_a_file_has_the_form_that_is_documented(wrapped, key, path):
    document = json.loads(path.read_bytes())
    assert list(document) == ["algorithm", "bits", "ciphertext", "key", "parameters", "provider", "version"]
    assert (document["key"], document["bits"], document["version"]) == (key.id, 256, 1)
    assert stat.S_IMODE(path.stat().st_mode) & 0o133 == 0
    assert WrappedKey.load(path) == wrapped
    assert hash(WrappedKey.load(path)) == hash(wrapped)
    assert bytes(key.material()).hex() not in path.read_text()


def test_a_file_stands_for_a_key_file(key, path, tmp_path, monkeypatch):
    sealed = fastrack.seal(np.arange(3), key)
    for source in (
        path,
        str(path),
        [fastrack.Key.generate(), path],
        WrappedKey.load(path),
        f"aws-kms:alias/owner#{path}",
    ):
        assert fastrack.unseal(sealed, keys=source, framework="numpy").tolist() == [0, 1, 2]
        if not isinstance(source, list):
            assert fastrack.KeyRing(source).first == key
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(path))
    assert fastrack.unseal(fastrack.seal(np.arange(3)), framework="numpy").tolist() == [0, 1, 2]
    fastrack.save_file({"x": np.arange(3)}, tmp_path / "data.safetensors", key=path)
    fastrack.verify_file(tmp_path / "data.safetensors", keys=path)


def test_a_ring_asks_once_and_not_before_it_has_to(key, path):
    before = Toy.asked
    ring = fastrack.KeyRing(path)
    with pytest.raises(UnknownKeyError, match=f"given: {key.id}, wrapped"):
        ring["0" * 32]
    assert Toy.asked == before
    assert ring[key.id] == ring[key.id] == key
    assert Toy.asked == before + 1


@pytest.mark.usefixtures("path")
def test_a_folder_may_hold_wrapped_files(key, tmp_path):
    other = fastrack.Key.generate(128)
    assert fastrack.KeyRing(tmp_path).first == key
    other.save(tmp_path / "other.key")
    (tmp_path / "broken.wrapped").write_text("{}")
    (tmp_path / "text").write_text("-")
    ring = fastrack.KeyRing(tmp_path)
    assert ring[key.id] == key
    assert ring[other.id] == other
    with pytest.raises(UnknownKeyError, match="expected one key file to seal with, got 2"):
        ring.first  # noqa: B018
    with pytest.raises(UnknownKeyError, match="found none"):
        ring["0" * 32]


@each(
    "members",
    [
        {"version": 2}, {"version": True}, {"version": 1.0}, {"bits": 192}, {"bits": 256.0}, {"bits": True},
        {"key": "0" * 31}, {"key": "G" * 32}, {"key": 5}, {"provider": "other"}, {"provider": []},
        {"algorithm": ""}, {"algorithm": "a b"}, {"algorithm": None}, {"ciphertext": ""}, {"ciphertext": "QQ"},
        {"ciphertext": "QR=="}, {"ciphertext": "QQ==\n"}, {"ciphertext": "A" * 16384}, {"ciphertext": 5},
        {"parameters": []}, {"parameters": None}, {"parameters": {"a": 5}}, {"parameters": {"a": ""}},
        {"parameters": {"a b": "c"}}, {"parameters": {"a": "\n"}}, {"parameters": {"a": "x" * 2049}},
        {"parameters": {f"a{n}": "x" for n in range(17)}}, {"parameters": {"a": "ü"}},
        {"more": 1}, {"bits": ...}, {"key": ...},
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused(wrapped, members):
    with pytest.raises(FormatError, match="the text is not a wrapped key file"):
        WrappedKey.from_bytes(changed(wrapped, **members))


def test_one_form_only_is_read(wrapped):
    content = wrapped.to_bytes()
    twice = content.replace(b'"bits":256,', b'"bits":128,"bits":256,')
    forms = [b"", content[:-1], content + b"\n", b" " + content, content.replace(b":", b": "), twice, content * 2]
    forms += [b"[" * 60000, b"1" * 5000, b"\xff", b"null\n", b"[]\n", b'{"a":1}\n', content + b" " * 65536]
    for form in forms:
        with pytest.raises(FormatError, match="is not a wrapped key file"):
            WrappedKey.from_bytes(form)
    for end in range(0, len(content), 7):
        with pytest.raises(FormatError):
            WrappedKey.from_bytes(content[:end])


def test_a_key_file_in_its_place_is_refused_and_not_repeated(key, tmp_path):
    path = tmp_path / "owner.key.wrapped"
    key.save(path)
    with pytest.raises(FormatError, match="it is no JSON") as caught:
        fastrack.KeyRing(path)
    assert bytes(key.material()).hex() not in str(caught.value)


def test_a_file_that_others_may_replace_is_refused(path):
    for mode in (0o666, 0o646):
        path.chmod(mode)
        with pytest.raises(KeyPermissionError, match=f"mode {mode:04o}"):
            fastrack.KeyRing(path)
    path.chmod(0o444)
    fastrack.KeyRing(path)


def test_another_key_than_the_file_names_is_refused(wrapped):
    assert wrapped.unwrap().bits == 256
    for members in ({"key_id": "0" * 32}, {"bits": 128}, {"ciphertext": b"x" * 48}):
        with pytest.raises(ProviderError):
            dataclasses.replace(wrapped, **members).unwrap()
    with pytest.raises(ProviderError, match="expected a file of aws-kms, got one of tpm"):
        Toy().unwrap(dataclasses.replace(wrapped, provider="tpm"))


def test_the_secret_that_a_provider_gives_is_wiped(wrapped, monkeypatch):
    given = []
    decrypt = Toy._decrypt
    monkeypatch.setattr(Toy, "_decrypt", lambda *a: given.append(decrypt(*a)) or given[-1])
    assert any(wrapped.unwrap().material())
    assert given == [bytearray(32)]


def test_a_wrapped_key_holds_no_secret_and_may_be_pickled(wrapped, key):
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped
    assert bytes(key.material()) not in pickle.dumps(wrapped)


@each("uri", ["", "owner.key", "s3:bucket", "pkcs11", "token=a;pin-value=1234"])
def test_a_uri_that_is_none_is_not_repeated(uri):
    with pytest.raises(ValueError, match=r"begins with one of pkcs11, tpm, .* got another text") as caught:
        open_wrapper(uri)
    assert "1234" not in str(caught.value)


def test_a_source_needs_the_path_of_a_file():
    with pytest.raises(UnknownKeyError, match="and the path of a wrapped key file, got no path"):
        fastrack.KeyRing("aws-kms:alias/owner")
    with pytest.raises(FormatError, match="got another name"):
        fastrack.KeyRing("aws-kms:alias/other#owner.key.wrapped")
    with pytest.raises(FormatError, match="without a PIN") as caught:
        fastrack.KeyRing("pkcs11:token=a;object=b?pin-value=1234")
    assert "1234" not in str(caught.value)


@each(
    ("uri", "module", "extra"),
    [
        ("pkcs11:token=a;object=b", "pkcs11", "pkcs11"),
        ("tpm:", "tpm2_pytss", "tpm"),
        ("gcp-kms:projects/p/locations/l/keyRings/r/cryptoKeys/k", "google.cloud.kms", "gcp"),
        ("azure-keyvault:https://a.vault.azure.net/keys/k", "azure.identity", "azure"),
    ],
)
def test_a_package_that_is_missing_is_named(key, monkeypatch, uri, module, extra):
    for name in (module, "azure.keyvault.keys.crypto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ProviderError, match=rf"pip install 'fastrack-io\[{extra}\]'"):
        open_wrapper(uri).wrap(key)


def test_no_client_is_loaded_before_it_is_used():
    loaded = run_python(
        "import sys, fastrack.providers\n"
        "print({'pkcs11', 'tpm2_pytss', 'hvac', 'boto3', 'grpc', 'azure', 'requests'} & set(sys.modules))"
    )
    assert loaded == "set()\n"


# The command.


def run(line, status=0):
    result = invoke(line)
    assert result.exit_code == status, result.output
    return result


def test_keygen_wraps_a_new_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = run(["keygen", "owner.key.wrapped", "--wrap", "aws-kms:alias/owner", "--bits", "128"]).stdout
    wrapped = WrappedKey.load("owner.key.wrapped")
    assert wrapped.unwrap().bits == 128
    assert "a new 128-bit key, wrapped by aws-kms" in said
    assert wrapped.key_id in said
    np.save("x.npy", np.arange(3))
    run(["seal", "x.npy", "x.safetensors", "--key", "owner.key.wrapped"])
    run(["verify", "x.safetensors", "--key", "owner.key.wrapped"])
    document = json.loads(run(["keygen", "b.wrapped", "--wrap", "aws-kms:alias/owner", "--json"]).stdout)
    assert document == {"path": "b.wrapped", "key_id": WrappedKey.load("b.wrapped").key_id, "bits": 256}


def test_keygen_refuses_what_would_not_be_found_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "suffix" in run(["keygen", "owner.key", "--wrap", "aws-kms:alias/owner"], 2).stderr
    assert "--wrap URI" in run(["keygen", "owner.wrapped"], 2).stderr
    assert "--wrap" in run(["keygen", "owner.wrapped", "--wrap", "aws-kms:alias/other"], 2).stderr
    assert "1234" not in run(["keygen", "a.wrapped", "--wrap", "pkcs11:token=a;object=b?pin-value=1234"], 2).stderr
    run(["keygen", "alice.wrapped", "--identity", "--wrap", "aws-kms:alias/owner"], 2)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.wrapped").write_text("mine")
    run(["keygen", "a.wrapped", "--wrap", "aws-kms:alias/owner"], 1)
    assert (tmp_path / "a.wrapped").read_text() == "mine"


def test_keygen_saves_no_file_that_does_not_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Toy, "_decrypt", lambda *_: bytearray(b"x" * 32))
    assert "altered" in run(["keygen", "a.wrapped", "--wrap", "aws-kms:alias/owner"], 5).stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_names_a_wrapped_key_and_asks_no_provider(path, key, monkeypatch):
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(path))
    before = Toy.asked
    assert key.id in run(["doctor", "--json"]).stdout
    assert Toy.asked == before
