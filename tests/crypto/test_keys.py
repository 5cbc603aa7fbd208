import copy
import os
import pickle
import re
import stat
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from helpers import file_systems
from helpers.cases import each
from hypothesis import given
from hypothesis import strategies as st

import fastrack
from fastrack import Key, KeyRing
from fastrack._crypto.secret_bytes import SecretBytes
from fastrack._keys import keyring
from fastrack._keys import keys as keys_module
from fastrack.errors import ClosedError, FormatError, KeyPermissionError

SECRET = bytes(range(100, 132))
SECRETS = (st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32)).filter(any)


@pytest.fixture
def key():
    return Key.from_bytes(SECRET)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "owner.key"


def shows_the_secret(text, secret=SECRET):
    return secret.hex() in text or repr(secret)[2:-1] in text or secret.hex()[:8] in text


# Making keys


def test_a_generated_key_has_256_or_128_bits():
    assert Key.generate().bits == 256
    assert Key.generate(128).bits == 128
    assert Key.generate(bits=128).material().nbytes == 16
    assert len({Key.generate() for _ in range(50)}) == 50


@each("bits", [0, 16, 32, 192, 512, "256", None])
def test_a_key_of_another_size_is_not_generated(bits):
    with pytest.raises(ValueError, match="bits"):
        Key.generate(bits)


@each("kind", [bytes, bytearray, memoryview])
def test_a_key_is_made_of_anything_like_bytes(kind):
    assert bytes(Key.from_bytes(kind(SECRET)).material()) == SECRET


@each("size", [0, 1, 15, 17, 24, 31, 33, 64])
def test_a_key_of_another_length_is_refused_and_shows_itself_all_the_same(size):
    with pytest.raises(FormatError, match=f"got {size}") as caught:
        Key.from_bytes(bytes(size))
    told = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "<Key " in told


@each("wrong", ["a" * 32, 32, None, [1] * 32])
def test_a_key_is_not_made_of_anything_else(wrong):
    with pytest.raises(TypeError):
        Key.from_bytes(wrong)


def test_a_key_keeps_its_own_copy_of_the_secret():
    secret = bytearray(SECRET)
    key = Key.from_bytes(secret)
    secret[:] = bytes(32)
    assert bytes(key.material()) == SECRET


# Identity


def test_an_id_is_32_hexadecimal_digits():
    assert re.fullmatch("[0-9a-f]{32}", Key.generate().id)


def test_an_id_never_changes_from_one_version_to_the_next(key):
    assert key.id == "f5045862d1232c7737680e93a12f5cab"
    assert Key.from_bytes(SECRET[:16]).id == "01fac968081f5accfeb498d0e9fe7cb4"
    assert Key.from_bytes(SECRET[:16] + bytes(16)).id != "01fac968081f5accfeb498d0e9fe7cb4"


@given(secret=SECRETS, other=SECRETS)
def test_keys_are_equal_when_their_secrets_are(secret, other):
    assert Key.from_bytes(secret) == Key.from_bytes(secret)
    assert (Key.from_bytes(secret) == Key.from_bytes(other)) is (secret == other)
    assert (Key.from_bytes(secret).id == Key.from_bytes(other).id) is (secret == other)
    assert hash(Key.from_bytes(secret)) == hash(Key.from_bytes(secret))


def test_a_key_does_not_equal_its_bytes_or_its_id_or_once_wiped_another(key):
    assert key != SECRET
    assert key != key.id
    other = Key.generate()
    key.wipe()
    other.wipe()
    assert key != other


# Keeping the secret


def test_a_repr_shows_the_id_and_the_size_and_no_secret(key):
    assert repr(key) == f"<Key 256-bit id={key.id}>"
    assert not shows_the_secret(repr(key) + str(key) + f"{key}")
    assert not hasattr(key, "__dict__")


PICKLERS = [partial(pickle.dumps, protocol=protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


@each("duplicate", [copy.copy, copy.deepcopy, *PICKLERS])
def test_a_key_cannot_be_pickled_or_copied(key, duplicate):
    with pytest.raises(TypeError, match=r"key\.save") as caught:
        duplicate(key)
    assert not shows_the_secret(str(caught.value))


def test_the_material_cannot_be_written_to(key):
    assert key.material().readonly
    with pytest.raises(TypeError):
        key.material()[0] = 0


def test_wiping_overwrites_the_secret_in_place(key):
    view = key.material()
    key.wipe()
    assert bytes(view) == bytes(32)


def test_a_wiped_key_keeps_its_id_and_gives_nothing_else(key, path):
    key_id = key.id
    key.wipe()
    key.wipe()
    assert key.id == key_id
    assert "wiped" in repr(key)
    for use in (key.material, lambda: key.save(path)):
        with pytest.raises(ClosedError, match=key_id):
            use()
    assert not path.exists()


def test_a_view_keeps_its_secret(key, path):
    key.save(path)
    assert bytes(Key.load(path).material()) == SECRET
    assert Key.from_bytes(Key.load(path).material()) == key


def test_a_key_that_goes_away_wipes_itself(key):
    wiped = []

    class Watched(SecretBytes):
        def __del__(self, parent=SecretBytes.__del__):
            parent(self)
            wiped.append(bytes(self))

    key._secret = Watched(SECRET)
    key._secret = None
    assert wiped == [bytes(32)]


@each("place", ["builtins.key", "key", "sys.key"])
def test_a_key_that_lives_to_the_end_of_the_interpreter_goes_quietly(place):
    script = f"import builtins, sys, fastrack\n{place} = fastrack.Key.generate()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("size", [16, 32])
def test_a_key_of_zeros_is_refused(path, size):
    with pytest.raises(FormatError, match="got zeros"):
        Key.from_bytes(bytes(size))
    key_id = keys_module.derive_id(bytearray(size))
    path.write_text(f"# fastrack key, {8 * size} bits, id {key_id}\nfastrack-key-1:{bytes(size).hex()}\n")
    path.chmod(0o600)
    with pytest.raises(FormatError, match="got zeros"):
        Key.load(path)


# Key files


@pytest.mark.parametrize("bits", [128, 256])
def test_a_saved_key_loads_again(path, bits):
    key = Key.generate(bits)
    key.save(path)
    assert Key.load(path) == key
    assert Key.load(str(path)).id == key.id
    path.chmod(0o400)  # not even its owner may write to it
    assert Key.load(path) == key


def test_a_key_file_is_two_lines_that_anyone_can_read(key, path):
    key.save(path)
    assert path.read_text() == f"# fastrack key, 256 bits, id {key.id}\nfastrack-key-1:{SECRET.hex()}\n"


@each("umask", [0o000, 0o022, 0o077])
def test_only_its_owner_may_read_a_key_file(key, path, umask):
    path.unlink(missing_ok=True)
    before = os.umask(umask)
    try:
        key.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_file_of_another_user_is_refused(key, path, monkeypatch):
    key.save(path)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        another = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(KeyPermissionError, match=rf"uid {os.geteuid()}\b"):
        Key.load(path)


def test_a_save_never_overwrites_a_file_and_leaves_nothing_else_behind(key, path, tmp_path):
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        key.save(path)
    assert path.read_text() == "precious"
    path.unlink()
    key.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_does_not_follow_a_link_to_nowhere(key, path, tmp_path):
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        key.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_on_a_full_disk_leaves_nothing_behind(key, path, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        key.save(path)
    assert list(tmp_path.iterdir()) == []


def test_of_many_saves_at_once_one_wins_whole(path):
    contenders = [Key.generate() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        errors = [pool.submit(key.save, path) for key in contenders]
    losers = [key for key, error in zip(contenders, errors, strict=True) if error.exception()]
    assert all(isinstance(error.exception(), FileExistsError | None) for error in errors)
    assert {Key.load(path), *losers} == set(contenders)
    assert len(losers) == 7


def test_a_key_can_be_saved_in_the_working_directory(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key.save("here.key")
    assert Key.load("here.key") == key


def write_private(path, content):
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@pytest.mark.slow
def test_every_other_change_of_one_byte_in_a_key_file_is_refused(key, path):
    key.save(path)
    good = path.read_bytes()
    for position in range(len(good)):
        for flip in (1, 0x20, 0x80):
            bad = bytearray(good)
            bad[position] ^= flip
            with pytest.raises(FormatError):
                Key.load(write_private(path, bad))


def test_every_truncation_of_a_key_file_but_of_its_last_newline_is_refused(key, path):
    key.save(path)
    good = path.read_bytes()
    for size in range(len(good) - 1):
        with pytest.raises(FormatError):
            Key.load(write_private(path, good[:size]))
    assert Key.load(write_private(path, good.removesuffix(b"\n"))) == key


def test_a_huge_file_is_refused_after_a_few_hundred_bytes(path):
    with path.open("wb") as file:
        file.truncate(2**40)
    path.chmod(0o600)
    with pytest.raises(FormatError):
        Key.load(path)


@pytest.mark.parametrize(
    ("content", "told"), [(b"PK\3\4 and more", "not a fastrack key file"), (bytes(31) + b"1", "as many bytes as a key")]
)
def test_another_file_is_refused_as_such_whatever_its_mode(tmp_path, content, told):
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    for mode in (0o600, 0o644):
        path.chmod(mode)
        with pytest.raises(FormatError, match=told) as caught:
            Key.load(path)
        assert "chmod" not in str(caught.value)


def test_a_pipe_without_a_writer_or_a_folder_is_refused_at_once(tmp_path):
    """To open one may block for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(FormatError, match="not a fastrack key file"):
        Key.load(pipe)
    with pytest.raises(OSError, match="got a folder"):
        Key.load(tmp_path)


# Key rings


def test_a_ring_finds_a_key_by_its_id_and_seals_with_the_first():
    a, b = Key.generate(), Key.generate(128)
    for ring, first in ((KeyRing([a, b]), a), (KeyRing([b, a]), b)):
        assert ring[a.id] is a
        assert ring[b.id] is b
        assert ring.first is first


def test_a_ring_takes_a_key_a_path_a_ring_and_any_nest_of_them(key, path):
    key.save(path)
    a, b, c = Key.generate(), Key.generate(), Key.generate()
    ring = KeyRing([a, path, KeyRing([b]), (k for k in [c])])
    assert list(ring) == [a, key, b, c]
    assert list(KeyRing(a)) == [a]
    assert list(KeyRing(path)) == list(KeyRing(str(path))) == [key]
    assert list(KeyRing(ring)) == list(ring)
    assert list(KeyRing()) == []


def test_a_ring_knows_what_it_holds_once(key):
    ring = KeyRing([key, Key.from_bytes(SECRET), key])
    assert len(ring) == 1
    assert key in ring
    assert key.id in ring
    assert Key.generate() not in ring
    assert "0" * 32 not in ring
    assert 7 not in ring


@each("wrong", [7, 1.5, object(), None, [7], [None]])
def test_a_ring_takes_nothing_else(wrong):
    with pytest.raises(TypeError, match="keys= take"):
        KeyRing(wrong)


@each("kind", [bytes, bytearray, memoryview])
def test_bytes_are_not_taken_for_keys_by_mistake(kind):
    with pytest.raises(TypeError, match="from_bytes") as caught:
        KeyRing(kind(SECRET))
    assert not shows_the_secret(str(caught.value))


def test_a_ring_shows_ids_alone_and_cannot_be_pickled(key):
    assert repr(KeyRing(key)) == f"<KeyRing {key.id}>"
    assert repr(KeyRing()) == "<KeyRing empty>"
    with pytest.raises(TypeError, match=r"key\.save"):
        pickle.dumps(KeyRing(key))


def test_keys_that_are_given_need_no_environment(key):
    ring = KeyRing.resolve(key)
    assert ring.first is key
    assert KeyRing.resolve(ring) is ring


def test_without_keys_the_environment_names_a_key_file(key, path, monkeypatch):
    key.save(path)
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(path))
    assert KeyRing.resolve().first == key
    other = Key.generate()
    assert list(KeyRing.resolve(other)) == [other]
    assert len(KeyRing.resolve([])) == 0  # that is a choice


def test_a_bad_path_in_the_environment_is_blamed_on_the_environment(path, monkeypatch):
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(path))
    with pytest.raises(FileNotFoundError) as caught:
        KeyRing.resolve()
    assert "FASTRACK_KEY_FILE" in caught.value.__notes__[0]


@each("name", ["owner.key", "0123456789abcdef" * 2 + ".key", "keys/" + "ab" * 16])
def test_a_path_that_is_not_there_is_told(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=name):
        Key.load(tmp_path / name)


def test_a_key_file_may_be_called_as_a_key_looks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Key.from_bytes(SECRET).save("ab" * 16)
    assert Key.load("ab" * 16) == Key.from_bytes(SECRET)


def test_a_wiped_key_does_not_hide_a_good_one(key):
    wiped = Key.from_bytes(key.material())
    wiped.wipe()
    for keys in ([wiped, key], [key, wiped]):
        assert KeyRing(keys)[key.id].material() == key.material()


def test_a_file_system_without_links_takes_a_key_all_the_same(key, path, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    file_systems.refuse_unnamed(monkeypatch)  # such file systems have no files without names either
    key.save(path)
    with pytest.raises(FileExistsError):
        Key.generate().save(path)
    assert Key.load(path) == key
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_argument_is_a_key_or_a_source_that_knows_one(key, path):
    key.save(path)
    assert keyring.sealing_key(key) is key
    assert keyring.sealing_key(path) == keyring.sealing_key(str(path)) == key
    assert keyring.sealing_key(KeyRing([key, Key.generate()])) is key
    with pytest.raises(TypeError, match="from_bytes"):
        keyring.sealing_key(b"0" * 32)


def test_keys_that_can_be_iterated_once_serve_all_columns_and_files(key, tmp_path):
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        fastrack.save_file({"data": np.arange(3), "offsets": np.array([0, 1, 3])}, path, key)
    assert len(fastrack.SealedDataset(paths, keys=(one for one in [key]))) == 6
    assert len(fastrack.SealedDataset.records(paths, keys=(one for one in [key]))) == 4


@each(
    ("content", "told"),
    [
        (bytes(32), "Key.from_bytes"),
        (b"fastrack-public-1:Ed25519:AAAA", "it holds a public key"),
        (b"# fastrack secret key, Ed25519, id", "it holds the secret key of a key pair"),
    ],
)
def test_a_file_that_holds_another_kind_of_key_is_refused_as_that(path, content, told):
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(FormatError, match=f"is not a fastrack key file.*{told}"):
        Key.load(path)
