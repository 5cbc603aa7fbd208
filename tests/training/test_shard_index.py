"""The sealed index of a dataset: what opens by it, and what it refuses."""

import pickle
import shutil
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from helpers.by_hand.documents import canonical
from helpers.cases import each
from helpers.commands import invoke
from helpers.sealed_files import write_file

import fastrack
from fastrack import AuthenticationError, FormatError, Key, RollbackError, SealedDataset, UnknownKeyError
from fastrack._samples.shard_index import ShardIndex
from fastrack._util import gate
from fastrack.grants import Signer

KEY = Key.from_bytes(bytes(range(32)))
SHARDS = 6


def write(folder, key=KEY, start=0):
    """Write samples of rows and of records, one for each shard."""
    with fastrack.DatasetWriter(folder, key, shard_size=1) as writer:
        for number in range(start, start + SHARDS):
            writer.write({"image": np.full(8, number, np.uint8), "text": f"sample {number}"})


def shard(number, folder="data"):
    return Path(folder, f"shard-{number:06}.safetensors")


def images(data, keys=KEY):
    return fastrack.to_device(data[: len(data)]["image"], keys=keys, framework="numpy")[:, 0].tolist()


def bare(sample):
    return sample


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset and its index, written once."""
    folder = tmp_path_factory.mktemp("made") / "data"
    write(folder)
    fastrack.index_dataset(folder, KEY)
    return folder


@pytest.fixture(autouse=True)
def _data_set(made, tmp_path, monkeypatch):
    """A copy of it in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, "data")


def test_a_data_set_is_opened_by_its_index_and_reads_a_shard_when_a_sample_is_used():
    for path in ("data", "data/fastrack.index"):
        data = SealedDataset(path, keys=KEY)
        assert (len(data), data.columns) == (SHARDS, ("image", "text", "text.lengths"))
        assert not data._shards.files
        assert images(data) == list(range(SHARDS))
    data = SealedDataset("data", keys=KEY)
    assert fastrack.unseal(data[4]["image"], KEY, framework="numpy").tolist() == [4] * 8
    assert list(data._shards.files) == [4]


def test_it_has_the_samples_that_a_list_of_the_shards_has():
    paths = sorted(Path("data").glob("*.safetensors"))
    for columns in (None, ["text"], ["image"]):
        found = SealedDataset("data", columns, keys=KEY, transform=bare)
        listed = SealedDataset(paths, columns, keys=KEY, transform=bare)
        assert found.columns == listed.columns
        assert [{k: bytes(v) for k, v in one.items()} for one in found] == [
            {k: bytes(v) for k, v in one.items()} for one in listed
        ]


def test_records_and_windows_are_found_by_it():
    data = SealedDataset.records("data", "text.records", "text.offsets", keys=KEY, columns=["image"], transform=bare)
    assert [one["text.records"] for one in data] == [f"sample {number}".encode() for number in range(SHARDS)]
    windows = SealedDataset("data", keys=KEY).windows("text", 4)
    assert len(windows) == 2 * SHARDS
    assert fastrack.unseal(windows[2]["text"], KEY, framework="numpy").tobytes() == b"samp"


def test_a_pickled_data_set_still_compares_its_shards_with_the_index():
    again = pickle.loads(pickle.dumps(SealedDataset("data", ["image"], keys=KEY)))
    write("other", start=100)
    shutil.copy(shard(3, "other"), shard(3))
    assert fastrack.unseal(again[2]["image"], KEY, framework="numpy").tolist() == [2] * 8
    with pytest.raises(
        RollbackError, match=r"shard-000003\.safetensors: expected the file id \w+ by .*fastrack\.index"
    ):
        fastrack.unseal(again[3]["image"], KEY)


def test_an_index_needs_the_key_it_was_sealed_with():
    with pytest.raises(UnknownKeyError) as caught:
        SealedDataset("data", keys=Key.generate())
    assert "list of its shards" in str(caught.value.__notes__)
    with fastrack.use_keys(KEY):
        assert len(SealedDataset("data")) == SHARDS


@pytest.mark.parametrize("by_index", [False, True], ids=["folder", "index"])
@pytest.mark.parametrize("wrong", ["another's", "older", "swapped", "resealed"])
def test_a_shard_that_the_index_does_not_mean_is_refused_by_name(wrong, by_index):
    if wrong == "swapped":
        shard(1).rename("kept")
        shard(2).rename(shard(1))
        Path("kept").rename(shard(2))
    else:
        write("other", start=0 if wrong == "older" else 1)
        if wrong == "resealed":
            fastrack.rekey_file(shard(2), shard(2, "other"), KEY, key=KEY)
        shutil.copy(shard(2, "other"), shard(2))
    data = SealedDataset("data/fastrack.index" if by_index else "data", ["image"], keys=KEY)
    with pytest.raises(RollbackError, match=r"shard-00000[12]\.safetensors: expected the file id") as caught:
        images(data)
    assert caught.value.path.name in str(caught.value)


@pytest.mark.parametrize("pinned_by", ["index", "folder", "file_ids", "file_ids of a pickle"])
def test_a_shard_of_the_same_id_under_another_key_is_refused(pinned_by):
    other, paths = Key.generate(), [Path(f"set/{name}.safetensors") for name in "ab"]
    Path("set").mkdir()
    for path in paths:
        fastrack.save_file({"image": np.zeros((2, 3))}, path, KEY)
    ids = [fastrack.load_file(path).file_id for path in paths]
    fastrack.index_dataset("set", KEY)
    pickled, size = pickle.dumps(SealedDataset(paths, file_ids=ids)), paths[1].stat().st_size
    write_file({"image": np.ones((2, 3))}, paths[1], other, file_id=ids[1])
    assert (fastrack.load_file(paths[1]).file_id, paths[1].stat().st_size) == (ids[1], size)

    def use():
        if pinned_by == "file_ids of a pickle":
            return pickle.loads(pickled)[:]["image"]
        pins = {"file_ids": ids} if pinned_by == "file_ids" else {}
        where = {"index": "set/fastrack.index", "folder": "set"}.get(pinned_by, paths)
        return SealedDataset(where, keys=[KEY, other], **pins)[:]["image"]

    with pytest.raises(RollbackError, match=rf"b\.safetensors: expected a file under the key {KEY.id}"):
        fastrack.unseal(use(), [KEY, other])


def test_a_missing_and_an_additional_shard_are_refused_by_name():
    shutil.copytree("data", "more")
    shutil.copy(shard(0), shard(SHARDS, "more"))
    with pytest.raises(RollbackError, match=rf"shard-00000{SHARDS}.*: expected no such shard by .*fastrack index"):
        SealedDataset("more", keys=KEY)
    shard(SHARDS - 1).unlink()
    with pytest.raises(RollbackError, match=rf"shard-00000{SHARDS - 1}.*: expected \d+ bytes by .*, got none"):
        SealedDataset("data", keys=KEY)
    with pytest.raises(FileNotFoundError, match=f"shard-00000{SHARDS - 1}"):
        images(SealedDataset("data/fastrack.index", keys=KEY))


def test_a_shard_of_another_size_is_refused_at_once():
    with shard(1).open("ab") as file:
        file.write(b" ")
    with pytest.raises(RollbackError, match=r"shard-000001.*: expected \d+ bytes by"):
        SealedDataset("data", keys=KEY)


def test_a_shard_that_was_altered_is_refused_when_it_is_read():
    content = bytearray(shard(1).read_bytes())
    content[-1] ^= 1
    shard(1).write_bytes(content)
    with pytest.raises(AuthenticationError):
        SealedDataset("data", keys=KEY, transform=bare)[1]


def test_the_index_of_more_shards_takes_the_place_of_the_earlier_one():
    shutil.copytree("data", "old")
    write("data", start=SHARDS)
    with pytest.raises(RollbackError, match="expected no such shard"):
        SealedDataset("data", keys=KEY)
    again = fastrack.index_dataset("data", KEY)
    assert images(SealedDataset("data", keys=KEY)) == list(range(2 * SHARDS))
    assert images(SealedDataset("old", keys=KEY)) == list(range(SHARDS))  # authentic: its id tells it apart
    for folder in ("old", "old/fastrack.index"):
        with pytest.raises(AuthenticationError, match=f"expected file id '{again}'"):
            SealedDataset(folder, keys=KEY, file_ids=[again])
    assert len(SealedDataset("data", keys=KEY, file_ids=[again])) == 2 * SHARDS
    with pytest.raises(ValueError, match="file_ids=: expected that of the index"):
        SealedDataset("data", keys=KEY, file_ids=[again] * 2)


def test_an_anchor_pins_the_index_and_its_shards():
    owner = Signer.generate()
    fastrack.publish("data", signer=owner)
    anchor = fastrack.Anchor.create("a.anchor", owner=owner.verifier)
    for path in ("data", "data/fastrack.index"):
        assert images(SealedDataset(path, keys=KEY, anchor=anchor)) == list(range(SHARDS))
    fastrack.index_dataset("data", KEY)
    with pytest.raises(RollbackError, match=r"fastrack\.index"):
        SealedDataset("data/fastrack.index", keys=KEY, anchor=anchor)


def test_files_of_other_programs_are_listed_in_the_order_of_their_names():
    Path("set").mkdir()
    for name, value in (("b", 1), ("a", 0), ("c", 2)):
        fastrack.save_file({"image": np.full((2, 3), value)}, f"set/{name}.safetensors", KEY)
    fastrack.index_dataset("set", KEY)
    data = SealedDataset("set", keys=KEY)
    assert fastrack.unseal(data[:]["image"], KEY, framework="numpy")[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_another_file_in_the_place_of_the_index_is_kept():
    for content in (b"notes", shard(0).read_bytes()):
        Path("data/fastrack.index").write_bytes(content)
        with pytest.raises(FileExistsError, match="got another file"):
            fastrack.index_dataset("data", KEY)
        assert Path("data/fastrack.index").read_bytes() == content


def test_what_cannot_be_indexed_is_refused():
    Path("empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected \.safetensors files"):
        fastrack.index_dataset("empty", KEY)
    with pytest.raises(NotADirectoryError, match="folder of a dataset"):
        fastrack.index_dataset(shard(0), KEY)
    with pytest.raises(UnknownKeyError):
        fastrack.index_dataset("data", Key.generate())
    fastrack.save_file({"x": np.array(1.0)}, "empty/a.safetensors", KEY)
    with pytest.raises(FormatError, match="expected a tensor with rows"):
        fastrack.index_dataset("empty", KEY)


DOCUMENT = {
    "files": "0" * 32 + "1" * 32,
    "format": 1,
    "names": ["a.safetensors", "b.safetensors"],
    "rows": [[1, 2]],
    "sizes": [3, 4],
    "tensors": [["x", "I64", [2]]],
}
WRONG = [
    {"format": 2},
    {"names": ["../a.safetensors", "b"]},
    {"names": ["a", "a"]},
    {"names": ["a", 1]},
    {"names": []},
    {"files": "0" * 64},
    {"files": "0" * 32},
    {"files": 5},
    {"sizes": [1, -1]},
    {"sizes": [1]},
    {"rows": [[1]]},
    {"rows": [[1, "2"]]},
    {"rows": []},
    {"tensors": []},
    {"tensors": [["x", "I65", [2]]]},
    {"tensors": [["x", ["I64"], [2]]]},
    {"tensors": [["x", "I64", [-2]]]},
    {"tensors": [["x", "I64", 2]]},
    {"more": 1},
]


def seal_index(content, path="wrong.index", kind="index"):
    write_file({"shards": np.frombuffer(content, np.uint8)}, path, KEY, kind=kind)
    return path


def test_an_authentic_index_of_another_form_is_refused():
    right = zlib.compress(canonical(DOCUMENT))
    assert len(SealedDataset(seal_index(right), keys=KEY)) == 3
    assert isinstance(ShardIndex.read(Path("wrong.index"), fastrack.KeyRing(KEY)), ShardIndex)
    contents = [zlib.compress(canonical({**DOCUMENT, **changes})) for changes in WRONG]
    for content in (*contents, right[:-1], right + b"x", b"", canonical(DOCUMENT), zlib.compress(b"[" * 100_000)):
        with pytest.raises(FormatError, match=r"wrong\.index is not the index"):
            SealedDataset(seal_index(content), keys=KEY)
    with pytest.raises(FormatError, match="expected the index of a dataset, got another file"):
        SealedDataset(seal_index(right, kind="tensor"), keys=KEY)


@each(
    ("text", "told", "most"),
    [
        (b" " * (33 << 20), "at most 1048576 bytes", 3 << 20),
        (b"[" + b"[]," * 100_000 + b"0]", "at most 15010 lists", 3 << 20),
    ],
)
def test_an_index_inflates_to_no_more_than_may_be_listed(text, told, most, monkeypatch):
    monkeypatch.setitem(gate.LIMITS["index of a dataset"], "bytes", 1 << 20)
    path = seal_index(zlib.compress(text))
    tracemalloc.start()
    with pytest.raises(FormatError, match=told):
        SealedDataset(path, keys=KEY)
    assert tracemalloc.get_traced_memory()[1] < most
    tracemalloc.stop()


def test_an_index_may_list_many_shards_of_many_columns():
    names = [f"column[{number}]" for number in range(3700)]
    tensors = [[name, "F32", []] for name in names]
    index = seal_index(
        zlib.compress(canonical({**DOCUMENT, "rows": [[1, 2]] * 3700, "tensors": tensors})), "wide.index"
    )
    assert len(ShardIndex.read(Path(index), fastrack.KeyRing(KEY)).tensors) == 3700
    numbers = canonical({"rows": [[123_456] * 10] * 1000})
    assert 1000 * len(numbers) < gate.most_bytes("index of a dataset")  # 10,000 shards


def test_an_index_that_no_reader_would_open_is_not_written(monkeypatch):
    before = Path("data/fastrack.index").read_bytes()
    monkeypatch.setitem(gate.LIMITS, "index of a dataset", {"bytes": 100})
    with pytest.raises(FormatError, match=r"writing data/fastrack.index failed: .* make fewer and larger shards"):
        fastrack.index_dataset("data", KEY)
    assert Path("data/fastrack.index").read_bytes() == before


def test_an_index_that_is_opened_in_another_way_is_no_file_of_samples():
    shutil.copy("data/fastrack.index", "index.safetensors")
    for paths in ("index.safetensors", ["data/fastrack.index"], "data/*"):
        with pytest.raises(FormatError, match=r"got an index\. Give it alone, not in a list or by a pattern, under a"):
            SealedDataset(paths)


def test_a_folder_that_is_named_like_an_index_is_none():
    Path("data").rename("train.index")
    assert images(SealedDataset("train.index", keys=KEY)) == list(range(SHARDS))


@pytest.mark.parametrize("name", [b"a\\b", b"a\nb", b"a\xff"])
def test_a_name_that_readers_of_an_index_refuse_is_refused_before_it_is_written(name):
    Path("set").mkdir()
    fastrack.save_file({"image": np.zeros((2, 3))}, "set/a.safetensors", KEY)
    shutil.copy("set/a.safetensors", b"set/" + name + b".safetensors")
    with pytest.raises(ValueError, match=r"set: expected names of UTF-8 .*, got 'a.*b?\.safetensors'\. Rename it"):
        fastrack.index_dataset("set", KEY)
    assert not Path("set/fastrack.index").exists()


def test_the_command_writes_the_index_and_tells_its_id():
    KEY.save("owner.key")
    done = invoke(["index", "data", "--key", "owner.key"])
    assert done.exit_code == 0
    assert "data/fastrack.index: 6 shards" in done.stdout
    file_id = done.stdout.split()[-1]
    assert "of the index of a dataset" in invoke(["inspect", "data/fastrack.index"]).stdout
    assert invoke(["index", "https://host/data", "--key", "owner.key"]).exit_code == 2
    assert len(SealedDataset("data", keys=KEY, file_ids=[file_id])) == SHARDS
