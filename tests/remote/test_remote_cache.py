"""The cache on the local disk: shared, bounded, and never trusted."""

import multiprocessing
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.range_server import open_url
from helpers.tampering import flip_byte

import fastrack
from fastrack._remote import cache as module

MIB = 1 << 20


def kept(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


def lost_maps():
    """Return the maps of this process on files that were removed from the cache."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if line.endswith("(deleted)") and "/fastrack/remote/" in line]


def test_a_file_is_downloaded_once(served, url, key, images):
    for _ in range(2):
        with fastrack.load_file(url) as file:
            np.testing.assert_array_equal(fastrack.unseal(file["images"], key, framework="numpy"), images)
    assert len(served.requests) == 3  # to open it, for the rest, and to open it again


def test_plaintext_is_not_on_the_disk(served, url, key, images, cache):
    with fastrack.load_file(url) as file:
        fastrack.unseal(file["images"], key, framework="numpy")
        fastrack.to_device(file["images"][[1, 5]], keys=key)
    written = b"".join(path.read_bytes() for path in cache.iterdir())
    assert (served.folder / "a.safetensors").read_bytes() in written
    for row in images[::8]:
        assert row[:16].tobytes() not in written
        assert row[40_000:40_016].tobytes() not in written


def test_rows_download_only_their_blocks(served, url, key, cache):
    with fastrack.load_file(url) as file:
        fastrack.unseal(file["images"][[12, 30]], key, framework="numpy")
    assert kept(cache) < (served.folder / "a.safetensors").stat().st_size / 2


def test_wrong_bytes_in_the_cache_are_downloaded_again(served, url, key, images, cache):
    def spoil():
        [path] = cache.glob("*.data")
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, 100_000):
                file.seek(start)
                file.write(os.urandom(8))

    file = fastrack.load_file(url)
    fastrack.unseal(file["images"], key, framework="numpy")
    uses = {
        "whole": lambda: fastrack.unseal(file["images"], key, framework="numpy"),
        "rows": lambda: fastrack.unseal(file["images"][:], key, framework="numpy"),
        "on a device": lambda: fastrack.to_device(file["images"], keys=key, framework="numpy"),
        "rows on a device": lambda: fastrack.to_device(file["images"][:], keys=key, framework="numpy"),
    }
    for name, use in uses.items():
        spoil()
        before = len(served.requests)
        np.testing.assert_array_equal(use(), images, err_msg=name)
        assert len(served.requests) > before, name
    spoil()
    fastrack.verify_file(file, key)


def test_a_header_that_is_wrong_in_the_cache_is_downloaded_again(served, url, key, cache):
    file = fastrack.load_file(url)
    [path] = cache.glob("*.data")
    content = (served.folder / "a.safetensors").read_bytes()
    header = content.index(file["labels"].header)
    for use in (fastrack.unseal, fastrack.to_device):
        use(file["labels"], keys=key)
        with path.open("r+b") as spoiled:
            spoiled.seek(header)
            spoiled.write(bytes(56))
        assert use(file["labels"], keys=key, framework="numpy").tolist() == list(range(40))


@pytest.mark.parametrize("how", ["unseal", "to_device", "verify"])
def test_a_file_that_was_altered_on_the_server_is_refused(how, served, url, key):
    flip_byte(served.folder / "a.safetensors", 2_000_000)
    file = fastrack.load_file(url)
    uses = {
        "unseal": lambda: fastrack.unseal(file["images"], key),
        "to_device": lambda: fastrack.to_device(file["images"], keys=key),
        "verify": lambda: fastrack.verify_file(file, key),
    }
    with pytest.raises(fastrack.AuthenticationError, match=r"http.*a\.safetensors") as caught:
        uses[how]()
    assert caught.value.tensor == "images"
    assert str(caught.value.path) == url


def test_a_file_that_is_whole_gives_way_to_what_else_a_call_needs(served, key, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "9M")
    rows = np.random.default_rng(2).integers(0, 256, (96, 1 << 16), np.uint8)
    for name in "ab":
        fastrack.save_file({"x": rows}, served.folder / name, key)
    whole, other = fastrack.load_file(served.url("a")), fastrack.load_file(served.url("b"))
    fastrack.to_device(whole["x"], keys=key)
    assert whole["x"].location[0].copy().entry.is_complete
    both = fastrack.to_device([whole["x"][[95]], other["x"][0:64]], keys=key, framework="numpy")
    np.testing.assert_array_equal(np.concatenate(both), rows[[95, *range(64)]])
    assert not whole["x"].location[0].copy().entry.is_complete


def test_wrong_bytes_of_a_file_that_is_whole_cost_no_more_than_their_rows(served, url, key, images, cache):
    with fastrack.load_file(url) as file:
        fastrack.to_device(file["images"], keys=key)
        [path] = cache.glob("*.data")
        with path.open("r+b") as spoiled:
            spoiled.seek(2 * MIB)
            spoiled.write(bytes(MIB // 2))
        before = len(served.requests)
        row = fastrack.to_device(file["images"][[34]], keys=key, framework="numpy")
        np.testing.assert_array_equal(row, images[[34]])
        assert len(served.requests) - before in {1, 2}  # with the header
        ranges = [requested.removeprefix("bytes=").split("-") for _, requested in served.requests[before:]]
        assert sum(int(last) + 1 - int(first) for first, last in ranges) <= 3 * module.BLOCK


def test_the_cache_keeps_to_its_bound(served, cache, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "8M")
    data = {name: served.write(name, 6 * MIB + number) for number, name in enumerate("abcd")}
    files = {name: served.open_remote(name) for name in data}
    generator = np.random.default_rng(5)
    most = 0
    for _ in range(100):
        name = "abcd"[generator.integers(4)]
        start = int(generator.integers(0, 6 * MIB))
        stop = min(start + int(generator.integers(1, MIB)), files[name].size)
        assert files[name].read(start, stop) == data[name][start:stop]
        assert kept(cache) <= 8 * MIB + 64 * 4096
        most = max(most, kept(cache))
    assert most > 6 * MIB
    assert not lost_maps()
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "3M")
    served.write("e", 6 * MIB)
    other = served.open_remote("e")
    with pytest.raises(OSError, match="FASTRACK_CACHE_SIZE") as caught:
        other.read(0, 6 * MIB)
    assert caught.value.errno == 28


def test_arrays_of_a_file_stay_right_when_it_is_evicted_and_end_with_its_place_on_the_disk(served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    first, second = served.write("a", 3 * MIB), served.write("b", 3 * MIB + 1)
    file, other = served.open_remote("a"), served.open_remote("b")
    view, memory = file.view(0, 3 * MIB), file.memory(5, 3 * MIB)
    assert other.read(0, 3 * MIB) == second[: 3 * MIB]
    assert view.tobytes() == first
    assert memory.array.tobytes() == first[5:]
    assert file.read(0, 3 * MIB) == first  # in another copy
    assert view.tobytes() == first
    assert lost_maps()
    del view, memory
    assert not lost_maps()


def hold(port, size, pipe):
    """Read a file that the parent evicts twice, in a copy that ends with it and in new ones."""
    file = open_url(f"http://127.0.0.1:{port}/a")
    view = file.view(0, size)
    before = view.tobytes()
    pipe.send(before)
    pipe.recv()
    pipe.send((view.tobytes() == before, len(lost_maps())))
    del view
    pipe.send((file.read(0, size) == before, len(lost_maps())))


@pytest.mark.slow
def test_another_process_goes_on_with_a_file_that_was_evicted(served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    first, second = served.write("a", 3 * MIB), served.write("b", 3 * MIB + 1)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(served.port, 3 * MIB, there))
    process.start()
    try:
        assert here.recv() == first
        assert served.open_remote("b").read(0, 3 * MIB) == second[: 3 * MIB]
        here.send("evicted")
        assert here.recv() == (True, 1)
        assert here.recv() == (True, 0)
    finally:
        process.join(60)
        process.kill()


def test_a_file_larger_than_the_cache_is_read_in_parts_that_fit(served, cache, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    data = served.write("a", 11 * MIB)
    file = served.open_remote("a")
    for start in (*range(0, 11 * MIB, MIB), 0, 4 * MIB, 10 * MIB, 0):
        assert file.read(start, start + MIB) == data[start : start + MIB]
        assert kept(cache) <= 4 * MIB + 64 * 4096
    assert not lost_maps()
    assert file.read(0, 4 * MIB) == data[: 4 * MIB]  # to the last byte
    with pytest.raises(OSError, match=r"4 MiB.*FASTRACK_CACHE_SIZE"):
        file.read(0, 4 * MIB + 1)


def test_files_that_do_not_fit_together_are_refused_in_one_call_and_read_in_several(served, key, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "9M")
    rows = np.random.default_rng(2).integers(0, 256, (96, 1 << 16), np.uint8)
    for name in "ab":
        fastrack.save_file({"x": rows}, served.folder / name, key)
    files = [fastrack.load_file(served.url(name)) for name in "ab"]
    with pytest.raises(OSError, match="FASTRACK_CACHE_SIZE"):
        fastrack.to_device([file["x"] for file in files], keys=key)
    for file in files:
        np.testing.assert_array_equal(fastrack.to_device(file["x"], keys=key, framework="numpy"), rows)


def test_the_files_that_were_used_least_recently_are_evicted(served, monkeypatch, limited):
    limited(cache_touch=0)
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    files = {}
    for number, name in enumerate("abc"):
        served.write(name, MIB + number)
        files[name] = served.open_remote(name)
        files[name].read(0, MIB)
        time.sleep(0.02)  # the clock of the file system is coarse
    files["a"].read(0, MIB)
    served.write("d", 2 * MIB)
    served.open_remote("d").read(0, 2 * MIB)
    assert [name for name, file in files.items() if file.copy().entry.is_complete] == ["a"]


@pytest.mark.parametrize("how", ["evicted", "removed"])
def test_a_file_that_goes_while_it_is_downloaded_is_still_read(how, served, cache):
    data = served.write("a", 8 * MIB)
    file = served.open_remote("a")

    def go(_handler, number):
        if number in {1, 3}:
            for path in cache.glob("*.data"):
                path.unlink() if how == "removed" else module._remove(path)
        return False

    served.faults = go
    assert file.view(0, 8 * MIB).tobytes() == data
    assert file.read(0, 8 * MIB) == data
    assert file.read(3, 2 * MIB) == data[3 : 2 * MIB]


def test_threads_share_downloads(served):
    data = served.write("a", 4 * MIB)
    file = served.open_remote("a")
    served.latency = 0.02
    before = len(served.requests)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: file.read(0, 4 * MIB), range(8))) == [data] * 8
    assert len(served.requests) == before + 1


def test_a_failed_download_ahead_of_time_is_tried_again(served):
    data = served.write("a", 2 * MIB)
    file = served.open_remote("a")
    fail = threading.Event()
    fail.set()
    served.faults = lambda handler, number: fail.is_set() and (handler.refuse(404), True)[1]
    file.prefetch([(MIB, 2 * MIB)])
    with pytest.raises(FileNotFoundError):
        file.read(MIB, 2 * MIB)
    fail.clear()
    assert file.read(MIB, 2 * MIB) == data[MIB:]


def test_a_forked_child_reads_on(served):
    data = served.write("a", 2 * MIB)
    file = served.open_remote("a")
    child = os.fork()
    if not child:
        os._exit(0 if file.read(0, 2 * MIB) == data else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    before = len(served.requests)
    assert file.read(0, 2 * MIB) == data
    assert len(served.requests) == before


@pytest.mark.parametrize("is_macos", [False, True])
def test_blocks_are_kept_where_a_file_system_allocates_no_place(is_macos, served, monkeypatch):
    def allocate(descriptor, start, size):  # as the C library does on NFS, FUSE and the first file system of a machine
        end = os.fstat(descriptor).st_size
        for place in range(start + (size - 1) % 4096, start + size, 4096):
            if place >= end or os.pread(descriptor, 1, place) == bytes(1):
                os.pwrite(descriptor, bytes(1), place)

    monkeypatch.setattr(module, "_allocate", (lambda *_: None) if is_macos else allocate)
    data = served.write("a", 2 * MIB)
    assert served.open_remote("a").read(0, 2 * MIB) == data
    before = len(served.requests)
    assert served.open_remote("a").read(0, 2 * MIB) == data
    assert len(served.requests) == before + 1  # to open it


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(4000), bytes(2 * MIB + 24), "a pipe"])
def test_a_damaged_entry_is_made_anew(content, served, cache):
    data = served.write("a", 2 * MIB)
    assert served.open_remote("a").read(0, 2 * MIB) == data
    [path] = cache.glob("*.data")
    path.unlink()
    os.mkfifo(path) if content == "a pipe" else path.write_bytes(content)
    assert served.open_remote("a").read(0, 2 * MIB) == data
    assert not list(cache.glob(".*"))


@pytest.mark.parametrize("is_downloaded", [False, True])
@pytest.mark.parametrize(("removed", "seconds"), [("*.data", 0), (".", 0), (".", 1)])
def test_what_was_removed_is_downloaded_again(removed, seconds, is_downloaded, served, cache, limited):
    limited(cache_touch=seconds)
    data = served.write("a", 2 * MIB)
    file = served.open_remote("a")
    if is_downloaded:
        assert file.read(0, 2 * MIB) == data
    for path in [cache] if removed == "." else cache.glob("*.data"):
        shutil.rmtree(path) if path == cache else path.unlink()
    assert file.read(0, 2 * MIB) == data
    if not seconds or not is_downloaded:  # else it is noticed at the next use
        assert kept(cache) >= 2 * MIB
        assert not lost_maps()


def test_an_entry_that_is_damaged_while_it_is_open_is_known_by_its_mark(served, cache):
    data = served.write("a", 2 * MIB)
    file = served.open_remote("a")
    file.read(0, 2 * MIB)
    entry = file.copy().entry
    [path] = cache.glob("*.data")
    with path.open("r+b") as spoiled:
        spoiled.seek(-8, os.SEEK_END)
        spoiled.write(b"no mark!")
    assert served.open_remote("a").read(0, 2 * MIB) == data  # in another entry, begun in its place
    assert entry.is_evicted


def test_rows_of_files_that_do_not_fit_together_are_downloaded_once(served, key, monkeypatch):
    rows = np.random.default_rng(2).integers(0, 256, (64, 1 << 16), np.uint8)
    with fastrack.DatasetWriter(served.folder / "set", key, shard_size=rows.nbytes) as writer:
        for _ in range(3):
            writer.write_batch({"x": rows})
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "10M")
    shards = [served.url(f"set/{path.name}") for path in sorted((served.folder / "set").iterdir())]
    data = fastrack.SealedDataset(shards, keys=key, columns=["x"])
    for start in (0, 64):
        fastrack.unseal(data[range(start, start + 48)]["x"], key)
    before = len(served.requests)
    found = fastrack.unseal(data[range(192)]["x"], key, framework="numpy")
    np.testing.assert_array_equal(found, np.concatenate([rows] * 3))
    ranges = [text.removeprefix("bytes=").split("-") for _, text in served.requests[before:]]
    assert sum(int(last) + 1 - int(first) for first, last in ranges) < 7.5 * MIB  # 1, 1 and 4 MiB that were missing


def test_a_folder_that_others_may_use_is_refused(served, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    (tmp_path / "open" / "fastrack" / "remote").mkdir(parents=True)
    (tmp_path / "open" / "fastrack" / "remote").chmod(0o755)
    served.write("a", 1000)
    with pytest.raises(PermissionError, match="only this user"):
        served.open_remote("a")


@pytest.mark.parametrize("text", ["5", "x", "-1G", "1P"])
def test_a_bound_that_is_no_size_is_refused(text, served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", text)
    served.write("a", 1000)
    with pytest.raises(ValueError, match="FASTRACK_CACHE_SIZE"):
        served.open_remote("a")
