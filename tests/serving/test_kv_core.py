"""Sealed KV blocks without a server: each opens only in its own context, and everything else is a miss."""

import errno
import hashlib
import logging
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from cryptography import cobblestone
from helpers.forking import in_forked_child

from fastrack import Key, UnknownKeyError
from fastrack.kv import BlockContext, BlockFolder, BlockSealer, _folder

HERE = BlockContext("llama@1", "bfloat16 [4, 8]", "0 of 2", b"hash", "tenant")
OTHERS = {
    "model": HERE._replace(model="llama@2"),
    "layout": HERE._replace(layout="bfloat16 [8, 4]"),
    "ranks": HERE._replace(ranks="1 of 2"),
    "hash": HERE._replace(hash=b"hasH"),
    "salt": HERE._replace(salt="tenan"),
    "no salt": HERE._replace(salt=""),
}


def block_of(size, seed=0):
    return np.random.default_rng(seed).integers(1, 256, size, np.uint8)


def sealed_by(sealer, context, block):
    message = np.empty(sealer.sealed_size(block.size), np.uint8)
    assert sealer.seal(context, block, message) == message.size
    return message


@pytest.fixture
def folder(tmp_path, key):
    return BlockFolder(tmp_path / "kv", key)


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 100_000])
def test_a_block_is_a_message_of_the_format_in_its_context(key, size):
    sealer, block = BlockSealer(key), block_of(size)
    message, opened = sealed_by(sealer, HERE, block), np.empty_like(block)
    assert sealer.open(HERE, message, opened)
    assert np.array_equal(opened, block)
    decryptor = cobblestone.Cobblestone256Decryptor(bytes(key.material()), HERE.encode())
    buffer = np.empty(message.size + (1 << 16), np.uint8)
    count = decryptor.update_into(message, buffer.data)
    assert buffer[:count].tobytes() + decryptor.finalize() == block.tobytes()


@pytest.mark.parametrize("other", OTHERS)
def test_a_block_opens_in_its_own_context_alone(key, other):
    sealer, block = BlockSealer(key), block_of(20_000)
    message, opened = sealed_by(sealer, HERE, block), block_of(20_000, 1)
    assert not sealer.open(OTHERS[other], message, opened)
    assert not opened.any()
    assert not BlockSealer(Key.generate()).open(HERE, message, opened)
    assert sealer.counts == {"sealed": 1, "refused": 1}


def test_an_altered_or_cut_block_is_a_miss_and_leaves_zeros(key):
    sealer, block = BlockSealer(key), block_of(40_000)
    message, opened = sealed_by(sealer, HERE, block), np.empty_like(block)
    for place in [0, 23, 24, 55, 56, 57, 16439, 16440, 16455, 16456, 32896, len(message) - 17, len(message) - 1]:
        altered = message.copy()
        altered[place] ^= 0x80
        opened.fill(7)
        assert not sealer.open(HERE, altered, opened)
        assert not opened.any()
    for size in [0, 1, 55, 56, 100, 16456, len(message) - 1]:
        assert not sealer.open(HERE, message[:size].copy(), opened)
    assert sealer.open(HERE, np.append(message, np.zeros(9, np.uint8)), opened)  # a larger buffer
    for size in (39_999, 40_001):  # of another layout
        assert not sealer.open(HERE, message, np.empty(size, np.uint8))


@pytest.mark.parametrize("first", [0, 1, 56, 39_999])
def test_a_block_and_its_message_in_the_same_memory_are_refused(key, first):
    """Sealed in place a block would be another one, and opened in place no block."""
    sealer, block = BlockSealer(key), block_of(40_000)
    memory = np.zeros(100_000, np.uint8)
    memory[first : first + block.size] = block
    with pytest.raises(ValueError, match="apart"):
        sealer.seal(HERE, memory[first : first + block.size], memory[: sealer.sealed_size(block.size)])
    message = memory[: sealer.sealed_size(block.size)]
    message[:] = sealed_by(sealer, HERE, block)
    before = memory.copy()
    with pytest.raises(ValueError, match="apart"):
        sealer.open(HERE, message, memory[first : first + block.size])
    assert np.array_equal(memory, before)
    behind = memory[message.size : message.size + block.size]
    assert sealer.open(HERE, message, behind)
    assert np.array_equal(behind, block)
    assert sealer.counts == {"sealed": 1, "opened": 1}


def test_two_messages_of_one_block_have_nothing_in_common(key):
    sealer, block = BlockSealer(key), block_of(100)
    first, second = sealed_by(sealer, HERE, block), sealed_by(sealer, HERE, block)
    assert not np.array_equal(first[:24], second[:24])
    assert (first[56:] == second[56:]).mean() < 0.2


def test_a_key_is_needed(tmp_path):
    for make in (BlockSealer, lambda: BlockFolder(tmp_path / "kv")):
        with pytest.raises(UnknownKeyError):
            make()


def test_names_tell_nothing_without_the_key(key, folder):
    names = {context.name(key) for context in [HERE, *OTHERS.values()]}
    assert len(names) == 1 + len(OTHERS)
    assert HERE.name(key) == HERE.name(key) != HERE.name(Key.generate())
    assert HERE.name(key) not in {hashlib.sha256(text).hexdigest() for text in (HERE.encode(), HERE.hash)}
    folder.put(HERE, block_of(10))
    [path] = folder.path.glob("??/*")
    assert path.name == f"{HERE.name(key)}.kv"
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_is_a_miss_and_is_stored_again(folder, caplog):
    block, opened = block_of(20_000), np.empty(20_000, np.uint8)
    assert folder.put(HERE, block)
    [path] = folder.path.glob("??/*")
    content = path.read_bytes()
    damages = [content[:-1], content + b"\0", b"", content[:-1] + bytes([content[-1] ^ 1]), bytes(len(content))]
    with caplog.at_level(logging.WARNING, "fastrack"):
        for number, damaged in enumerate(damages, 1):
            path.write_bytes(damaged)
            assert not folder.get(HERE, opened)
            assert not opened.any()
            assert folder.put(HERE, block)
            assert folder.get(HERE, opened)
            assert folder.sealer.counts["refused"] == number
    assert len(caplog.records) == 1
    assert folder.sealer.counts["stored"] == 1 + len(damages)


def test_a_block_that_is_there_is_not_written_again(folder, key):
    block = block_of(1000)
    assert folder.put(HERE, block)
    assert BlockFolder(folder.path, key).put(HERE, block)
    other = BlockFolder(folder.path, Key.generate())
    assert not other.get(HERE, np.empty(1000, np.uint8))
    assert other.sealer.counts == {"absent": 1}
    assert folder.remove(HERE) == BlockSealer.sealed_size(1000)
    assert folder.remove(HERE) == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_a_disk_does_is_a_miss(folder, monkeypatch, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    block, opened = block_of(1000), np.empty(1000, np.uint8)
    monkeypatch.setattr(_folder.os, "write", fail)
    assert not folder.put(HERE, block)
    assert not list(folder.path.glob("??/*"))
    monkeypatch.undo()
    assert folder.put(HERE, block)
    monkeypatch.setattr(_folder.os, "fstat", fail)
    assert not folder.get(HERE, opened)
    monkeypatch.undo()
    assert folder.get(HERE, opened)
    assert folder.sealer.counts == {"sealed": 2, "unstored": 1, "stored": 1, "unreadable": 1, "opened": 1}


@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_is_a_miss(folder, kind, tmp_path):
    folder.put(HERE, block_of(10))
    [path] = folder.path.glob("??/*")
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    assert not folder.has(HERE)
    assert not folder.get(HERE, np.empty(10, np.uint8))
    assert folder.put(HERE, block_of(10)) is (kind != "folder")
    assert folder.get(HERE, np.empty(10, np.uint8)) is (kind != "folder")


def test_a_block_that_cannot_be_removed_frees_nothing(folder, monkeypatch):
    folder.put(HERE, block_of(16))

    def refuse(*_, dir_fd):  # noqa: ARG001 - as `os.unlink` has it
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert folder.remove(HERE) == 0
    assert folder.remove(HERE) == folder.sealer.sealed_size(16)
    assert folder.remove(HERE) == 0


def test_a_disk_that_does_not_answer_has_no_blocks(folder, monkeypatch):
    def fail(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    assert folder.put(HERE, block_of(10))
    with monkeypatch.context() as patch:
        patch.setattr(_folder.os, "stat", fail)
        is_there = folder.has(HERE)
    assert not is_there


def test_threads_share_a_folder(folder):
    contexts = [HERE._replace(hash=bytes([number])) for number in range(8)]
    failures = []

    def work(seed):
        random = np.random.default_rng(seed)
        opened = np.empty(50_000, np.uint8)
        for number in random.integers(0, 8, 60):
            block = block_of(50_000, int(number))
            if not folder.get(contexts[number], opened):
                folder.put(contexts[number], block)
            elif not np.array_equal(opened, block):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert not folder.sealer.counts["refused"]


@pytest.mark.parametrize("part", ["folder", "sealer"])
def test_a_forked_child_stores_and_opens_whatever_its_parents_threads_do(folder, part):
    block = block_of(1000)

    def work():
        opened = np.empty(1000, np.uint8)
        return folder.put(HERE, block) and folder.get(HERE, opened) and np.array_equal(opened, block)

    with (folder if part == "folder" else folder.sealer)._lock:  # as a thread that the child lacks
        assert in_forked_child(work, seconds=20)


OLD = 1  # a time of modification, long ago


def contents_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_link_in_the_place_of_a_subfolder_leads_to_no_other_folder(folder, key, tmp_path):
    """Without that, another user of a shared folder could have the server write and remove files anywhere."""
    others, name = tmp_path / "others", HERE.name(key)
    others.mkdir()
    (folder.path / name[:2]).symlink_to(others)
    for other in (f"{name}.kv", f"{name}.kv.1-1.writing", "song.writing"):
        (others / other).write_bytes(b"of another program")
        os.utime(others / other, (OLD, OLD))
    before = contents_of(others)
    assert not folder.put(HERE, block_of(10))
    assert not folder.get(HERE, np.empty(10, np.uint8))
    assert not folder.has(HERE)
    assert folder.remove(HERE) == 0
    BlockFolder(folder.path, key)
    assert contents_of(others) == before
    assert folder.sealer.counts == {"sealed": 1, "unstored": 1, "unreadable": 1}


def test_only_files_of_killed_writers_are_removed_at_the_start(folder, key):
    name, subfolder = HERE.name(key), folder.path / HERE.name(key)[:2]
    assert folder.put(HERE, block_of(10))
    kept = {
        f"{name}.kv",
        "song.writing",
        f"x{name}.kv.1-1.writing",
        f"{name}.kv.1.writing",
        "f" * 64 + ".kv.1-1.writing",
    }
    for other in kept | {f"{name}.kv.1-1.writing"}:
        (subfolder / other).write_bytes(b"")
        os.utime(subfolder / other, (OLD, OLD))
    (subfolder / f"{name}.kv.2-1.writing").write_bytes(b"")  # of a writer that may live
    (folder.path / "song").mkdir()
    (folder.path / "song" / f"{name}.kv.1-1.writing").write_bytes(b"")
    os.utime(folder.path / "song" / f"{name}.kv.1-1.writing", (OLD, OLD))
    BlockFolder(folder.path, key)
    assert contents_of(subfolder).keys() == kept | {f"{name}.kv.2-1.writing"}
    assert len(contents_of(folder.path / "song")) == 1


def test_a_writer_leaves_the_file_of_another_with_its_number_alone(folder, key, monkeypatch):
    """As of another machine: writers are told apart by their process."""
    monkeypatch.setattr(_folder, "_numbers", iter([5, 6]))
    path = folder.path / HERE.name(key)[:2] / f"{HERE.name(key)}.kv.{os.getpid()}-5.writing"
    path.parent.mkdir()
    path.write_bytes(b"of another")
    assert not folder.put(HERE, block_of(10))
    assert path.read_bytes() == b"of another"
    assert folder.put(HERE, block_of(10))


@pytest.mark.parametrize("lost", ["all", "a subfolder"])
def test_a_folder_that_is_removed_is_made_again_for_this_user(folder, lost):
    assert folder.put(HERE, block_of(10))
    [path] = folder.path.glob("??")
    shutil.rmtree(folder.path if lost == "all" else path)
    assert not folder.has(HERE)
    assert not folder.get(HERE, np.empty(10, np.uint8))
    assert folder.put(HERE, block_of(10))
    assert folder.get(HERE, np.empty(10, np.uint8))
    assert {each.stat().st_mode & 0o777 for each in (folder.path, path)} == {0o700}
    assert folder.sealer.counts == {"sealed": 2, "stored": 2, "absent": 1, "opened": 1}


def test_no_descriptor_is_left(folder):
    def count():
        return len(list(Path("/proc/self/fd").iterdir()))

    assert folder.put(HERE, block_of(10))
    before = count()
    for other in OTHERS.values():
        folder.put(other, block_of(10))
        folder.get(HERE, np.empty(9, np.uint8))
        folder.has(other)
        folder.remove(other)
    assert count() == before


def test_a_file_that_may_not_be_read_is_a_miss_once(folder, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    block, opened = block_of(1000), np.empty(1000, np.uint8)
    assert folder.put(HERE, block)
    monkeypatch.setattr(_folder.os, "fstat", refuse)
    assert not folder.get(HERE, opened)
    monkeypatch.undo()
    assert not folder.has(HERE)
    assert folder.put(HERE, block)
    assert folder.get(HERE, opened)
