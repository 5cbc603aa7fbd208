"""`Vault`: what comes back is what was put, whatever happened to the place where it waited."""

import contextlib
import errno
import gc
import os
import pickle
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.forking import in_forked_child

import fastrack
from fastrack._transfer.slots import Slots
from fastrack.errors import AuthenticationError, ClosedError

MIB = 1 << 20
CANARY = b"a secret that must not be found outside"


def blocks(count=6, size=3 * MIB):
    return [np.random.default_rng(number).integers(0, 256, size, np.uint8) for number in range(count)]


class Recording(dict):
    """A store that remembers all that it ever had."""

    def __init__(self):
        super().__init__()
        self.written = []

    def __setitem__(self, name, content):
        self.written.append(content)
        super().__setitem__(name, content)


@pytest.fixture(params=["memory", "folder", "store"])
def vault(request, tmp_path):
    store = {"memory": None, "folder": tmp_path, "store": Recording()}[request.param]
    with fastrack.Vault(store) as made:
        yield made


ARRAYS = [
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array(3.5),
    np.zeros((0, 4), np.float32),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    np.arange(40_000, dtype=np.uint16)[::2],
]
TENSORS = [
    torch.arange(10, dtype=torch.bfloat16).reshape(2, 5),
    torch.ones(2, 3, 8, 8).to(memory_format=torch.channels_last) * torch.arange(8),
    torch.arange(24.0).reshape(4, 6).T,
    torch.arange(24.0).reshape(4, 6)[:, ::2],
    torch.tensor(True),
    torch.randn(600, 700, requires_grad=True),
    torch.randn(700, 600).T,
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{list(array.shape)}")
def test_an_array_comes_back(vault, array):
    ticket = vault.put("x", array)
    assert (ticket.name, ticket.dtype, ticket.shape, ticket.nbytes) == ("x", array.dtype, array.shape, array.nbytes)
    found = vault.get(ticket)
    assert (type(found), found.dtype) == (np.ndarray, array.dtype)
    assert np.array_equal(found, array)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{tensor.stride()}")
def test_a_tensor_comes_back_with_its_order_in_memory(vault, tensor):
    ticket = vault.put("x", tensor)
    assert ticket.shape == tuple(tensor.shape)
    found = vault.get(ticket)
    assert (found.dtype, found.requires_grad) == (tensor.dtype, False)
    assert torch.equal(found, tensor)
    dense = tensor.detach().clone(memory_format=torch.preserve_format)
    if tensor.numel() > 1 and dense.stride() == tensor.stride():
        assert found.stride() == tensor.stride()
        out = torch.empty_like(dense)
        assert vault.get(ticket, out=out) is out
        assert torch.equal(out, tensor)


@pytest.mark.parametrize("order", ["fifo", "lifo", "random"])
def test_tensors_come_back_in_any_order_from_any_thread(vault, order):
    contents = blocks()
    tickets = [vault.put(f"block {number}", block) for number, block in enumerate(contents)]
    numbers = list(range(len(tickets)))
    numbers = {"fifo": numbers, "lifo": numbers[::-1], "random": random.Random(1).sample(numbers, len(numbers))}[order]
    wrong = []

    def take(mine):
        wrong.extend(number for number in mine if not np.array_equal(vault.get(tickets[number]), contents[number]))

    threads = [threading.Thread(target=take, args=(numbers[start::3],)) for start in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_places_are_made_once(vault):
    contents = blocks()
    for number in range(5):
        tickets = [vault.put("block", block) for block in contents]
        for ticket in reversed(tickets):
            vault.get(ticket)
            vault.drop(ticket)
        del tickets
        if number == 0:
            size = vault.nbytes
    assert vault.nbytes == size <= len(contents) * 4 * MIB


def places(vault, tickets):
    """The messages, where they wait, as arrays that can be altered."""
    if vault._store is None:
        return [ticket._place for ticket in tickets]
    found = []
    for ticket in tickets:
        found.append(np.frombuffer(bytearray(vault._store[ticket._place.name]), np.uint8))
        dict.__setitem__(vault._store, ticket._place.name, found[-1])
    return found


def refused(vault, ticket):
    out = np.full(ticket.shape, 1, np.uint8)
    with pytest.raises(AuthenticationError, match=r"'block'.*altered, lost or swapped") as caught:
        vault.get(ticket, out=out)
    assert not out.any()
    assert caught.value.tensor == "block"


def test_an_altered_message_does_not_open(vault):
    ticket = vault.put("block", blocks(1)[0])
    [place] = places(vault, [ticket])
    for byte in (0, 30, 56, 60_000, place.size // 2, place.size - 1):
        place[byte] ^= 1
        refused(vault, ticket)
        place[byte] ^= 1
    assert np.array_equal(vault.get(ticket), blocks(1)[0])


def test_neither_another_nor_an_older_message_opens(vault):
    """Each is of the same name, dtype and shape."""
    first, second, third = blocks(3)
    tickets = [vault.put("block", first), vault.put("block", second)]
    one, other = places(vault, tickets)
    older = one.copy()
    one[:], other[:] = other.copy(), one.copy()
    refused(vault, tickets[0])
    refused(vault, tickets[1])
    del one, other
    vault.drop(tickets[0])
    again = vault.put("block", third)
    [place] = places(vault, [again])
    newer, place[:] = place.copy(), older
    refused(vault, again)
    place[:] = newer
    assert np.array_equal(vault.get(again), third)


def test_a_store_that_loses_cuts_or_extends_is_refused():
    with fastrack.Vault(Recording()) as vault:
        ticket = vault.put("block", blocks(1)[0])
        [name] = vault._store
        content = vault._store.pop(name)
        refused(vault, ticket)
        for other in (b"", content[:-1], content + b"\0"):
            vault._store[name] = other
            refused(vault, ticket)
        vault._store[name] = content
        assert np.array_equal(vault.get(ticket), blocks(1)[0])


def test_no_plaintext_waits(vault):
    secret = np.frombuffer(CANARY * 40_000, np.uint8)
    ticket = vault.put("block", secret)
    [place] = places(vault, [ticket])
    assert CANARY not in place.tobytes()
    if vault._store is not None:
        assert not any(CANARY in bytes(content) for content in vault._store.written)
    assert vault.get(ticket).tobytes() == secret.tobytes()


def test_files_have_no_names_and_hold_the_messages(tmp_path):
    with fastrack.Vault(tmp_path) as vault:
        vault.put("block", blocks(1)[0])
        assert list(tmp_path.iterdir()) == []
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        assert any(str(tmp_path) in line and "deleted" in line for line in maps)


def test_what_is_dropped_leaves_the_store_and_so_does_all_at_the_end():
    store = Recording()
    vault = fastrack.Vault(store)
    kept, dropped, forgotten = (vault.put("block", block) for block in blocks(3))
    vault.drop(dropped)
    assert len(store) == 2
    with pytest.raises(ClosedError, match="dropped"):
        vault.get(dropped)
    del forgotten
    gc.collect()
    vault.drop(dropped)
    assert len(store) == 1
    vault.close()
    assert not store
    with pytest.raises(ClosedError, match="closed"):
        vault.get(kept)
    with pytest.raises(ClosedError, match="closed"):
        vault.put("x", np.ones(2))
    assert repr(vault) == "<Vault, closed>"


class Failing(Recording):
    def __setitem__(self, name, content):
        super().__setitem__(name, content[:9])
        raise OSError(errno.EIO, "the store is broken")


def test_a_store_that_fails_is_heard_and_keeps_nothing():
    store = Failing()
    vault = fastrack.Vault(store)
    with pytest.raises(OSError, match="broken"):
        vault.put("block", np.ones(3))
    gc.collect()
    vault.close()
    assert not store


def test_a_full_disk_is_heard_and_what_waits_stays(tmp_path, monkeypatch):
    vault = fastrack.Vault(tmp_path)
    ticket, size = vault.put("block", blocks(1)[0]), vault.nbytes

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space"):
            vault.put("larger", np.zeros(9 * MIB, np.uint8))
    assert vault.nbytes == size
    assert np.array_equal(vault.get(ticket), blocks(1)[0])
    vault.put("larger", np.zeros(9 * MIB, np.uint8))


def test_a_folder_that_is_missing_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        fastrack.Vault(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        fastrack.Vault(str(tmp_path / "file"))
    with pytest.raises(TypeError, match="store="):
        fastrack.Vault(7)


def test_tickets_of_other_vaults_and_processes_are_refused(vault):
    other = fastrack.Vault()
    ticket, foreign = vault.put("block", blocks(1)[0]), other.put("block", blocks(1)[0])
    with pytest.raises(ValueError, match="of this vault"):
        vault.get(foreign)
    vault.drop(foreign)
    assert other.get(foreign).size == foreign.nbytes

    def child():
        with pytest.raises(ValueError, match="this process"):
            vault.get(ticket)
        own = vault.put("block", blocks(2)[1])
        assert np.array_equal(vault.get(own), blocks(2)[1])
        vault.drop(own)
        vault.drop(ticket)
        vault.close()
        return vault.nbytes

    assert in_forked_child(child) > 0
    assert np.array_equal(vault.get(ticket), blocks(1)[0])
    for each in (vault, ticket):
        with pytest.raises(TypeError, match="pickling"):
            pickle.dumps(each)


@pytest.mark.slow
def test_a_place_is_not_used_again_while_somebody_reads_it(vault):
    """Threads put, get and drop at random: a ticket that another thread dropped is closed, or opens as what it was."""
    contents, wrong, shared = blocks(4, MIB + 7), [], {}
    gone = (ClosedError,) if vault._store is None else (ClosedError, AuthenticationError)  # of the store between
    end = time.monotonic() + 0.7

    def step(choose):
        number = choose.randrange(len(contents))
        ticket = shared.get(number)
        if ticket is None or choose.random() < 0.3:
            shared[number] = vault.put("block", contents[number])
            return ticket is None or vault.drop(ticket)
        with contextlib.suppress(*gone):
            return np.array_equal(vault.get(ticket), contents[number]) or wrong.append(number)

    def work(seed):
        choose = random.Random(seed)
        while time.monotonic() < end:
            step(choose)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [None] * 4
    assert wrong == []


def test_a_result_keeps_its_memory_while_anything_views_it():
    vault = fastrack.Vault()
    first, second = blocks(2)
    found = torch.from_numpy(vault.get(vault.put("block", first)))[5:].view(-1)
    address = found.data_ptr() - 5
    assert vault.get(vault.put("block", second)).ctypes.data != address
    assert np.array_equal(found.numpy(), first[5:])
    del found
    assert vault.get(vault.put("block", second)).ctypes.data == address


def test_prefetch_opens_in_any_order_and_can_be_cancelled(vault):
    contents = blocks()
    tickets = [vault.put(f"block {number}", block) for number, block in enumerate(contents)]
    with vault.prefetch(tickets) as ahead:
        assert np.array_equal(ahead.take(tickets[4]), contents[4])
        assert [ticket.name for ticket, _ in ahead] == [f"block {number}" for number in (0, 1, 2, 3, 5)]
        with pytest.raises(KeyError, match="'block 4': expected one of the plan that was not taken"):
            ahead.take(tickets[4])
    ahead = vault.prefetch(tickets)
    ahead.take(tickets[1])
    ahead.close()
    with pytest.raises(ClosedError):
        ahead.take(tickets[2])
    assert np.array_equal(vault.get(tickets[2]), contents[2])


@pytest.mark.parametrize("place", ["_submit", "_open", "result"])
def test_what_was_interrupted_is_taken_again(vault, monkeypatch, place):
    contents = blocks()
    tickets = [vault.put(f"block {number}", block) for number, block in enumerate(contents)]

    def interrupt(*_):
        raise KeyboardInterrupt

    with vault.prefetch(tickets) as ahead:
        if place == "_open":
            ahead._ahead.clear()
        with monkeypatch.context() as patch:
            patch.setattr(*((Future, place) if place == "result" else (ahead, place)), interrupt)
            patch.setattr(Future, "cancel", lambda _: False)
            with pytest.raises(KeyboardInterrupt):
                ahead.take(tickets[0])
        assert [ticket.name for ticket in ahead.names()] == [f"block {number}" for number in range(6)]
        for (_, found), block in zip(ahead, contents, strict=True):
            assert np.array_equal(found, block)


def test_a_failure_ahead_is_raised_where_it_is_taken_or_at_the_end(vault):
    tickets = [vault.put("block", block) for block in blocks(3)]
    [place] = places(vault, tickets[1:2])
    place[99] ^= 1
    with vault.prefetch(tickets) as ahead:
        ahead.take(tickets[0])
        with pytest.raises(AuthenticationError, match="'block'"):
            ahead.take(tickets[1])
        ahead.take(tickets[2])


def test_a_forked_child_takes_what_was_to_open_ahead(vault):
    contents = blocks()
    tickets = [vault.put(f"block {number}", block) for number, block in enumerate(contents)]
    ahead = vault.prefetch(tickets)

    def child():
        with pytest.raises(ValueError, match="this process"):  # it does not wait for the thread of its parent
            ahead.take(tickets[5])
        ahead.close()
        return True

    assert in_forked_child(child, seconds=20)
    assert np.array_equal(ahead.take(tickets[5]), contents[5])
    ahead.close()


def test_many_places_in_files_take_no_descriptors(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with fastrack.Vault(tmp_path) as vault:
        tickets = [vault.put("small", np.full(9, number)) for number in range(300)]
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
        assert all(vault.get(ticket)[0] == number for number, ticket in enumerate(tickets))


def test_a_folder_is_that_of_the_beginning(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    vault = fastrack.Vault("here")
    monkeypatch.chdir("/")
    assert vault.get(vault.put("x", np.ones(2))).tolist() == [1, 1]


class Stubborn(Recording):
    """A store that fails to remove anything until it is told to."""

    is_broken = True

    def __delitem__(self, name):
        if self.is_broken:
            raise OSError(errno.EIO, "the store is broken")
        super().__delitem__(name)


def test_what_a_store_failed_to_remove_is_removed_by_the_next_call():
    store = Stubborn()
    vault = fastrack.Vault(store)
    ticket = vault.put("x", np.ones(2))
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            vault.drop(ticket)
    store.is_broken = False
    vault.drop(ticket)
    assert not store


class Closing(Recording):
    def __setitem__(self, name, content):
        super().__setitem__(name, content)
        self.vault.close()


def test_a_vault_that_is_closed_meanwhile_leaves_nothing_in_the_store():
    store = Closing()
    store.vault = fastrack.Vault(store)
    with pytest.raises(ClosedError):
        store.vault.put("x", np.ones(2))
    assert not store


@pytest.mark.parametrize(
    "content", ["text", None, [1], memoryview(bytes(400))[::2]], ids=lambda content: type(content).__name__
)
def test_a_store_that_returns_no_bytes_is_refused(content):
    with fastrack.Vault(Recording()) as vault:
        ticket = vault.put("block", np.zeros(3, np.uint8))
        [name] = vault._store
        vault._store[name] = content
        refused(vault, ticket)


def test_values_and_keys_are_in_no_message(vault):
    ticket = vault.put("block", np.full(3, 77.25))
    assert (type(ticket), repr(ticket), repr(vault)) == (fastrack.Ticket, "<Ticket 'block' F64 [3]>", "<Vault>")
    with pytest.raises(TypeError, match="expected a NumPy"):
        vault.put("x", [1, 2])
    with pytest.raises(TypeError, match="name"):
        vault.put(np.ones(2), "x")


def test_slots_take_at_most_twice_what_was_in_use_at_once():
    slots = Slots()
    for size in (5 * MIB, 2 * MIB, 9 * MIB, MIB, 3 * MIB):
        held = slots.take(size)
        assert held.size == size
        del held
    assert slots.nbytes <= 2 * 9 * MIB * 9 / 8
    with pytest.raises(MemoryError):
        slots.take(1 << 60)
    assert slots.nbytes <= 2 * 9 * MIB * 9 / 8
    slots.take(4 * MIB)
    assert slots.nbytes <= 2 * 9 * MIB * 9 / 8
    several = [slots.take(MIB) for _ in range(20)]
    assert slots.nbytes <= 2 * 20 * MIB * 9 / 8
    assert len({part.ctypes.data for part in several}) == 20
