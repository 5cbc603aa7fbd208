"""The cache among several processes, and what an eviction leaves and removes."""

import errno
import os
import traceback
import tracemalloc

import numpy as np
import pytest

import fastrack
from fastrack._remote import cache as module
from fastrack._remote import objects
from fastrack._remote.objects import Version
from fastrack._util.locations import Url

MIB = 1 << 20


def evict(served):
    """Let the cache evict all that no call uses."""
    served.write("room", 4 * MIB)
    served.open_remote("room").read(0, 4 * MIB)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """A cache of 4 MiB."""
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")


def in_child(function):
    """Call a function in a forked child, and return its process. It has to return True."""
    child = os.fork()
    if child:
        return child
    try:
        os._exit(0 if function() else 1)
    except BaseException:  # noqa: BLE001 - nothing may come back here
        traceback.print_exc()
        os._exit(1)


def join(*children):
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
def test_processes_that_evict_and_open_at_once_read_the_right_bytes(served, cache, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "8M")
    sizes = {name: (2 + number) * MIB + number for number, name in enumerate("abcd")}
    data = {name: served.write(name, size) for name, size in sizes.items()}

    def work(seed):
        generator = np.random.default_rng(seed)
        kept, done = [], 0
        for _ in range(30):
            name = "abcd"[generator.integers(4)]
            start = int(generator.integers(0, sizes[name]))
            stop = min(start + int(generator.integers(1, MIB)), sizes[name])
            try:
                file = served.open_remote(name)  # which makes entries that others remove
                assert file.read(start, stop) == data[name][start:stop]
                done += 1
            except OSError as error:
                if error.errno != errno.ENOSPC:  # others use what there is
                    raise
            kept = [*kept[-2:], file] if generator.integers(2) else []
        return done > 0

    join(*[in_child(lambda seed=seed: work(seed)) for seed in range(4)])
    assert len(list(cache.glob("*.data"))) == len(list(cache.glob("*.index")))


def test_an_entry_without_blocks_is_removed_when_no_process_has_it_open(served):
    data = served.write("a", 3 * MIB)
    file = served.open_remote("a")
    assert file.read(0, 3 * MIB) == data
    path = file._entry.path
    read, begun = os.pipe()
    ended, end = os.pipe()

    def hold():
        os.close(end)
        other = served.open_remote("a")
        os.write(begun, b"x")
        os.read(ended, 1)
        return other.read(0, 3 * MIB) == data

    child = in_child(hold)
    os.read(read, 1)
    evict(served)
    assert path.exists()  # it is open here and there
    del file
    evict(served)
    assert path.exists()
    os.close(end)
    join(child)
    evict(served)
    evict(served)
    assert not path.exists()
    assert not path.with_suffix(".index").exists()
    assert served.open_remote("a").read(0, 3 * MIB) == data


def test_a_forked_child_keeps_what_its_parent_has_open(served):
    data = served.write("a", 3 * MIB)
    files = [served.open_remote("a")]
    path = files[0]._entry.path
    read, begun = os.pipe()
    ended, end = os.pipe()

    def read_later():
        os.close(end)
        os.write(begun, b"x")
        os.read(ended, 1)
        return files[0].read(0, 3 * MIB) == data

    child = in_child(read_later)
    os.read(read, 1)
    files.clear()
    evict(served)
    evict(served)
    assert path.exists()
    os.close(end)
    join(child)


@pytest.mark.parametrize("suffix", [".data", ".index"])
def test_another_file_of_the_name_of_an_entry_is_not_written_to(suffix, served):
    data = served.write("a", 2 * MIB)
    file = served.open_remote("a")
    path = file._entry.path.with_suffix(suffix)
    path.rename(path.with_name("away"))
    path.write_bytes(path.with_name("away").read_bytes())
    with pytest.raises(fastrack.ClosedError, match="removed"):
        file.read(MIB, 2 * MIB)
    path.with_name("away").rename(path)
    assert file.read(MIB, 2 * MIB) == data[MIB:]


def test_the_index_of_a_file_that_is_large_by_a_lie_costs_little_to_read(cache):
    keeper = module.open_cache()
    entries = [keeper.open(Url(f"s3://bucket/{number}"), Version(objects.LARGEST, "x")) for number in range(8)]
    index = entries[0].open_index()
    last = objects.LARGEST // module.BLOCK - 1
    for block in (5, last):
        entries[0].write_flags(index, range(block, block + 1), 1)
    entries[0].write_stamp(index, 0, 7)
    os.close(index)
    tracemalloc.start()
    try:
        found = {path: module._list_regions(path) for path in cache.glob("*.index")}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB
    regions = sorted(region for listed in found.values() for region in listed)
    assert [(region.used, region.number) for region in regions] == [(0, objects.LARGEST // module.REGION - 1), (7, 0)]
    assert all(region.path == entries[0].path.with_suffix(".index") for region in regions)
