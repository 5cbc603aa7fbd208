"""Sealed folders on a server: opened as on the local disk, and bound together as there."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import fastrack
from fastrack._util.locations import Url, join
from fastrack.errors import AuthenticationError, RollbackError
from fastrack.transformers import from_pretrained

STATE = {"weight": torch.rand(300, 70), "bias": torch.rand(300)}


@pytest.fixture
def folder_url(tmp_path, served, key):
    plain = tmp_path / "plain"
    (plain / "below").mkdir(parents=True)
    safetensors.torch.save_file(STATE, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps({"size": 70}))
    (plain / "below" / "vocab.txt").write_text("a b c" * 50_000)
    (plain / "empty.txt").write_text("")
    fastrack.seal_folder(plain, served.folder / "sealed", key)
    return served.url("sealed")


class Reader:
    def __init__(self, path):
        self.path = path

    @classmethod
    def from_pretrained(cls, path, **_):
        return cls(path)


def test_a_folder_is_opened_from_a_server(folder_url, tmp_path, key):
    folder = fastrack.load_folder(folder_url, key)
    assert json.loads(folder.read("config.json")) == {"size": 70}
    assert folder.read("below/vocab.txt") == b"a b c" * 50_000
    assert folder.read("empty.txt") == b""
    folder.verify(key)
    module = torch.nn.Linear(70, 300)
    fastrack.load_model(module, folder, keys=key)
    assert torch.equal(module.weight, STATE["weight"])
    fastrack.unseal_folder(folder_url, tmp_path / "back", key)
    for name in ("model.safetensors", "below/vocab.txt", "empty.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert from_pretrained(Reader, folder_url, keys=key).path


@pytest.mark.parametrize("content", [b'{"size": 71}', b"{}", b""])
def test_an_altered_file_of_a_server_is_refused(folder_url, served, key, content):
    (served.folder / "sealed" / "config.json").write_bytes(content)
    with pytest.raises(AuthenticationError, match=r"http.*config\.json"):
        fastrack.load_folder(folder_url, key).read("config.json")


def test_wrong_bytes_in_the_cache_are_fetched_again(folder_url, key, cache):
    assert fastrack.load_folder(folder_url, key).read("below/vocab.txt")
    meddled = 0
    for path in cache.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if b"a b c" * 100 in content:
            path.write_bytes(content.replace(b"a b c", b"a b d"))
            meddled += 1
    assert meddled
    assert fastrack.load_folder(folder_url, key).read("below/vocab.txt") == b"a b c" * 50_000


def test_a_missing_file_of_a_server_is_refused(folder_url, served, key):
    (served.folder / "sealed" / "config.json").unlink()
    (served.folder / "sealed" / "model.safetensors").unlink()
    folder = fastrack.load_folder(folder_url, key)
    with pytest.raises(RollbackError, match=r"http.*config\.json"):
        folder.read("config.json")
    with pytest.raises(RollbackError, match=r"http.*model\.safetensors"):
        folder.weights()


def test_an_open_folder_takes_no_anchor_of_its_own(folder_url, tmp_path, key):
    folder = fastrack.load_folder(folder_url, key)
    with pytest.raises(ValueError, match="anchor"):
        fastrack.load_model(torch.nn.Linear(70, 300), folder, key, anchor=tmp_path / "a")


def test_the_names_of_files_are_quoted_where_the_protocol_wants_it():
    assert join(Url("https://host/a/"), "b c/d#e.txt").full == "https://host/a/b%20c/d%23e.txt"
    assert join(Url("s3://bucket/a"), "b c/d.txt").full == "s3://bucket/a/b c/d.txt"
    assert join(Path("a"), "b/c") == Path("a/b/c")
