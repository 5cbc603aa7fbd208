"""Names in stores: what would be syntax of a URL is refused, not written under another name, and no query is kept."""

import numpy as np
import pytest
from helpers.commands import invoke

import fastrack
from fastrack._remote import upload
from fastrack._util.locations import Url, join
from fastrack.errors import FormatError

pytest.importorskip("fsspec", reason="fsspec is not installed")
from helpers.object_store import ObjectStore

URL = "shelf://bucket/run"
QUERIES = ["?X-Amz-Signature=hunter2", "#hunter2", "/below?sig=hunter2/x", "?sig=hunter2::x"]
NAMES = ["c::d.e", "b#2", "what?.bin", "below/t::file.bin"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "plain" / "below").mkdir(parents=True)
    (tmp_path / "plain" / "a.bin").write_bytes(b"content")
    return tmp_path / "plain"


def writers(folder, key):
    import torch.distributed.checkpoint as dcp

    from fastrack.distributed import CheckpointWriter

    np.save(folder / "x.npy", np.arange(3))
    return {
        "seal_folder": lambda url: fastrack.seal_folder(folder, url, key),
        "seal_file": lambda url: fastrack.seal_file(folder / "x.npy", url, key),
        "save_file": lambda url: fastrack.save_file({"x": np.arange(3)}, url, key),
        "save_checkpoint": lambda url: fastrack.save_checkpoint(url, {"epoch": 3}, key),
        "import_samples": lambda url: fastrack.import_samples(folder / "x.npy", url, key),
        "DatasetWriter": lambda url: fastrack.DatasetWriter(url, key),
        "CheckpointWriter": lambda url: dcp.save({}, storage_writer=CheckpointWriter(url, key), no_dist=True),
    }


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.filterwarnings("ignore")
def test_a_store_is_not_written_to_by_a_url_with_more_than_a_name(folder, key, query):
    """Stores make a query part of the names of objects, and a pasted URL has a signature there."""
    for name, write in writers(folder, key).items():
        with pytest.raises(ValueError, match="more than a name") as caught:
            write(URL + query)
        assert "hunter" not in f"{caught.value} {caught.value!r} {getattr(caught.value, '__notes__', '')}", name
    assert not ObjectStore.store


def test_commands_show_no_query_of_a_store(folder, key, tmp_path):
    key.save(tmp_path / "a.key")
    for command in (["seal", str(folder)], ["import", str(folder / "a.bin")]):
        result = invoke([*command, f"{URL}?sig=hunter2", "--key", str(tmp_path / "a.key")])
        assert result.exit_code == 2, result.exception
        assert isinstance(result.exception, SystemExit)
        assert "hunter" not in result.output
    assert not ObjectStore.store


@pytest.mark.parametrize("name", NAMES)
def test_a_file_whose_name_is_syntax_is_named_before_a_folder_is_stored(folder, key, name):
    (folder / name).write_bytes(b"content")
    with pytest.raises(FormatError) as caught:
        fastrack.seal_folder(folder, URL, key)
    assert repr(name) in str(caught.value)
    assert not ObjectStore.store
    fastrack.seal_folder(folder, folder.parent / "sealed", key)  # on this machine it is a name like others


def test_an_object_whose_name_is_syntax_is_named_when_a_data_set_is_opened(key):
    fastrack.save_file({"x": np.zeros((4, 2))}, f"{URL}/a.safetensors", key)
    assert len(fastrack.SealedDataset(f"{URL}/", keys=key)) == 4
    for other in ("t::file.safetensors", "t#1.safetensors"):
        ObjectStore().pipe_file(f"/bucket/run/{other}", b"data")
        for url in (f"{URL}/", f"{URL}/*.safetensors"):
            with pytest.raises(FormatError) as caught:
                fastrack.SealedDataset(url, keys=key)
            assert repr(other) in str(caught.value)
        ObjectStore().rm_file(f"/bucket/run/{other}")
    ObjectStore().pipe_file("/bucket/run/notes::1.txt", b"data")  # which no one reads
    assert len(fastrack.SealedDataset(f"{URL}/", keys=key)) == 4


def test_a_file_of_a_folder_on_a_web_server_stands_before_the_query():
    assert join(Url("https://host/folder/?sig=a/b#c"), "x y?.bin").full == "https://host/folder/x%20y%3F.bin?sig=a/b#c"


def test_a_note_on_what_was_sent_shows_the_bucket_and_the_name_alone():
    class Out:
        mpu = {"UploadId": "17"}  # noqa: RUF012
        bucket, key = "user:hunter2@bucket", "a b?hunter3"

        def discard(self):
            raise OSError

    error = ValueError()
    upload._discard(Out(), Url("s3://user:hunter2@bucket/a b"), error)
    assert "--bucket bucket --key 'a b' --upload-id 17" in error.__notes__[0]
    assert "hunter" not in error.__notes__[0]
