"""New files: room is made beforehand where that is possible, and nothing is left of one that fails."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

import pytest

from fastrack import newfile
from fastrack.newfile import new_file

MIB = 1 << 20


def fails_with(problem, times=1):
    """What `fallocate` may do, a few times over."""
    calls = []

    def fallocate(*arguments):
        calls.append(arguments)
        ctypes.set_errno(problem)
        return -1 if len(calls) <= times else 0

    fallocate.calls = calls
    return fallocate


def write(path, size=4 * MIB, claimed=None):
    content = os.urandom(size)
    with new_file(path, size if claimed is None else claimed) as file:
        file.write(content[:10])
        file.write(content[10:])
    assert path.read_bytes() == content


@pytest.mark.parametrize("claimed", [0, 1, 4 * MIB, 5 * MIB])
def test_a_file_is_as_long_as_what_was_written(tmp_path, claimed):
    write(tmp_path / "file", claimed=claimed)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.skipif(sys.platform != "linux", reason="sets no room aside")
def test_room_is_made_before_anything_is_written(tmp_path):
    with new_file(tmp_path / "file", 4 * MIB) as file:
        (part,) = tmp_path.iterdir()
        assert part.stat().st_size == 0
        if part.stat().st_blocks:  # the file system can
            assert part.stat().st_blocks * 512 >= 4 * MIB
        file.write(b"x")


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_is_too_full_is_found_out_beforehand(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(newfile, "_fallocate", fails_with(problem))
    written = []
    with pytest.raises(OSError, match="free some space") as failure, new_file(tmp_path / "file", 4 * MIB):
        written.append(1)
    assert failure.value.errno == problem
    assert not written
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("problem", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EINTR])
def test_a_file_system_that_sets_no_room_aside_does_without(tmp_path, monkeypatch, problem):
    monkeypatch.setattr(newfile, "_fallocate", fails_with(problem))
    write(tmp_path / "file")


def test_a_system_without_these_calls_does_without(tmp_path, monkeypatch):
    monkeypatch.setattr(newfile, "_fallocate", None)
    monkeypatch.setattr(newfile, "_sync_file_range", None)
    write(tmp_path / "file")


def test_what_is_large_is_on_its_way_to_the_disk_at_once(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(newfile, "_sync_file_range", lambda _, *arguments: calls.append(arguments) or -1)
    write(tmp_path / "file")
    assert calls == [(10, 4 * MIB - 10, 2)]


def test_other_systems_are_not_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert newfile._from_libc("fallocate") is None
    monkeypatch.undo()
    assert newfile._from_libc("there_is_no_such_function") is None
