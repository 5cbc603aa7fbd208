"""Keys where their paths are expected, damaged key files, and secrets that a container platform mounts."""

import base64
import os
import re
import tempfile
import traceback
from pathlib import Path

import numpy as np
import pytest
from helpers.cases import each
from helpers.forking import in_forked_child

import fastrack
from fastrack import FastrackError, FormatError, Key, KeyPermissionError
from fastrack.grants import Grants, Identity, Recipient, Signer, Verifier
from fastrack.providers import WrappedKey

SECRET = bytes(range(7, 39))
NOBODY = 65534

SPELLINGS = {
    "line": lambda key: f"fastrack-key-1:{key.hex()}",
    "file": lambda key: f"# fastrack key, 256 bits, id {'0' * 32}\nfastrack-key-1:{key.hex()}\n",
    "secret file": lambda key: f"# fastrack secret key, Ed25519, id 00\nfastrack-secret-1:Ed25519:{key.hex()}\n",
    "hex": lambda key: key.hex(),
    "HEX": lambda key: key.hex().upper(),
    "0xHEX": lambda key: f" 0x{key.hex().upper()}\n",
    "pairs": lambda key: key.hex(":"),
    "short": lambda key: f"{key[:16].hex()}\n",
    "base64": lambda key: base64.b64encode(key).decode(),
    "base64 without padding": lambda key: base64.b64encode(key).decode().rstrip("="),
    "short base64 without padding": lambda key: base64.urlsafe_b64encode(key[:16]).decode().rstrip("="),
}


def assert_not_told(text, spelled):
    short = base64.b64encode(SECRET[:16]).decode()[:20]
    for part in (spelled.strip(), SECRET.hex(), SECRET[:16].hex(), short):
        assert part.lower() not in text.lower(), text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def path(folder):
    key = Key.generate()
    fastrack.save_file({"x": np.arange(10)}, folder / "sealed.safetensors", key)
    np.save(folder / "plain.npy", np.arange(10))
    fastrack.save_checkpoint("state.safetensors", {"step": 3}, key=key)
    return folder / "sealed.safetensors"


def _to_device(path, keys):
    with fastrack.load_file(path) as file:
        fastrack.to_device(file["x"], keys=keys)


def _wrap(path, keys):
    with fastrack.load_file(path) as file:
        list(fastrack.wrap([file["x"]], keys=keys))


def _channel(path, keys):
    with fastrack.load_file(path) as file, fastrack.Channel(keys=keys) as channel:
        channel.to_device(file["x"])


ROUTES = {
    "seal": lambda path, keys: fastrack.seal(np.arange(3), keys),
    "seal_file": lambda path, keys: fastrack.seal_file("plain.npy", "other.safetensors", keys),
    "to_host": lambda path, keys: fastrack.to_host(np.arange(3), key=keys),
    "save_checkpoint": lambda path, keys: fastrack.save_checkpoint("other.safetensors", {"step": 3}, key=keys),
    "load_checkpoint": lambda path, keys: fastrack.load_checkpoint("state.safetensors", keys=keys),
    "to_device": _to_device,
    "wrap": _wrap,
    "Channel": _channel,
    "SealedDataset": lambda path, keys: len(fastrack.SealedDataset(path, ["x"], keys=keys)),
    "verify_file": lambda path, keys: fastrack.verify_file(path, keys=keys),
    "unseal_file": lambda path, keys: fastrack.unseal_file(path, "plain.npz", keys),
    "rekey_file, old": lambda path, keys: fastrack.rekey_file(path, "other.safetensors", keys=keys, key=Key.generate()),
    "rekey_file, new": lambda path, keys: fastrack.rekey_file(path, "other.safetensors", keys=[], key=keys),
    "KeyRing": lambda path, keys: fastrack.KeyRing(keys),
    "KeyRing.resolve": lambda path, keys: fastrack.KeyRing.resolve([keys]),
    "use_keys": lambda path, keys: fastrack.use_keys(keys),
    "Key.load": lambda path, keys: Key.load(keys),
    "Key.from_bytes": lambda path, keys: Key.from_bytes(keys.encode()),
    "Identity.load": lambda path, keys: Identity.load(keys),
    "Signer.load": lambda path, keys: Signer.load(keys),
    "Recipient.load": lambda path, keys: Recipient.load(keys),
    "Verifier.load": lambda path, keys: Verifier.load(keys),
    "Grants.load": lambda path, keys: Grants.load(keys, owner=[]),
    "WrappedKey.load": lambda path, keys: WrappedKey.load(keys),
}


@each("route", ROUTES)
def test_a_key_in_place_of_a_path_is_refused_and_not_repeated(path, route):
    for name, spell in SPELLINGS.items():
        text = spell(SECRET)
        with pytest.raises(FastrackError) as caught:
            ROUTES[route](path, text)
        assert_not_told("".join(traceback.format_exception(caught.value)), text)
        assert "itself" in str(caught.value) or route == "Key.from_bytes", name


@pytest.mark.parametrize("variable", ["FASTRACK_KEY_FILE", "FASTRACK_IDENTITY", "FASTRACK_OWNER"])
def test_a_key_in_a_variable_for_a_path_is_not_repeated(path, monkeypatch, variable):
    owner, identity = Signer.generate(), Identity.generate()
    owner.verifier.save("owner.pub")
    identity.save("alice.secret")
    Grants.issue(Key.generate(), [identity.recipient], signer=owner).save("sealed.grants")
    given = {"KEY_FILE": "sealed.grants", "IDENTITY": "alice.secret", "OWNER": "owner.pub"}
    for name, value in given.items():
        monkeypatch.setenv(f"FASTRACK_{name}", value)
    for spell in SPELLINGS.values():
        monkeypatch.setenv(variable, spell(SECRET))
        with pytest.raises(FastrackError, match="itself") as caught:
            fastrack.verify_file(path)
        assert_not_told("".join(traceback.format_exception(caught.value)), spell(SECRET))


def test_a_path_without_a_digit_or_a_capital_is_told():
    for name in ("secrets/training-owner", "keys/2026-training-own", "var/keys/project-a/training-set-owner-01234"):
        assert len(name) in {22, 43}
        with pytest.raises(FileNotFoundError, match=name):
            Key.load(name)


@each(
    "alter",
    [
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: text + text,
        lambda text: b"\n" + text,
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.upper(),
        lambda text: text + bytes(10_000),
        lambda text: text.replace(b"256 bits", b"128 bits"),
        lambda text: text[:-33],
        lambda text: b"",
        lambda text: SECRET.hex().encode(),
        lambda text: text + b"\n",
        lambda text: text[:-3],
        lambda text: text.splitlines()[1] + b"\n",
        lambda text: text.splitlines()[1].split(b":")[1],
        lambda text: text.replace(b"fastrack-key-1", b"fastrack-key-2"),
        lambda text: text[:-3] + (b"0" if text[-3:-2] != b"0" else b"1") + text[-2:],
        lambda text: b"fastrack_key = '" + text.splitlines()[1] + b"'",
        lambda text: base64.b64encode(SECRET),
        lambda text: SECRET,
    ],
)
def test_a_damaged_key_file_is_refused_and_not_shown(path, alter):
    owner = path.parent / "owner.key"
    owner.unlink(missing_ok=True)
    Key.from_bytes(SECRET).save(owner)
    owner.write_bytes(alter(owner.read_bytes()))
    with pytest.raises(FormatError, match=re.escape(str(owner))) as caught:
        fastrack.verify_file(path, keys=owner)
    told = "".join(traceback.format_exception(caught.value))
    assert_not_told(told, SECRET.hex())
    assert base64.b64encode(SECRET).decode() not in told


# Secrets that a container platform mounts: files that root or another user owns, for a process of a user of its own.


@pytest.fixture
def mounted():
    """Return a function that makes a key file with an owner and a mode, in a folder that all users may enter."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user, and become one")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        sealed = folder / "sealed.safetensors"

        def make(owner, mode):
            key = Key.from_bytes(SECRET)
            key.save(folder / "owner.key")
            os.chown(folder / "owner.key", owner, owner)
            (folder / "owner.key").chmod(mode)
            fastrack.save_file({"x": np.arange(10)}, sealed, key)
            sealed.chmod(0o644)
            return folder / "owner.key", sealed

        yield make


def open_as_nobody(key_file, sealed, allowed):
    """Return the type and the text of the error with which a user without rights fails to open a file, or the sum."""

    def attempt():
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ.pop("FASTRACK_KEY_MODE", None)
        os.environ |= {"FASTRACK_KEY_FILE": str(key_file)} | ({"FASTRACK_KEY_MODE": allowed} if allowed else {})
        try:
            with fastrack.load_file(sealed) as file:
                return int(fastrack.unseal(file["x"], framework="numpy").sum())
        except (FastrackError, OSError) as error:
            return type(error), str(error)

    return in_forked_child(attempt)


def test_a_secret_of_root_for_all_opens_where_its_mode_is_allowed(mounted):
    key_file, sealed = mounted(0, 0o444)
    for allowed in (None, "0440"):
        kind, text = open_as_nobody(key_file, sealed, allowed)
        assert kind is KeyPermissionError
        assert "FASTRACK_KEY_MODE=0440 or 0444" in text
        assert_not_told(text, SECRET.hex())
    assert open_as_nobody(key_file, sealed, "0444") == 45


def test_a_secret_of_a_third_user_is_refused_whatever_its_mode(mounted):
    key_file, sealed = mounted(4321, 0o444)
    for allowed in (None, "0444"):
        kind, text = open_as_nobody(key_file, sealed, allowed)
        assert kind is KeyPermissionError
        assert f"uid {NOBODY} or 0" in text
        assert "got uid 4321" in text


def test_a_secret_for_root_alone_cannot_be_read(mounted):
    key_file, sealed = mounted(0, 0o400)
    assert open_as_nobody(key_file, sealed, "0444")[0] is PermissionError
