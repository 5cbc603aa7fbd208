"""SGLang's factory of storage backends, over sealed pages."""

import errno
import importlib.util
import os
import warnings
from dataclasses import fields
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from fastrack import FastrackError, FormatError, Key, UnknownKeyError

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

with warnings.catch_warnings():  # its own
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

import numpy as np
import torch
from helpers.killed_writer import killed_at

from fastrack.kv import _folder, _hosts

IS_OLD = _hosts.is_old("SGLang", version("sglang"))
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # SGLang's own
served = pytest.mark.skipif(IS_OLD, reason="this version of SGLang is refused")

KEYS = [f"{number:064x}" for number in range(4)]
PAGES = [torch.full((4096,), float(number + 1), dtype=torch.bfloat16) for number in range(4)]
ONE = {
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "is_mla_model": False,
    "enable_storage_metrics": False,
    "is_page_first_layout": False,
    "model_name": "llama",
}
MLA = {"is_mla_model": True}
CONFIGS = [
    {},
    {"tp_rank": 1},
    {"tp_size": 4},
    {"pp_size": 2},
    {"pp_size": 2, "pp_rank": 1},
    {"attn_cp_size": 2},
    {"attn_cp_size": 2, "attn_cp_rank": 1},
    {"model_name": "llama2"},
    {"should_split_heads": True, "tp_lcm_size": 8},
    MLA,
    {**MLA, "pp_size": 2},
    {**MLA, "pp_size": 2, "pp_rank": 1},
    {**MLA, "attn_cp_size": 2},
    {**MLA, "attn_cp_size": 2, "attn_cp_rank": 1},
    {**MLA, "attn_cp_size": 4, "attn_cp_rank": 1},
]
OF_DCP = [
    {**MLA, "dcp_size": 2, "logical_page_size": 32},
    {**MLA, "dcp_size": 2, "dcp_rank": 1, "tp_rank": 1, "logical_page_size": 32},
    {**MLA, "dcp_size": 2, "tp_size": 4, "logical_page_size": 32},
    {**MLA, "dcp_size": 2, "logical_page_size": 64},
]
E4M3, E5M2 = ({"dtype": torch.uint8, "cached": getattr(torch, f"float8_{kind}")} for kind in ("e4m3fn", "e5m2"))
POOLS = [
    *({"layout": layout} for layout in ("page_first", "page_first_direct", "page_head", "page_unified")),
    {"layout": "page_first", "page_size": 32},
    {"layout": "page_first", "head_num": 4},
    {"layout": "page_first", "layer_num": 4},
    {"layout": "page_first", "start_layer": 1},
    {"dtype": torch.float16},
    E4M3,
    E5M2,
    {"dtype": torch.uint8, "kv_dtype": "fp8_e4m3"},
    {"dtype": torch.uint8, "kv_dtype": "fp8_e5m2"},
]


def config_of(extra=None, **changed):
    """Return SGLang's description of a server, without what this version of it does not know."""
    known = {each.name for each in fields(HiCacheStorageConfig)}
    given = {name: value for name, value in {**ONE, **changed}.items() if name in known}
    return HiCacheStorageConfig(**given, extra_config=extra)


def pool_of(*, dtype=torch.bfloat16, cached=None, pages=None, **changed):
    """Return what SGLang's pools of pages in host memory have, with that of the GPU if `cached` is its dtype."""
    memory = [] if pages is None else pages
    facts = {"page_size": 16, "layout": "layer_first", "head_num": 8, "head_dim": 32, "layer_num": 2} | changed
    if cached is not None:
        facts["device_pool"] = SimpleNamespace(dtype=cached, store_dtype=dtype)
    return SimpleNamespace(
        get_dummy_flat_data_page=lambda: torch.empty(4096, dtype=dtype),
        get_data_page=lambda index, flat: memory[index // facts["page_size"]],
        set_from_flat_data_page=lambda index, page: memory[index // facts["page_size"]].copy_(page),
        **facts,
    )


@pytest.fixture
def backend(tmp_path, key):
    key.save(tmp_path / "kv.key")

    def backend(*, config=None, pool=None, edition="1", **settings):
        extra = {
            "backend_name": "fastrack",
            "module_path": "fastrack.kv.sglang",
            "class_name": "SealedHiCache",
            "interface_v1": 0,
            "folder": str(tmp_path / "kv"),
            "keys": str(tmp_path / "kv.key"),
            "edition": edition,
            **settings,
        }
        made = StorageBackendFactory.create_backend("dynamic", config_of(extra, **config or {}), None)
        made.register_mem_pool_host(pool or pool_of())
        return made

    return backend


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("??/*.kv"))


def load(backend, dtype=torch.bfloat16):
    return backend.batch_get(KEYS, [torch.empty(4096, dtype=dtype) for _ in KEYS])


@pytest.mark.skipif(not IS_OLD, reason="this version of SGLang is served")
def test_a_version_whose_hashes_have_no_salt_is_refused(backend):
    with pytest.raises(FastrackError, match=r"SGLang: expected version 0\.5\.20 or later, got 0\.5\.1.*tenant"):
        backend()


def test_an_older_version_is_refused_by_its_metadata(backend, monkeypatch):
    for old in ("0.5.19", "0.5.20rc1", "0.4.99.dev3+g1"):
        monkeypatch.setattr(_hosts, "version", lambda package, old=old: old)
        with pytest.raises(FastrackError, match=r"SGLang: expected version 0\.5\.20 or later, got 0\."):
            backend()


@served
def test_what_sglang_separates_and_what_changes_the_bytes_of_a_page_is_a_miss(backend, tmp_path):
    """By pairs, of pages that are in each other's place."""
    can_split = "dcp_size" in {each.name for each in fields(HiCacheStorageConfig)}
    configs = CONFIGS + (OF_DCP if can_split else [])
    servers = [(backend(config=config), config) for config in configs]
    for changed in POOLS:
        pool = {name: value for name, value in changed.items() if name != "kv_dtype"}
        settings = {name: value for name, value in changed.items() if name == "kv_dtype"}
        servers += [(backend(config=config, pool=pool_of(**pool), **settings), config) for config in ({}, MLA)]
    servers.append((backend(edition="2"), {}))
    sealer, opened, message = servers[0][0].folder.sealer, np.empty(64, np.uint8), np.empty(136, np.uint8)
    suffixes = [HiCacheFile(config_of(**config), str(tmp_path / "hicache")).config_suffix for _, config in servers]
    contexts = [server._context(KEYS[0]) for server, _ in servers]
    wrong, names = 0, {context.name(sealer.key) for context in contexts}
    for context in contexts:
        sealer.seal(context, np.ones(64, np.uint8), message)
        wrong += sum(sealer.open(other, message, opened) for other in contexts) - 1
    assert wrong == 0
    assert len(names) == len(contexts) > len(set(suffixes)) > 10


@served
def test_pages_of_mla_are_those_of_all_tensor_parallel_ranks(backend):
    assert backend(config=MLA).batch_set(KEYS, PAGES)
    other = backend(config={**MLA, "tp_rank": 1})
    assert other.batch_exists(KEYS) == 4
    assert all(map(torch.equal, load(other), PAGES))


@served
def test_the_kind_of_fp8_is_asked_for_where_no_pool_tells_it(backend):
    with pytest.raises(ValueError, match=r"expected the dtype of the KV cache .* as kv_dtype, got none"):
        backend(pool=pool_of(dtype=torch.uint8))


@served
@pytest.mark.parametrize("name", ["INDEXER", "MAMBA", "SWA", "DRAFT"])
def test_a_model_with_several_pools_is_refused_at_their_registration(backend, name):
    from sglang.srt.mem_cache.hicache_storage import PoolName

    here = backend()
    here.register_mem_host_pool_v2(pool_of(), PoolName.KV)
    with pytest.raises(FormatError, match=f"one pool of keys and values, got {PoolName[name].value}"):
        here.register_mem_host_pool_v2(pool_of(), PoolName[name])
    empty = pool_of()
    empty.get_dummy_flat_data_page = lambda: torch.empty(0, dtype=torch.uint8)
    with pytest.raises(FormatError, match="got a pool without keys and values"):
        backend(pool=empty)


@served
@pytest.mark.parametrize("model", ["/models/llama", None])
def test_a_path_is_no_name_of_a_model(backend, model):
    with pytest.raises(ValueError, match="--served-model-name"):
        backend(config={"model_name": model})


@served
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


@served
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
    others = [
        {"config": {"tp_rank": 1}},
        {"config": {"model_name": "other"}},
        {"edition": "2"},
        {"keys": str(tmp_path / "rotated.key")},
        {"pool": pool_of(dtype=torch.float16)},
    ]
    for options in others:
        before = set(files(tmp_path))
        other = backend(**options)
        assert load(other) == [None] * 4
        other.batch_set(KEYS, PAGES)
        for path, content in zip(sorted(set(files(tmp_path)) - before), contents, strict=True):
            path.write_bytes(content)
        assert load(other) == [None] * 4
        assert other.folder.sealer.counts["refused"] == 4


@served
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


@served
def test_a_killed_writer_leaves_misses(backend, tmp_path):
    killed_at(2, lambda: backend().batch_set(KEYS, PAGES))
    here = backend()
    assert [page is not None for page in load(here)] == [True, True, False, False]
    assert all(map(torch.equal, load(here)[:2], PAGES))
    assert len(list((tmp_path / "kv").glob("??/*.writing"))) == 1
    assert here.batch_set(KEYS, PAGES)
    assert all(map(torch.equal, load(here), PAGES))


@served
def test_pages_of_a_pool_are_moved_by_the_interface_of_pages(backend):
    pool = torch.stack(PAGES + [torch.zeros_like(PAGES[0])] * 4)
    here, fresh = backend(pool=pool_of(pages=pool)), backend(pool=pool_of(pages=pool))
    assert here.batch_set_v1(KEYS, torch.arange(0, 64)) == [True] * 4
    assert fresh.batch_exists(KEYS) == 4  # before it has seen a page
    assert fresh.batch_get_v1([*KEYS[:2], "0" * 63 + "9", KEYS[3]], torch.arange(64, 128)) == [True, True, False, True]
    assert torch.equal(pool[4:6], pool[:2])
    assert not pool[6].any()
    assert torch.equal(pool[7], pool[3])


@served
def test_settings_are_checked(backend):
    with pytest.raises(ValueError, match="expected settings among folder, keys, limit, edition, kv_dtype, got key"):
        backend(key="x")
    with pytest.raises(ValueError, match="extra_config: expected the version of the weights as edition, got none"):
        backend(edition=None)
    with pytest.raises(UnknownKeyError):
        backend(keys=None)
