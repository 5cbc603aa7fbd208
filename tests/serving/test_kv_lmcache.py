"""LMCache's own storage manager, over sealed blocks: what is not the block that was stored is a miss, by key."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from fastrack import FastrackError, Key, UnknownKeyError

pytest.importorskip("lmcache.v1.distributed.storage_manager", reason="lmcache is not installed")

import torch
from helpers.lmcache_storage import TOLD, block, key_of, storage

from fastrack.kv import BlockSealer, _folder, _hosts
from fastrack.kv._lmcache_serde import SealedBlocks, context_of, layout_text, meaning_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # LMCache's own

KEYS = [key_of(number) for number in range(4)]
BLOCKS = {key: block(number) for number, key in enumerate(KEYS)}


@pytest.fixture
def key_file(tmp_path, key):
    key.save(tmp_path / "kv.key")
    return tmp_path / "kv.key"


@pytest.fixture
def adapter(tmp_path, key_file):
    def adapter(**params):
        return {
            "type": "plugin",
            "module_path": "fastrack.kv.lmcache",
            "class_name": "SealedAdapter",
            "adapter_params": {"folder": str(tmp_path / "kv"), "keys": str(key_file), **TOLD, **params},
        }

    return adapter


@pytest.fixture
def stock(tmp_path, key_file):
    def stock(serde):
        keys = {
            "fastrack": {"keys": str(key_file), **TOLD},
            "aesgcm": {"aes_bits": 256, "master_key_path": str(key_file)},
        }
        return {
            "type": "plugin",
            "module_path": "fastrack.kv.lmcache",
            "class_name": "StockAdapter",
            "adapter_params": {"type": "fs", "base_path": str(tmp_path / "fs")},
            "serde": {"type": serde, **keys[serde]},
        }

    return stock


def files(tmp_path):
    return sorted((tmp_path / "kv").glob("??/*.kv"))


def store(server, blocks=BLOCKS):
    before = server.adapter.folder.sealer.counts
    total = before["stored"] + before["present"] + before["unstored"] + len(blocks)
    server.store(blocks, lambda: _ended(server.adapter.folder.sealer.counts) == total)


def _ended(counts):
    return counts["stored"] + counts["present"] + counts["unstored"]


def same(found, expected=BLOCKS):
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def exchange(first, second):
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def test_blocks_come_back_as_they_were_and_nothing_is_in_plain(adapter, tmp_path):
    with storage(adapter()) as server:
        store(server)
        assert same(server.load(KEYS))
        assert server.adapter.report_status()["opened"] == 4
    needles = [memoryview(each.contiguous().view(torch.uint8).numpy()).tobytes()[:64] for each in BLOCKS.values()]
    contents = [path.read_bytes() for path in files(tmp_path)]
    assert {len(content) for content in contents} == {BlockSealer.sealed_size(131072)}
    assert not any(needle in content for needle in needles for content in contents)
    names = "".join(path.name for path in files(tmp_path))
    assert not any(key.chunk_hash.hex() in names for key in KEYS)


def test_a_damaged_block_of_four_is_one_miss_and_three_hits_and_is_stored_again(adapter, tmp_path, caplog):
    with storage(adapter()) as server:
        store(server)
        path = files(tmp_path)[0]
        damaged = bytearray(path.read_bytes())
        damaged[70_000] ^= 1
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING, "fastrack"):
            found = server.load(KEYS)
        assert len(found) == 3
        assert same(found, {key: BLOCKS[key] for key in found})
        assert server.adapter.report_status()["refused"] == 1
        assert [record.name for record in caplog.records].count("fastrack") == 1
        store(server, {key: BLOCKS[key] for key in KEYS if key not in found})
        assert same(server.load(KEYS))


def test_exchanged_blocks_are_misses_with_fastrack_and_other_blocks_with_aesgcm(adapter, stock, tmp_path):
    with storage(adapter()) as server:
        store(server)
        exchange(*files(tmp_path)[:2])
        found = server.load(KEYS)
        assert len(found) == 2
        assert same(found, {key: BLOCKS[key] for key in found})
    results = {}
    for serde in ("fastrack", "aesgcm"):
        with storage(stock(serde)) as server:
            server.store(BLOCKS, lambda: len(list((tmp_path / "fs").glob("*.data"))) == 4)
            assert same(server.load(KEYS))
            exchange(*sorted((tmp_path / "fs").glob("*.data"))[:2])
            results[serde] = server.load(KEYS)
        for path in (tmp_path / "fs").iterdir():
            path.unlink()
    assert results["fastrack"] == {}  # with only the serde a miss of one is a miss of all
    assert not same(results["aesgcm"])
    assert len(results["aesgcm"]) == 4


@pytest.mark.nightly  # test_kv_core.py shows the same of each value of a context
@pytest.mark.parametrize("other", [{"salt": "another"}, {"model": "another"}, {"rank": 0x02000200}])
def test_blocks_of_another_tenant_model_or_rank_are_misses(adapter, tmp_path, other):
    others = {key_of(number, **other): block(9) for number in range(4)}
    with storage(adapter()) as server:
        store(server)
        theirs = files(tmp_path)
        assert server.load(list(others)) == {}
        store(server, others)
        for mine, path in zip(theirs, sorted(set(files(tmp_path)) - set(theirs)), strict=True):
            exchange(mine, path)
        assert server.load(KEYS) == server.load(list(others)) == {}
        assert server.adapter.report_status()["refused"] == 8


@pytest.mark.nightly  # test_kv_core.py shows the same of each value of a context
@pytest.mark.parametrize(
    ("layout", "params"),
    [({"shape": (2, 2, 128, 128)}, {}), ({"dtype": torch.float16}, {}), ({}, {"edition": "newer"})],
)
def test_blocks_of_another_layout_or_edition_are_misses(adapter, tmp_path, layout, params):
    with storage(adapter()) as server:
        store(server)
    before = files(tmp_path)
    with storage(adapter(**params), **layout) as server:
        assert server.load(KEYS) == {}
        shape, dtype = layout.get("shape", (2, 2, 256, 64)), layout.get("dtype", torch.bfloat16)
        store(server, {key: block(9, shape, dtype) for key in KEYS})
        for old, new in zip(before, sorted(set(files(tmp_path)) - set(before)), strict=True):
            new.write_bytes(old.read_bytes())  # the older block in the place of the newer one
        assert server.load(KEYS) == {}
        assert server.adapter.report_status()["refused"] == 4


def test_two_dtypes_of_one_width_and_two_kinds_of_fp8_are_misses(adapter, tmp_path):
    kinds = [
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.uint8, "fp8_e4m3"),
        (torch.uint8, "fp8_e5m2"),
    ]
    for dtype, name in kinds:
        blocks = {key: torch.ones((2, 2, 256, 64), dtype=dtype) for key in KEYS}
        with storage(adapter(kv_dtype=name), dtype=dtype) as server:
            assert server.load(KEYS) == {}
            before = files(tmp_path)
            store(server, blocks)
            assert same(server.load(KEYS), blocks)
            new = sorted(set(files(tmp_path)) - set(before))
            for old, path in zip(before[-4:], new, strict=bool(before)):
                path.write_bytes(old.read_bytes())  # that of another dtype in its place
            if before:
                assert server.load(KEYS) == {}


def test_each_value_that_lmcache_does_not_tell_separates_blocks(key):
    one = key_of(0)
    contexts = [context_of(meaning_of(TOLD), one, "l")]
    contexts += [context_of(meaning_of(TOLD | {name: "other"}), one, "l") for name in TOLD]
    contexts += [context_of(meaning_of(TOLD), other, "l") for other in (key_of(1), key_of(0, salt="a"))]
    contexts += [context_of(meaning_of(TOLD), other, "l") for other in (key_of(0, model="a"), key_of(0, rank=1))]
    contexts.append(context_of(meaning_of(TOLD), one, layout_text([(1, 2)], [torch.uint8])))
    assert len({context.name(key) for context in contexts}) == len(contexts) == 11


@pytest.mark.parametrize("name", TOLD)
def test_what_lmcache_does_not_tell_is_asked_for_by_name(adapter, stock, name):
    with (
        pytest.raises(ValueError, match=f"adapter_params: expected .* as {name}, got none"),
        storage(adapter(**{name: ""})),
    ):
        pass
    serde = stock("fastrack")
    del serde["serde"][name]
    with pytest.raises(ValueError, match=f"serde: expected .* as {name}, got none"), storage(serde):
        pass


def test_an_older_version_is_refused_by_its_metadata(adapter, monkeypatch):
    monkeypatch.setattr(_hosts, "version", lambda package: "0.5.5")
    told = r"LMCache: expected version 0\.5\.6 or later, got 0\.5\.5: .*salt"
    with pytest.raises(FastrackError, match=told), storage(adapter()):
        pass


def test_two_servers_share_a_folder_until_the_key_is_rotated(adapter, tmp_path):
    with storage(adapter()) as first, storage(adapter()) as second:
        store(first)
        assert same(second.load(KEYS))
        store(second)
        assert second.adapter.report_status()["present"] == 4
    Key.generate().save(tmp_path / "rotated.key")
    with storage(adapter(keys=str(tmp_path / "rotated.key"))) as server:
        assert server.load(KEYS) == {}
        store(server)
        assert same(server.load(KEYS))


def test_a_full_disk_is_counted_and_stores_nothing(adapter, tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with storage(adapter()) as server:
        monkeypatch.setattr(_folder.os, "write", write)
        store(server)
        monkeypatch.undo()
        assert server.adapter.report_status()["unstored"] == 4
        assert server.load(KEYS) == {}
        assert not list((tmp_path / "kv").glob("??/*"))
        store(server)
        assert same(server.load(KEYS))


def test_a_killed_writer_leaves_misses_and_no_file_for_ever(adapter, tmp_path, key_file):
    code = (
        "import os, signal, sys; from fastrack.kv import *; from fastrack.kv import _folder\n"
        "write = os.write\n"
        "def cut(descriptor, data): write(descriptor, data[:9]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "_folder.os.write = cut\n"
        "BlockFolder(sys.argv[1], sys.argv[2]).put(BlockContext('m', 'l', 'r', b'h'), bytes(100))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "kv", key_file], check=False)
    assert done.returncode == -signal.SIGKILL
    [part] = (tmp_path / "kv").glob("??/*")
    with storage(adapter()) as server:
        store(server)
        assert same(server.load(KEYS))
        assert part.exists()  # a writer of another machine may be at work
    os.utime(part, (time.time() - 3600, time.time() - 3600))
    with storage(adapter()) as server:
        assert not part.exists()
        assert same(server.load(KEYS))


def test_what_stands_in_the_place_of_a_block_is_a_miss(adapter, tmp_path):
    with storage(adapter()) as server:
        store(server)
        cut, grown, folder, pipe = files(tmp_path)
        cut.write_bytes(cut.read_bytes()[:-1])
        grown.write_bytes(grown.read_bytes() + b"\0")
        for path in (folder, pipe):
            path.unlink()
        folder.mkdir()
        os.mkfifo(pipe)
        assert server.load(KEYS) == {}


def test_deleted_blocks_are_gone(adapter, tmp_path):
    with storage(adapter()) as server:
        store(server)
        server.adapter.delete(KEYS[:3])
        assert len(files(tmp_path)) == 1
        assert server.load(KEYS).keys() == {KEYS[3]}
        assert server.adapter.get_usage().total_bytes_used == BlockSealer.sealed_size(131072)


def test_sizes_of_the_serde_are_exact(key):
    from lmcache.v1.distributed.api import MemoryLayoutDesc

    for shape in ([1], [8192], [2, 3, 5, 7], [2, 2, 256, 64]):
        layout = MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])
        size = SealedBlocks(BlockSealer(key), meaning_of(TOLD)).estimate_serialized_size(layout)
        plain = torch.zeros(shape, dtype=torch.bfloat16).view(torch.uint8).numpy().reshape(-1)
        from fastrack.kv import BlockContext

        assert BlockSealer(key).seal(BlockContext("m", "l", "r", b"h"), plain, bytearray(size)) == size


def test_settings_without_a_key_or_with_an_unknown_name_are_refused(adapter):
    for params, error in [
        ({"keys": None}, UnknownKeyError),
        ({"key": "x"}, ValueError),
        ({"folder": None}, ValueError),
    ]:
        with pytest.raises(error), storage(adapter(**params)):
            pass
