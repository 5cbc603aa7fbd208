"""Shuffled epochs through a `DataLoader`: sealed rows to the `cpu` device, against the same loader on plain arrays.

Run as `python bench/bench_epochs.py [--scale 1.0] [--repeat 5] [--batches N]`. Every round runs each way in turn, and
the medians of the time from one batch to the next are compared, which other processes disturb little. `--scale` shrinks
the data; `--batches` ends epochs early.
"""

import argparse
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.utils.data import DataLoader

from fastrack import Channel, Key, SealedDataset, collate, save_file

GIB = 1 << 30


class Plain:
    """Samples of plain arrays, of torch or of NumPy."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return min(map(len, self.arrays.values()))

    def __getitem__(self, row):
        return {name: array[row] for name, array in self.arrays.items()}


def noise(high, *shape, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, high, shape, dtype)


def digits(scale):
    count = int(60_000 * scale)
    return {"images": noise(256, count, 28, 28), "labels": noise(10, count, dtype=np.int64)}


def pictures(scale):
    return {"images": noise(256, int(2 * GIB * scale) // 150_528, 224, 224, 3)}


def text(scale):
    return {"tokens": noise(50_000, int((GIB >> 3) * scale) // 1024 * 1024, dtype=np.uint16)}


CASES = {  # how to make arrays, samples of a batch, and the size of a window
    "28x28 and labels, batch 256": (digits, 256, None),
    "224x224x3, batch 64": (pictures, 64, None),
    "windows of 1024, batch 32": (text, 32, 1024),
}


def mapped(array, path):
    np.save(path, array)
    return np.load(path, mmap_mode="c")  # torch requires writable memory


def times_of(moved):
    """Return the seconds that each batch took."""
    seconds, start = [], time.perf_counter()
    for _ in moved:
        stop = time.perf_counter()
        seconds.append(stop - start)
        start = stop
    return seconds


def epochs(case, scale, batches, folder, key, channel):
    """Return functions that run an epoch, by way."""
    make, batch, window = CASES[case]
    arrays = make(scale)
    save_file(arrays, folder / "sealed.safetensors", key=key)
    maps = {name: mapped(array, folder / f"{name}.npy") for name, array in arrays.items()}
    sealed = SealedDataset(folder / "sealed.safetensors")
    if window:
        sealed = sealed.windows("tokens", window)
        arrays, maps = ({"tokens": columns["tokens"].reshape(-1, window)} for columns in (arrays, maps))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def through(data, move=lambda each: each, **options):
        return lambda: times_of(map(move, islice(DataLoader(data, batch, shuffle=True, **options), batches)))

    return {
        "plain, in memory": through(Plain(tensors)),
        "plain, mapped": through(Plain(maps)),
        "sealed": through(sealed, channel.to_device, collate_fn=collate),
    }


def measure(case, *, scale=1.0, repeat=5, batches=None):
    """Return the median seconds of a batch, by way."""
    key = Key.generate()
    with tempfile.TemporaryDirectory() as folder, Channel("cpu", keys=key) as channel:
        ways = epochs(case, scale, batches, Path(folder), key, channel)
        rounds = [{name: run() for name, run in ways.items()} for _ in range(repeat + 1)][1:]
    return {name: median(spent for times in rounds for spent in times[name]) for name in ways}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batches", type=int)
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    for case in (case for case in CASES if options.only in case):
        seconds = measure(case, scale=options.scale, repeat=options.repeat, batches=options.batches)
        print(case)
        for name, spent in seconds.items():
            print(f"  {name:20} {spent * 1e6:9.1f} us   sealed takes {seconds['sealed'] / spent:5.2f} x that")


if __name__ == "__main__":
    main()
