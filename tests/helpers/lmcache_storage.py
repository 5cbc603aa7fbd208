"""LMCache's storage manager, with L1 in memory and one L2 adapter, as its server makes it."""

import argparse
import contextlib
import json
import time

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

SHAPE, DTYPE = (2, 2, 256, 64), torch.bfloat16
TOLD = {"edition": "1", "kv_dtype": "bfloat16", "layout": "NHD", "hash": "blake3", "seed": "0"}
"""Settings of fastrack for what LMCache does not tell."""


def key_of(number, *, salt="", model="m", rank=0x01000100):
    return ObjectKey(number.to_bytes(8, "big"), model, rank, 0, salt)


def block(number, shape=SHAPE, dtype=DTYPE):
    return torch.full(shape, float(number + 1), dtype=dtype)


class Storage:
    """A server's storage. `adapter` is what ``--l2-adapter`` takes."""

    def __init__(self, adapter, *, shape=SHAPE, dtype=DTYPE, size=256 << 20):
        adapters = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter)]))
        memory = L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, shm_name="")
        self.layout = MemoryLayoutDesc([torch.Size(shape)], [dtype])
        self.manager = StorageManager(
            StorageManagerConfig(
                l1_manager_config=L1ManagerConfig(memory_config=memory),
                eviction_config=EvictionConfig(eviction_policy="LRU"),
                l2_adapter_config=adapters,
            )
        )

    @property
    def adapter(self):
        return self.manager.l2_adapters()[0][1]

    def store(self, blocks, done):
        """Store blocks by their keys, and wait until `done` says that they are in L2."""
        reserved = self.manager.reserve_write(list(blocks), self.layout)
        assert reserved.keys() == blocks.keys()
        for key, memory in reserved.items():
            memory.tensor.copy_(blocks[key])
        self.manager.finish_write(list(blocks))
        wait(done)
        time.sleep(0.1)  # until the controller has unlocked what it stored
        self.manager.clear(force=True)

    def load(self, keys):
        """Return the blocks that come back from L2, by key."""
        spec = PrefetchTaskSpec([GroupedObjectKeys(list(keys), 0, self.layout)], fetching_policy="full")
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, 30)
        hits = self.manager.query_prefetch_status(handle).hit_cells[0].get_indices_list()
        found = [keys[number] for number in hits]
        blocks = {}
        if found:
            with self.manager.read_prefetched_results(found) as memories:
                blocks = {key: memory.tensor.clone() for key, memory in zip(found, memories, strict=True)}
            self.manager.finish_read_prefetched(found)
        self.manager.clear(force=True)
        return blocks


@contextlib.contextmanager
def storage(adapter, **options):
    opened = Storage(adapter, **options)
    try:
        yield opened
    finally:
        opened.manager.close()


def wait(done, seconds=30):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)
