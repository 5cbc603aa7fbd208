"""The benchmark of CSV compares readers that read the same."""

import pytest

pytest.importorskip("pyarrow")

from bench import bench_csv, csv_before
from fastrack._samples.csv import csv_files


def test_both_readers_read_the_table_alike(tmp_path):
    bench_csv.write_table(tmp_path / "a.csv", 100)

    def read(reader):
        return [
            (name, str(block.column), block.data.tobytes())
            for batch in reader([tmp_path / "a.csv"])
            for name, block in batch.items()
        ]

    before, now = read(csv_before.read_files), read(csv_files.read_files)
    assert len(now) == 11
    for name in {name for name, _, _ in now}:  # batches differ
        assert b"".join(each[2] for each in before if each[0] == name) == b"".join(
            each[2] for each in now if each[0] == name
        )
    assert bench_csv.measure(100, 1).keys() == {"0.2", "without PyArrow", "with PyArrow"}
