"""SGLang's factory of storage backends, over sealed pages."""

import errno
import importlib.util
import os
import warnings
from types import SimpleNamespace

import pytest

from fastrack import Key, UnknownKeyError

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

with warnings.catch_warnings():  # its own
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

import torch
from helpers.killed_writer import killed_at

from fastrack.kv import _folder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # SGLang's own

KEYS = [f"{number:064x}" for number in range(4)]
PAGES = [torch.full((4096,), float(number + 1), dtype=torch.bfloat16) for number in range(4)]


@pytest.fixture
def backend(tmp_path, key):
    key.save(tmp_path / "kv.key")

    def backend(*, tp_rank=0, model="llama", **settings):
        config = HiCacheStorageConfig(
            tp_rank=tp_rank,
            tp_size=2,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=model,
            extra_config={
                "backend_name": "fastrack",
                "module_path": "fastrack.kv.sglang",
                "class_name": "SealedHiCache",
                "interface_v1": 0,
                "folder": str(tmp_path / "kv"),
                "keys": str(tmp_path / "kv.key"),
                **settings,
            },
        )
        return StorageBackendFactory.create_backend("dynamic", config, None)

    return backend


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("??/*.kv"))


def load(backend, dtype=torch.bfloat16):
    return backend.batch_get(KEYS, [torch.empty(4096, dtype=dtype) for _ in KEYS])


def test_pages_come_back_and_a_damaged_one_is_a_miss(backend, tmp_path):
    here = backend()
    assert here.batch_set(KEYS, PAGES)
    assert here.batch_exists(KEYS) == 4
    assert all(map(torch.equal, load(here), PAGES))
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    found = load(here)
    assert sum(page is None for page in found) == 1
    assert all(torch.equal(page, PAGES[number]) for number, page in enumerate(found) if page is not None)
    assert here.batch_set(KEYS, PAGES)
    assert all(map(torch.equal, load(here), PAGES))


def test_exchanged_pages_and_those_of_others_are_misses(backend, tmp_path):
    here = backend()
    here.batch_set(KEYS, PAGES)
    contents = [path.read_bytes() for path in files(tmp_path)]
    for path, content in zip(files(tmp_path), reversed(contents), strict=True):
        path.write_bytes(content)
    assert load(here) == [None] * 4
    assert here.folder.sealer.counts["refused"] == 4
    here.batch_set(KEYS, PAGES)
    assert all(map(torch.equal, load(backend()), PAGES))  # two servers on one store
    Key.generate().save(tmp_path / "rotated.key")
    contents = [path.read_bytes() for path in files(tmp_path)]
    others = [{"tp_rank": 1}, {"model": "other"}, {"edition": "2"}, {"keys": str(tmp_path / "rotated.key")}]
    for options in others:
        before = set(files(tmp_path))
        other = backend(**options)
        assert load(other) == [None] * 4
        other.batch_set(KEYS, PAGES)
        for path, content in zip(sorted(set(files(tmp_path)) - before), contents, strict=True):
            path.write_bytes(content)
        assert load(other) == [None] * 4
        assert other.folder.sealer.counts["refused"] == 4
    assert load(here, torch.float16) == [None] * 4


def test_a_full_disk_stores_nothing_and_raises_nothing(backend, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    here = backend()
    monkeypatch.setattr(_folder.os, "write", fail)
    assert not here.batch_set(KEYS, PAGES)
    monkeypatch.undo()
    assert here.batch_exists(KEYS) == 0
    assert load(here) == [None] * 4
    assert here.folder.sealer.counts["unstored"] == 4


def test_a_killed_writer_leaves_misses(backend, tmp_path):
    killed_at(2, lambda: backend().batch_set(KEYS, PAGES))
    here = backend()
    assert [page is not None for page in load(here)] == [True, True, False, False]
    assert all(map(torch.equal, load(here)[:2], PAGES))
    assert len(list((tmp_path / "kv").glob("??/*.writing"))) == 1
    assert here.batch_set(KEYS, PAGES)
    assert all(map(torch.equal, load(here), PAGES))


def test_pages_of_a_pool_are_moved_by_the_interface_of_pages(backend):
    pool = torch.stack(PAGES + [torch.zeros_like(PAGES[0])] * 4)
    host = SimpleNamespace(
        page_size=16,
        get_dummy_flat_data_page=lambda: torch.empty(4096, dtype=torch.bfloat16),
        get_data_page=lambda index, flat: pool[index // 16],
        set_from_flat_data_page=lambda index, page: pool[index // 16].copy_(page),
    )
    here, fresh = backend(), backend()
    here.register_mem_pool_host(host)
    fresh.register_mem_pool_host(host)
    assert here.batch_set_v1(KEYS, torch.arange(0, 64)) == [True] * 4
    assert fresh.batch_exists(KEYS) == 4  # before it has seen a page
    assert fresh.batch_get_v1([*KEYS[:2], "0" * 63 + "9", KEYS[3]], torch.arange(64, 128)) == [True, True, False, True]
    assert torch.equal(pool[4:6], pool[:2])
    assert not pool[6].any()
    assert torch.equal(pool[7], pool[3])


def test_settings_are_checked(backend):
    with pytest.raises(ValueError, match="expected settings among folder, keys, edition, got key"):
        backend(key="x")
    with pytest.raises(UnknownKeyError):
        backend(keys=None)
