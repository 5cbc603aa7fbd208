"""Shuffled epochs through a `DataLoader`: sealed rows to the `cpu` device, against the same loader on plain arrays.

Run as `python bench/bench_epochs.py [--scale 1.0] [--repeat 5] [--batches N]`. Every round runs each way in turn, and
the medians are compared. `--scale` shrinks the data; `--batches` ends epochs early.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from fastrack import Channel, Key, SealedDataset, collate, save_file

GIB = 1 << 30


class Plain:
    """Samples of plain arrays, of torch or of NumPy."""

    def __init__(self, arrays: dict[str, Any]):
        self.arrays = arrays
        self.count = min(len(array) for array in arrays.values())

    def __len__(self):
        return self.count

    def __getitem__(self, row):
        return {name: array[row] for name, array in self.arrays.items()}


class PlainWindows:
    """Windows on one long plain array."""

    def __init__(self, tokens: Any, size: int):
        self.tokens, self.size = tokens, size

    def __len__(self):
        return len(self.tokens) // self.size

    def __getitem__(self, row):
        return {"tokens": self.tokens[row * self.size : (row + 1) * self.size]}


def digits(scale: float) -> dict[str, Any]:
    """60,000 images of 28 x 28, and labels."""
    random, count = np.random.default_rng(0), int(60_000 * scale)
    images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return {"images": images, "labels": random.integers(0, 10, count)}


def pictures(scale: float) -> dict[str, Any]:
    """2 GiB of images of 224 x 224 x 3."""
    count = int(2 * GIB * scale) // 150_528
    return {"images": np.random.default_rng(0).integers(0, 256, (count, 224, 224, 3), dtype=np.uint8)}


def text(scale: float) -> dict[str, Any]:
    """128 Mi tokens of 16 bits."""
    tokens = np.random.default_rng(0).integers(0, 50_000, int((GIB >> 3) * scale) // 1024 * 1024, dtype=np.uint16)
    return {"tokens": tokens}


CASES: dict[str, tuple[Callable[[float], dict[str, Any]], int, int | None]] = {
    "28x28 and labels, batch 256": (digits, 256, None),
    "224x224x3, batch 64": (pictures, 64, None),
    "windows of 1024, batch 32": (text, 32, 1024),
}


def mapped(array: Any, path: Path) -> Any:
    np.save(path, array)
    return np.load(path, mmap_mode="c")  # torch wants to be able to write


def epochs(case: str, scale: float, folder: Path, key: Key, channel: Channel) -> dict[str, Callable[[int | None], int]]:
    """How to run an epoch, each way."""
    make, batch, window = CASES[case]
    arrays = make(scale)
    save_file(arrays, folder / "sealed.safetensors", key=key)
    maps = {name: mapped(array, folder / f"{name}.npy") for name, array in arrays.items()}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    sealed = SealedDataset(folder / "sealed.safetensors")
    plain: list[Any] = [Plain(tensors), Plain(maps)]
    if window:
        sealed = sealed.windows("tokens", window)
        plain = [PlainWindows(each["tokens"], window) for each in (tensors, maps)]

    def through(loader: DataLoader[Any], move: Callable[[Any], Any]) -> Callable[[int | None], int]:
        def epoch(batches: int | None) -> int:
            count = 0
            for each in islice(loader, batches):
                moved = move(each)
                count += len(next(iter(moved.values())))
            return count

        return epoch

    return {
        "plain, in memory": through(DataLoader(plain[0], batch, shuffle=True), lambda each: each),
        "plain, mapped": through(DataLoader(plain[1], batch, shuffle=True), lambda each: each),
        "sealed": through(DataLoader(sealed, batch, shuffle=True, collate_fn=collate), channel.to_device),
    }


def measure(ways: dict[str, Callable[[int | None], int]], repeat: int, batches: int | None) -> dict[str, float]:
    """Median seconds of an epoch each way, in interleaved runs after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeat + 1):
        for name, epoch in ways.items():
            gc.collect()
            start = time.perf_counter()
            epoch(batches)
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: median(runs) for name, runs in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batches", type=int)
    parser.add_argument("--only", default="", help="cases with this in their name")
    options = parser.parse_args()
    key = Key.generate()
    for case in (case for case in CASES if options.only in case):
        with tempfile.TemporaryDirectory() as folder, Channel("cpu", keys=key) as channel:
            ways = epochs(case, options.scale, Path(folder), key, channel)
            seconds = measure(ways, options.repeat, options.batches)
        print(case)
        for name, spent in seconds.items():
            print(f"  {name:20} {spent:8.3f} s   sealed takes {seconds['sealed'] / spent:5.2f} x that")


if __name__ == "__main__":
    main()
