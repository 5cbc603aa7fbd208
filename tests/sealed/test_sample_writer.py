"""`DatasetWriter`: what it says is stored is stored, in order and once, however it ended."""

import collections
import contextlib
import errno
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.forking import in_forked_child
from helpers.tampering import strip, tamper_file
from hypothesis import given, settings
from hypothesis import strategies as st

import fastrack
from fastrack import AuthenticationError, ClosedError, DatasetWriter, FormatError, Key, KeyRing, load_file, unseal
from fastrack._samples import about, blocks, dataset_writer, stored
from fastrack._sealed.file_header import ABOUT

RECORDS = ("image", "name", "tokens")


def sample(index):
    """A sample that differs from all others."""
    image = np.random.default_rng(index).integers(0, 256, index * 37 % 3000, np.uint8).tobytes()
    tokens = np.arange(index, index + index % 5, dtype=np.int32)
    return {
        "image": image,
        "label": index,
        "name": f"né {index}",
        "grid": np.full((2, 3), index / 7, np.float32),
        "tokens": tokens,
    }


def read(folder, key):
    """All samples of a folder, by plain unsealing of its tensors."""
    samples = []
    for path in stored.shards_in(folder):
        with load_file(path) as file:
            tensors = {name: unseal(file[name], key, framework="numpy") for name in file if name != ABOUT}
        offsets = {name: tensors.pop(f"{name}.offsets") for name in RECORDS if f"{name}.offsets" in tensors}
        tensors = {name.removesuffix(".records"): tensor for name, tensor in tensors.items()}
        for index in range(len(tensors["label"])):
            cut = {name: tensors[name][at[index] : at[index + 1]] for name, at in offsets.items()}
            samples.append({name: cut[name] if name in cut else tensors[name][index] for name in tensors})
    return samples


def assert_same(found, expected):
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            if isinstance(value, (str, bytes)):
                assert got[name].tobytes() == (value.encode() if isinstance(value, str) else value)
            else:
                array = np.asarray(value)
                assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
                assert np.array_equal(got[name], array)


@pytest.mark.parametrize("shard_size", [1, 5000, 1 << 20])
def test_samples_come_back(tmp_path, key, shard_size):
    samples = [sample(index) for index in range(40)]
    with DatasetWriter(tmp_path / "new" / "data", key, records=["tokens"], shard_size=shard_size) as writer:
        for each in samples:
            writer.write(each)
        assert writer.stored <= len(samples)
    assert writer.stored == len(samples)
    assert_same(read(tmp_path / "new" / "data", key), samples)
    shards = stored.shards_in(tmp_path / "new" / "data")
    assert len(shards) == {1: 40, 5000: len(shards), 1 << 20: 1}[shard_size]
    assert len(shards) > 5 or shard_size > 5000


@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from([1, 100, 4000, 10**6]))
@settings(max_examples=15, deadline=None)
def test_batches_of_any_size_are_as_samples_one_by_one(tmp_path_factory, key, sizes, shard_size):
    one, several = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("several")
    samples = [sample(index) for index in range(sum(sizes))]
    with DatasetWriter(one, key, records=["tokens"], shard_size=shard_size) as writer:
        for each in samples:
            writer.write(each)
    done = 0
    with DatasetWriter(several, key, records=["tokens"], shard_size=shard_size) as writer:
        for size in sizes:
            chosen = samples[done : done + size]
            batch = {name: [each[name] for each in chosen] for name in sample(0)}
            if size % 2:
                batch |= {"grid": torch.tensor(np.stack(batch["grid"])), "label": np.array(batch["label"])}
            writer.write_batch(batch)
            done += size
    assert_same(read(several, key), samples)
    assert [path.stat().st_size for path in stored.shards_in(one)] == [
        path.stat().st_size for path in stored.shards_in(several)
    ]


def test_shards_hold_no_more_than_their_size_but_one_sample(tmp_path, key):
    with DatasetWriter(tmp_path, key, shard_size=1000) as writer:
        for size in (10, 980, 300, 2000, 5, 700, 290):
            writer.write({"x": bytes(size)})
    sizes = []
    for path in stored.shards_in(tmp_path):
        with load_file(path) as file:
            sizes.append((file["x.records"].nbytes, file["x.offsets"].shape[0] - 1))
    assert sizes == [(10, 1), (980, 1), (300, 1), (2000, 1), (705, 2), (290, 1)]  # each offset counts 8 bytes


def test_kinds_of_values(tmp_path, key):
    values = {
        "bool": True, "int": -1, "float": 0.1, "text": "é", "bytes": bytearray(b"ab"), "view": memoryview(b"abcd")[::2],
        "scalar": np.float32(2), "array": np.ones((2, 2), np.uint16)[:, ::-1],
        "torch": torch.ones(3, dtype=torch.bfloat16), "empty": np.zeros((0, 3)), "zero": torch.tensor(5),
    }  # fmt: skip
    with DatasetWriter(tmp_path, key) as writer:
        writer.write(values)
    with load_file(stored.shards_in(tmp_path)[0]) as file:
        found = {name: (file[name].dtype, file[name].shape) for name in file if name != ABOUT}
        assert bytes(unseal(file["view.records"], key, framework="numpy")) == b"ac"
    assert found == {
        "bool": ("BOOL", (1,)), "int": ("I64", (1,)), "float": ("F64", (1,)),
        "text.records": ("U8", (2,)), "bytes.records": ("U8", (2,)),
        "view.records": ("U8", (2,)), "scalar": ("F32", (1,)), "array": ("U16", (1, 2, 2)), "torch": ("BF16", (1, 3)),
        "empty": ("F64", (1, 0, 3)), "zero": ("I64", (1,)),
        "text.offsets": ("I64", (2,)), "bytes.offsets": ("I64", (2,)), "view.offsets": ("I64", (2,)),
    }  # fmt: skip


@each(
    ("wrong", "error"),
    [
        ({"x": None}, TypeError),
        ({"x": [1, 2]}, TypeError),
        ({"x": 2**63}, ValueError),
        ({"x": "\ud800"}, ValueError),
        ({"x": np.array(["a"])}, TypeError),
        ({"x": 0.5}, ValueError),
        ({"x": b"1"}, ValueError),
        ({"x": np.zeros(2, np.int64)}, ValueError),
        ({"x": 1, "y": 2}, ValueError),
        ({}, ValueError),
        ({"y": 2}, ValueError),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_of_it_kept(tmp_path, key, wrong, error):
    with DatasetWriter(tmp_path, key) as writer:
        writer.write({"x": 1})
        with pytest.raises(error):
            writer.write(wrong)
        writer.write({"x": 3})
    with load_file(stored.shards_in(tmp_path)[0]) as file:
        assert unseal(file["x"], key, framework="numpy").tolist() == [1, 3]


@each(
    ("wrong", "error"),
    [
        ({"x": [1, 2], "y": [1]}, ValueError),
        ({"x": [1, 0.5], "y": [1, 2]}, ValueError),
        ({"x": "text", "y": [1]}, TypeError),
        ({"x": 5, "y": 5}, TypeError),
        ({"x": iter([1]), "y": [1]}, TypeError),
        ({"x": np.array(5), "y": [1]}, TypeError),
    ],
)
def test_batches_that_do_not_fit_are_refused(tmp_path, key, wrong, error):
    with DatasetWriter(tmp_path, key) as writer:
        with pytest.raises(error):
            writer.write_batch(wrong)
        writer.write_batch({"x": [], "y": []})
    assert writer.stored == 0
    assert not stored.shards_in(tmp_path)


def test_names_that_offsets_and_lengths_have_are_refused(tmp_path, key):
    for name in ("x.offsets", "x.lengths", "y.records"):
        with DatasetWriter(tmp_path, key) as writer:
            with pytest.raises(ValueError, match="Rename"):
                writer.write({"x": b"", name: 1})
            with pytest.raises(TypeError, match="text"):
                writer.write({1: 1})
    with DatasetWriter(tmp_path, key, records=["x"]) as writer, pytest.raises(ValueError, match="records="):
        writer.write({"y": 1})
    with pytest.raises(ValueError, match="one dimension"), DatasetWriter(tmp_path, key, records=["x"]) as writer:
        writer.write({"x": np.zeros((2, 2))})


def test_a_folder_is_continued(tmp_path, key):
    samples = [sample(index) for index in range(30)]
    for start in (0, 10, 20):
        with DatasetWriter(tmp_path, key, records=["tokens"], shard_size=6000) as writer:
            assert writer.stored == start
            for each in samples[start : start + 10]:
                writer.write(each)
    assert_same(read(tmp_path, key), samples)
    with DatasetWriter(tmp_path, key) as writer:
        assert writer.stored == 30
        with pytest.raises(ValueError, match="columns"):
            writer.write({"label": 1})


def test_an_exception_drops_what_is_in_memory(tmp_path, key):
    def samples():
        yield from ({"x": index} for index in range(10))
        raise ZeroDivisionError

    writer = DatasetWriter(tmp_path, key, shard_size=30)
    with pytest.raises(ZeroDivisionError), writer:
        collections.deque(map(writer.write, samples()))
    assert writer.stored == 9
    with pytest.raises(ClosedError):
        writer.write({"x": 10})
    writer.close()
    with DatasetWriter(tmp_path, key) as writer:
        assert writer.stored == 9


def test_a_failure_to_write_loses_nothing_and_stores_nothing_twice(tmp_path, key, monkeypatch):
    def fail(tensors, *_, **__):
        views.extend(tensor.load()(0, tensor.nbytes) for tensor in tensors.values())  # which a traceback may hold
        raise OSError("full")

    views = []
    samples = [{"label": number, "name": "a" * number} for number in range(12)]
    batch = {name: [each[name] for each in samples[3:]] for name in samples[0]}
    with DatasetWriter(tmp_path, key, shard_size=40) as writer:
        writer.write(samples[0])
        writer.write(samples[1])
        for call, given in ((writer.write, samples[2]), (writer.write_batch, batch)):
            with monkeypatch.context() as patch:
                patch.setattr(dataset_writer, "write_sealed", fail)
                with pytest.raises(OSError, match="full"):
                    call(given)
            call(given)
    assert_same(read(tmp_path, key), samples)


def test_after_a_failure_the_rest_of_a_batch_is_given_again(tmp_path, key, monkeypatch):
    def write_one(descriptor):
        if list(tmp_path.glob("*.safetensors")):
            raise OSError(errno.ENOSPC, "full")
        return sync(descriptor)

    sync, labels = os.fsync, np.arange(30)
    with DatasetWriter(tmp_path, key, shard_size=80) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", write_one)
            with pytest.raises(OSError, match="free some space"):
                writer.write_batch({"label": labels})
        assert 0 < writer.stored < 30
        writer.write_batch({"label": labels[writer.stored :]})
    assert [sample["label"] for sample in read(tmp_path, key)] == labels.tolist()


def test_two_writers_do_not_replace_shards_of_each_other(tmp_path, key):
    first, second = DatasetWriter(tmp_path, key), DatasetWriter(tmp_path, key)
    first.write({"x": 1})
    second.write({"x": 2})
    first.close()
    with pytest.raises(FileExistsError):
        second.close()


def test_threads_share_a_writer(tmp_path, key):
    with DatasetWriter(tmp_path, key, shard_size=4000) as writer:

        def write(start):
            for index in range(start, start + 200):
                writer.write({"image": bytes([index % 256]) * (index % 50), "label": index})

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(write, range(0, 1000, 200)))
    found = sorted(read(tmp_path, key), key=lambda each: each["label"])
    assert_same(found, [{"image": bytes([i % 256]) * (i % 50), "label": i} for i in range(1000)])


def test_folders_that_cannot_be_continued(tmp_path, key):
    with DatasetWriter(tmp_path, key, shard_size=8) as writer:
        writer.write_batch({"x": [1, 2, 3]})
    with pytest.raises(ValueError, match="key"):
        DatasetWriter(tmp_path, Key.generate())
    second = tmp_path / "shard-000001.safetensors"
    content = second.read_bytes()
    fastrack.save_file({"x": np.zeros(3)}, second, key)
    with pytest.raises(FormatError, match="columns"):
        DatasetWriter(tmp_path, key)
    fastrack.save_file({"x": np.zeros(3, np.int64), "y": np.zeros(4)}, second, key)
    with pytest.raises(FormatError, match="as many"):
        DatasetWriter(tmp_path, key)
    fastrack.save_file({"x": np.zeros(1, np.int64)}, second, key)
    with pytest.raises(FormatError, match="says its place"):
        DatasetWriter(tmp_path, key)
    second.write_bytes(b"")
    with pytest.raises(FormatError):
        DatasetWriter(tmp_path, key)
    second.write_bytes(content)
    tamper_file(second, "x", 30)
    with pytest.raises(AuthenticationError):
        DatasetWriter(tmp_path, key)
    second.unlink()
    with pytest.raises(FormatError, match="shard-000001"):
        DatasetWriter(tmp_path, key)


def data_set(folder, key, *runs, shard_size=16):
    """A dataset of these runs of numbers: two to a shard."""
    for run in runs:
        with DatasetWriter(folder, key, shard_size=shard_size) as writer:
            writer.write_batch({"x": run})
    return stored.shards_in(folder)


def test_each_shard_says_its_place_its_files_and_whether_its_run_is_complete(tmp_path, key):
    with DatasetWriter(tmp_path, key, shard_size=16) as writer:
        writer.write_batch({"x": [1, 2, 3]}, file="a")
        writer.write_batch({"x": [4]}, file="b")
        writer.write({"x": 5})
    with contextlib.suppress(ZeroDivisionError), DatasetWriter(tmp_path, key, shard_size=16) as writer:
        writer.write_batch({"x": [6, 7, 8]}, file="c")
        raise ZeroDivisionError
    found = stored.read_data_set(tmp_path, KeyRing(key))
    assert [(each.first, each.samples, each.run, each.complete, each.files) for _, each in found.shards] == [
        (0, 2, 0, False, (("a", 2),)),
        (2, 2, 0, False, (("a", 1), ("b", 1))),
        (4, 1, 0, True, ()),
        (5, 2, 5, False, (("c", 2),)),
    ]
    assert (found.samples, found.run, found.is_complete) == (7, 5, False)
    assert len({each.data_set for _, each in found.shards}) == 1
    DatasetWriter(tmp_path, key).close()
    assert stored.read_data_set(tmp_path, KeyRing(key)).is_complete is False
    data_set(tmp_path, key, [8])
    found = stored.read_data_set(tmp_path, KeyRing(key))
    assert (found.samples, found.run, found.is_complete) == (8, 5, True)


def test_shards_that_change_places_or_data_sets_are_refused(tmp_path, key):
    one = data_set(tmp_path / "one", key, [1, 2, 3, 4, 5])
    two = data_set(tmp_path / "two", key, [1, 2, 3, 4, 5])
    contents = [path.read_bytes() for path in one]
    one[1].write_bytes(two[1].read_bytes())
    with pytest.raises(FormatError, match="another's"):
        stored.read_data_set(tmp_path / "one", KeyRing(key))
    one[0].write_bytes(contents[1])
    with pytest.raises(FormatError, match="samples 0 to 1"):
        stored.read_data_set(tmp_path / "one", KeyRing(key))
    one[0].write_bytes(contents[0])
    one[1].write_bytes(contents[1])
    one[2].unlink()
    assert stored.read_data_set(tmp_path / "one", KeyRing(key)).is_complete is False


@each("stripped", [(0,), (0, 1), (1,), (2,), (3,), (0, 1, 2)])
def test_a_shard_whose_place_was_removed_is_refused_beside_others(tmp_path, key, stripped):
    paths = data_set(tmp_path, key, [1, 2, 3, 4], [5, 6, 7, 8])
    for index in stripped:
        strip(paths[index], ABOUT)
    with pytest.raises(FormatError, match="someone changed"):
        stored.read_data_set(tmp_path, KeyRing(key))
    with pytest.raises(FormatError, match="someone changed"):
        DatasetWriter(tmp_path, key)


@each("runs", [((5, 6), (7, 8)), ((5, 6, 7), (8, 9, 10))])
def test_shards_of_two_continuations_of_one_data_set_are_refused_together(tmp_path, key, runs):
    data_set(tmp_path / "one", key, [1, 2, 3, 4])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    taken_back, kept = (data_set(tmp_path / name, key, *runs) for name in ("one", "two"))
    assert stored.read_data_set(tmp_path / "two", KeyRing(key)).is_complete
    for index in range(2, len(kept) - 1):
        content = kept[index].read_bytes()
        shutil.copy(taken_back[index], kept[index])
        with pytest.raises(FormatError, match="got one that followed another"):
            stored.read_data_set(tmp_path / "two", KeyRing(key))
        kept[index].write_bytes(content)


def test_a_type_is_kept_and_bytes_among_texts_have_none(tmp_path, key):
    for values, kind in ((["a"], "text"), ([b"b", "a"], ""), (["c"], "")):
        with DatasetWriter(tmp_path, key) as writer:
            writer.write_batch({"x": values})
        assert stored.read_data_set(tmp_path, KeyRing(key)).columns["x"].type == kind
    days = replace(blocks.Block.of(np.arange(3)), column=blocks.Column("I64", (), "arrow:x"))
    with DatasetWriter(tmp_path / "days", key) as writer:
        writer.write({"x": 3})
        with pytest.raises(ValueError, match="'arrow:x'"):
            writer.write_batch({"x": days})


@pytest.mark.filterwarnings("ignore:.* do not say their order:UserWarning")
def test_shards_of_version_0_1_are_read_and_continued(tmp_path, key):
    offsets = np.array([0, 1, 3])
    for index in (0, 1):
        old = {"x": np.arange(2), "t.records": np.frombuffer(b"abb", np.uint8), "t.offsets": offsets}
        fastrack.save_file(old, tmp_path / f"shard-{index:06}.safetensors", key)
    found = stored.read_data_set(tmp_path, KeyRing(key))
    assert (found.samples, found.run, found.is_complete, found.columns["t"].type) == (4, 0, None, "")
    with DatasetWriter(tmp_path, key) as writer:
        assert writer.stored == 4
        writer.write({"x": 7, "t": "c"})
    found = stored.read_data_set(tmp_path, KeyRing(key))
    assert (found.samples, found.run, found.is_complete, found.columns["t"].type) == (5, 4, True, "text")
    data = fastrack.SealedDataset(tmp_path, keys=key, transform=lambda sample: (int(sample["x"]), bytes(sample["t"])))
    assert list(data) == [(0, b"a"), (1, b"bb"), (0, b"a"), (1, b"bb"), (7, b"c")]
    shutil.copy(tmp_path / "shard-000000.safetensors", tmp_path / "shard-000003.safetensors")
    with pytest.raises(FormatError, match="says its place"):
        DatasetWriter(tmp_path, key)


def test_shards_of_version_0_1_are_as_many_as_those_after_them_say(tmp_path, key):
    for index in (0, 1):
        fastrack.save_file({"x": np.arange(2)}, tmp_path / f"shard-{index:06}.safetensors", key)
    assert stored.read_data_set(tmp_path, KeyRing(key)).before == 4
    paths = data_set(tmp_path, key, [1, 2], [3, 4])
    assert stored.read_data_set(tmp_path, KeyRing(key)).before == 4
    strip(paths[2], ABOUT)
    with pytest.raises(FormatError, match="from sample 4 on"):
        stored.read_data_set(tmp_path, KeyRing(key))


@each("content", [b"", b"{}", b"[]", b"\xff", b'{"version":2}', b'{"version":1,"data_set":"a"}', b"[" * 100_000])
def test_what_a_shard_says_is_refused_in_another_form(content):
    with pytest.raises(FormatError, match="expected"):
        about.About.decode(content, Path("shard"))


@each(
    "change",
    [
        {"first": -1}, {"first": True}, {"samples": 2.0}, {"run": 3}, {"complete": 1}, {"types": []},
        {"types": {"x": 1}}, {"files": [["a", 1]]}, {"files": [["a"]]}, {"files": [[1, 2]]}, {"files": 5},
        {"files": [["a", 3], ["b", -1]]}, {"data_set": ""}, {"data_set": None}, {"other": 1},
        {"shard": ""}, {"previous": None}, {"before": 3}, {"before": -1},
    ],
)  # fmt: skip
def test_what_a_shard_says_is_refused_with_another_value(change):
    made = about.About("a", "b", "c", 1, 2, 2, 0, complete=True, types={"x": "text"}, files=(("é\udcff", 2),))
    content = made.encode().tobytes()
    assert about.About.decode(content, Path("shard")) == made
    with pytest.raises(FormatError, match="expected"):
        about.About.decode(
            json.dumps({**json.loads(content.decode(errors="surrogateescape")), **change}).encode(), Path("x")
        )


def test_a_writer_is_not_pickled_and_shows_no_key(tmp_path, key):
    writer = DatasetWriter(tmp_path, key)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(writer)
    assert key.id not in repr(writer)


def test_a_forked_child_does_not_write_its_parents_samples(tmp_path, key):
    def end_as_a_child():
        with pytest.raises(ClosedError, match="forked"):
            writer.write({"x": 2})
        writer.close()
        return tmp_path.exists() and len(list(tmp_path.iterdir()))

    with DatasetWriter(tmp_path, key) as writer:
        writer.write({"x": 1})
        assert in_forked_child(end_as_a_child) == 0
        writer.write({"x": 3})
    data = fastrack.SealedDataset(tmp_path, keys=key)
    assert [int(unseal(data[at]["x"], key, framework="numpy")) for at in range(len(data))] == [1, 3]


def write_slowly(folder, key, count):
    with DatasetWriter(folder, key, records=["tokens"], shard_size=8000) as writer:
        for index in range(writer.stored, count):
            writer.write(sample(index))


@pytest.mark.slow
def test_a_killed_writer_is_resumed_without_a_gap(tmp_path, key):
    context = multiprocessing.get_context("fork")
    rng, kills, most = np.random.default_rng(0), 0, 0
    for attempt in range(50):
        process = context.Process(target=write_slowly, args=(tmp_path, key, 100))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads about
            process.start()
        time.sleep(rng.uniform(0.005, 0.03 * (attempt + 2)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += process.exitcode != 0
        writer = DatasetWriter(tmp_path, key)
        assert most <= writer.stored <= 100
        most = writer.stored
        assert len(list(tmp_path.iterdir())) == len(stored.shards_in(tmp_path))  # no part of a shard is left
        if most == 100:
            break
    if most < 100:
        write_slowly(tmp_path, key, 100)
    assert kills
    assert_same(read(tmp_path, key), [sample(index) for index in range(100)])


def test_memory_holds_one_shard(tmp_path, key):
    with DatasetWriter(tmp_path, key, shard_size=1 << 20) as writer:
        for _ in range(50):
            writer.write({"x": bytes(300_000)})
            assert sum(map(len, writer._data.values())) <= 1 << 20
    assert writer.stored == 50
