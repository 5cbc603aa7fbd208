"""The cache among several processes, and what an eviction leaves and removes."""

import os
import traceback
import tracemalloc

import numpy as np
import pytest

from fastrack._remote import cache as module
from fastrack._remote import objects
from fastrack._remote.objects import Version
from fastrack._util.locations import Url

MIB = 1 << 20


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
            file = served.open_remote(name)  # which makes entries that others remove
            assert file.read(start, stop) == data[name][start:stop]
            done += 1
            kept = [*kept[-2:], file] if generator.integers(2) else []
        return done > 0

    join(*[in_child(lambda seed=seed: work(seed)) for seed in range(4)])
    assert not list(cache.glob(".*"))  # nothing is left of files that were made or removed


def test_another_file_of_the_name_of_an_entry_is_not_written_to(served, cache):
    data = served.write("a", 2 * MIB)
    file = served.open_remote("a")
    [path] = cache.glob("*.data")
    content = bytes(path.stat().st_size)
    other = cache / "other"
    other.write_bytes(content)
    path.unlink()
    os.link(other, path)
    assert file.read(MIB, 2 * MIB) == data[MIB:]
    assert other.read_bytes() == content


def test_a_file_that_is_large_by_a_lie_costs_little_to_keep_and_to_evict(cache):
    keeper = module.open_cache()
    entries = [keeper.open(Url(f"s3://bucket/{number}"), Version(objects.LARGEST, "x")) for number in range(8)]
    last = objects.LARGEST // module.BLOCK - 1
    entries[0].open_writer().mark(range(last, last + 1))
    assert list(entries[0].flags[last - 1 :]) == [0, 1]
    assert sum(path.stat().st_blocks for path in cache.iterdir()) * 512 < MIB
    tracemalloc.start()
    try:
        keeper._evict(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MIB
    assert all(entry.is_evicted for entry in entries)
    assert not list(cache.iterdir())


def test_a_forked_child_goes_on_with_a_file_that_its_parent_evicts(served):
    data = served.write("a", 3 * MIB)
    file = served.open_remote("a")
    view = file.view(0, 3 * MIB)
    ended, end = os.pipe()

    def read_later():
        os.close(end)
        os.read(ended, 1)
        return view.tobytes() == file.read(0, 3 * MIB) == data

    child = in_child(read_later)
    served.write("room", 4 * MIB)
    served.open_remote("room").read(0, 4 * MIB)
    assert not file.copy().entry.is_complete
    os.close(end)
    join(child)
