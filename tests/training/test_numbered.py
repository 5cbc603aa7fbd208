"""Samples as numbers in tables: what a table may hold, and what is refused."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from helpers.cases import each
from helpers.tampering import tamper_file

import fastrack
from fastrack._training import dataset, row_tables
from fastrack._training.handles import DatasetHandle

X = np.arange(300 * 7, dtype=np.int32).reshape(300, 7)


@pytest.fixture
def paths(tmp_path, key):
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for path, rows in zip(paths, np.split(X, [100]), strict=True):
        fastrack.save_file({"x": rows, "y": rows[:, 0].copy()}, path, key)
    return paths


@pytest.fixture
def data(paths):
    return fastrack.SealedDataset(paths)


@pytest.fixture
def records(tmp_path, key):
    starts = np.cumsum([0, *range(40)])
    fastrack.save_file({"data": np.arange(starts[-1]), "offsets": starts}, tmp_path / "r.safetensors", key)
    return fastrack.SealedDataset.records(tmp_path / "r.safetensors", keys=key)


def table_of(samples, start, stop):
    return row_tables.make_table(samples.dataset_id, start, stop)


def opened(batch, key):
    return fastrack.to_device(batch, keys=key, framework="numpy")


def test_a_table_has_an_id_and_numbers_alone(data):
    table = table_of(row_tables.RowTable(data), 90, 130)
    assert {name: (column.dtype, column.shape) for name, column in table.items()} == {
        "dataset": (np.dtype(np.int64), (40,)),
        "row": (np.dtype(np.int64), (40,)),
    }
    assert np.array_equal(table["row"], np.arange(90, 130))
    assert len(set(table["dataset"])) == 1


def test_rows_in_any_order_are_opened(data, key):
    samples = row_tables.RowTable(data)
    order = np.random.default_rng(0).permutation(300)
    table = {name: column[order] for name, column in table_of(samples, 0, 300).items()}
    batch = opened(samples.handles({**table, "weight": order / 2, "id": order.astype(str)}), key)
    assert np.array_equal(batch["x"], X[order])
    assert np.array_equal(batch["y"], X[order, 0])
    assert np.array_equal(batch["weight"], order / 2)
    assert batch["id"].tolist() == order.astype(str).tolist()
    assert batch.keys() == {"x", "y", "weight", "id"}


def test_no_rows_are_an_empty_batch(data, key):
    samples = row_tables.RowTable(data)
    assert opened(samples.handles(table_of(samples, 5, 5)), key)["x"].shape == (0, 7)


def test_windows_are_samples_too(data, key):
    samples = row_tables.RowTable(data.windows("x", 3, 2))
    batch = opened(samples.handles(table_of(samples, 10, 12)), key)
    assert np.array_equal(batch["x"], [X[20:23], X[22:25]])


SCRIPT = """
import sys, fastrack
from fastrack._training.row_tables import RowTable
data = fastrack.SealedDataset(sys.argv[1:])
print(RowTable(data).dataset_id, RowTable(data.windows("x", 3)).dataset_id)
"""


@pytest.mark.slow
def test_the_id_is_that_of_the_files_in_every_process(data, paths, key, tmp_path):
    windows = data.windows("x", 3)
    ids = [row_tables.RowTable(each).dataset_id for each in (data, windows)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *paths], capture_output=True, check=True, text=True)
    assert done.stdout.split() == list(map(str, ids))
    assert row_tables.RowTable(pickle.loads(pickle.dumps(data))).dataset_id == ids[0]
    others = [
        fastrack.SealedDataset(paths[::-1]),
        fastrack.SealedDataset(paths, ["x"]),
        fastrack.SealedDataset(paths, ["y", "x"]),
        fastrack.SealedDataset(paths[:1]),
        data.windows("x", 3, 1),
        data.windows("x", 4),
    ]
    fastrack.save_file({"x": X[:100], "y": X[:100, 0]}, tmp_path / "again.safetensors", key)
    others.append(fastrack.SealedDataset([tmp_path / "again.safetensors", paths[1]]))
    assert len({*ids, *(row_tables.RowTable(other).dataset_id for other in others)}) == len(others) + 2
    assert all(0 <= number < 2**63 for number in ids)


def test_rows_of_another_data_set_are_refused(data, paths):
    samples, other = row_tables.RowTable(data), row_tables.RowTable(fastrack.SealedDataset(paths[:1]))
    mixed = {
        name: np.concatenate([column, table_of(other, 0, 1)[name]]) for name, column in table_of(samples, 0, 9).items()
    }
    for table in (table_of(other, 0, 5), mixed):
        with pytest.raises(fastrack.FormatError, match="this dataset"):
            samples.handles(table)


@pytest.mark.parametrize("row", [-1, 300, 2**62, -(2**63)])
def test_numbers_that_no_sample_has_are_refused(data, row):
    samples = row_tables.RowTable(data)
    table = table_of(samples, 0, 3)
    table["row"][1] = row
    with pytest.raises(fastrack.FormatError, match=str(row)):
        samples.handles(table)


def test_what_is_no_table_of_numbers_is_refused(data):
    samples = row_tables.RowTable(data)
    table = table_of(samples, 0, 3)
    wrong = [
        {},
        {"row": table["row"]},
        {"dataset": table["dataset"]},
        {**table, "row": table["row"].astype(float)},
        {**table, "row": table["row"].astype(np.uint64)},
        {**table, "row": table["row"].astype(str)},
        {**table, "row": table["row"].astype(object)},
        {**table, "row": table["row"][:, None]},
        {**table, "dataset": table["dataset"].astype(float)},
        {**table, "dataset": table["dataset"][0]},
        {**table, "dataset": table["dataset"][:2]},
        {**table, "dataset": np.array([None, None, None])},
    ]
    for altered in wrong:
        with pytest.raises(fastrack.FormatError):
            samples.handles(altered)
    with pytest.raises(ValueError, match="'y'"):
        samples.handles({**table, "y": np.zeros(3)})


def test_what_is_no_data_set_is_refused(paths):
    for given in (paths[0], str(paths[0]), None):
        with pytest.raises(TypeError, match="SealedDataset"):
            row_tables.RowTable(given)


def test_neither_key_nor_data_travel(data, key):
    for sent in (row_tables.RowTable(data), table_of(row_tables.RowTable(data), 0, 300)):
        pickled = pickle.dumps(sent)
        assert bytes(key.material()) not in pickled
        assert X[3].tobytes() not in pickled


def test_an_altered_file_is_refused_when_its_rows_are_opened(data, paths, key):
    samples = row_tables.RowTable(pickle.loads(pickle.dumps(data)))
    tamper_file(paths[1], "x", 60)
    with pytest.raises(fastrack.AuthenticationError):
        opened(samples.handles(table_of(samples, 150, 160)), key)
    assert np.array_equal(opened(samples.handles(table_of(samples, 0, 10)), key)["x"], X[:10])


# Records. Their lengths are in no pickle.


def test_records_find_their_lengths_with_the_keys(records, key):
    there = row_tables.RowTable(records)
    ring = fastrack.KeyRing(key)
    assert there.with_lengths(ring) is there
    layout = pickle.loads(pickle.dumps(records._ref.layout))
    restored = dataset.restore_dataset(DatasetHandle(layout), layout.shards, None)  # as in another process
    elsewhere = row_tables.RowTable(restored)
    with pytest.raises(TypeError):
        opened(elsewhere.handles(table_of(elsewhere, 3, 6)), key)
    found = elsewhere.with_lengths(ring)
    batch = opened(found.handles(table_of(found, 3, 6)), key)
    assert batch["lengths"].tolist() == [3, 4, 5]
    assert batch["data"].tolist() == [[3, 4, 5, 0, 0], [6, 7, 8, 9, 0], [10, 11, 12, 13, 14]]
    assert found.dataset_id == elsewhere.dataset_id


def test_rows_need_no_lengths(data, key):
    samples = row_tables.RowTable(data)
    assert samples.with_lengths(fastrack.KeyRing(key)) is samples


@each(("count", "parts"), [(0, 4), (1, 4), (10, 3), (10, 10), (10, 11), (1000, 7), (5, 1)])
def test_samples_are_divided_into_ranges_of_one_size(count, parts):
    ranges = row_tables.divide(count, parts)
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert len(ranges) == max(1, min(count, parts))


def test_columns_of_several_kinds_are_numbered_and_a_transform_is_refused(tmp_path, key):
    with fastrack.DatasetWriter(tmp_path / "data", key, shard_size=100) as writer:
        for index in range(20):
            writer.write({"text": "x" * index, "label": index})
    data = fastrack.SealedDataset(tmp_path / "data", keys=key)
    samples = row_tables.RowTable(data)
    handles = samples.handles(table_of(samples, 3, 7))
    assert fastrack.unseal(handles["label"], key, framework="numpy").tolist() == [3, 4, 5, 6]
    assert handles["text.lengths"].tolist() == [3, 4, 5, 6]
    stored = pickle.dumps(samples)
    number = samples.dataset_id
    del data, samples, handles
    elsewhere = pickle.loads(stored).with_lengths(fastrack.KeyRing(key))
    assert elsewhere.dataset_id == number
    assert elsewhere.handles(table_of(elsewhere, 3, 7))["text.lengths"].tolist() == [3, 4, 5, 6]
    with pytest.raises(ValueError, match="transform="):
        row_tables.RowTable(fastrack.SealedDataset(tmp_path / "data", keys=key, transform=len))
