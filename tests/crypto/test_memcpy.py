"""Copies of ciphertext, on several threads: all of it, nothing else, and nowhere else."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.buffers import Fenced
from helpers.forking import in_forked_child
from helpers.reference import noise

from fastrack._crypto import jit, memcpy
from fastrack._crypto.cobblestone import SEALED_CHUNK_SIZE

MIB = 1 << 20
THREADS = [1, 2, 4]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("size", [0, 1, SEALED_CHUNK_SIZE, 2 * MIB - 1, 2 * MIB, 5 * MIB + 7, 40 * MIB + 1])
def test_a_run_is_copied(size, threads):
    source, target = Fenced.holding(noise(size), 3), Fenced(size, 17)
    memcpy.copy(target.data, source.data, threads)
    assert np.array_equal(target.data, noise(size))
    assert target.stands


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (np.zeros(9, np.uint8), np.zeros(10, np.uint8)),
        (np.zeros(10, np.uint8), np.zeros(9, np.uint8)),
        (np.zeros(5, np.uint16), np.zeros(10, np.uint8)),
        (np.zeros(20, np.uint8)[::2], np.zeros(10, np.uint8)),
        (np.zeros(10, np.uint8), np.zeros((2, 5), np.uint8)),
        (np.frombuffer(bytes(10), np.uint8), np.zeros(10, np.uint8)),
    ],
    ids=["short", "long", "of words", "with gaps", "of two dimensions", "read-only"],
)
def test_buffers_that_do_not_fit_are_refused(target, source):
    for threads in (1, 2):
        with pytest.raises(ValueError, match="buffer"):
            memcpy.copy(target, source, threads)


def test_threads_copy_side_by_side():
    source = noise(600 * SEALED_CHUNK_SIZE)

    def work(_):
        copied = np.zeros_like(source)
        memcpy.copy(copied, source, 4)
        return np.array_equal(copied, source)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_a_forked_child_copies():
    source, target = noise(8 * MIB), np.zeros(8 * MIB, np.uint8)
    memcpy.copy(target, source, 4)
    target.fill(0)

    def child():
        memcpy.copy(target, source, 4)
        return np.array_equal(target, source)

    assert in_forked_child(child)
    assert not target.any()


def test_a_kernel_on_disk_is_known_by_all_that_it_is_made_of():
    code = [memcpy._build(digest).py_func for digest in ("one", "other")]
    assert [[cell.cell_contents for cell in function.__closure__] for function in code] == [["one"], ["other"]]
    assert re.fullmatch("[0-9a-f]{16}", jit.source_digest())


def test_the_digest_covers_the_files_of_what_is_compiled(monkeypatch, tmp_path):
    paths = [tmp_path / name for name in ("llvm.py", "gcm_ir.py", "jit.py", "more.py")]
    for path in paths:
        path.write_text(path.name)
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    before = jit.source_digest(paths[3])
    for path in paths:
        path.write_text("altered")
        after = jit.source_digest(paths[3])
        assert after != before
        before = after
