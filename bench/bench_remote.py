"""Measure epochs over shards on a server against shards on local disk, and compare clients.

    PYTHONPATH=.:tests python -m bench.bench_remote [--rounds 3] [--latencies 1 10 50] [--step 20]

The server is a process of its own on the loopback interface, and waits before each answer. Rows of 64 KiB are shuffled
over eight shards of 16 MiB, in batches of 64. With a step, each batch is followed by a sleep, as by work on a GPU. In
each round all cases run in turns; medians are shown. The clients read 512 ranges of 256 KiB, 32 at a time; the first
is a bare loop of `recv_into`, the limit of the server and the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch

import fastrack
from fastrack._bench.measure import medians

SHARDS, ROWS, ROW, BATCH = 8, 256, 1 << 16, 64
RANGES, RANGE = 512, 1 << 18


@contextlib.contextmanager
def serve(folder, latency):
    command = [sys.executable, "-m", "helpers.range_server", str(folder), str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def epoch(paths, key, step):
    """Return the seconds of a shuffled epoch, without opening the files."""
    data = fastrack.SealedDataset(paths, keys=key)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=fastrack.collate)
    start = time.perf_counter()
    for _ in fastrack.wrap(loader, keys=key):
        time.sleep(step)
    return time.perf_counter() - start


def compare_epochs(folder, key, cache, options):
    local = [folder / f"{shard}.safetensors" for shard in range(SHARDS)]
    epoch(local, key, 0)
    for step in (0, options.step / 1000):
        for latency in options.latencies:
            seconds = {"local": [], "cold": [], "warm": []}
            with serve(folder, latency / 1000) as port:
                urls = [f"http://127.0.0.1:{port}/{path.name}" for path in local]
                for _ in range(options.rounds):
                    shutil.rmtree(cache / "fastrack" / "remote", ignore_errors=True)
                    forget()
                    seconds["local"].append(epoch(local, key, step))
                    seconds["cold"].append(epoch(urls, key, step))
                    seconds["warm"].append(epoch(urls, key, step))
            median = {name: statistics.median(times) for name, times in seconds.items()}
            size = SHARDS * ROWS * ROW / 1e6
            print(
                f"step {step * 1000:3.0f} ms, latency {latency:3} ms: local {size / median['local']:5.0f} MB/s; of it "
                f"cold {median['local'] / median['cold']:.2f}, warm {median['local'] / median['warm']:.2f}",
                flush=True,
            )


def forget():
    from fastrack._remote import cache

    cache._open_cache.cache_clear()


def compare_clients(folder, options):
    (folder / "bucket").mkdir()
    path = folder / "bucket" / "object"
    path.write_bytes(np.random.default_rng(0).bytes(RANGES * RANGE))
    starts = [number * RANGE for number in range(RANGES)]
    os.environ |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    for latency in options.latencies:
        with serve(folder, latency / 1000) as port:
            endpoint = f"http://127.0.0.1:{port}"
            clients = make_clients(endpoint, starts)
            seconds = medians(clients, options.rounds)
        figures = (f"{name} {RANGES * RANGE / 1e6 / taken:.0f} MB/s" for name, taken in seconds.items())
        print(f"latency {latency:3} ms: {', '.join(figures)}", flush=True)


def make_clients(endpoint, starts):
    from fastrack._remote.remote_file import open_object
    from fastrack._util.locations import Url

    pool = ThreadPoolExecutor(32)
    ours = open_object(Url(f"{endpoint}/bucket/object"))
    ends = [start + RANGE for start in starts]

    def read(start):
        data = bytearray()
        ours.read(start, start + RANGE, lambda _, piece: data.extend(piece))
        return data

    clients = {
        "bare sockets": lambda: list(pool.map(partial(receive, endpoint), starts)),
        "fastrack": lambda: list(pool.map(read, starts)),
    }
    with contextlib.suppress(ImportError):
        import fsspec

        url = f"{endpoint}/bucket/object"
        http = fsspec.filesystem("http")
        clients["fsspec http"] = lambda: http.cat_ranges([url] * RANGES, starts, ends, batch_size=32)
    with contextlib.suppress(ImportError):
        import s3fs

        s3 = s3fs.S3FileSystem(endpoint_url=endpoint)
        clients["s3fs"] = lambda: s3.cat_ranges(["bucket/object"] * RANGES, starts, ends, batch_size=32)
    with contextlib.suppress(ImportError):
        import obstore

        store = obstore.store.S3Store("bucket", endpoint=endpoint, allow_http=True, region="us-east-1")
        clients["obstore"] = lambda: list(
            pool.map(lambda start: memoryview(obstore.get_range(store, "object", start=start, length=RANGE)), starts)
        )
    return clients


def receive(endpoint, start):
    """Receive a range with the least work: headers are ignored. Each thread has its connection."""
    if getattr(_thread, "endpoint", None) != endpoint:
        _thread.endpoint = endpoint
        _thread.socket = socket.create_connection((urlsplit(endpoint).hostname, urlsplit(endpoint).port))
        _thread.buffer = bytearray(RANGE + 4096)
    view, count, end = memoryview(_thread.buffer), 0, None
    request = f"GET /bucket/object HTTP/1.1\r\nHost: x\r\nRange: bytes={start}-{start + RANGE - 1}\r\n\r\n"
    _thread.socket.sendall(request.encode())
    while end is None or count < end:
        count += _thread.socket.recv_into(view[count:])
        if end is None and (head := _thread.buffer.find(b"\r\n\r\n", 0, count)) >= 0:
            end = head + 4 + RANGE


_thread = threading.local()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latencies", type=int, nargs="+", default=[1, 10, 50])
    parser.add_argument("--step", type=int, default=20)
    options = parser.parse_args()
    key = fastrack.Key.generate()
    with tempfile.TemporaryDirectory() as root:
        folder, cache = Path(root) / "served", Path(root) / "cache"
        folder.mkdir()
        os.environ.pop("FASTRACK_CACHE_DIR", None)
        os.environ["XDG_CACHE_HOME"] = str(cache)
        generator = np.random.default_rng(1)
        for shard in range(SHARDS):
            rows = generator.integers(0, 256, (ROWS, ROW), np.uint8)
            fastrack.save_file({"x": rows}, folder / f"{shard}.safetensors", key)
        compare_epochs(folder, key, cache, options)
        compare_clients(folder, options)


if __name__ == "__main__":
    main()
