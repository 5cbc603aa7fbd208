"""A folder of KV blocks with a limit: least recently used blocks make room, whichever process stored them."""

import fcntl
import itertools
import logging
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest

from fastrack.kv import BlockContext, BlockFolder, BlockSealer, _folder

SIZE = 20_000
FILE = BlockSealer.sealed_size(SIZE)
LIMIT = 16 * FILE


def here(number):
    return BlockContext("m", "l", "r", b"%d" % number)


def block(number):
    return np.full(SIZE, number % 251 + 1, np.uint8)


def total(path):
    return sum(file.stat().st_size for file in path.glob("??/*"))


def age(folder, number, seconds):
    """Set back the time of a block: times of a disk may be as coarse as a clock's tick."""
    name, then = folder._name(here(number)), time.time() - seconds
    os.utime(folder.path / name[:2] / name, (then, then))


@pytest.fixture
def folder(tmp_path, key):
    folder = BlockFolder(tmp_path / "kv", key, limit=LIMIT)
    for number in range(16):
        assert folder.put(here(number), block(number))
        age(folder, number, 100 - number)
    return folder


@pytest.mark.parametrize("use", ["get", "put"])
def test_the_block_that_was_not_used_for_longest_makes_room(folder, use, key):
    other, opened = BlockFolder(folder.path, key, limit=LIMIT), np.empty(SIZE, np.uint8)
    assert total(folder.path) == LIMIT
    assert other.get(here(0), opened) if use == "get" else other.put(here(0), block(0))
    assert other.put(here(16), block(16))
    assert [number for number in range(17) if not folder.has(here(number))] == [1, 2]
    assert other.sealer.counts["evicted"] == 2  # a sixteenth of the limit is free then, but for the new block
    assert folder.get(here(16), opened)
    assert np.array_equal(opened, block(16))
    assert total(folder.path) <= LIMIT


def test_a_block_above_the_limit_evicts_none_and_is_told_once(folder, caplog):
    with caplog.at_level(logging.WARNING, "fastrack"):
        for number in (20, 21):
            assert not folder.put(here(number), bytes(17 * SIZE))
    assert len(caplog.records) == 1
    assert folder.sealer.counts["unstored"] == 2
    assert total(folder.path) == LIMIT


@pytest.mark.parametrize("content", [b"", b"x" * 42, b"%020d %020d\n" % (0, 0), b"%020d %020d\n" % (10**19, 10**19)])
def test_a_count_that_is_damaged_or_old_is_made_anew_from_the_files(folder, content):
    (folder.path / "counted").write_bytes(content)
    assert folder.put(here(16), block(16))
    assert total(folder.path) <= LIMIT
    assert int((folder.path / "counted").read_bytes()[:20]) == total(folder.path)


def test_files_that_others_removed_make_room(folder):
    for path in list(folder.path.glob("??"))[:4]:
        shutil.rmtree(path)
    assert folder.put(here(16), block(16))
    assert folder.sealer.counts["evicted"] == 0
    shutil.rmtree(folder.path)
    assert all(folder.put(here(number), block(number)) for number in range(16))


def test_a_link_in_the_place_of_the_count_is_not_followed(folder, tmp_path):
    (tmp_path / "song").write_bytes(b"song")
    (folder.path / "counted").unlink()
    (folder.path / "counted").symlink_to(tmp_path / "song")
    assert not folder.put(here(16), block(16))
    assert (tmp_path / "song").read_bytes() == b"song"


def test_a_stopped_server_stops_no_other(folder, monkeypatch):
    monkeypatch.setattr(_folder, "_WAIT", 0.05)
    with (folder.path / "counted").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not folder.put(here(16), block(16))
    assert folder.put(here(16), block(16))


def test_only_files_of_the_folder_are_counted_and_removed(folder):
    subfolder = next(folder.path.glob("??"))
    (subfolder / "song").write_bytes(bytes(10 * LIMIT))
    (folder.path / "song.kv").write_bytes(b"")
    (folder.path / "counted").unlink()
    assert folder.put(here(16), block(16))
    assert (subfolder / "song").exists()
    assert (folder.path / "song.kv").exists()
    assert folder.sealer.counts["evicted"] == 2


@pytest.mark.parametrize("limit", [0, -1, 1.5, "20 GiB"])
def test_a_limit_is_a_number_of_bytes(tmp_path, key, limit):
    with pytest.raises(ValueError, match="limit of a folder of KV blocks: expected a number of bytes from 1 on, got"):
        BlockFolder(tmp_path / "kv", key, limit=limit)


@pytest.mark.slow
@pytest.mark.parametrize("times", [12, pytest.param(40, marks=pytest.mark.nightly)])
def test_two_servers_that_are_killed_at_random_keep_to_the_limit_by_a_block_each(tmp_path, key, times):
    """Both are stopped, the files are counted, and both are killed, many times."""
    path, chance, kept = tmp_path / "kv", random.Random(7), 0
    for _ in range(times):
        children = [fork_writer(path, key, chance.randrange(1 << 30)) for _ in range(2)]
        time.sleep(chance.uniform(0.01, 0.12))
        for child in children:
            os.kill(child, signal.SIGSTOP)
            os.waitid(os.P_PID, child, os.WSTOPPED)
        size = total(path)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert size <= LIMIT + 2 * FILE
        kept = max(kept, size)
    assert kept > LIMIT // 2  # the limit was reached
    folder, opened, right = BlockFolder(path, key, limit=LIMIT), np.empty(SIZE, np.uint8), 0
    for number in range(100):
        if folder.get(here(number), opened):
            assert np.array_equal(opened, block(number))
            right += 1
    assert right > 4
    assert folder.sealer.counts["refused"] == 0
    parts = list(path.glob("??/*.writing"))
    for part in parts:
        os.utime(part, (0, 0))
    BlockFolder(path, key, limit=LIMIT)
    assert not list(path.glob("??/*.writing"))


def fork_writer(path, key, seed):
    """Start a process that stores and opens blocks until it is killed."""
    child = os.fork()
    if child:
        return child
    try:
        folder, chance, opened = BlockFolder(path, key, limit=LIMIT, threads=1), random.Random(seed), bytearray(SIZE)
        for _ in itertools.count():
            number = chance.randrange(100)
            if folder.get(here(number), opened):
                assert opened == block(number).tobytes()
            folder.put(here(number), block(number))
    finally:
        os._exit(1)
