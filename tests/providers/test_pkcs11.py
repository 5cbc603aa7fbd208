"""Keys on a PKCS#11 token: SoftHSM, in a folder of the test; and a stand-in for what SoftHSM 2.6 lacks."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from helpers.by_hand.keys import read_wrapped, unwrap
from helpers.cases import each
from helpers.commands import invoke

import fastrack
from fastrack.errors import FormatError, KeyPermissionError, ProviderError
from fastrack.providers import Pkcs11, WrappedKey

UTIL = shutil.which("softhsm2-util")
FOLDERS = ("lib/softhsm", "lib64/pkcs11", "local/lib/softhsm", "lib/x86_64-linux-gnu/softhsm")
MODULES = [Path(UTIL or "/usr/bin/x").parents[1] / folder / "libsofthsm2.so" for folder in FOLDERS]
MODULE = next((str(path) for path in MODULES if path.exists()), None)
PIN = "482913"
AES_KEY = bytes(range(32))

# Runs in a process of its own for each folder, as SoftHSM reads its configuration once.
SETUP = """
import json, sys
import pkcs11
from cryptography.hazmat.primitives import serialization
from pkcs11 import Attribute, KeyType, ObjectClass

module, pin, aes = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
number = {name: bytes.fromhex(value) for name, value in json.load(sys.stdin).items()}
private = {getattr(Attribute, name): value for name, value in number.items()}
with pkcs11.lib(module).get_token(token_label="vault").open(rw=True, user_pin=pin) as session:
    common = {Attribute.TOKEN: True, Attribute.PRIVATE: True, Attribute.SENSITIVE: True}
    session.create_object({**common, **private, Attribute.CLASS: ObjectClass.PRIVATE_KEY,
                           Attribute.KEY_TYPE: KeyType.RSA, Attribute.LABEL: "owner",
                           Attribute.ID: b"\\x01", Attribute.DECRYPT: True})
    session.create_object({**common, Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.AES,
                           Attribute.VALUE: aes, Attribute.LABEL: "aes key", Attribute.ID: b"\\x02",
                           Attribute.WRAP: True, Attribute.UNWRAP: True})
    session.generate_key(KeyType.AES, 256, label="other", id=b"\\x03", store=True,
                         template={Attribute.WRAP: True, Attribute.UNWRAP: True})
    for identity in (b"\\x05", b"\\x06"):
        session.generate_key(KeyType.AES, 256, label="twice", id=identity, store=True)
"""


@pytest.fixture(scope="module")
def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture(scope="module")
def token(tmp_path_factory, rsa_key):
    """Yield the folder of a token, which this process opens through the environment variable of SoftHSM."""
    pytest.importorskip("pkcs11")
    if UTIL is None or MODULE is None:
        pytest.skip("needs SoftHSM: apt-get install softhsm2")
    folder = tmp_path_factory.mktemp("softhsm")
    (folder / "tokens").mkdir()
    configuration = folder / "softhsm2.conf"
    configuration.write_text(f"directories.tokendir = {folder}/tokens\nobjectstore.backend = file\nlog.level = ERROR\n")
    before = os.environ.get("SOFTHSM2_CONF")
    os.environ["SOFTHSM2_CONF"] = str(configuration)
    command = [UTIL, "--init-token", "--free", "--label", "vault", "--pin", PIN, "--so-pin", "12345678"]
    command += ["--module", MODULE]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    numbers = rsa_key.private_numbers()
    public = numbers.public_numbers
    values = {
        "MODULUS": public.n,
        "PUBLIC_EXPONENT": public.e,
        "PRIVATE_EXPONENT": numbers.d,
        "PRIME_1": numbers.p,
        "PRIME_2": numbers.q,
        "EXPONENT_1": numbers.dmp1,
        "EXPONENT_2": numbers.dmq1,
        "COEFFICIENT": numbers.iqmp,
    }
    given = json.dumps({name: f"{value:0{(value.bit_length() + 7) // 8 * 2}x}" for name, value in values.items()})
    command = [sys.executable, "-c", SETUP, MODULE, PIN, AES_KEY.hex()]
    subprocess.run(command, input=given, text=True, check=True, timeout=60)
    (folder / "pin").write_text(f"{PIN}\n")
    (folder / "pin").chmod(0o600)
    yield folder
    del os.environ["SOFTHSM2_CONF"]
    if before is not None:
        os.environ["SOFTHSM2_CONF"] = before


@pytest.fixture
def make(token):
    def make(name="object=aes%20key", query="", pin="pin"):
        return Pkcs11(f"pkcs11:token=vault;{name}?module-path={MODULE}&pin-source=file:{token}/{pin}{query}")

    return make


SHA1 = "&x-algorithm=RSA-OAEP-SHA1"


@pytest.mark.parametrize("bits", [128, 256])
@pytest.mark.parametrize(("name", "query"), [("object=aes%20key", ""), ("object=owner", SHA1), ("id=%01", SHA1)])
def test_a_key_that_the_token_wrapped_opens_what_it_sealed(make, tmp_path, monkeypatch, bits, name, query):
    key = fastrack.Key.generate(bits)
    path = tmp_path / "owner.key.wrapped"
    make(name, query).wrap(key).save(path)
    assert WrappedKey.load(path).parameters == {"uri": f"pkcs11:token=vault;{name}"}
    monkeypatch.setenv("FASTRACK_PKCS11_MODULE", MODULE)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", PIN)
    sealed = fastrack.seal(np.arange(5), path)
    assert fastrack.unseal(sealed, keys=path, framework="numpy").tolist() == [0, 1, 2, 3, 4]


def test_a_source_may_name_the_library_and_the_file_of_the_pin(make, token, key, tmp_path):
    path = tmp_path / "owner.key.wrapped"
    make().wrap(key).save(path)
    uri = f"pkcs11:token=vault;object=aes%20key?module-path={MODULE}&pin-source=file:{token}/pin"
    assert fastrack.KeyRing(f"{uri}#{path}")[key.id] == key


def test_the_command_makes_a_file_and_seals_with_it(token, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTRACK_PKCS11_MODULE", MODULE)
    np.save("x.npy", np.arange(3))
    uri = f"pkcs11:token=vault;object=owner?pin-source=file:{token}/pin{SHA1}"
    key = f"pkcs11:token=vault;object=owner?pin-source=file:{token}/pin#owner.key.wrapped"
    for line in (
        ["keygen", "owner.key.wrapped", "--wrap", uri],
        ["seal", "x.npy", "x.safetensors", "--key", key],
        ["verify", "x.safetensors", "--key", key],
    ):
        result = invoke(line)
        assert result.exit_code == 0, result.output
        assert PIN not in result.output
    result = invoke(["verify", "x.safetensors", "--key", "owner.key.wrapped"])
    assert result.exit_code == 5
    assert "FASTRACK_PKCS11_PIN" in result.stderr


@pytest.mark.parametrize(("name", "query"), [("object=aes%20key", ""), ("object=owner", SHA1)])
def test_a_second_reader_opens_what_the_token_wrapped(make, rsa_key, key, name, query):
    document = read_wrapped(make(name, query).wrap(key).to_bytes())
    assert unwrap(document, AES_KEY if name == "object=aes%20key" else rsa_key) == bytes(key.material())


def test_a_token_without_sha_256_says_so(make, key):
    wrapped = make("object=owner").wrap(key)
    assert wrapped.algorithm == "RSA-OAEP-SHA256"
    try:
        make("object=owner").unwrap(wrapped)
    except ProviderError as error:
        message = str(error)
    else:
        pytest.skip("this SoftHSM has SHA-256")
    assert "does not support RSA-OAEP-SHA256. Wrap a key with x-algorithm=RSA-OAEP-SHA1" in message


@pytest.mark.parametrize(("name", "query"), [("object=aes%20key", ""), ("object=owner", SHA1)])
def test_an_altered_file_is_refused(make, key, name, query):
    provider = make(name, query)
    wrapped = provider.wrap(key)
    altered = bytearray(wrapped.ciphertext)
    altered[7] ^= 1
    for members in (
        {"ciphertext": bytes(altered)},
        {"ciphertext": b"x"},
        {"ciphertext": wrapped.ciphertext[:-8]},
        {"key_id": "0" * 32},
        {"bits": 128},
        {"algorithm": "RSA-OAEP-SHA1" if "AES" in wrapped.algorithm else "AES-KW"},
    ):
        with pytest.raises(ProviderError):
            provider.unwrap(dataclasses.replace(wrapped, **members))
    with pytest.raises(FormatError, match="expected the algorithm"):
        provider.unwrap(dataclasses.replace(wrapped, algorithm="RSA"))


def test_another_key_of_the_token_does_not_unwrap(make, key):
    with pytest.raises(ProviderError):
        make("object=other").unwrap(make().wrap(key))


def test_what_is_missing_is_named(make, key, monkeypatch):
    monkeypatch.delenv("FASTRACK_PKCS11_MODULE", raising=False)
    monkeypatch.delenv("FASTRACK_PKCS11_PIN", raising=False)
    cases = {
        "pkcs11:token=vault;object=owner": "Set FASTRACK_PKCS11_MODULE",
        "pkcs11:token=vault;object=owner?module-path=/nowhere.so": "loading the PKCS#11 library /nowhere.so failed",
        f"pkcs11:token=vault;object=owner?module-path={MODULE}": "No PIN was given",
        f"pkcs11:token=other;object=owner?module-path={MODULE}": "expected one such token, got 0",
        f"pkcs11:token=vault;serial=5;object=owner?module-path={MODULE}": "expected one such token, got 0",
    }
    for uri, message in cases.items():
        with pytest.raises(ProviderError, match=message):
            Pkcs11(uri).wrap(key)
    for name, count in (("object=nothing", 0), ("object=owner;type=secret-key", 0), ("object=twice", 2)):
        with pytest.raises(ProviderError, match=f"expected one RSA or AES key of that name on the token, got {count}"):
            make(name).wrap(key)
    with pytest.raises(ProviderError, match="needs another type of key than AES"):
        make(query="&x-algorithm=RSA-OAEP-SHA256").wrap(key)
    with pytest.raises(FileNotFoundError):
        make(pin="nothing").wrap(key)


@pytest.fixture
def logins(make, monkeypatch):
    """Yield the PINs that are sent. In the end another part of the process logs in, which ends the token's count."""
    import pkcs11

    sent, find = [], Pkcs11._find_token

    class Counted:
        def __init__(self, token):
            self._token = token

        def __getattr__(self, name):
            return getattr(self._token, name)

        def open(self, user_pin=None):
            sent.append(user_pin)
            return self._token.open(user_pin=user_pin)

    monkeypatch.setattr(Pkcs11, "_find_token", lambda self, package: Counted(find(self, package)))
    yield sent
    monkeypatch.undo()
    make()._find_token(pkcs11).open(user_pin=PIN).close()


def test_five_files_and_a_wrong_pin_are_one_login(make, key, logins, tmp_path, monkeypatch):
    make().wrap(key).save(tmp_path / "owner.key.wrapped")
    monkeypatch.setenv("FASTRACK_PKCS11_MODULE", MODULE)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", "111111")
    (tmp_path / "sealed").mkdir()
    for number in range(5):
        fastrack.save_file({"x": np.arange(3)}, tmp_path / f"sealed/{number}.safetensors", key=key)
    logins.clear()
    source, target, wrapped = (str(tmp_path / name) for name in ("sealed", "out", "owner.key.wrapped"))
    result = invoke(["unseal", "-r", source, target, "--key", wrapped])
    assert (result.exit_code, logins) == (5, ["111111"])
    assert "not tried: 4 files" in result.output
    for path in (tmp_path / "sealed").iterdir():
        with pytest.raises(ProviderError, match="not sent again"):
            fastrack.verify_file(path, keys=wrapped)
    assert logins == ["111111"]
    code = "import sys, fastrack; from fastrack.providers import WrappedKey; WrappedKey.load(sys.argv[1]).unwrap()"
    for pin in ("111111", "222222", PIN):  # a process of its own learns it from the token, whatever PIN it has
        command = [sys.executable, "-c", code, wrapped]
        environment = {**os.environ, "FASTRACK_PKCS11_PIN": pin}
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "the token counts a wrong PIN, so none was sent" in done.stderr) == (1, True)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", PIN)
    monkeypatch.setenv("FASTRACK_PKCS11_TRY", "low")
    fastrack.verify_file(path, keys=wrapped)
    monkeypatch.delenv("FASTRACK_PKCS11_TRY")
    fastrack.verify_file(path, keys=wrapped)


@pytest.mark.usefixtures("logins")
def test_a_wrong_pin_is_not_repeated(make, token, key, monkeypatch):
    monkeypatch.setenv("FASTRACK_PKCS11_TRY", "low")
    for text in ("777777", "777", "7" * 200):
        path = token / "wrong"
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ProviderError, match=r"the PIN is (wrong|too short)") as caught:
            make(pin="wrong").wrap(key)
        assert text not in str(caught.value)
    for text in (b"", b"\n", b"\xff\xff", b"7" * 256):
        path.write_bytes(text)
        with pytest.raises(ProviderError, match="expected a PIN in UTF-8"):
            make(pin="wrong").wrap(key)


def test_a_pin_that_others_may_read_is_refused(make, token, key):
    path = token / "shared"
    path.write_text(PIN)
    path.chmod(0o644)
    with pytest.raises(KeyPermissionError):
        make(pin="shared").wrap(key)


def test_threads_and_a_session_of_another_part_of_the_process_are_no_hindrance(make, key):
    import pkcs11

    wrapped = make().wrap(key)
    opened = []
    threads = [threading.Thread(target=lambda: opened.append(make().unwrap(wrapped) == key)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [True] * 8
    with pkcs11.lib(MODULE).get_token(token_label="vault").open(user_pin=PIN):
        assert make().unwrap(wrapped) == key


def test_a_forked_process_opens_the_token_anew(make, key):
    wrapped = make().wrap(key)
    child = os.fork()
    if child == 0:
        try:
            os._exit(make().unwrap(wrapped) != key)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert make().unwrap(wrapped) == key


# URIs.


@each(
    "uri",
    [
        "", "pkcs11:", "token=a;object=b", "pkcs11:token=a", "pkcs11:object=b", "pkcs11:token=a;object=",
        "pkcs11:token=a;token=b;object=c", "pkcs11:token=a;object=b;slot-id=1", "pkcs11:token=a;object=b;type=cert",
        "pkcs11:token=a;object=b?module-name=softhsm", "pkcs11:token=a;object=b?pin-source=|/bin/pin",
        "pkcs11:token=a;object=b?pin-source=pin", "pkcs11:token=a;object=b?x-algorithm=RSA",
        "pkcs11:token=a;object=ü", "pkcs11:token=a;object=b c", "pkcs11:token=a;object=b?more",
        "pkcs11:token=a;object=b#c", "pkcs11:token=a#c;object=b", "pkcs11:token=a;object=b?pin-source=/bin/pin#c",
    ],
)  # fmt: skip
def test_another_uri_is_refused(uri):
    with pytest.raises(ValueError, match="expected"):
        Pkcs11(uri)


@pytest.mark.parametrize("uri", ["pkcs11:token=a;object=b?pin-value=1234", "pkcs11:token=a;pin-value=1234;object=b"])
def test_a_pin_in_a_uri_is_refused_and_not_repeated(uri):
    with pytest.raises(ValueError, match="without a PIN") as caught:
        Pkcs11(uri)
    assert "1234" not in str(caught.value)


@each("uri", ["pkcs11:token=a;object=b?module-path=/tmp/evil.so", "pkcs11:token=a;object=b?", "pkcs11:object=b", "x"])
def test_a_file_names_no_library(uri):
    with pytest.raises(FormatError, match="is wrong"):
        WrappedKey("pkcs11", "AES-KW", "0" * 32, 256, b"x", {"uri": uri}).unwrap()


def test_a_uri_is_written_in_one_form():
    shown = repr(Pkcs11("pkcs11:object=a%20b%3b;id=%01%ff;token=t"))
    assert shown == "<Pkcs11 pkcs11:token=t;object=a%20b%3B;id=%01%FF>"


# A stand-in for a token with RSA-OAEP and SHA-256, which SoftHSM 2.6 lacks. It shows the parameters of the call.


def test_rsa_oaep_with_sha_256_on_a_stand_in(rsa_key, key, monkeypatch):
    pkcs11 = pytest.importorskip("pkcs11")
    from cryptography.hazmat.primitives.asymmetric.padding import MGF1, OAEP
    from cryptography.hazmat.primitives.hashes import SHA256

    class PrivateKey(dict):
        def decrypt(self, data, *, mechanism, mechanism_param):
            assert mechanism is pkcs11.Mechanism.RSA_PKCS_OAEP
            assert mechanism_param == (pkcs11.Mechanism.SHA256, pkcs11.MGF.SHA256, None)
            return rsa_key.decrypt(data, OAEP(MGF1(SHA256()), SHA256(), None))

    public = rsa_key.public_key().public_numbers()
    found = PrivateKey(
        {pkcs11.Attribute.MODULUS: public.n.to_bytes(256, "big"), pkcs11.Attribute.PUBLIC_EXPONENT: b"\1\0\1"}
    )

    class Session:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def get_objects(self, attributes):
            return [found] if attributes[pkcs11.Attribute.CLASS] == pkcs11.ObjectClass.PRIVATE_KEY else []

    monkeypatch.setattr(Pkcs11, "_find_token", lambda *_: None)
    monkeypatch.setattr(Pkcs11, "_log_in", lambda *_: Session())
    provider = Pkcs11("pkcs11:token=vault;object=owner")
    wrapped = provider.wrap(key)
    assert provider.unwrap(wrapped) == key
    assert unwrap(read_wrapped(wrapped.to_bytes()), rsa_key) == bytes(key.material())
