"""Credentials that were refused are not sent again: stand-ins for a token and for Vault, and a wrapper that refuses."""

import json
import mmap
import os
import pickle
import sys
import tempfile
import types

import numpy as np
import pytest
from helpers import stand_in_pkcs11
from helpers.cases import each
from helpers.commands import invoke
from helpers.processes import run_python
from helpers.stand_in_pkcs11 import make_token, read_token
from helpers.toy_wrapper import Toy, install
from helpers.vault_answers import DOCUMENTED

import fastrack
from fastrack.errors import ProviderError
from fastrack.providers import Pkcs11, Tpm, VaultTransit, WrappedKey

PIN, WRONG = "482913", "111111"
URI = "pkcs11:token=vault;object=owner"


@pytest.fixture
def new_token(tmp_path, key, monkeypatch):
    """Make a token and the file of a key that it wrapped, and give the right PIN."""
    monkeypatch.setitem(sys.modules, "pkcs11", stand_in_pkcs11)

    def make(**options):
        path = make_token(tmp_path / "token", **options)
        monkeypatch.setenv("FASTRACK_PKCS11_MODULE", str(path))
        monkeypatch.setenv("FASTRACK_PKCS11_PIN", PIN)
        Pkcs11(URI).wrap(key).save(tmp_path / "owner.key.wrapped")
        return path

    return make


@pytest.fixture
def token(new_token):
    return new_token()


@pytest.fixture
def files(tmp_path, key, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sealed").mkdir()
    for number in range(5):
        fastrack.save_file({"x": np.arange(3)}, tmp_path / f"sealed/{number}.safetensors", key=key)
    return tmp_path / "sealed"


def wrong_ones(token):
    return read_token(token)["sent"].count(WRONG)


# A token.


@pytest.mark.parametrize(
    "command", [["unseal", "-r", "sealed", "out"], ["verify", "-r", "sealed"], ["verify", "sealed/*.safetensors"]]
)
@pytest.mark.usefixtures("files")
def test_a_wrong_pin_is_sent_once_by_a_command_on_many_files(token, monkeypatch, command):
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    result = invoke([*command, "--key", "owner.key.wrapped"])
    assert result.exit_code == 5
    assert wrong_ones(token) == 1
    assert result.stderr.count("PinIncorrect, the PIN is wrong, and is not sent again") == 1
    assert "not tried: 4 files, as credentials were refused" in result.output
    assert WRONG not in result.output


@pytest.mark.usefixtures("files")
def test_a_program_hears_of_one_refusal(token, monkeypatch):
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    result = invoke(["verify", "-r", "sealed", "--key", "owner.key.wrapped", "--json"])
    (line,) = map(json.loads, result.stdout.splitlines())
    assert (line["error"]["type"], wrong_ones(token)) == ("ProviderError", 1)


def test_a_loop_over_files_sends_a_wrong_pin_once(new_token, files, monkeypatch):
    token = new_token(tries=20, has_flags=False)  # which tells of no wrong one
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    ring = fastrack.KeyRing("owner.key.wrapped")
    for keys in (ring, "owner.key.wrapped"):
        for path in sorted(files.iterdir()):
            with pytest.raises(ProviderError) as caught:
                fastrack.verify_file(path, keys=keys)
            assert caught.value.is_refusal
    assert pickle.loads(pickle.dumps(caught.value)).is_refusal  # a worker raises it
    assert wrong_ones(token) == 1


def unwrap_in_children(count, path, *, alone):
    """Unwrap in forked processes; `alone`, each has a memory of its own, as spawned ones have. Return how it went."""
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            try:
                if alone:
                    sys.modules["fastrack._keys.wrapped"]._refused = mmap.mmap(-1, mmap.PAGESIZE)
                WrappedKey.load(path).unwrap()
                os._exit(0)
            except ProviderError:
                os._exit(1)
            finally:
                os._exit(2)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.slow
def test_workers_with_memories_of_their_own_do_not_lock_a_token(new_token, tmp_path, monkeypatch):
    token = new_token(seconds=0.02)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    assert unwrap_in_children(6, tmp_path / "owner.key.wrapped", alone=True) == [1] * 6
    assert wrong_ones(token) == 1
    monkeypatch.setenv("FASTRACK_PKCS11_TRY", "low")  # asked for, but not for the last try
    assert unwrap_in_children(6, tmp_path / "owner.key.wrapped", alone=True) == [1] * 6
    assert read_token(token)["left"] == 1


def test_forked_workers_know_what_one_of_them_was_refused(new_token, tmp_path, monkeypatch):
    token = new_token(has_flags=False)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    assert unwrap_in_children(4, tmp_path / "owner.key.wrapped", alone=False) == [1] * 4
    with pytest.raises(ProviderError, match="this PIN was refused before, and is not sent again"):
        WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()
    assert wrong_ones(token) == 1


@pytest.mark.slow
def test_a_ring_that_was_made_before_a_fork_is_enough_to_know(new_token, key, tmp_path, monkeypatch):
    token = new_token(has_flags=False)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    code = """
import os, sys
from helpers import stand_in_pkcs11
import fastrack

sys.modules["pkcs11"] = stand_in_pkcs11
ring = fastrack.KeyRing(sys.argv[1])
for _ in range(3):
    if (child := os.fork()) == 0:
        try:
            ring[sys.argv[2]]
        except fastrack.ProviderError:
            os._exit(1)
        finally:
            os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code, tmp_path / "owner.key.wrapped", key.id).split() == ["1", "1", "1"]
    assert wrong_ones(token) == 1


@pytest.mark.usefixtures("token")
def test_no_other_user_holds_up_a_login(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = tmp_path / f"fastrack-{os.getuid()}-pkcs11.lock"
    WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()
    lock.unlink()
    lock.symlink_to(tmp_path / "of-another")
    WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()
    assert not (tmp_path / "of-another").exists()
    if os.getuid() == 0:
        lock.unlink()
        lock.touch()
        os.chown(lock, 1, 1)
        monkeypatch.setattr("fcntl.lockf", None)  # would wait for ever
        WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()


@pytest.mark.slow
def test_spawned_processes_do_not_lock_a_token(new_token, tmp_path, monkeypatch):
    token = new_token(seconds=0.1)
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", WRONG)
    code = """
import multiprocessing, sys
from helpers import stand_in_pkcs11

def unwrap(path):
    sys.modules["pkcs11"] = stand_in_pkcs11
    from fastrack.providers import WrappedKey
    try:
        WrappedKey.load(path).unwrap()
    except Exception as error:
        return type(error).__name__, error.is_refusal

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        print(pool.map(unwrap, 4 * sys.argv[1:], chunksize=1))
"""
    (tmp_path / "spawning.py").write_text(code)
    told = run_python(
        "import subprocess, sys; print(subprocess.run([sys.executable, *sys.argv[1:]], check=True, capture_output=True,"
        " text=True).stdout)",
        tmp_path / "spawning.py",
        tmp_path / "owner.key.wrapped",
    )
    assert told.strip() == str([("ProviderError", True)] * 4)
    assert wrong_ones(token) == 1


def test_a_count_that_is_low_and_a_final_try_are_left_alone_unless_asked_for(token, tmp_path, monkeypatch):
    def unwrap(pin, asked=None):
        monkeypatch.setenv("FASTRACK_PKCS11_PIN", pin)
        monkeypatch.setenv("FASTRACK_PKCS11_TRY", asked or "")
        return WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()

    with pytest.raises(ProviderError, match="PinIncorrect"):
        unwrap(WRONG)
    with pytest.raises(ProviderError, match=r"counts a wrong PIN, so none was sent; check .* FASTRACK_PKCS11_TRY=low"):
        unwrap(PIN)
    with pytest.raises(ProviderError, match="PinIncorrect"):
        unwrap("222222", "low")
    for asked in ("", "low", "1"):
        with pytest.raises(
            ProviderError, match=r"would lock the token, so none .* FASTRACK_PKCS11_TRY=final"
        ) as caught:
            unwrap(PIN, asked)
        assert caught.value.is_refusal
    assert read_token(token)["sent"] == [PIN, WRONG, "222222"]  # the first one wrapped
    unwrap(PIN, "final")
    unwrap(PIN)  # as a login ends the count
    assert read_token(token)["left"] == 3


def test_a_locked_token_ends_a_run(new_token, tmp_path, monkeypatch):
    new_token(tries=1, has_flags=False)
    for pin, name in ((WRONG, "PinIncorrect"), (PIN, "PinLocked")):
        monkeypatch.setenv("FASTRACK_PKCS11_PIN", pin)
        with pytest.raises(ProviderError, match=name) as caught:
            WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()
        assert caught.value.is_refusal


@pytest.mark.parametrize("text", [PIN.encode(), b"\xef\xbb\xbf482913\r\n", b"482913\r\n"])
def test_a_pin_is_sent_without_what_an_editor_adds(token, tmp_path, monkeypatch, text):
    path = tmp_path / "pin"
    path.write_bytes(text)
    path.chmod(0o600)
    Pkcs11(f"{URI}?pin-source=file:{path}").unwrap(WrappedKey.load(tmp_path / "owner.key.wrapped"))
    monkeypatch.setenv("FASTRACK_PKCS11_PIN", text.decode())
    WrappedKey.load(tmp_path / "owner.key.wrapped").unwrap()
    assert set(read_token(token)["sent"]) == {PIN}


@pytest.mark.parametrize("text", [PIN.encode("utf-16"), PIN.encode("utf-16-le")])
def test_a_pin_in_utf_16_is_not_sent(token, tmp_path, text):
    path = tmp_path / "pin"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ProviderError, match="expected a PIN in UTF-8"):
        Pkcs11(f"{URI}?pin-source=file:{path}").unwrap(WrappedKey.load(tmp_path / "owner.key.wrapped"))
    assert read_token(token)["sent"] == [PIN]


# Other keys.


@pytest.mark.usefixtures("files")
def test_any_wrapper_that_refuses_ends_a_run_and_other_failures_do_not(tmp_path, key, monkeypatch):
    install(monkeypatch)
    Toy().wrap(key).save(tmp_path / "owner.key.wrapped")
    asked = []

    def decrypt(self, wrapped):
        asked.append(wrapped)
        raise self._failure("ExpiredTokenException, get a new one", refusal=is_refusal)

    monkeypatch.setattr(Toy, "_decrypt", decrypt)
    for is_refusal, count in ((True, 1), (False, 5)):
        asked.clear()
        result = invoke(["verify", "-r", "sealed", "--key", "owner.key.wrapped"])
        assert (result.exit_code, len(asked)) == (5, count)
        assert ("not tried" in result.output) == is_refusal


class Adapter:
    """As hvac's adapter: a document for status 200, else the response."""

    namespace = None

    def __init__(self):
        self.asked = []

    def post(self, path, *, json, raise_exception):
        assert json
        assert raise_exception is False
        self.asked.append(path)
        return types.SimpleNamespace(status_code=self.status, json=lambda: {"errors": self.errors})


@each("code,error,is_refusal", [(0x9A2, 0xA2, True), (0x98E, 0x8E, True), (0x99D, 0x9D, False)])
def test_a_tpm_whose_owner_has_a_password_ends_a_run(monkeypatch, code, error, is_refusal):
    class FailureError(Exception):
        rc = code

    FailureError.error = error  # as tpm2-pytss: without the number of the session

    def fail(_):
        raise FailureError

    monkeypatch.setitem(sys.modules, "tpm2_pytss", types.SimpleNamespace(TSS2_Exception=FailureError, ESAPI=fail))
    with pytest.raises(ProviderError, match=f"code 0x{code:x}, the ") as caught:
        Tpm().wrap(fastrack.Key.generate())
    assert caught.value.is_refusal == is_refusal


@each("status,errors,reason", DOCUMENTED)
def test_vaults_documented_answers_have_their_reasons(status, errors, reason):
    pytest.importorskip("requests")
    client = types.SimpleNamespace(url="https://vault.example", token=os.urandom(8).hex(), adapter=Adapter())
    client.adapter.status, client.adapter.errors = status, errors
    wrapper = VaultTransit("owner", client=client)
    wrapped = WrappedKey("vault-transit", "transit", "0" * 32, 256, b"vault:v1:", {"mount": "transit", "name": "owner"})
    with pytest.raises(ProviderError, match=reason) as caught:
        wrapper.unwrap(wrapped)
    assert str(caught.value).startswith(f"asking <VaultTransit transit/owner> failed: status {status}, ")
    assert caught.value.is_refusal == (status == 403)
    with pytest.raises(ProviderError, match="is not sent again" if caught.value.is_refusal else reason):
        wrapper.unwrap(wrapped)
    assert len(client.adapter.asked) == (1 if caught.value.is_refusal else 2)


def test_another_token_is_sent_after_one_was_refused():
    pytest.importorskip("requests")
    client = types.SimpleNamespace(url="https://vault.example", token="s.old", adapter=Adapter())
    client.adapter.status, client.adapter.errors = 403, ["permission denied"]
    for client.token in ("s.old", "s.old", "s.new"):
        with pytest.raises(ProviderError):
            VaultTransit("owner", client=client).wrap(fastrack.Key.generate())
    assert len(client.adapter.asked) == 2
