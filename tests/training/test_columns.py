"""Columns of several kinds in a sample: rows, records, windows and plain tensors; and samples opened in workers."""

import os
import pickle
import re
import shutil
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.tampering import rewrite_file, strip, tamper_file
from torch.utils.data import DataLoader

import fastrack
from fastrack import (
    Anchor,
    AuthenticationError,
    DatasetWriter,
    FormatError,
    Key,
    RollbackError,
    SealedDataset,
    UnknownKeyError,
    collate,
    wrap,
)
from fastrack._training import dataset as opening
from fastrack.grants import Signer

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # this machine may be small
]

COUNT = 90


def texts(index):
    return b"%d " % index * (index % 9)


def tokens(index):
    return np.arange(index, index + index % 4, dtype=np.int32)


def row(index):
    return np.full((2, 3), index, np.float32)


@pytest.fixture(scope="module")
def folder(key, tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "data"
    with DatasetWriter(folder, key, records=["tokens"], shard_size=1200) as writer:
        for index in range(COUNT):
            sample = {"text": texts(index), "label": index, "tokens": tokens(index), "row": row(index)}
            writer.write(sample)
    assert len(list(folder.iterdir())) > 3
    return folder


@pytest.fixture(scope="module")
def key_file(key, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "owner.key"
    key.save(path)
    return path


def assert_batch(batch, indices):
    assert batch["label"].tolist() == list(indices)
    assert torch.equal(batch["row"], torch.tensor(np.stack([row(index) for index in indices])))
    for name, records in (("text", map(texts, indices)), ("tokens", map(tokens, indices))):
        for found, length, expected in zip(batch[name], batch[f"{name}.lengths"], records, strict=True):
            assert found[:length].numpy().tobytes() == bytes(expected)
            assert not found[length:].any()


def test_a_written_folder_has_all_columns(folder, key):
    data = SealedDataset(folder, keys=key)
    assert set(data.columns) == {"text", "text.lengths", "label", "tokens", "tokens.lengths", "row"}
    assert len(data) == COUNT
    for indices in ([5, 80, 0], list(range(COUNT))):
        batch = data[indices]
        assert_batch(fastrack.to_device(batch, keys=key), indices)
    sample = data[-1]
    assert fastrack.unseal(sample["text"], key).numpy().tobytes() == texts(COUNT - 1)
    assert sample["text.lengths"] == len(texts(COUNT - 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_their_batches_are_those_of_plain_indexing(folder, key, workers):
    data = SealedDataset(folder, keys=key)
    loader = DataLoader(
        data, 16, num_workers=workers, collate_fn=collate, multiprocessing_context="fork" if workers else None
    )
    for number, batch in enumerate(wrap(loader, keys=key)):
        assert_batch(batch, range(16 * number, min(16 * number + 16, COUNT)))


def test_samples_collated_one_by_one_are_the_same(folder, key):
    data = SealedDataset(folder, keys=key, columns=["label", "row"])
    batch = collate([data[3], data[70]])
    assert batch["label"].to(keys=key).tolist() == [3, 70]


def test_columns_are_chosen_by_name(folder, key):
    assert SealedDataset(folder, ["label"]).columns == ("label",)  # without a key
    assert SealedDataset(folder, ["label", "text"], keys=key).columns == ("label", "text", "text.lengths")
    with pytest.raises(UnknownKeyError):
        SealedDataset(folder, ["text"])
    with pytest.raises(ValueError, match="'nothing'"):
        SealedDataset(folder, ["label", "nothing"], keys=key)


def test_records_have_further_columns(tmp_path, key):
    lengths = np.array([3, 0, 5, 1])
    tables = []
    for shard in range(2):
        tables.append(tmp_path / f"{shard}.safetensors")
        table = {"data": np.arange(9) + shard, "offsets": np.cumsum([0, *lengths]), "label": lengths + shard}
        fastrack.save_file({**table, "plain": lengths * 2}, tables[-1], key, plain=["plain"])
    data = SealedDataset.records(tables, columns=["label"], plain_columns=["plain"], keys=key)
    assert data.columns == ("data", "lengths", "label", "plain")
    (batch,) = wrap(DataLoader(data, 8, collate_fn=collate), keys=key)
    assert batch["label"].tolist() == [*lengths, *(lengths + 1)]
    assert batch["lengths"].tolist() == [*lengths, *lengths]
    assert batch["plain"].tolist() == [*(lengths * 2), *(lengths * 2)]
    assert batch["data"][2].tolist() == [3, 4, 5, 6, 7]
    fastrack.save_file({"data": np.arange(9), "offsets": np.array([0, 9]), "label": np.arange(2)}, tables[0], key)
    with pytest.raises(ValueError, match="as many samples"):
        SealedDataset.records(tables[0], columns=["label"], keys=key)
    fastrack.save_file({"data": np.arange(9), "offsets": np.array([0, 9]), "lengths": np.arange(1)}, tables[0], key)
    with pytest.raises(ValueError, match="different names"):
        SealedDataset.records(tables[0], columns=["lengths"], keys=key)
    with pytest.raises(TypeError, match="columns="):
        SealedDataset.records(tables[1], columns="label", keys=key)


def test_windows_have_several_columns(tmp_path, key):
    text, mask = np.arange(1000), (np.arange(1000) % 3).astype(np.uint8)
    fastrack.save_file(
        {"text": text, "mask": mask, "weight": text * 0.5}, tmp_path / "a.safetensors", key, plain=["weight"]
    )
    fastrack.save_file(
        {"text": text[:50], "mask": mask[:50], "weight": text[:50] * 0.5},
        tmp_path / "b.safetensors",
        key,
        plain=["weight"],
    )
    data = SealedDataset(tmp_path, plain_columns=["weight"])
    windows = data.windows(["mask", "text", "weight"], 64, 32)
    assert (windows.columns, len(windows)) == (("mask", "text", "weight"), 30)
    (batch,) = wrap(DataLoader(windows, 64, collate_fn=collate), keys=key)
    for index in range(30):
        chosen = slice(32 * index, 32 * index + 64)
        assert np.array_equal(batch["text"][index], text[chosen])
        assert np.array_equal(batch["mask"][index], mask[chosen])
        assert np.array_equal(batch["weight"][index], text[chosen] * 0.5)
    assert windows[3]["weight"].tolist() == (text[96:160] * 0.5).tolist()
    assert len(data.windows(["text", "weight"], 50)) == 21  # of both files
    for names, match in ((["weight"], "sealed column"), (["text", "text"], "different"), (["text", "none"], "'none'")):
        with pytest.raises(ValueError, match=match):
            data.windows(names, 10)
    with pytest.raises(ValueError, match="step"):
        data.windows(["text", "mask"], 10, 0)


def test_windows_on_records_go_from_one_into_the_next(folder, key):
    data = SealedDataset(folder, ["tokens"], keys=key).windows("tokens", 10)
    found = wrap(DataLoader(data, 1000, collate_fn=collate), keys=key)
    (batch,) = found
    first = np.concatenate([tokens(index) for index in range(COUNT)])[:10]
    assert batch["tokens"][0].tolist() == first.tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.bool_, torch.bfloat16])
def test_plain_columns_of_any_dtype(tmp_path, key, dtype):
    labels = (
        torch.arange(12).reshape(4, 3).to(dtype)
        if dtype is torch.bfloat16
        else np.arange(12).reshape(4, 3).astype(dtype)
    )
    fastrack.save_file({"x": np.arange(4), "labels": labels}, tmp_path / "a.safetensors", key, plain=["labels"])
    data = SealedDataset(tmp_path / "a.safetensors", plain_columns=["labels"])
    assert torch.equal(data[[3, 1]]["labels"], torch.as_tensor(labels)[[3, 1]])
    data[2]["labels"].fill_(1)  # a copy
    assert torch.equal(data[2]["labels"], torch.as_tensor(labels)[2])
    assert "labels" not in SealedDataset(tmp_path / "a.safetensors").columns


def test_plain_columns_that_do_not_fit(tmp_path, key):
    path = tmp_path / "a.safetensors"
    fastrack.save_file(
        {"x": np.arange(4), "y": np.arange(4), "p": np.arange(3), "q": np.array(1)}, path, key, plain=["p", "q"]
    )
    for name, match in (("p", "as many rows"), ("q", "as many rows"), ("x", "different names"), ("none", "'p', 'q'")):
        with pytest.raises(ValueError, match=match):
            SealedDataset(path, plain_columns=[name])
    with pytest.raises(TypeError, match="plain_columns="):
        SealedDataset(path, plain_columns="p")
    fastrack.save_file({"x": np.arange(4), "p": np.arange(4)}, path, key, plain=["p"])
    fastrack.save_file({"x": np.arange(4), "p": np.arange(4.0)}, tmp_path / "b.safetensors", key, plain=["p"])
    with pytest.raises(ValueError, match="as in the first file"):
        SealedDataset(tmp_path, plain_columns=["p"])


def test_an_absent_column_is_told_with_the_columns_there_are_and_the_nearest(tmp_path, key):
    with DatasetWriter(tmp_path / "data", key) as writer:
        writer.write({"text": b"one", "label": 1})
    told = "has no column {!r}; it has 'label', 'text'"
    for name, nearest in (("texts", ". Did you mean 'text'?"), ("offsets", "")):
        with pytest.raises(ValueError, match=re.escape(told.format(name) + nearest) + "$"):
            SealedDataset(tmp_path / "data", columns=["label", name])
    for _ in range(2):  # without an index and with one
        for columns, named in (("text", "got 'text'"), ([], "got []"), ("fastrack.about", "got 'fastrack.about'")):
            with pytest.raises(
                ValueError, match=re.escape(f"expected a sequence of names, {named}") + ".* has "
            ) as error:
                SealedDataset(tmp_path / "data", columns=columns, keys=key)
            assert str(error.value).endswith(" has ['label', 'text']")
        fastrack.index_dataset(tmp_path / "data", key)
    data = SealedDataset(tmp_path / "data", keys=key)
    with pytest.raises(TypeError, match="Compose several in one"):
        SealedDataset(tmp_path / "data", keys=key, transform=[str])
    with pytest.raises(ValueError, match=told.format("labels")):
        data.windows("labels", 1)
    fastrack.save_file({"x": np.arange(4), "p": np.arange(4)}, tmp_path / "one.safetensors", key, plain=["p"])
    with pytest.raises(ValueError, match="plain_columns="):
        SealedDataset(tmp_path / "one.safetensors", columns=["p"])
    fastrack.save_file({"x": np.arange(4), "y": np.arange(4)}, tmp_path / "two.safetensors", key)
    with pytest.raises(ValueError, match=r"one\.safetensors has no column 'y'; it has 'x'"):
        SealedDataset([tmp_path / "two.safetensors", tmp_path / "one.safetensors"], columns=["y"])
    with DatasetWriter(tmp_path / "more", key) as writer:
        writer.write({"words": b"one", "label": 1})
    shards = [next((tmp_path / name).glob("shard-*")) for name in ("data", "more")]
    with pytest.raises(ValueError, match=r"has no column 'text'; it has 'label', 'words'$"):
        SealedDataset(shards, columns=["text"])


def test_plain_columns_are_authenticated_by_a_manifest(tmp_path, key):
    path, signer = tmp_path / "a.safetensors", Signer.generate()
    fastrack.save_file({"x": np.arange(4), "p": np.arange(4)}, path, key, plain=["p"])
    fastrack.publish(path, signer=signer)
    Anchor.create(tmp_path / "reader.anchor", owner=signer.verifier)
    data = SealedDataset(path, plain_columns=["p"], anchor=tmp_path / "reader.anchor")
    assert data[:]["p"].tolist() == [0, 1, 2, 3]
    stored = pickle.dumps(data)
    del data
    content = bytearray(path.read_bytes())
    content[content.rindex(np.arange(4).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(AuthenticationError, match="'p'"):
        SealedDataset(path, plain_columns=["p"], anchor=tmp_path / "reader.anchor")
    with pytest.raises(AuthenticationError, match="'p'"):
        pickle.loads(stored)[:]


def test_an_anchored_folder_has_every_shard_that_its_manifest_lists(folder, key, tmp_path):
    folder = shutil.copytree(folder, tmp_path / "copy")
    signer, options = Signer.generate(), {"keys": key, "anchor": tmp_path / "reader.anchor"}
    Anchor.create(options["anchor"], owner=signer.verifier)
    (folder / "notes.txt").write_text("no shard")
    fastrack.publish(folder, signer=signer)
    count = len(SealedDataset(folder, **options))
    *_, last = sorted(folder.glob("shard-*"))
    for path in (last, folder / "shard-000000.safetensors"):
        content = path.read_bytes()
        path.unlink()
        for missing in (SealedDataset, partial(SealedDataset.records, data="text.records", offsets="text.offsets")):
            with pytest.raises(RollbackError, match=path.name) as caught:
                missing(folder, **options)
            assert caught.value.path == path
        path.write_bytes(content)
    (folder / "notes.txt").unlink()  # no shard
    assert len(SealedDataset(folder, **options)) == count
    fastrack.save_file({"other": np.arange(3)}, folder / "other.safetensors", key)
    assert len(SealedDataset(folder, **options)) == count  # beside shards it is none


def test_an_anchored_folder_of_other_names_has_all_that_its_manifest_lists_there(key, tmp_path):
    signer, anchor = Signer.generate(), tmp_path / "reader.anchor"
    Anchor.create(anchor, owner=signer.verifier)
    for name in ("set/a", "set/b", "set/sub/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        fastrack.save_file({"x": np.arange(3)}, tmp_path / f"{name}.safetensors", key)
    fastrack.publish(tmp_path / "set", signer=signer)
    (tmp_path / "set" / "a.safetensors").unlink()
    assert len(SealedDataset(tmp_path / "set" / "sub", anchor=anchor)) == 3
    with pytest.raises(RollbackError, match=r"a\.safetensors"):
        SealedDataset(tmp_path / "set", anchor=anchor)
    assert len(SealedDataset(tmp_path / "set")) == 3
    (tmp_path / "set" / "sub" / "a.safetensors").unlink()
    with pytest.raises(RollbackError, match=r"sub/a\.safetensors"):
        SealedDataset(tmp_path / "set" / "sub", anchor=anchor)


def test_records_without_offsets_are_refused(folder, key, tmp_path):
    path = tmp_path / "a.safetensors"

    def drop(metadata, tensors):
        listed = metadata["fastrack.tensors"]
        metadata["fastrack.tensors"] = listed.replace('"text.offsets"', '"other"')
        tensors["other"] = tensors.pop("text.offsets")

    rewrite_file(min(folder.iterdir()), drop, path)
    with pytest.raises(ValueError, match=r"text\.offsets"):
        SealedDataset(path, ["text"], keys=key)


def test_a_missing_shard_is_noticed_but_for_the_last(folder, key, tmp_path):
    for path in sorted(folder.iterdir()):
        os.link(path, tmp_path / path.name)
    (tmp_path / "shard-000001.safetensors").unlink()
    with pytest.raises(FormatError, match="shard-000001"):
        SealedDataset(tmp_path, keys=key)


def test_a_joined_data_set_is_pickled_without_offsets_and_keys(folder, key):
    data = SealedDataset(folder, keys=key)
    stored = pickle.dumps(data)
    assert bytes(key.material()) not in stored
    again = pickle.loads(stored)
    assert again._ref is data._ref
    del data, again
    alone = pickle.loads(stored)
    assert (len(alone), alone.columns[0]) == (COUNT, "text") or len(alone) == COUNT
    assert alone[[1, 2]]["label"].to(keys=key).tolist() == [1, 2]


# Transforms.


def errors_of(loader):
    """Iterate to the end, as torch ends workers slowly before it once one has raised."""
    batches, errors = iter(loader), []
    while True:
        try:
            next(batches)
        except StopIteration:
            return errors
        except Exception as error:  # noqa: BLE001 - returned
            errors.append(error)


def describe(sample):
    """Describe a transform's sample and the process that it runs in."""
    return {
        "label": sample["label"],
        "text": int.from_bytes(sample["text"][:4], "little"),
        "sum": sample["tokens"].sum(),
        "row": sample["row"] + 1,
        "pid": os.getpid(),
    }


@pytest.mark.parametrize("method", ["none", "fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_samples_are_opened_and_transformed_in_the_worker(folder, key_file, method):
    data = SealedDataset(folder, keys=key_file, transform=describe)
    workers = {} if method == "none" else {"num_workers": 2, "multiprocessing_context": method}
    seen, processes = [], set()
    for batch in DataLoader(data, 20, collate_fn=collate, **workers):
        for index in batch["label"].tolist():
            position = batch["label"].tolist().index(index)
            assert batch["text"][position] == int.from_bytes(texts(index)[:4], "little")
            assert batch["sum"][position] == tokens(index).sum()
            assert np.array_equal(batch["row"][position], row(index) + 1)
            seen.append(index)
        processes |= set(batch["pid"].tolist())
    assert sorted(seen) == list(range(COUNT))
    assert (os.getpid() in processes) == (method == "none")


def test_what_a_transform_is_given(folder, key):
    data = SealedDataset(folder, keys=key, transform=lambda sample: sample)
    sample = data[7]
    assert sample["text"] == texts(7)
    assert torch.equal(sample["tokens"], torch.tensor(tokens(7)))
    assert (sample["label"].shape, sample["label"].item()) == ((), 7)
    assert [each["text"] for each in data[80:83]] == [texts(80), texts(81), texts(82)]
    assert [each["text"] for each in data[[4, -1]]] == [texts(4), texts(COUNT - 1)]
    assert data[[]] == []
    assert [each["label"].item() for each in data] == list(range(COUNT))


def test_windows_and_plain_columns_are_transformed(tmp_path, key):
    fastrack.save_file({"x": np.arange(100), "p": np.arange(100) * 2}, tmp_path / "a.safetensors", key, plain=["p"])
    data = SealedDataset(tmp_path, plain_columns=["p"], keys=key, transform=lambda sample: sample["x"] + sample["p"])
    assert data[5].item() == 15
    assert [each.tolist() for each in data.windows(["x", "p"], 2)[3:5]] == [[18, 21], [24, 27]]


def test_records_are_opened_without_padding(tmp_path, key, monkeypatch):
    with DatasetWriter(tmp_path, key) as writer:
        writer.write_batch({"x": [bytes(1 << 20), *[b"1"] * 500]})
    data = SealedDataset(tmp_path, keys=key, transform=lambda sample: len(sample["x"]))
    move = mock.Mock(side_effect=fastrack.to_device)
    monkeypatch.setattr(opening, "to_device", move)
    assert data[:] == [1 << 20, *[1] * 500]
    assert move.call_args[0][0]["x"].nbytes == (1 << 20) + 500


@pytest.mark.parametrize("workers", [0, 2])
def test_an_altered_record_is_refused_in_the_worker(tmp_path, key, workers):
    with DatasetWriter(tmp_path, key) as writer:
        writer.write_batch({"x": [bytes(30_000)] * 8, "y": range(8)})
    path = tmp_path / "shard-000000.safetensors"
    tamper_file(path, "x.records", 100_000)
    data = SealedDataset(tmp_path, keys=key, transform=lambda sample: sample["y"])
    assert data[0] == 0
    context = "fork" if workers else None
    loader = DataLoader(data, 2, num_workers=workers, multiprocessing_context=context, collate_fn=collate)
    errors = errors_of(loader)
    assert errors
    assert all(type(error) is AuthenticationError and "x.records" in str(error) for error in errors)


def test_a_spawned_worker_is_given_no_key_of_memory(folder, key, key_file):
    with pytest.raises(TypeError, match=r"[Kk]ey"):
        pickle.dumps(SealedDataset(folder, keys=key, transform=describe))
    with pytest.raises(UnknownKeyError):
        SealedDataset(folder, keys=Key.generate(), transform=describe)
    again = pickle.loads(pickle.dumps(SealedDataset(folder, keys=key_file, transform=describe)))
    assert again[3]["sum"] == tokens(3).sum()


def test_keys_come_from_the_default(folder, key):
    with fastrack.use_keys(key):
        assert SealedDataset(folder, transform=describe)[3]["label"] == 3
    data = SealedDataset(folder, ["label"], transform=lambda sample: sample)
    with pytest.raises(UnknownKeyError):
        data[3]


def test_an_error_of_a_transform_is_raised(folder, key):
    data = SealedDataset(folder, keys=key, transform=lambda sample: 1 // (sample["label"].item() - 5))
    errors = errors_of(DataLoader(data, 4, num_workers=2, multiprocessing_context="fork"))
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_no_worker_is_left(folder, key):
    loader = DataLoader(
        SealedDataset(folder, keys=key, transform=describe), 4, num_workers=2, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    workers = batches._workers
    del batches
    deadline = time.monotonic() + 10
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(worker.is_alive() for worker in workers)


def test_links_to_nothing_are_no_shards_unless_they_are_named_like_one(folder, key, tmp_path):
    data = shutil.copytree(folder, tmp_path / "data")
    for name in ("notes", ".#notes", ".#shard-000000.safetensors"):
        (data / name).symlink_to("absent")
    assert len(SealedDataset(data, keys=key)) == COUNT
    (data / "more.safetensors").symlink_to("absent")
    with pytest.raises(FileNotFoundError, match="more"):
        SealedDataset(data, keys=key)


def test_what_holds_nothing_sealed_is_refused_as_that(key, tmp_path):
    fastrack.save_file({"x": np.arange(6)}, tmp_path / "plain.safetensors", key, plain=["x"])
    with pytest.raises(FormatError, match=r"plain\.safetensors: expected sealed tensors, got none"):
        SealedDataset(tmp_path / "plain.safetensors")
    with pytest.raises(FormatError, match="got a file of which nothing is sealed"):
        fastrack.load_checkpoint(tmp_path / "plain.safetensors", keys=key)
    with pytest.raises(FormatError, match="expected sealed weights, got none"):
        fastrack.load_model(torch.nn.Linear(2, 2), tmp_path / "plain.safetensors", keys=key)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"safetensors files in this folder, got none.*empty"):
        SealedDataset(tmp_path / "empty")


def test_records_without_a_key_say_that_the_data_set_needs_one(folder):
    with pytest.raises(UnknownKeyError) as caught:
        SealedDataset(folder)
    assert "give it keys=" in caught.value.__notes__[0]
    assert len(SealedDataset(folder, ["row", "label"])) == COUNT


def numbered(folder, key, start, count=6):
    """A dataset of numbers: two to a shard."""
    with fastrack.DatasetWriter(folder, key, shard_size=16) as writer:
        writer.write_batch({"x": np.arange(start, start + count)})
    return sorted(folder.iterdir())


def exchange(paths):
    contents = [path.read_bytes() for path in paths]
    paths[0].write_bytes(contents[1])
    paths[1].write_bytes(contents[0])


@each(
    "change",
    [
        exchange,
        lambda paths: shutil.copy(paths[0].parent.with_name("other") / paths[1].name, paths[1]),
        lambda paths: strip(paths[0], "fastrack.about"),
        lambda paths: strip(paths[2], "fastrack.about"),
        lambda paths: [path.rename(path.with_name(f"{3 - at}.safetensors")) for at, path in enumerate(paths)],
    ],
)
def test_shards_that_are_not_in_their_place_are_not_trained_on(tmp_path, key, change):
    numbered(tmp_path / "other", key, 100)
    paths = numbered(tmp_path / "set", key, 0)
    assert [
        int(fastrack.unseal(sample["x"], key, framework="numpy"))
        for sample in SealedDataset(tmp_path / "set", keys=key)
    ] == list(range(6))
    change(paths)
    with pytest.raises(FormatError, match="expected"):
        SealedDataset(tmp_path / "set", keys=key)
    with pytest.raises(FormatError, match="expected"):
        SealedDataset(tmp_path / "set", ["x"], keys=key, transform=dict)
    assert len(SealedDataset(tmp_path / "set")) == 6  # no keys, no check
    assert len(SealedDataset(sorted((tmp_path / "set").iterdir()), keys=key)) == 6


def test_a_data_set_without_an_end_is_trained_on_with_a_warning(tmp_path, key):
    numbered(tmp_path, key, 0)[-1].unlink()
    with pytest.warns(UserWarning, match="of 4 samples is not complete") as warned:
        data = SealedDataset(tmp_path, keys=key)
    assert warned[0].filename == __file__
    assert len(pickle.loads(pickle.dumps(data))) == 4


def test_shards_that_do_not_say_their_place_are_trained_on_with_a_warning_unless_none_was_expected_to(tmp_path, key):
    for folder, name in (("set", "shard-000000"), ("other", "any")):
        (tmp_path / folder).mkdir()
        fastrack.save_file({"x": np.arange(4)}, tmp_path / folder / f"{name}.safetensors", key)
    with pytest.warns(UserWarning, match="set has shards that do not say their order"):
        SealedDataset(tmp_path / "set", keys=key)
    for data in (SealedDataset(tmp_path / "other", keys=key), SealedDataset(tmp_path / "set")):
        assert len(data) == 4


def test_a_shard_that_is_replaced_while_places_are_read_is_refused(tmp_path, key, monkeypatch):
    numbered(tmp_path / "other", key, 100)
    numbered(tmp_path / "set", key, 0)
    original = opening.require_places

    def require_places(shards, keys):
        for path in (tmp_path / "other").iterdir():
            shutil.copy(path, tmp_path / "set")
        original(shards, keys)

    monkeypatch.setattr(opening, "require_places", require_places)
    with pytest.raises(FormatError, match="replaced meanwhile"):
        SealedDataset(tmp_path / "set", keys=key)


@pytest.mark.slow
def test_classes_are_named_in_the_order_of_their_labels(tmp_path, key, key_file):
    for name in ("dogs", "ants", "cats"):
        for number in range(2):
            path = tmp_path / "in" / name / "deep" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\x89PNG\r\n\x1a\n" + name.encode() + bytes([number]))
    fastrack.import_samples(tmp_path / "in", tmp_path / "out", key, shard_size=60)
    data = SealedDataset(tmp_path / "out", ["label"], keys=key, transform=lambda sample: int(sample["label"]))
    assert [data.classes[label] for label in data] == ["ants", "ants", "cats", "cats", "dogs", "dogs"]
    assert data.classes == ("ants", "cats", "dogs")
    shards = sorted((tmp_path / "out").iterdir())
    assert SealedDataset(shards, keys=key).classes == ("ants", "cats", "dogs")
    assert SealedDataset(shards[-1], keys=key).classes == ()  # which has the label 2 only
    restored = pickle.loads(pickle.dumps(SealedDataset(tmp_path / "out", keys=str(key_file))))
    with fastrack.use_keys(key):
        assert restored.classes == SealedDataset(tmp_path / "out").classes == data.classes
    with pytest.raises(UnknownKeyError):
        _ = SealedDataset(tmp_path / "out").classes


@each(
    "samples",
    [
        [{"label": 0}],
        [{"path": "a/1"}],
        [{"path": "1", "label": 0}],
        [{"path": "a/1", "label": 0}, {"path": "a/2", "label": 1}],
        [{"path": "a/1", "label": 0}, {"path": "b/1", "label": 0}],
        [{"path": "a/1", "label": 2**40}],
        [{"path": "a/1", "label": -1}],
        [{"path": "a/1", "label": 0.0}],
        [{"path": np.arange(3), "label": 0}],
    ],
)
def test_samples_that_tell_no_class_for_each_label_have_none(tmp_path, key, samples):
    fastrack.import_samples(samples, tmp_path / "out", key)
    assert SealedDataset(tmp_path / "out", keys=key).classes == ()


def test_classes_of_a_replaced_or_altered_shard_are_refused(tmp_path, key):
    for name in ("old", "new"):
        fastrack.import_samples([{"path": f"{name}/1", "label": 0}], tmp_path / name, key)
    data = SealedDataset(tmp_path / "new", keys=key)
    shutil.copy(tmp_path / "old" / "shard-000000.safetensors", tmp_path / "new")
    with pytest.raises(FormatError, match="was replaced since this dataset was made"):
        _ = data.classes
    fastrack.index_dataset(tmp_path / "old", key)
    indexed = SealedDataset(tmp_path / "old" / "fastrack.index", ["label"], keys=key)
    assert indexed.classes == ("old",)
    tamper_file(tmp_path / "old" / "shard-000000.safetensors", "path.records", -1)
    with pytest.raises(AuthenticationError):
        _ = SealedDataset(tmp_path / "old" / "shard-000000.safetensors", ["label"], keys=key).classes
