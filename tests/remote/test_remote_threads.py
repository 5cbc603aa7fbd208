"""Threads share one copy of a file that was evicted, and no read waits for a download that no thread has begun."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastrack._remote import cache, objects, remote_file
from fastrack._util.locations import locate

MIB, THREADS = 1 << 20, 8


class Slow:
    """An object whose ranges take a moment, and whose bytes are counted."""

    def __init__(self, url):
        self.url, self.version, self.head = url, objects.Version(16 * MIB, "v1"), b""
        self.nbytes, self._lock = 0, threading.Lock()

    def read(self, start, stop, sink):
        time.sleep(0.02)
        with self._lock:
            self.nbytes += stop - start
        sink(start, bytes(stop - start))


def test_an_evicted_file_is_downloaded_once_by_all_threads():
    remote = Slow(locate("https://files.example/data"))
    file = remote_file.RemoteFile(remote.url, remote)
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
    file = remote_file.RemoteFile(remote.url, remote)
    (file.cache._folder / "a folder").mkdir()
    file.fetch([(0, MIB)])
    file.cache._evict(0)
    assert [path.name for path in file.cache._folder.iterdir()] == ["a folder"]


WAIT = 30  # seconds after which a read would wait for ever


class Quick(Slow):
    def read(self, start, stop, sink):
        sink(start, bytes(stop - start))


def is_read(file, start, stop):
    """Return whether another thread reads a range, which a download without a thread would keep from it."""
    reader = threading.Thread(target=file.read, args=(start, stop), daemon=True)
    reader.start()
    reader.join(WAIT)
    return not reader.is_alive()


def interrupted_after(lines, action):
    """Run an action, with Ctrl-C before the given number of lines of its module; return whether there were as many.

    Each line counts once. Lines that only begin or end a block are left out: no signal is handled there.
    """
    seen, texts = set(), Path(remote_file.__file__).read_text().splitlines()

    def trace(frame, event, _):
        if frame.f_code.co_filename != remote_file.__file__:
            return None
        if event == "line" and frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            if len(seen) > lines and not texts[frame.f_lineno - 1].lstrip().startswith(("with ", "try:")):
                raise KeyboardInterrupt
        return trace

    try:
        sys.settrace(trace)
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fetch", "prefetch"])
def test_an_interrupt_before_any_line_of_a_download_leaves_nothing_to_wait_for(way):
    remote, lines = Quick(locate("https://files.example/data")), 0
    while True:
        file = remote_file.RemoteFile(remote.url, remote)
        cache._remove(file.copy().entry._path)
        remote_file._threads.__init__()
        was_interrupted = interrupted_after(lines, lambda file=file: getattr(file, way)([(0, 6 * MIB)]))
        assert is_read(file, 0, 6 * MIB), lines
        if not was_interrupted:
            break
        lines += 1
    assert lines > 30


def start_others(thread, start=threading.Thread.start):
    if thread.name == "fastrack-remote":
        raise RuntimeError("can't start new thread")
    start(thread)


def test_a_read_without_threads_raises_and_a_later_one_does_not_wait(monkeypatch):
    remote = Quick(locate("https://files.example/data"))
    file = remote_file.RemoteFile(remote.url, remote)
    remote_file._threads.__init__()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_others)
        with pytest.raises(RuntimeError, match="new thread"):
            file.fetch([(0, MIB)])
    assert is_read(file, 0, MIB)


def test_the_threads_that_there_are_download_where_no_more_can_be_started(monkeypatch):
    remote = Quick(locate("https://files.example/data"))
    file = remote_file.RemoteFile(remote.url, remote)
    file.fetch([(0, MIB)])
    monkeypatch.setattr(threading.Thread, "start", start_others)
    assert is_read(file, 0, 16 * MIB)
    assert file.copy().entry.is_complete
