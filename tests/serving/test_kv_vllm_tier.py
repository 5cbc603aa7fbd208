"""vLLM's tiering manager, the scheduler's side, over sealed blocks: a failure is a miss, by key."""

import errno
import importlib.util
import os
import time
import uuid
import warnings
from functools import partial
from pathlib import Path

import pytest

from fastrack import Key, UnknownKeyError

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import numpy as np
from helpers.killed_writer import killed_at

with warnings.catch_warnings():  # its own
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from fastrack.kv import _folder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # vLLM's own

SIZE = 64 << 10
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(4)]
END = ScheduleEndContext([], [])
MISS, HIT = LookupResult.MISS, LookupResult.HIT


class Server:
    """The scheduler's side of a server."""

    def __init__(self, tier, *, dtype="bfloat16", model="llama", layout="LBNHC", kind=TieringOffloadingSpec, **extra):
        self.spec = kind(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
                worker_kv_bytes_per_block=SIZE,
                enable_kv_cache_events=False,
                extra_config={"cpu_bytes_to_use": 16 * SIZE, "secondary_tiers": [tier], **extra},
                engine_id=uuid.uuid4().hex,
                model=OffloadingModelConfig(model, dtype),
                cache=OffloadingCacheConfig(16, 1),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
                kv_cache_layout=layout,
            )
        )
        self.manager = self.spec.get_manager()
        [self.tier] = self.manager.secondary_tiers
        self.memory = np.frombuffer(self.tier._primary_kv_view.cast("B"), np.uint8).reshape(
            -1, self.spec.kv_bytes_per_chunk
        )
        self.request = ReqContext("request")
        self.manager.on_new_request(self.request)

    def counts(self):
        return dict(self.tier.folder.sealer.counts)

    def step(self):
        self.tier.drain_jobs()
        self.manager.on_schedule_end(END)

    def store(self, keys=KEYS):
        for key, place in zip(keys, self.manager.prepare_store(keys, self.request).store_spec.block_ids, strict=True):
            self.memory[place] = key[0] + 1
        self.manager.complete_store(keys, self.request)
        self.step()
        self.step()

    def load(self, keys=KEYS):
        """Forget the primary tier, look up, and return what vLLM finds, and what is in its memory then."""
        self.manager.reset_cache()
        self.memory[:] = 0
        end = time.monotonic() + 20
        while True:
            found = [self.manager.lookup(key, self.request) for key in keys]
            if all(each in {MISS, HIT} for each in found) or time.monotonic() > end:
                break
            self.step()
        hits = [key for key, result in zip(keys, found, strict=True) if result is HIT]
        places = self.manager.prepare_load(hits, self.request).block_ids if hits else []
        contents = {
            int(self.memory[place][0]) for place in places if (self.memory[place] == self.memory[place][0]).all()
        }
        return found, contents == {key[0] + 1 for key in hits}

    def close(self):
        del self.memory
        self.manager.shutdown()


@pytest.fixture
def server(tmp_path, key):
    key.save(tmp_path / "kv.key")
    opened = []

    def server(*, edition="1", keys="kv.key", name=None, **options):
        tier = {"type": "SealedTier", "module_path": "fastrack.kv.vllm_tier", "folder": str(tmp_path / "kv")}
        tier["model"] = name
        opened.append(Server({**tier, "keys": str(tmp_path / keys), "edition": edition}, **options))
        return opened[-1]

    yield server
    for each in opened:
        each.close()


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("??/*.kv"))


def test_blocks_come_back_and_one_of_four_that_is_damaged_is_one_miss(server, tmp_path):
    here = server()
    here.store()
    assert len(files(tmp_path)) == 4
    assert here.load() == ([HIT] * 4, True)
    path = tmp_path / "kv" / here.tier._context(KEYS[0]).name(here.tier.folder.sealer.key)[:2]
    [path] = path.glob("*.kv")
    content = bytearray(path.read_bytes())
    content[30_000] ^= 1
    path.write_bytes(content)
    assert here.load() == ([MISS, HIT, HIT, HIT], True)
    assert here.counts()["refused"] == 1


@pytest.mark.parametrize("kind", ["pipe", "damaged, in a folder that cannot be changed"])
def test_what_stays_in_the_folder_and_does_not_open_is_asked_for_once(server, kind, monkeypatch, tmp_path):
    here = server()
    here.store()
    name = here.tier.folder._name(here.tier._context(KEYS[0]))
    path = tmp_path / "kv" / name[:2] / name
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(bytes(len(content)))
        monkeypatch.setattr(here.tier.folder, "remove", lambda context: 0)
    start = time.monotonic()
    assert here.load() == ([MISS, HIT, HIT, HIT], True)
    assert time.monotonic() - start < 10
    assert here.counts().get("refused", 0) <= 1
    monkeypatch.undo()
    if kind == "pipe":
        here.store(KEYS[:1])
        assert here.load() == ([HIT] * 4, True)


def test_exchanged_blocks_are_misses(server, tmp_path):
    here = server()
    here.store()
    contents = [path.read_bytes() for path in files(tmp_path)]
    for path, content in zip(files(tmp_path), reversed(contents), strict=True):
        path.write_bytes(content)
    assert here.load() == ([MISS] * 4, True)
    assert here.counts()["refused"] == 4


def test_blocks_of_another_edition_model_dtype_layout_or_key_are_misses(server, tmp_path):
    here = server()
    here.store()
    assert server().load() == ([HIT] * 4, True)  # two servers on one store
    Key.generate().save(tmp_path / "rotated.key")
    contents = [path.read_bytes() for path in files(tmp_path)]
    for options in (
        {"edition": "2"},
        {"model": "other"},
        {"dtype": "float16"},
        {"layout": "LBHNC"},
        {"keys": "rotated.key"},
    ):
        before = set(files(tmp_path))
        other = server(**options)
        assert other.load() == ([MISS] * 4, True)
        other.store()
        for path, content in zip(sorted(set(files(tmp_path)) - before), contents, strict=True):
            path.write_bytes(content)
        assert other.load() == ([MISS] * 4, True)
        assert other.counts()["refused"] == 4


def test_a_path_is_no_name_of_a_model_and_a_copy_of_it_elsewhere_has_the_same_blocks(server):
    with pytest.raises(ValueError, match="the setting model"):
        server(model="/dev/shm/copy-1/llama")
    server(model="/dev/shm/copy-1/llama", name="llama").store()
    assert server(model="/dev/shm/copy-2/llama", name="llama").load() == ([HIT] * 4, True)


def test_the_version_of_the_weights_is_asked_for(server):
    with pytest.raises(ValueError, match="secondary_tiers: expected the version of the weights as edition, got none"):
        server(edition="")


def test_rows_that_workers_sealed_are_stored_as_they_are_without_a_key(tmp_path):
    from fastrack.kv.vllm import SealedOffloadingSpec

    tier = {"type": "SealedTier", "module_path": "fastrack.kv.vllm_tier", "folder": str(tmp_path / "kv")}
    here = Server(tier, kind=SealedOffloadingSpec, fastrack_namespace="meaning")
    try:
        here.store()
        assert here.memory.shape[1] > SIZE  # room for the header and the tags
        contents = [path.read_bytes() for path in files(tmp_path)]
        assert {len(content) for content in contents} == {here.memory.shape[1]}
        assert {content[0] for content in contents} == {key[0] + 1 for key in KEYS}
        assert all(len(set(content)) == 1 for content in contents)
        assert here.load() == ([HIT] * 4, True)
        here.manager.failed.add(KEYS[1])  # as a worker says who could not open it
        assert here.load() == ([HIT] * 4, True)  # a reset forgets
        here.manager.failed.add(KEYS[1])
        assert here.manager.lookup(KEYS[1], here.request) is MISS
        here.manager.complete_load(KEYS, here.request)
        assert here.manager.prepare_store(KEYS, here.request).keys_to_store == KEYS[1:2]  # anew, and nothing else
        here.manager.failed.add(KEYS[1])  # a rank could not
        here.manager.complete_store(KEYS[1:2], here.request)
        assert here.manager.lookup(KEYS[1], here.request) is MISS
        here.store(KEYS[1:2])
        assert here.manager.lookup(KEYS[1], here.request) is HIT
        here.manager.primary_tier.reset_cache()  # as if evicted
        assert here.manager.lookup(KEYS[1], here.request) is MISS  # not that of the folder, which may be the bad one
        assert here.load() == ([HIT] * 4, True)
    finally:
        here.close()


def test_a_spec_that_seals_is_refused_by_itself_and_without_room(tmp_path):
    from fastrack.kv.vllm import SealedOffloadingSpec

    tier = {"type": "SealedTier", "module_path": "fastrack.kv.vllm_tier", "folder": str(tmp_path / "kv")}
    with pytest.raises(ValueError, match="expected 'SealedOffloadingConnector' for SealedOffloadingSpec"):
        Server(tier, kind=SealedOffloadingSpec)
    with pytest.raises(ValueError, match="expected cpu_bytes_to_use for a chunk"):
        Server(tier, kind=SealedOffloadingSpec, fastrack_namespace="meaning", cpu_bytes_to_use=SIZE)


def test_a_full_disk_stores_nothing_and_raises_nothing(server, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    here = server()
    monkeypatch.setattr(_folder.os, "write", fail)
    here.store()
    monkeypatch.undo()
    assert here.counts() == {"sealed": 4, "unstored": 4}
    assert here.load() == ([MISS] * 4, True)


def test_a_killed_writer_leaves_misses(server, tmp_path):
    regions = partial(Path("/dev/shm").glob, "vllm_offload_*")
    before = set(regions())
    killed_at(2, lambda: server().store())
    for left in set(regions()) - before:
        left.unlink()  # vLLM's own tier of the killed process
    here = server()
    found, is_whole = here.load()
    assert is_whole
    assert found.count(HIT) == len(files(tmp_path)) == 2
    here.store([key for key, result in zip(KEYS, found, strict=True) if result is MISS])
    assert here.load() == ([HIT] * 4, True)


def test_a_tier_without_a_key_is_refused(tmp_path):
    tier = {"type": "SealedTier", "module_path": "fastrack.kv.vllm_tier", "folder": str(tmp_path / "kv")}
    tier["edition"] = "1"
    with pytest.raises(UnknownKeyError):
        Server(tier)
