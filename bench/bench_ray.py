"""Rows of 64 KiB through Ray Data: sealed rows that are opened in the consumer, against plain ones.

The plain rows are read from NumPy's files, or are in Ray's object store already.
Run as `python bench/bench_ray.py [--rows 4096] [--repeat 5]`; takes `ray[data]`. Every round runs each way in turn, and
the medians are compared.
"""

import argparse
import logging
import tempfile
from pathlib import Path

import numpy as np
import pytest

from fastrack import Key, SealedDataset, save_file
from fastrack._bench.measure import medians

pytest.importorskip("ray", reason="needs fastrack-io[ray]")  # pytest looks for benchmarks in this file too

import ray
import ray.data

from fastrack.ray import SealedCollateFn, SealedDatasource

SIZE, BATCH, FILES = 65_536, 64, 8


def write(folder, rows):
    """Write the same rows as sealed and as plain files, and return functions to read them, and the sum of all bytes."""
    random = np.random.default_rng(0)
    key = Key.generate()
    key.save(folder / "owner.key")
    parts = [random.integers(0, 256, (rows // FILES, SIZE), np.uint8) for _ in range(FILES)]
    paths = [folder / f"{number}.safetensors" for number in range(FILES)]
    (folder / "npy").mkdir()
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        save_file({"data": part}, path, key)
        np.save(folder / "npy" / f"{number}.npy", part)
    stored = ray.data.from_numpy(parts).materialize()
    data = SealedDataset(paths)
    collate = SealedCollateFn(data, keys=str(folder / "owner.key"))
    ways = {
        "plain, files": (lambda: ray.data.read_numpy(str(folder / "npy")), None),
        "plain, stored": (lambda: stored, None),
        "sealed": (lambda: ray.data.read_datasource(SealedDatasource(data)), collate),
    }
    return ways, sum(part.sum(dtype=np.int64).item() for part in parts)


def epoch(read, collate, total, *, shuffle):
    """Return a function that runs an epoch and reads every byte of every row: their sum has to be `total`."""

    def run():
        rows = read().random_shuffle(seed=0) if shuffle else read()
        batches = rows.iter_torch_batches(batch_size=BATCH, collate_fn=collate)
        assert sum(batch["data"].sum().item() for batch in batches) == total

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rows = options.rows // FILES * FILES
    ray.init(
        num_cpus=2,
        object_store_memory=4 * rows * SIZE,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    with tempfile.TemporaryDirectory() as folder:
        ways, total = write(Path(folder), rows)
        for shuffle in (False, True):
            runs = {name: epoch(*way, total, shuffle=shuffle) for name, way in ways.items()}
            rates = {name: rows / seconds for name, seconds in medians(runs, options.repeat).items()}
            print(f"{rows} rows of {SIZE >> 10} KiB, {'shuffled' if shuffle else 'in order'}")
            for name, rate in rates.items():
                print(f"  {name:15} {rate:8.0f} rows/s   sealed does {rates['sealed'] / rate:5.2f} x that")


if __name__ == "__main__":
    main()
