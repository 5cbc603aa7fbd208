"""Datasets of sealed files: their batches are what plain indexing gives, bit for bit, or an error."""

import collections
import gc
import itertools
import pickle

import numpy as np
import pytest
import torch
from helpers.cases import each
from helpers.staged import staged_channel
from helpers.tampering import shorten_claim, tamper_file
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Subset

import fastrack
from fastrack import (
    AuthenticationError,
    Channel,
    ClosedError,
    FormatError,
    Key,
    SealedDataset,
    SealedRows,
    collate,
)
from fastrack._sealed import message_headers
from fastrack._training import handles
from fastrack.format import chunk_offset

CHUNK_SIZE = 16384
COUNTS = [100, 0, 57, 1]  # samples in each file
SEVERAL = [slice(90, 130), slice(None, None, -7), [3, -1, 100], np.array([157, 0]), torch.tensor([1, 1]), [5], slice(0)]


def random(shape, dtype=np.uint8, seed=0):
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def save(folder, key, *tables):
    """Save each in a file of its own, and return their paths."""
    paths = [folder / f"{index}.safetensors" for index in range(len(tables))]
    for path, table in zip(paths, tables, strict=True):
        fastrack.save_file(table, path, key=key)
    return paths


@pytest.fixture(scope="module", params=[Channel, staged_channel], ids=["cpu", "staged"])
def channel(request, key):
    with request.param(keys=key) as channel:
        yield channel


@pytest.fixture(scope="module")
def tables():
    """The same columns for each file: rows of many sizes, and one of none."""
    return [
        {
            "images": random((count, 28, 28), seed=index),
            "labels": random(count, np.int64, index),
            "big": random((count, CHUNK_SIZE + 3), np.uint16, index),
            "empty": np.empty((count, 0), np.float32),
        }
        for index, count in enumerate(COUNTS)
    ]


@pytest.fixture(scope="module")
def plain(tables):
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


@pytest.fixture(scope="module")
def paths(tables, key, tmp_path_factory):
    return save(tmp_path_factory.mktemp("shards"), key, *tables)


@pytest.fixture(scope="module")
def dataset(paths):
    return SealedDataset(paths)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].numpy().dtype == array.dtype
        assert tuple(found[name].shape) == array.shape
        assert found[name].numpy().tobytes() == array.tobytes()


def chosen(plain, rows):
    return {name: array[rows] for name, array in plain.items()}


class TestSamples:
    def test_are_as_many_as_the_files_have(self, dataset):
        assert len(dataset) == sum(1 for _ in dataset) == sum(COUNTS)
        assert dataset.columns == ("big", "empty", "images", "labels")
        assert repr(dataset) == "<SealedDataset of 158 samples: big, empty, images, labels>"

    def test_are_handles_that_say_what_they_are(self, dataset, key):
        sample = dataset[3]
        assert isinstance(sample["images"], SealedRows)
        image = sample["images"]
        assert (image.name, image.dtype, image.shape, image.nbytes) == ("images", "U8", (28, 28), 784)
        assert image.key_id == key.id
        assert sample["labels"].shape == ()

    @each("index", [0, 99, 100, 156, 157, -1, -158, np.int64(5), torch.tensor(5)])
    def test_are_those_of_plain_indexing(self, channel, dataset, plain, index):
        assert_same(channel.to_device(dataset[index]), chosen(plain, int(index)))

    @each("index", [*SEVERAL, random(158) > 150])
    def test_may_be_several(self, channel, dataset, plain, index):
        rows = index.numpy() if isinstance(index, torch.Tensor) else index
        assert_same(channel.to_device(dataset[index]), chosen(plain, rows))

    @each("index", [158, -159, [0, 158], [-159], 10**30])
    def test_out_of_range_are_refused(self, dataset, index):
        with pytest.raises((IndexError, TypeError), match=r"out of range|rows are chosen"):
            dataset[index]

    def test_out_of_range_are_refused_in_a_batch(self, dataset):
        with pytest.raises(IndexError, match="158"):
            dataset.__getitems__([1, 158])

    def test_unseal_on_the_host(self, dataset, plain, key):
        rows = [150, 2, 157, 2]
        batch = collate(dataset.__getitems__(rows))
        for name, array in plain.items():
            assert np.array_equal(fastrack.unseal(batch[name], key, framework="numpy"), array[rows])

    def test_may_be_of_some_columns(self, paths, channel, plain):
        dataset = SealedDataset(str(paths[0]), columns=["labels"])
        assert_same(channel.to_device(dataset[7]), {"labels": plain["labels"][7]})


class TestBatches:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(-158, 157), min_size=1, max_size=60))
    def test_are_those_of_plain_indexing(self, channel, dataset, plain, rows):
        expected = chosen(plain, rows)
        samples = dataset.__getitems__(rows)
        assert_same(channel.to_device(collate(samples)), expected)
        assert_same(channel.to_device(collate(list(samples))), expected)
        assert_same(channel.to_device(collate([dataset[row] for row in rows])), expected)

    @settings(max_examples=40, deadline=None)
    @given(
        data=st.data(),
        dtype=st.sampled_from([np.uint8, np.int16, np.float32, np.complex64, np.bool_]),
        tail=st.lists(st.sampled_from([0, 1, 2, 7, 300]), max_size=2),
        count=st.integers(1, 30),
    )
    def test_of_any_shape_and_dtype(self, data, channel, key, tmp_path_factory, dtype, tail, count):
        table = random((count, *tail)).astype(dtype)
        paths = save(tmp_path_factory.mktemp("any"), key, {"x": table})
        rows = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=40))
        batch = channel.to_device(collate(SealedDataset(paths).__getitems__(rows)))
        assert_same(batch, {"x": table[rows]})

    def test_are_one_handle_a_column(self, dataset):
        batch = collate(dataset.__getitems__([1, 120, 3]))
        assert batch["images"].shape == (3, 28, 28)
        assert len(batch["images"].slices()) == 2

    def test_are_sequences_of_samples(self, dataset):
        samples = dataset.__getitems__([5, 100, 7])
        assert len(samples) == 3
        assert [sample["labels"].rows for sample in samples] == [5, 100, 7]
        assert [sample["labels"].rows for sample in samples[1:]] == [100, 7]
        assert samples[-1]["labels"].rows == 7
        with pytest.raises(IndexError):
            samples[3]

    def test_may_hold_ranges(self, channel, dataset, plain):
        batch = collate([dataset[start : start + 3] for start in (98, 0, 154)])
        rows = np.array([98, 0, 154])[:, None] + np.arange(3)
        assert_same(channel.to_device(batch), chosen(plain, rows))


class TestTampering:
    @pytest.fixture
    def altered(self, tables, key, tmp_path):
        """Three files; in the second, chunk 1 of the images is bad."""
        paths = save(tmp_path, key, *({"images": table["images"]} for table in (tables[0], tables[2], tables[0])))
        tamper_file(paths[1], "images", chunk_offset(1) + 9)
        return SealedDataset(paths)

    def require_named(self, error, altered):
        assert (error.tensor, error.chunk) == ("images", 1)
        assert error.path == altered._ref.layout.shards.paths[1]
        assert "/1.safetensors: tensor 'images', chunk 1" in str(error)

    def test_is_found_wherever_the_chunk_is_used(self, channel, altered):
        for rows in ([121], [5, 121, 200], list(range(257))):
            out = np.full((len(rows), 28, 28), 7, np.uint8)
            with pytest.raises(AuthenticationError) as caught:
                channel.to_device(collate(altered.__getitems__(rows))["images"], out=out)
            self.require_named(caught.value, altered)
            assert not out.any()
        with pytest.raises(AuthenticationError) as caught:
            channel.to_device(altered[121]["images"])
        self.require_named(caught.value, altered)

    def test_does_not_matter_elsewhere(self, channel, altered, plain):
        moved = channel.to_device(collate(altered.__getitems__([100, 5])))
        assert np.array_equal(moved["images"], plain["images"][[100, 5]])

    def test_is_found_on_the_host(self, altered, key):
        with pytest.raises(AuthenticationError) as caught:
            fastrack.unseal(collate(altered.__getitems__([5, 121]))["images"], key)
        self.require_named(caught.value, altered)

    def test_is_named_by_a_loader(self, altered, key):
        loader = DataLoader(altered, batch_size=7, collate_fn=collate)
        with pytest.raises(AuthenticationError) as caught:
            list(fastrack.wrap(loader, keys=key))
        self.require_named(caught.value, altered)

    def test_is_told_later_if_nobody_waits(self, channel, altered):
        def move():  # the device may be quick
            channel.to_device(collate(altered.__getitems__([5, 121])), non_blocking=True)
            assert channel.device != "cpu"
            channel.synchronize()

        with pytest.raises(AuthenticationError) as caught:
            move()
        self.require_named(caught.value, altered)
        channel.synchronize()

    def test_files_of_several_owners_go_together(self, channel, tables, key, tmp_path):
        other = Key.generate()
        paths = save(tmp_path, key, {"images": tables[0]["images"]}, {})
        fastrack.save_file({"images": tables[0]["images"]}, paths[1], key=other)
        moved = channel.to_device(collate(SealedDataset(paths).__getitems__([101, 0])), keys=[key, other])
        assert np.array_equal(moved["images"], tables[0]["images"][[1, 0]])


class TestFilesThatClaimOtherCounts:
    """The header of a file can be rewritten without the key."""

    @pytest.fixture
    def shards(self, key, tmp_path):
        return save(tmp_path, key, *({"a": np.arange(100) + 1000 * number} for number in range(3)))

    @pytest.mark.parametrize("count", [0, 60])
    def test_are_found_out_by_the_first_batch_that_has_nothing_of_them(self, shards, channel, count):
        shorten_claim(shards[1], "a", count)
        data = SealedDataset(shards)
        assert len(data) == 200 + count
        for batch in (collate([data[0], data[1]]), data[0], data.windows("a", 8)[0]):
            with pytest.raises(AuthenticationError, match="'a'"):
                channel.to_device(batch)
            with pytest.raises(AuthenticationError, match="'a'"):
                fastrack.unseal(batch["a"], channel._keys)

    def test_leave_zeros_in_what_was_to_be_filled(self, shards, key):
        shorten_claim(shards[1], "a", 0)
        out = {"a": np.full(2, 7)}
        with Channel(keys=key) as channel, pytest.raises(AuthenticationError):
            channel.to_device(SealedDataset(shards)[[0, 1]], out=out)
        assert not out["a"].any()

    def test_are_refused_at_once_where_a_key_is_given(self, shards, key):
        assert len(SealedDataset(shards, keys=key)) == 300
        shorten_claim(shards[1], "a", 0)
        with pytest.raises(AuthenticationError, match="'a'"):
            SealedDataset(shards, keys=key)

    def test_are_looked_for_once(self, shards, key, monkeypatch):
        data = SealedDataset(shards)
        opened = []
        original = message_headers.open_headers
        monkeypatch.setattr(
            message_headers, "open_headers", lambda some, *rest: opened.extend(some) or original(some, *rest)
        )
        for _ in range(3):
            assert fastrack.unseal(data[5]["a"], key).item() == 5
        assert len(opened) == 3 + 3


class TestFilesThatDoNotGoTogether:
    @each(
        ("tables", "match"),
        [
            ([{"a": np.zeros(5), "odd": np.zeros(6), "c": np.zeros((5, 2))}], r"'odd' .*\[6\]"),
            ([{"a": np.zeros(5), "odd": np.array(6.0)}], r"'odd' .*\[\]"),
            ([{"a": np.zeros(5), "b": np.zeros(5)}, {"a": np.zeros(5)}], r"1\.safetensors .*'b'"),
            ([{"a": np.zeros((5, 2))}, {"a": np.zeros((5, 3))}], r"1\.safetensors: 'a'"),
            ([{"a": np.zeros((5, 2))}, {"a": np.zeros((5, 2), np.float32)}], r"1\.safetensors: 'a'"),
        ],
    )
    def test_are_refused_by_the_name_of_a_column(self, key, tmp_path, tables, match):
        paths = save(tmp_path, key, *tables)
        with pytest.raises(ValueError, match=match):
            SealedDataset(paths)
        if "c" in tables[0]:
            assert len(SealedDataset(paths, columns=["a", "c"])) == 5


@pytest.fixture(scope="module")
def tokens():
    return [random(20_000, np.uint16, 1), random(3, np.uint16, 2), random(1033, np.uint16, 3)]


@pytest.fixture(scope="module")
def text(tokens, key, tmp_path_factory):
    paths = save(tmp_path_factory.mktemp("tokens"), key, *({"tokens": array} for array in tokens))
    return SealedDataset(paths, columns=["tokens"])


class TestWindows:
    @each(("size", "step"), [(128, None), (100, 1), (64, 100), (1, 1), (1033, 1033), (4, 3)])
    def test_are_slices_of_each_file(self, channel, text, tokens, size, step):
        stride = step or size
        starts = [(array, at) for array in tokens for at in range(0, array.size - size + 1, stride)]
        windows = text.windows("tokens", size, step)
        assert len(windows) == len(starts)
        rows = np.random.default_rng(0).integers(0, len(starts), 50)
        expected = np.stack([array[at : at + size] for array, at in (starts[row] for row in rows)])
        assert_same(channel.to_device(collate(windows.__getitems__(rows.tolist()))), {"tokens": expected})
        assert_same(channel.to_device(windows[int(rows[0])]), {"tokens": expected[0]})

    def test_may_be_of_rows(self, channel, key, tmp_path):
        table = random((50, 7), np.float32)
        windows = SealedDataset(save(tmp_path, key, {"a": table, "b": table})).windows("a", 5, 2)
        assert_same(channel.to_device(windows[3]), {"a": table[6:11]})

    def test_longer_than_the_data_are_none(self, text):
        assert len(text.windows("tokens", 30_000)) == 0


DATA = random(50_000, np.int32)


@pytest.fixture(scope="module")
def offsets():
    middle = np.sort(random(40, np.int64) * 200)
    return [np.array([0, *middle, 50_000]), np.array([7]), np.array([100, 100, 50_000])]


@pytest.fixture(scope="module")
def records(offsets):
    return [DATA[a:b] for each in offsets for a, b in itertools.pairwise(each)]


@pytest.fixture(scope="module")
def record_set(offsets, key, tmp_path_factory):
    tables = [{"data": DATA, "offsets": each} for each in offsets]
    return SealedDataset.records(save(tmp_path_factory.mktemp("records"), key, *tables), keys=key)


OUT_OF_RANGE = [[0, 5, 4], [-1, 5], [0, 50_001], [50_001], [5, 4, 50_000], [2**63 - 1], [-(2**63), 2**63 - 1]]


class TestRecords:
    def test_are_of_their_own_lengths(self, channel, record_set, records):
        assert len(record_set) == len(records)
        for row, record in enumerate(records):
            sample = record_set[row]
            assert sample["lengths"] == record.size
            assert np.array_equal(channel.to_device(sample["data"]), record)

    @settings(max_examples=30, deadline=None)
    @given(rows=st.lists(st.integers(0, 42), min_size=1, max_size=20))
    def test_are_padded_with_zeros_in_a_batch(self, channel, record_set, records, key, rows):
        for samples in (record_set.__getitems__(rows), [record_set[row] for row in rows]):
            batch = collate(samples)
            sizes = [records[row].size for row in rows]
            expected = np.zeros((len(rows), max(sizes)), np.int32)
            for place, row in enumerate(rows):
                expected[place, : sizes[place]] = records[row]
            assert batch["lengths"].tolist() == sizes
            assert np.array_equal(channel.to_device(batch["data"]), expected)
            assert np.array_equal(fastrack.unseal(batch["data"], key), expected)
            out = np.full(expected.shape, 7, np.int32)
            assert np.array_equal(channel.to_device(batch["data"], out=out), expected)

    @each(
        ("offsets", "data", "match"),
        [
            *((np.array(each), DATA, "ascend") for each in OUT_OF_RANGE),
            (np.array([], int), DATA, "I64"),
            (np.array([[0, 1]]), DATA, "I64"),
            (np.array([0, 1], np.int32), DATA, "I64"),
            (np.array([0, 1]), np.zeros((3, 3)), "records"),
        ],
    )
    def test_need_offsets_into_their_data(self, key, tmp_path, offsets, data, match):
        paths = save(tmp_path, key, {"data": data, "offsets": offsets})
        with pytest.raises(FormatError, match=match):
            SealedDataset.records(paths, keys=key)

    def test_at_altered_offsets_are_refused(self, key, tmp_path):
        paths = save(tmp_path, key, {"data": DATA, "offsets": np.array([0, 1])})
        tamper_file(paths[0], "offsets", 60)
        with pytest.raises(AuthenticationError, match="'offsets'"):
            SealedDataset.records(paths, keys=key)


def test_lengths_that_are_not_known_here_are_not_taken_for_those_of_another_data_set(
    record_set, offsets, key, tmp_path
):
    other = SealedDataset.records(save(tmp_path, key, {"data": DATA, "offsets": offsets[0]}), keys=key)
    unknown = [handles.Lengths(each._ref, 0) for each in (record_set, other)]
    with pytest.raises(TypeError, match="several"):
        collate(unknown)


class TestCollate:
    def test_takes_rows_of_any_sealed_tensor(self, channel, key):
        table = random((100, 30), np.uint16)
        sealed = fastrack.seal(table, key)
        batch = collate([(sealed[row], row) for row in (5, 99, 0)])
        assert batch[1].tolist() == [5, 99, 0]
        assert len(batch[0].slices()) == 1
        assert np.array_equal(channel.to_device(batch[0]), table[[5, 99, 0]])

    def test_takes_ranges_and_lists_of_rows(self, channel, key):
        table = random((100, 3000), np.uint16)
        sealed = fastrack.seal(table, key)
        batch = collate([sealed[4:8], sealed[[1, 3, 3, 90]], sealed[::30]])
        expected = np.stack([table[4:8], table[[1, 3, 3, 90]], table[::30]])
        assert np.array_equal(channel.to_device(batch), expected)

    def test_takes_rows_of_several_tensors(self, channel, key):
        tables = [random((20, 5000), np.uint8, seed) for seed in range(3)]
        sealed = [fastrack.seal(table, key, f"table {seed}") for seed, table in enumerate(tables)]
        picks = [(0, 3), (2, 19), (0, 4), (1, 0), (2, 2)]
        batch = collate([sealed[which][row] for which, row in picks])
        assert batch.name == "table 0"
        assert batch.key_id == key.id
        expected = np.stack([tables[which][row] for which, row in picks])
        assert np.array_equal(channel.to_device(batch), expected)
        assert np.array_equal(channel.to_device(pickle.loads(pickle.dumps(batch))), expected)

    def test_takes_whole_tensors(self, channel, key):
        arrays = [random((7, 3000), np.int16, seed) for seed in range(4)]
        batch = collate([fastrack.seal(array, key) for array in arrays])
        assert np.array_equal(channel.to_device(batch), np.stack(arrays))

    def test_takes_batches_of_batches(self, channel, key):
        table = random((100, 30), np.uint16)
        sealed = fastrack.seal(table, key)
        batch = collate([collate([sealed[1], sealed[2]]), collate([sealed[5], sealed[1]])])
        assert np.array_equal(channel.to_device(batch), table[[[1, 2], [5, 1]]])

    def test_opens_a_tensor_that_was_taken_out_of_its_file_twice_once(self, paths):
        with fastrack.load_file(paths[0]) as file:
            assert len(collate([file["images"][row] for row in range(5)]).slices()) == 1

    def test_keeps_what_holds_the_handles(self, key):
        Point = collections.namedtuple("Point", "x y")  # noqa: PYI024
        sealed = fastrack.seal(np.arange(10), key)
        batch = collate([{"a": Point(sealed[row], [row, str(row)])} for row in range(3)])
        assert isinstance(batch["a"], Point)
        assert batch["a"].x.shape == (3,)
        numbers, texts = batch["a"].y
        assert torch.equal(numbers, torch.arange(3))
        assert texts == ["0", "1", "2"]

    def test_puts_everything_else_together_as_torch_does(self):
        samples = [{"a": (1, 2.5), "b": torch.ones(2), "c": np.float32(1), "d": "y"}] * 2
        found, expected = collate(samples), torch.utils.data.default_collate(samples)
        assert str(found) == str(expected)

    def test_makes_arrays_where_torch_is_not_installed(self, key, hide):
        hide("torch")
        assert collate([1, 2]).tolist() == [1, 2]
        assert collate([np.ones(2), np.zeros(2)]).shape == (2, 2)
        assert collate(["a", "b"]) == ["a", "b"]

    def test_takes_samples_of_several_data_sets(self, channel, paths, plain):
        one, other = SealedDataset(paths), SealedDataset(paths)
        assert_same(channel.to_device(collate([one[3], other[157]])), chosen(plain, [3, 157]))


class TestLoading:
    def test_with_every_sampler(self, channel, dataset, plain):
        generator = torch.Generator().manual_seed(0)
        orders = [
            {"sampler": RandomSampler(dataset, generator=generator), "batch_size": 30},
            {"batch_sampler": BatchSampler(RandomSampler(dataset, generator=generator), 30, drop_last=False)},
            {"shuffle": True, "batch_size": 30},
        ]
        for order in orders:
            batches = list(DataLoader(dataset, collate_fn=collate, **order))
            rows = np.concatenate([batch["labels"].rows for batch in batches])
            assert sorted(rows) == list(range(158))
            moved = [channel.to_device(batch) for batch in batches]
            for name, array in plain.items():
                assert np.array_equal(torch.cat([batch[name] for batch in moved]), array[rows])

    def test_over_several_ranks(self, dataset):
        seen = []
        for rank in range(3):
            sampler = DistributedSampler(dataset, num_replicas=3, rank=rank, seed=1)
            loader = DataLoader(dataset, batch_size=16, sampler=sampler, collate_fn=collate)
            seen += [row for batch in loader for row in batch["labels"].rows.tolist()]
        assert set(seen) == set(range(158))
        assert len(seen) == 159

    def test_of_a_subset(self, channel, dataset, plain):
        loader = DataLoader(Subset(dataset, [100, 3, 5]), batch_size=3, collate_fn=collate)
        assert_same(channel.to_device(next(iter(loader))), chosen(plain, [100, 3, 5]))

    def test_sample_by_sample(self, channel, dataset, plain):
        sample = next(iter(DataLoader(dataset, batch_size=None, collate_fn=lambda sample: sample)))
        assert_same(channel.to_device(sample), chosen(plain, 0))

    @each("workers", [0, 1])
    def test_without_a_collate(self, channel, dataset, plain, workers):
        loader = DataLoader(dataset, 40, num_workers=workers, multiprocessing_context="fork" if workers else None)
        assert_same(channel.to_device(next(iter(loader))), chosen(plain, list(range(40))))
        both = next(iter(DataLoader([(fastrack.seal(np.arange(3), Key.generate()), 1)] * 2, batch_size=2)))
        assert isinstance(both[0], SealedRows)

    def test_with_another_collate(self, dataset):
        loader = DataLoader(dataset, batch_size=4, collate_fn=list)
        assert [len(batch) for batch in loader] == [4] * 39 + [2]


class TestTravelling:
    def test_samples_are_small(self, paths):
        dataset = SealedDataset(paths, columns=["images", "labels"])
        assert len(pickle.dumps(dataset[157])) < 110
        assert len(pickle.dumps(dataset[157]["images"])) < 100
        rows = list(range(100))
        assert len(pickle.dumps(dataset.__getitems__(rows))) < 500
        assert len(pickle.dumps(collate(dataset.__getitems__(rows)))) < 1000

    def test_samples_come_back_as_they_went(self, channel, dataset, plain):
        for rows in (5, [5, 120]):
            back = pickle.loads(pickle.dumps(dataset[rows]))
            assert_same(channel.to_device(back), chosen(plain, rows))
        back = pickle.loads(pickle.dumps(collate([dataset[5:7], dataset[99:101]])))
        assert_same(channel.to_device(back), chosen(plain, np.array([[5, 6], [99, 100]])))
        samples = pickle.loads(pickle.dumps(dataset.__getitems__([5, 120])))
        assert_same(channel.to_device(collate(samples)), chosen(plain, [5, 120]))

    def test_samples_of_a_data_set_that_is_gone_are_refused(self, paths):
        dataset = SealedDataset(paths)
        sent = [pickle.dumps(thing) for thing in (dataset[0], dataset.__getitems__([0]), collate([dataset[0]]))]
        del dataset
        gc.collect()
        for data in sent:
            with pytest.raises(ClosedError):
                pickle.loads(data)

    def test_a_handle_keeps_its_data_set(self, channel, paths, plain):
        sample = SealedDataset(paths)[3]
        gc.collect()
        assert_same(channel.to_device(pickle.loads(pickle.dumps(sample))), chosen(plain, 3))

    def test_a_data_set_comes_back_as_itself(self, dataset):
        back = pickle.loads(pickle.dumps(dataset))
        assert collate([back[0], dataset[1]])["labels"].rows.tolist() == [0, 1]

    def test_a_data_set_opens_its_files_where_it_came_to(self, channel, paths, plain):
        dataset = SealedDataset(paths)
        data = pickle.dumps(dataset)
        assert len(data) < 5000
        del dataset
        gc.collect()
        assert_same(channel.to_device(pickle.loads(data)[[3, 150]]), chosen(plain, [3, 150]))

    def test_more_samples_than_four_bytes_count_travel(self, key, tmp_path):
        dataset = SealedDataset(save(tmp_path, key, {"none": np.empty((2**33, 0), np.uint8)}))
        back = pickle.loads(pickle.dumps(dataset[[2**33 - 1, 0]]))
        assert back["none"].rows.tolist() == [2**33 - 1, 0]


class TestTheSetOfFiles:
    @pytest.fixture
    def shards(self, key, tmp_path):
        return save(tmp_path, key, *({"x": np.full((10, 4), index)} for index in range(3)))

    def ids(self, paths):
        return [fastrack.load_file(path).file_id for path in paths]

    def test_has_no_copy_of_a_file_in_the_place_of_another(self, shards, key):
        shards[2].write_bytes(shards[0].read_bytes())
        with pytest.raises(FormatError, match=r"2\.safetensors: .*0\.safetensors"):
            SealedDataset(shards, ["x"], keys=key)

    def test_may_be_pinned(self, shards, key):
        ids = self.ids(shards)
        assert len(SealedDataset(shards, ["x"], keys=key, file_ids=ids)) == 30
        assert len(SealedDataset(shards[0], ["x"], file_ids=ids[:1])) == 10
        fastrack.save_file({"x": np.full((10, 4), 7)}, shards[1], key)  # by the same owner
        assert len(SealedDataset(shards, ["x"], keys=key)) == 30
        with pytest.raises(FormatError, match=rf"1\.safetensors: .*{ids[1]}"):
            SealedDataset(shards, ["x"], keys=key, file_ids=ids)
        with pytest.raises(ValueError, match="file_ids="):
            SealedDataset(shards, ["x"], file_ids=ids[:2])

    def test_may_be_pinned_for_records_too(self, key, tmp_path):
        paths = save(tmp_path, key, {"data": np.arange(10), "offsets": np.array([0, 3, 10])})
        assert len(SealedDataset.records(paths, keys=key, file_ids=self.ids(paths))) == 2
        with pytest.raises(FormatError, match="0" * 32):
            SealedDataset.records(paths, keys=key, file_ids=["0" * 32])


class TestRecipesFromWorkers:
    @each("row", [-1, -5, 158, 2**31, 2**60 + 3, 2**63 - 1])
    def test_name_samples_that_there_are(self, dataset, row):
        wide = [np.array([3, row]), np.array([[row, 3]])]
        for rows in [row, *wide]:
            with pytest.raises(FormatError, match="157"):
                dataset._ref.require(rows)
            with pytest.raises(FormatError, match="157"):
                handles.Lengths(dataset._ref, rows)
        with pytest.raises(FormatError, match="157"):
            handles.restore_rows(dataset._ref.dataset_id, 0, row)
        for get_or_create in (handles.restore_samples, lambda token, rows: handles.restore_rows(token, 0, rows)):
            packed = np.array([3, row % 2**32], "<u4").tobytes()
            if row % 2**32 >= 158:
                with pytest.raises(FormatError, match="157"):
                    get_or_create(dataset._ref.dataset_id, packed)

    @pytest.mark.parametrize("column", [-1, 4, 100])
    def test_name_columns_that_there_are(self, dataset, column):
        with pytest.raises(FormatError, match="0 to"):
            handles.restore_rows(dataset._ref.dataset_id, column, 3)
