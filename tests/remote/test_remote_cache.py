"""The cache on the local disk: shared, bounded, and never trusted."""

import multiprocessing
import os
import threading

import numpy as np
import pytest

import fastrack
from fastrack._remote import cache as module
from fastrack._remote.remote_file import open_remote
from fastrack._util.locations import Url

MIB = 1 << 20


def kept(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))


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
    path = served.folder / "a.safetensors"
    content = bytearray(path.read_bytes())
    content[2_000_000] ^= 1
    path.write_bytes(content)
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


@pytest.fixture
def small_regions(monkeypatch):
    """Evict regions of 2 MiB."""
    monkeypatch.setattr(module, "REGION", 2 * MIB)
    monkeypatch.setattr(module, "_BLOCKS", 2 * MIB // module.BLOCK)
    monkeypatch.setattr("fastrack._remote.remote_file.REGION", 2 * MIB)
    monkeypatch.setattr("fastrack._remote.remote_file._BLOCKS", 2 * MIB // module.BLOCK)


@pytest.mark.usefixtures("small_regions")
def test_a_file_that_is_whole_gives_way_to_what_else_a_call_needs(served, key, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "9M")
    rows = np.random.default_rng(2).integers(0, 256, (96, 1 << 16), np.uint8)
    for name in "ab":
        fastrack.save_file({"x": rows}, served.folder / name, key)
    whole, other = fastrack.load_file(served.url("a")), fastrack.load_file(served.url("b"))
    fastrack.to_device(whole["x"], keys=key)
    assert whole["x"].origin[0].is_complete
    both = fastrack.to_device([whole["x"][[95]], other["x"][0:64]], keys=key, framework="numpy")
    np.testing.assert_array_equal(np.concatenate(both), rows[[95, *range(64)]])
    assert not whole["x"].origin[0].is_complete


def test_a_file_that_is_whole_is_leased_once_and_evicted_when_no_call_uses_it(served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    data = served.write("a", 3 * MIB)
    served.write("b", 3 * MIB + 1)
    file, other = served.open_remote("a"), served.open_remote("b")
    assert file.lease_all() is None
    assert file.read(0, 3 * MIB) == data
    lease = file.lease_all()
    assert lease is file.lease_all()
    memory = file.memory(5, 3 * MIB)
    del lease
    with pytest.raises(OSError, match="others use"):
        other.read(0, 3 * MIB)
    assert memory.owner.tobytes() == data[5:]
    del memory
    other.read(0, 3 * MIB)
    assert file.lease_all() is None
    assert file.read(0, 3 * MIB) == data


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


@pytest.mark.usefixtures("small_regions")
def test_the_cache_keeps_to_its_bound(served, cache, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "8M")
    data = {name: served.write(name, 6 * MIB + number) for number, name in enumerate("abcd")}
    files = {name: served.open_remote(name) for name in data}
    generator = np.random.default_rng(5)
    for _ in range(100):
        name = "abcd"[generator.integers(4)]
        start = int(generator.integers(0, 6 * MIB))
        stop = min(start + int(generator.integers(1, MIB)), files[name].size)
        assert files[name].read(start, stop) == data[name][start:stop]
        assert kept(cache) <= 8 * MIB + 64 * 4096
    assert kept(cache) > 4 * MIB
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "3M")
    served.write("e", 6 * MIB)
    other = served.open_remote("e")
    with pytest.raises(OSError, match="FASTRACK_CACHE_SIZE") as caught:
        other.read(0, 6 * MIB)
    assert caught.value.errno == 28


def test_ranges_in_use_are_not_evicted(served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    first, second = served.write("a", 3 * MIB), served.write("b", 3 * MIB + 1)
    one, other = served.open_remote("a"), served.open_remote("b")
    lease = one.fetch([(0, 3 * MIB)])
    view = one.view(0, 3 * MIB)
    del lease
    with pytest.raises(OSError, match="others use"):
        other.read(0, 3 * MIB)
    assert view.tobytes() == first
    del view
    assert other.read(0, 3 * MIB) == second[: 3 * MIB]


def hold(port, begun, ended):
    file, _ = open_remote(Url(f"http://127.0.0.1:{port}/a"))
    lease = file.fetch([(0, 3 * MIB)])
    begun.set()
    ended.wait(30)
    del lease


@pytest.mark.slow
def test_ranges_in_use_by_another_process_are_not_evicted(served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", "4M")
    served.write("a", 3 * MIB)
    second = served.write("b", 3 * MIB + 1)
    context = multiprocessing.get_context("spawn")
    begun, ended = context.Event(), context.Event()
    process = context.Process(target=hold, args=(served.port, begun, ended))
    process.start()
    try:
        assert begun.wait(60)
        with pytest.raises(OSError, match="others use"):
            served.open_remote("b").read(0, 3 * MIB)
        process.kill()  # the kernel releases its locks
        process.join()
        assert served.open_remote("b").read(0, 3 * MIB) == second[: 3 * MIB]
    finally:
        process.kill()
        process.join()


def test_threads_share_downloads(served):
    data = served.write("a", 4 * MIB)
    file = served.open_remote("a")
    served.latency = 0.02
    before = len(served.requests)
    results = []
    threads = [threading.Thread(target=lambda: results.append(file.read(0, 4 * MIB))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [data] * 8
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


@pytest.mark.parametrize("suffix", ["index", "data"])
@pytest.mark.parametrize("content", [b"", b"garbage", bytes(4000)])
def test_a_damaged_entry_is_made_anew(suffix, content, served, cache):
    data = served.write("a", 2 * MIB)
    assert served.open_remote("a").read(0, 2 * MIB) == data
    [path] = cache.glob(f"*.{suffix}")
    path.unlink()
    path.write_bytes(content)
    [index] = cache.glob("*.index")
    index.unlink()
    assert served.open_remote("a").read(0, 2 * MIB) == data


def test_an_entry_that_was_removed_is_an_error_that_says_so(served, cache):
    served.write("a", 2 * MIB)
    file = served.open_remote("a")
    for path in cache.glob("*.data"):
        path.unlink()
    with pytest.raises(fastrack.ClosedError, match="Open it"):
        file.read(0, 2 * MIB)


def test_a_folder_that_others_may_use_is_refused(served, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    (tmp_path / "open" / "fastrack" / "remote").mkdir(parents=True, mode=0o755)
    served.write("a", 1000)
    with pytest.raises(PermissionError, match="alone"):
        served.open_remote("a")


@pytest.mark.parametrize("text", ["5", "x", "-1G", "1P"])
def test_a_bound_that_is_no_size_is_refused(text, served, monkeypatch):
    monkeypatch.setenv("FASTRACK_CACHE_SIZE", text)
    served.write("a", 1000)
    with pytest.raises(ValueError, match="FASTRACK_CACHE_SIZE"):
        served.open_remote("a")
