"""Keys from providers, folders, descriptors and text, wherever a key is wanted."""

import gc
import importlib.metadata
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.cases import each
from helpers.forking import in_forked_child

import fastrack
from fastrack import Key, KeyPermissionError, KeyRing, UnknownKeyError, use_keys
from fastrack._keys import keyring
from fastrack.errors import FormatError

pytestmark = pytest.mark.usefixtures("no_default_keys_afterwards")

MODES = {"0440": 0o440, "0640": 0o640, "0444": 0o444, "0644": 0o644}


class Vault:
    """A provider that notes which keys it was asked for."""

    def __init__(self, *keys):
        self.keys = {key.id: key for key in keys}
        self.asked = []

    def get_key(self, key_id):
        self.asked.append(key_id)
        return self.keys[key_id]


class SealingVault(Vault):
    def get_sealing_key(self):
        return next(iter(self.keys.values()))


class Ring(KeyRing):
    """A ring that has no keys, and fetches those that are asked for."""

    __slots__ = ("vault",)

    def __init__(self, key):
        super().__init__()
        self.vault = Vault(key)

    def __getitem__(self, key_id):
        return self.vault.get_key(key_id)


@pytest.fixture
def key():
    return Key.generate()


@pytest.fixture
def path(key, tmp_path):
    key.save(tmp_path / "owner.key")
    return tmp_path / "owner.key"


# Sources


SOURCES = {
    "provider": lambda key, path: Vault(key),
    "function": lambda key, path: {key.id: key}.get,
    "function that raises": lambda key, path: {key.id: key}.__getitem__,
    "mapping": lambda key, path: {key.id: key},
    "ring of a provider": lambda key, path: KeyRing(Vault(key)),
    "ring of another kind": lambda key, path: Ring(key),
    "folder": lambda key, path: path.parent,
    "text": lambda key, path: str(path),
    "among others": lambda key, path: [Key.generate(), Vault(Key.generate()), {key.id: key}.get],
}


def _through_a_channel(file, keys):
    with fastrack.Channel(keys=keys) as channel:
        return channel.to_device(file["x"])


USES = {
    "unseal": lambda file, keys: fastrack.unseal(file["x"], keys),
    "to_device": lambda file, keys: fastrack.to_device(file["x"][3:], keys=keys),
    "to": lambda file, keys: file["x"].to("cpu", keys=keys),
    "wrap": lambda file, keys: list(fastrack.wrap([file["x"], file["x"][:3]], keys=keys)),
    "wrap without a thread": lambda file, keys: list(fastrack.wrap([file["x"]], keys=keys, prefetch=0)),
    "verify": lambda file, keys: fastrack.verify_file(file.path, keys=keys),
    "unseal_file": lambda file, keys: fastrack.unseal_file(file, file.path.with_suffix(".npz"), keys, overwrite=True),
    "channel": _through_a_channel,
    "dataset": lambda file, keys: len(fastrack.SealedDataset(file.path, ["x"], keys=keys)),
    "records": lambda file, keys: len(fastrack.SealedDataset.records(file.path, keys=keys)),
}


@each("source", SOURCES)
@each("use", USES)
@each("default", [False, True])
def test_every_source_serves_every_use(key, path, file, source, use, default):
    keys = SOURCES[source](key, path)
    if default:
        with use_keys(keys):
            USES[use](file, None)
    else:
        USES[use](file, keys)


SEALERS = {
    "seal": lambda path, **key: fastrack.seal(np.arange(3), **key).key_id,
    "to_host": lambda path, **key: fastrack.to_host(np.arange(3), **key).key_id,
    "save_file": lambda path, **key: fastrack.save_file({"x": np.arange(3)}, path, **key),
    "seal_file": lambda path, **key: fastrack.seal_file(_array(path), path, **key),
    "save_checkpoint": lambda path, **key: fastrack.save_checkpoint(path, {"step": 3}, **key),
}
SEALING_SOURCES = {
    "key": lambda key, path: key,
    "provider": lambda key, path: SealingVault(key),
    "ring": lambda key, path: KeyRing([key, Key.generate()]),
    "ring of a provider": lambda key, path: KeyRing([{}.get, SealingVault(key)]),
    "file": lambda key, path: path,
    "folder": lambda key, path: path.parent,
}


def _array(path):
    np.save(path.with_suffix(".npy"), np.arange(3))
    return path.with_suffix(".npy")


@each("source", SEALING_SOURCES)
@each("sealer", SEALERS)
@pytest.mark.parametrize("way", ["argument", "default", "variable"])
def test_every_sealer_takes_every_source_and_the_defaults(key, path, tmp_path, monkeypatch, source, sealer, way):
    keys, options = SEALING_SOURCES[source](key, path), {}
    if way == "argument":
        options["key"] = keys
    elif way == "default":
        use_keys(keys)
    elif isinstance(keys, os.PathLike):
        monkeypatch.setenv("FASTRACK_KEY_FILE", str(keys))
    else:
        return  # the variable names files and folders
    out = tmp_path / f"{source}-{sealer}"
    out.mkdir()
    made = SEALERS[sealer](out / "sealed.safetensors", **options)
    if made is None:
        with fastrack.load_file(out / "sealed.safetensors") as file:
            made = file.key_id
    assert made == key.id


def test_a_provider_without_a_sealing_key_does_not_seal(key):
    with pytest.raises(UnknownKeyError, match=r"get_sealing_key.*Vault"):
        fastrack.seal(np.arange(3), Vault(key))


def test_keys_that_are_held_come_first_and_providers_in_their_order(key):
    first, second = Vault(key), Vault(key)
    assert KeyRing([first, key])[key.id] is key
    assert KeyRing([Vault(), first, second])[key.id] is key
    assert (first.asked, second.asked) == ([key.id], [])


# What providers do wrong


def test_an_unknown_key_tells_which_sources_were_asked(key):
    other = Key.generate()
    ring = KeyRing([other, Vault(), {}.get])
    with pytest.raises(UnknownKeyError, match=rf"{key.id}.*asked: {other.id}, Vault, dict.get"):
        ring[key.id]


def test_the_words_of_a_single_provider_are_kept(key):
    def refuse(key_id):
        raise UnknownKeyError(f"vault: {key_id} is sealed off; ask its owner")

    with pytest.raises(UnknownKeyError, match=rf"^vault: {key.id} is sealed off"):
        KeyRing(refuse)[key.id]


@each("wrong", [b"0" * 32, "owner.key", 7, [Key.generate()]])
def test_a_provider_gives_keys_and_nothing_else(key, wrong):
    with pytest.raises(TypeError, match=r"expected a fastrack\.Key, got") as caught:
        KeyRing(lambda key_id: wrong)[key.id]
    assert str(wrong) not in str(caught.value)


def test_another_key_than_asked_for_is_refused(key):
    other = Key.generate()
    with pytest.raises(UnknownKeyError, match=rf"expected key {key.id}, got key {other.id}"):
        KeyRing(lambda key_id: other)[key.id]


def test_a_failure_of_a_provider_reaches_the_caller_with_its_name(key, file):
    def lost_connection(_):
        raise ConnectionError("no route to the vault")

    with pytest.raises(ConnectionError, match="no route") as caught:
        fastrack.unseal(file["x"], lost_connection)
    assert "lost_connection" in caught.value.__notes__[0]
    assert key.id in caught.value.__notes__[0]
    with pytest.raises(ConnectionError, match="no route"):
        list(fastrack.wrap([file["x"]], keys=lost_connection))


def test_no_repr_of_a_provider_is_shown(key):
    class Client:
        def __repr__(self):
            return "Client(token=secret)"

        def get_key(self, key_id):
            raise LookupError(key_id)

    ring = KeyRing([key, Client()])
    with pytest.raises(UnknownKeyError) as caught:
        ring["f" * 32]
    assert "token" not in repr(ring) + str(caught.value)
    assert "Client" in repr(ring)


# The cache


def test_a_ring_asks_once_for_a_key_until_its_time_is_over(key, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(keyring.time, "monotonic", lambda: now[0])
    vault = Vault(key)
    ring = KeyRing(vault, ttl=60)
    for now[0] in (100.0, 159.0, 160.0, 219.9, 220.0):
        assert ring[key.id] is key
    assert len(vault.asked) == 3


def test_what_was_not_found_is_asked_for_again(key):
    vault = Vault()
    ring = KeyRing(vault)
    with pytest.raises(UnknownKeyError):
        ring[key.id]
    vault.keys[key.id] = key
    assert ring[key.id] is key


def test_a_wiped_key_is_asked_for_again(key):
    copies = []

    def fetch(_):
        copies.append(Key.from_bytes(key.material()))
        return copies[-1]

    ring = KeyRing(fetch)
    ring[key.id].wipe()
    assert ring[key.id].material() == key.material()
    assert len(copies) == 2


def test_the_cache_is_bounded_and_a_dropped_key_is_overwritten(limited):
    limited(keys_kept=4)
    secrets = {Key.from_bytes(bytes([n]) * 32).id: bytes([n]) * 32 for n in range(1, 9)}
    ring = KeyRing(lambda key_id: Key.from_bytes(secrets[key_id]))
    views = [ring[key_id].material() for key_id in secrets]
    gc.collect()
    held = [view for view in views if any(view)]
    assert len(held) == 8  # a view keeps its secret
    lost = [weakref.ref(view.obj) for view in views]
    del views, held
    gc.collect()
    assert sum(ref() is not None for ref in lost) == 4


def test_threads_ask_a_provider_once(key):
    started, vault = threading.Barrier(8), Vault(key)
    ring = KeyRing(vault)
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(lambda: (started.wait(), ring[key.id])) for _ in range(8)]
    assert all(one.result()[1] is key for one in found)
    assert vault.asked == [key.id]


def test_a_provider_may_use_the_ring_that_asks_it(key):
    other = Key.generate()

    def open_store(key_id):
        return other if key_id == other.id else ring[other.id] and key

    ring = KeyRing(open_store)
    assert ring[key.id] is key


def test_a_child_forked_during_a_look_up_is_not_blocked(key):
    asked, forked = threading.Event(), threading.Event()

    def slow(_):
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            forked.wait(30)
        return key

    ring = KeyRing(slow)
    thread = threading.Thread(target=lambda: ring[key.id])
    thread.start()
    asked.wait()
    assert in_forked_child(lambda: ring[key.id] is key)
    forked.set()
    thread.join()


# Files and folders


def test_a_folder_is_read_anew_for_a_key_that_came_later(key, tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    ring = KeyRing(folder)
    with pytest.raises(UnknownKeyError, match="found none"):
        ring[key.id]
    key.save(folder / "a.key")
    assert ring[key.id] == key


def test_a_folder_may_hold_other_things(key, tmp_path):
    """Kubernetes mounts a secret as links into a hidden folder."""
    hidden = tmp_path / "..2026"
    hidden.mkdir()
    key.save(hidden / "owner")
    (tmp_path / "..data").symlink_to(hidden)
    (tmp_path / "owner").symlink_to(tmp_path / "..data" / "owner")
    (tmp_path / "ca.crt").write_text("certificate")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    assert KeyRing(tmp_path)[key.id] == key
    assert KeyRing(tmp_path).first == key


def test_a_folder_of_several_keys_does_not_choose_one(path):
    Key.generate().save(path.parent / "second.key")
    with pytest.raises(UnknownKeyError, match="expected one key file to seal with, got 2"):
        fastrack.seal(np.arange(3), path.parent)


def test_a_damaged_file_of_a_folder_is_told(key, path):
    content = path.read_bytes()
    path.write_bytes(content[:-3] + (b"0" if content[-3:-2] != b"0" else b"1") + content[-2:])
    with pytest.raises(FormatError, match="was damaged"):
        KeyRing(path.parent)[key.id]


def test_a_home_directory_is_expanded(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    key.save(tmp_path / "home.key")
    assert KeyRing("~/home.key").first == key


@each("mode", MODES.values())
@each("allowed", [None, "", "0400", "0600", *MODES])
def test_a_platform_s_mode_is_taken_where_it_is_allowed(key, path, monkeypatch, mode, allowed):
    path.chmod(mode)
    monkeypatch.delenv("FASTRACK_KEY_MODE", raising=False)
    if allowed is not None:
        monkeypatch.setenv("FASTRACK_KEY_MODE", allowed)
    if mode & 0o077 & ~MODES.get(allowed, 0):
        with pytest.raises(KeyPermissionError, match=r"chmod 600 .*FASTRACK_KEY_MODE=") as caught:
            Key.load(path)
        assert key.material().hex() not in str(caught.value)
    else:
        assert Key.load(path) == key


@each("mode", [0o660, 0o620, 0o666, 0o604, 0o602, 0o601, 0o755, 0o777, 0o441])
def test_no_option_allows_writing_or_executing(path, monkeypatch, mode):
    path.chmod(mode)
    for allowed in ("", "0440", "0640", "0444", "0644"):
        monkeypatch.setenv("FASTRACK_KEY_MODE", allowed)
        if mode == 0o604 and allowed in {"0444", "0644"}:
            continue
        with pytest.raises(KeyPermissionError, match=f"{path} .*chmod 600"):
            Key.load(path)


@each("wrong", ["0666", "666", "rw", "0o444", "0777", "0460", "0441", " 0444"])
def test_a_mode_that_cannot_be_meant_is_refused(path, monkeypatch, wrong):
    monkeypatch.setenv("FASTRACK_KEY_MODE", wrong)
    with pytest.raises(FormatError, match=r"FASTRACK_KEY_MODE is wrong: expected one of 0400"):
        Key.load(path)


# Descriptors and providers by scheme


def test_a_key_comes_from_a_descriptor(key, path):
    reader, writer = os.pipe()
    os.write(writer, path.read_bytes())
    os.close(writer)
    try:
        assert KeyRing(f"fd:{reader}").first == key
        os.fstat(reader)  # it stays open
    finally:
        os.close(reader)


@each("number", ["2147483647", "2147483648", "9" * 20, "9" * 4301])
def test_a_descriptor_out_of_range_is_an_error_of_the_system(number):
    with pytest.raises(OSError, match=r"Bad file descriptor|No such file|File name too long"):
        KeyRing(f"fd:{number}")


@each("content", [b"", b"fastrack-key\n", b"x" * 10_000])
def test_a_descriptor_without_a_key_is_refused(content):
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    with pytest.raises(FormatError, match=f"file descriptor {reader} is not a fastrack key file"):
        KeyRing(f"fd:{reader}")
    os.close(reader)


@each("source", ["-", "fd:0", "/dev/stdin"])
def test_a_key_comes_from_standard_input(key, path, source):
    code = f"import fastrack; print(fastrack.KeyRing({source!r}).first.id)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=path.read_bytes(), capture_output=True, check=True, timeout=60
    )
    assert done.stdout.decode().strip() == key.id


def test_a_key_comes_from_text(key, path):
    assert Key.from_text(path.read_text()) == key
    for wrong in ("", path.read_text()[:-9], "fastrack-key-1:" + key.material().hex(), path.read_text() * 2):
        with pytest.raises(FormatError, match="the text") as caught:
            Key.from_text(wrong)
        assert key.material().hex()[:16] not in str(caught.value)


def test_an_installed_package_adds_a_scheme(key, monkeypatch):
    made = []

    def make(source):
        made.append(source)
        return Vault(key)

    class Entry:
        def load(self):
            return make

    def entry_points(*, group, name):
        return [Entry()] if (group, name) == ("fastrack.key_providers", "acme") else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    assert KeyRing("acme:project/ring?x=1")[key.id] is key
    assert made == ["acme:project/ring?x=1"]
    with pytest.raises(FileNotFoundError, match="other:thing"):
        KeyRing("other:thing")


def test_a_file_that_is_called_as_a_scheme_is_a_file(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key.save("fd:0")
    key.save("-")
    assert KeyRing("fd:0").first == key
    assert KeyRing("-").first == key


def test_entry_points_are_read_for_schemes_alone(path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", None)
    assert KeyRing(path)
    assert KeyRing(str(path))
