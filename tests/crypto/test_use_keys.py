"""Keys that count where none is given: those of a block, those of the process, and the environment variable."""

import asyncio
import contextvars
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from helpers.forking import in_forked_child

import fastrack
from fastrack import Key, KeyRing, UnknownKeyError, use_keys
from fastrack._keys import keyring

pytestmark = pytest.mark.usefixtures("no_default_keys_afterwards")


def in_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def default():
    try:
        return KeyRing.resolve().first
    except UnknownKeyError:
        return None


def test_a_default_holds_in_its_block_and_nests(key, file, monkeypatch, tmp_path):
    key.save(tmp_path / "owner.key")
    monkeypatch.setenv("FASTRACK_KEY_FILE", str(tmp_path / "owner.key"))
    other = Key.generate()
    with use_keys(other):
        with pytest.raises(UnknownKeyError, match=other.id):
            fastrack.unseal(file["x"])
        with use_keys({key.id: key}.get):
            fastrack.unseal(file["x"])
        assert KeyRing.resolve().first is other
    fastrack.unseal(file["x"])  # by the variable again
    use_keys(other)
    assert KeyRing.resolve().first is other
    use_keys(None)
    assert KeyRing.resolve().first == key


def test_a_default_that_cannot_be_used_changes_nothing(key, tmp_path):
    use_keys(key)
    with pytest.raises(FileNotFoundError):
        use_keys(tmp_path / "none.key")
    assert KeyRing.resolve().first is key


def test_arguments_precede_the_default(key):
    with use_keys(Key.generate()):
        assert KeyRing.resolve(key).first is key
        assert fastrack.seal(np.arange(3), key).key_id == key.id


def test_a_wrapped_loader_finds_a_default_that_was_set_later(key, file):
    loader = fastrack.wrap([file["x"]])
    use_keys({key.id: key}.get)
    assert [len(batch) for batch in loader] == [10]


def test_the_default_holds_in_other_threads(key, file):
    use_keys(key)
    assert np.array_equal(in_thread(lambda: fastrack.unseal(file["x"], framework="numpy")), np.arange(10))


def test_a_block_is_of_its_thread(key):
    other = Key.generate()
    with use_keys(key):
        assert (default(), in_thread(default)) == (key, None)
        use_keys(other)  # of the process
        assert (default(), in_thread(default)) == (key, other)
        with use_keys(None):
            assert default() is None
    assert (default(), in_thread(default)) == (other, other)


def test_blocks_of_many_threads_do_not_mix_and_leave_nothing(key):
    owners, use_keys_at = [Key.generate() for _ in range(3)], threading.Barrier(4)
    wrong = []

    def work(owner):
        use_keys_at.wait()
        for _ in range(1500):
            with nullcontext() if owner is key else use_keys(owner):
                if default() is not owner:
                    wrong.append(owner.id)

    use_keys(key)  # which the last thread uses without a block of its own
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, (*owners, key)))
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert default() is key


def test_keys_of_a_block_that_has_not_begun_are_of_no_other_thread(key):
    other = Key.generate()
    use_keys(key)
    first = use_keys(other)  # as of a thread that is interrupted before its block begins
    found = []
    thread = threading.Thread(target=lambda: found.append(default()))
    thread.start()
    with use_keys(Key.generate()), first:
        thread.join()
        assert default() is other
    assert found == [key]
    assert default() is key


def test_what_two_blocks_were_given_is_no_default_once_both_have_begun(key):
    first, second = use_keys(key), use_keys(Key.generate())
    with first:
        assert default() is key
        with second:
            assert in_thread(default) is None
    assert default() is None


def test_a_block_may_end_in_another_context(key):
    block = use_keys(key)
    contextvars.copy_context().run(block.__enter__)  # as of a generator that is closed elsewhere
    assert default() is None
    block.__exit__()
    assert default() is None


def test_a_child_forked_while_a_thread_sets_a_default_is_not_blocked(key):
    def set_default():
        with use_keys(key):
            return default() is key

    with keyring._lock:
        assert in_forked_child(set_default, seconds=20)


def test_a_default_whose_object_is_kept_is_that_of_the_process(key):
    kept = use_keys(key)  # as a notebook keeps what a cell returned
    assert default() is key
    assert in_thread(default) is key
    del kept
    assert in_thread(default) is key


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_wrapped_loader_has_the_keys_of_the_block_it_begins_in(key, file, prefetch):
    loader = fastrack.wrap([file["x"]] * 3, prefetch=prefetch)
    with use_keys(key):
        assert [len(batch) for batch in loader] == [10] * 3
    with pytest.raises(UnknownKeyError):
        list(loader)


def test_a_task_has_the_keys_of_its_block():
    async def work(owner):
        with use_keys(owner):
            await asyncio.sleep(0.001)
            return default() is owner

    async def run():
        return await asyncio.gather(*(work(Key.generate()) for _ in range(8)))

    assert all(asyncio.run(run()))
    assert default() is None
