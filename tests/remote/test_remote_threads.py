"""Threads that notice at once that a file was evicted share one copy of it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from fastrack._remote import cache
from fastrack._remote.objects import Version
from fastrack._remote.remote_file import RemoteFile
from fastrack._util.locations import locate

MIB, THREADS = 1 << 20, 8


class Slow:
    """An object whose ranges take a moment, and whose bytes are counted."""

    def __init__(self, url):
        self.url, self.version, self.head = url, Version(16 * MIB, "v1"), b""
        self.nbytes, self._lock = 0, threading.Lock()

    def read(self, start, stop, sink):
        time.sleep(0.02)
        with self._lock:
            self.nbytes += stop - start
        sink(start, bytes(stop - start))


def test_an_evicted_file_is_downloaded_once_by_all_threads():
    remote = Slow(locate("https://files.example/data"))
    file = RemoteFile(remote.url, remote)
    for _ in range(3):
        cache._remove(file.copy().entry._path)
        remote.nbytes, begin = 0, threading.Barrier(THREADS)

        def fetch(_, begin=begin):
            begin.wait()
            file.fetch([(0, 16 * MIB)])

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(fetch, range(THREADS)))
        assert remote.nbytes == 16 * MIB


def test_what_is_no_file_in_the_folder_of_the_cache_is_left_alone():
    remote = Slow(locate("https://files.example/other"))
    file = RemoteFile(remote.url, remote)
    (file.cache._folder / "a folder").mkdir()
    file.fetch([(0, MIB)])
    file.cache._evict(0)
    assert [path.name for path in file.cache._folder.iterdir()] == ["a folder"]
