"""Keys that stand where a path belongs."""

import base64
import tempfile
from pathlib import Path

import pytest

from fastrack import FormatError
from fastrack._util import key_text, regular_file

SHORT, LONG = bytes(range(101, 117)), bytes(range(101, 133))


@pytest.mark.parametrize("secret", [SHORT, LONG], ids=["128", "256"])
def test_a_key_is_found_in_each_form(secret):
    padded = base64.urlsafe_b64encode(secret).decode()
    bare = padded.rstrip("=")
    forms = [secret.hex(), secret.hex().upper(), secret.hex("-"), secret.hex(":", 2), secret.hex(" "), padded, bare]
    for form in forms:
        for text in (form, f"0x{form}", f"/{form}", f"key={form}", f"'{form}'") if form == forms[0] else (form,):
            assert key_text.has_key(text), text
    assert key_text.has_key(f"a key={bare}")
    assert key_text.has_key("fastrack-key-1:none")


def test_no_key_is_found_in_paths():
    digest = LONG.hex()
    for path in (f"blobs/{digest}", f"{digest}.safetensors", f"model-{digest}", "a/b/c", "größe", "", "a" * 43):
        assert not key_text.has_key(path), path
    assert key_text.has_key(SHORT.hex())
    assert not key_text.has_key(SHORT.hex(), may_be_id=True)


@pytest.mark.parametrize("path", [LONG.hex(), f"{LONG.hex()}\udcff\ud800", Path(f"/{LONG.hex()}")])
def test_no_error_beside_that_of_a_key_tells_it(path):
    with pytest.raises(FormatError, match="looks like a key") as refused:
        regular_file.open_regular(path)
    assert refused.value.__context__ is None
    assert refused.value.__cause__ is None


def test_a_file_may_be_called_like_a_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(LONG.hex()).write_bytes(b"content")
    with regular_file.open_regular(LONG.hex()) as file:
        assert file.read() == b"content"


def test_a_path_in_a_folder_that_is_there_is_none_though_it_has_as_many_characters(tmp_path, monkeypatch):
    path = "/process/self/fd/25/A1"
    assert key_text.has_key(path)
    assert key_text.looks_secret(path)  # where there is no such folder
    folder = tempfile.mkdtemp(prefix="Fold3r-", dir="/tmp")
    try:
        for path in (f"{folder}/".ljust(43, "x"), f"{folder}/new/run/".ljust(43, "x")):
            assert key_text.has_key(path)
            assert not key_text.looks_secret(path)
        assert key_text.looks_secret("/" + "aB3" * 14)  # in the root, as a key may begin with a slash
        assert key_text.looks_secret(f"//{'aB3' * 14}"[:43])
    finally:
        Path(folder).rmdir()
    monkeypatch.chdir(tmp_path)
    path = "tmp7u_n0rbz/back/one/A"
    assert key_text.looks_secret(path)
    Path("tmp7u_n0rbz").mkdir()
    assert not key_text.looks_secret(path)
