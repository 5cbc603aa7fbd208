"""Streamed epochs of sealed shards, against litdata's plain streaming of the same samples.

Run as `python bench/bench_streaming.py [--scale 1.0] [--repeat 5]`; takes `litdata`. Both read chunks of 16 MiB with
equal samples from local disk, shuffled, in batches of 64, with 0 and 2 workers, as tensors of torch on the CPU. Every
round runs both in turn, an epoch each with the start of its workers, and the medians are compared. litdata's samples
are not encrypted. Last comes what it costs to open 10^8 samples in 10^4 shards, and the numbers of a batch of them.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch.utils.data import DataLoader

from fastrack import Key, SealedDataset, StreamingSealedDataset, save_file, wrap
from fastrack._training.order import Order

CHUNK = 16 << 20
BATCH = 64
CASES = {  # floats in a sample, MiB of samples
    "1 KiB": (256, 64),
    "16 KiB": (4096, 256),
    "192 KiB": (49152, 768),
}


def write(folder, key, floats, mib):
    """Write the same samples twice, sealed and plain, in shards and chunks of equal numbers of samples."""
    import litdata

    rows = CHUNK // (4 * floats)
    shards = (mib << 20) // CHUNK
    values = np.random.default_rng(0).random((rows * shards, floats), dtype=np.float32)
    (folder / "sealed").mkdir()
    for shard in range(shards):
        own = slice(shard * rows, (shard + 1) * rows)
        columns = {"values": values[own], "labels": np.arange(own.start, own.stop)}
        save_file(columns, folder / "sealed" / f"{shard:05}.safetensors", key)
    litdata.optimize(
        fn=lambda row: {"values": torch.from_numpy(values[row]), "labels": row},
        inputs=list(range(rows * shards)),
        output_dir=str(folder / "plain"),
        chunk_size=rows,
        num_workers=1,
        start_method="fork",
        verbose=False,
    )
    return rows * shards


def loaders(folder, key, workers):
    """Return a loader of each kind."""
    import litdata

    data = SealedDataset(sorted((folder / "sealed").iterdir()), keys=key)
    stream = StreamingSealedDataset(data, BATCH, seed=1)
    plain = litdata.StreamingDataset(str(folder / "plain"), shuffle=True, seed=1, drop_last=False)
    return {
        "sealed": wrap(DataLoader(stream, batch_size=None, num_workers=workers), "cpu"),
        "litdata, plain": litdata.StreamingDataLoader(plain, batch_size=BATCH, num_workers=workers),
    }


def epoch(loader):
    """Return the seconds of an epoch, and its labels."""
    start, labels = time.perf_counter(), []
    for batch in loader:
        assert batch["values"].dtype == torch.float32
        labels += batch["labels"].tolist()
    return time.perf_counter() - start, labels


def compare(name, workers, scale, repeat):
    floats, mib = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder, key = Path(temporary), Key.generate()
        count = write(folder, key, floats, max(16, int(mib * scale)))
        ways = loaders(folder, key, workers)
        seconds = {way: [] for way in ways}
        for _ in range(repeat + 1):
            for way, loader in ways.items():
                taken, labels = epoch(loader)
                assert sorted(labels) == list(range(count))
                seconds[way].append(taken)
    rates = {way: count / median(taken[1:]) for way, taken in seconds.items()}  # the first round fills caches
    shown = ", ".join(f"{way} {rate:9,.0f}/s ({rate * floats * 4 / 1e6:7,.0f} MB/s)" for way, rate in rates.items())
    sealed, plain = rates.values()
    print(f"{name:>8} x {count}, {workers} workers: {shown}, ratio {sealed / plain:.2f}", flush=True)


def positions(shards=10_000, samples=10_000, repeat=100):
    ends = np.cumsum(np.full(shards, samples))
    start = time.perf_counter()
    order = Order(ends, 1, 0, 16)
    print(f"{ends[-1]:.0e} samples in {shards} shards: opened in {(time.perf_counter() - start) * 1e3:.1f} ms", end="")
    for size in (BATCH, 4096):
        taken = []
        for first in np.random.default_rng(0).integers(0, ends[-1] - size, repeat).tolist():
            start = time.perf_counter()
            order.samples(first, first + size)
            taken.append(time.perf_counter() - start)
        print(f", a batch of {size} in {median(taken) * 1e6:.0f} us", end="")
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    for name in CASES:
        for workers in (0, 2):
            compare(name, workers, options.scale, options.repeat)
    positions()
