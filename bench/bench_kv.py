"""KV blocks in LMCache's own memory objects: fastrack's serde against LMCache's `aesgcm`, AES-256 both, on one core.

Run as `python bench/bench_kv.py [--repeat 9] [--mib 8 32 80]`; takes `lmcache` 0.5.6. Each is a serde processor as the
server makes it, with one worker, which serializes a block from one memory object of LMCache's allocator into another,
and back, in turns; the medians are compared. Nothing is stored.
"""

import argparse
import os
import select
import time
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde.base import SerdeConfig
from lmcache.v1.distributed.serde.factory import create_serde_processor
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat

from fastrack import Key
from fastrack.kv import _lmcache_serde

MIB = 1 << 20


def main():
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--mib", type=int, nargs="+", default=[8, 32, 80])
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        path = Path(folder, "kv.key")
        Key.generate().save(path)
        settings = {
            "aesgcm": {"aes_bits": 256, "master_key_path": str(path)},
            _lmcache_serde.SERDE: {"keys": str(path), **dict.fromkeys(_lmcache_serde.REQUIRED, "1")},
        }
        serdes = {name: create_serde_processor(SerdeConfig(name, each)) for name, each in settings.items()}
    allocator = TensorMemoryAllocator(torch.zeros(4 * max(options.mib) * MIB + 64 * MIB, dtype=torch.uint8))
    ratios = {"store": [], "load": []}
    print(f"{'block':>8} {'aesgcm GB/s':>20} {'fastrack GB/s':>20} {'ratio':>14}\n{'':8}" + f"{'store / load':>20}" * 2)
    for mib in options.mib:
        layout = MemoryLayoutDesc([torch.Size((2, mib * MIB // 4))], [torch.bfloat16])
        key = ObjectKey(os.urandom(32), "model", 0x01000100, 0, "tenant")
        block, back = (allocator.allocate(layout.shapes, layout.dtypes, MemoryFormat.KV_2LTD) for _ in range(2))
        block.tensor.copy_(torch.randn(layout.shapes[0]))
        times = {(name, way): [] for name in serdes for way in ratios}
        for _ in range(options.repeat):
            for name, serde in serdes.items():
                size = serde.estimate_serialized_size(layout)
                sealed = allocator.allocate([torch.Size((size,))], [torch.uint8], MemoryFormat.BINARY_BUFFER)
                times[name, "store"].append(seconds(serde, "serialize", block, sealed, key))
                times[name, "load"].append(seconds(serde, "deserialize", sealed, back, key))
                assert torch.equal(block.tensor, back.tensor)
                back.tensor.zero_()
                sealed.ref_count_down()
        speeds = {each: mib * MIB / 1e9 / median(taken) for each, taken in times.items()}
        found = {way: speeds["fastrack", way] / speeds["aesgcm", way] for way in ratios}
        for way, ratio in found.items():
            ratios[way].append(ratio)
        cells = [f"{speeds[name, 'store']:8.2f} / {speeds[name, 'load']:<9.2f}" for name in serdes]
        print(f"{mib:4} MiB {cells[0]} {cells[1]} {found['store']:6.1f} / {found['load']:<5.1f}")
        block.ref_count_down()
        back.ref_count_down()
    for way, each in ratios.items():
        print(f"{way}: geometric mean {prod(each) ** (1 / len(each)):.1f}, least {min(each):.1f}")


def seconds(serde, task, source, target, key):
    """Run a task of a serde processor, and return how long it took."""
    notified = select.poll()
    notified.register(getattr(serde, f"get_{task}_event_fd")(), select.POLLIN)
    start = time.perf_counter()
    number = getattr(serde, f"submit_{task}")([source], [target], [key])
    [(descriptor, _)] = notified.poll()
    taken = time.perf_counter() - start
    os.eventfd_read(descriptor)
    assert getattr(serde, f"query_{task}_result")(number)
    return taken


if __name__ == "__main__":
    main()
