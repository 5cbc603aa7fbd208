"""The cache among several processes, and what an eviction leaves and removes."""

import errno
import os
import shutil
import subprocess
import traceback
import tracemalloc

import numpy as np
import pytest

from fastrack._remote import blocks, objects, remote_file
from fastrack._remote import cache as module
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
    entries = [keeper.open(Url(f"s3://bucket/{number}"), objects.Version(objects.LARGEST, "x")) for number in range(8)]
    last = objects.LARGEST // module.BLOCK - 1
    entries[0].open_writer().mark(range(last, last + 1))
    assert entries[0].flags(last - 1, last + 1) == b"\0\1"
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


class Zeros:
    """An object of zeros, of any size."""

    def __init__(self, size):
        self.url, self.version, self.head = Url("https://files.example/zeros"), objects.Version(size, "v1"), b""

    def read(self, start, stop, sink):
        sink(start, bytes(stop - start))


def test_only_flags_that_have_their_place_are_read(cache):
    size = (3 << 30) + 5
    entry = remote_file.RemoteFile(Zeros(size).url, Zeros(size)).copy().entry
    [path] = cache.glob("*.data")
    before = path.stat()
    assert entry.flags(0, size // blocks.BLOCK + 1) == bytes(size // blocks.BLOCK + 1)
    written = range(4090, 4100)  # of two groups
    entry.open_writer().mark(written)
    assert [number for number, flag in enumerate(entry.flags(0, size // blocks.BLOCK + 1)) if flag] == [*written]
    last = size // blocks.BLOCK  # of the last group, which is shorter
    entry.open_writer().mark(range(last, last + 1))
    assert entry.flags(last - 1, last + 1) == b"\0\1"
    assert path.stat().st_size == before.st_size
    assert path.stat().st_blocks > before.st_blocks


@pytest.mark.parametrize("pages", [0, 1, 2, 3, 4, 80])
def test_a_cache_on_a_full_tmpfs_is_an_error_and_not_the_end_of_the_process(pages, tmp_path, monkeypatch):
    mount, umount, place = shutil.which("mount"), shutil.which("umount"), tmp_path / "little"
    place.mkdir()
    command = [mount, "-t", "tmpfs", "-o", "size=1m", "fastrack-test", place]
    if not mount or not umount or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    monkeypatch.setenv("FASTRACK_CACHE_DIR", str(place))
    folder = place / "fastrack" / "remote"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)

    size = (3 << 30) + 4093  # the flags of a group, and those of groups, are on two pages

    def read():
        (place / "others").write_bytes(bytes(shutil.disk_usage(place).free - pages * 4096))
        try:
            file = remote_file.RemoteFile(Zeros(size).url, Zeros(size))
            assert file.read(1 << 30, (1 << 30) + blocks.BLOCK) == bytes(blocks.BLOCK)
        except OSError as error:
            return error.errno == errno.ENOSPC and pages <= 4
        (place / "rest").write_bytes(bytes(shutil.disk_usage(place).free))
        return file.copy().entry.flags(0, size // blocks.BLOCK + 1).count(1) == 1 and pages > 4

    try:
        join(in_child(read))
    finally:
        subprocess.run([umount, place], check=True)


def test_an_entry_that_another_process_cut_is_downloaded_again(served, cache, limited):
    limited(cache_touch=0)
    data = served.write("a", MIB)

    def read():
        file = served.open_remote("a")
        file.read(0, MIB)
        [path] = cache.glob("*.data")
        os.truncate(path, 4096)
        return bytes(file.view(0, MIB)) == data

    join(in_child(read))
