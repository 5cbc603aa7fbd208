"""Blocks of paged memory as messages of `BlockSealer`, gathered from pieces and put back, or cleared and told."""

import os
import threading

import numpy as np
import pytest

from fastrack import Key
from fastrack._crypto.engine import get_engine
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.host import HostPages
from fastrack.errors import ClosedError, DeviceError
from fastrack.format import HEADER_SIZE, message_size
from fastrack.kv import BlockContext, BlockSealer, _paged
from fastrack.kv._paged import PagedSealer

BLOCKS = 6
HERE = BlockContext("llama@1", "bfloat16", "0 of 1", b"tokens")


class Server:
    """Caches of two groups of other sizes, whose blocks lie in pieces: arrays with a stride, apart and interleaved."""

    def __init__(self, key, pages=HostPages):
        random = np.random.default_rng(0)
        self.keys = random.integers(1, 256, (BLOCKS, 20_000), np.uint8)  # K and V apart, blocks one after the other
        self.values = random.integers(1, 256, (BLOCKS, 20_000), np.uint8)
        self.packed = random.integers(1, 256, (BLOCKS, 3, 48), np.uint8)  # layers interleaved, of which two are taken
        self.groups = [
            [Piece(each.ctypes.data, each.strides[0], each.shape[1]) for each in (self.keys, self.values)],
            [Piece(self.packed[:, layer].ctypes.data, self.packed.strides[0], 48) for layer in (2, 0)],
        ]
        self.pages = pages(self.groups, get_engine(threads=1))
        self.paged = PagedSealer(self.pages, key)

    def plain(self, block):
        if block.group:
            return self.packed[block.number, [2, 0]].tobytes()
        return self.keys[block.number].tobytes() + self.values[block.number].tobytes()

    def copy(self):
        return [each.copy() for each in (self.keys, self.values, self.packed)]

    def messages(self, blocks):
        return [np.full(message_size(self.pages.sizes()[block.group]), 7, np.uint8) for block in blocks]


@pytest.fixture
def server(key):
    made = Server(key)
    yield made
    made.paged.close()


ALL = [PagedBlock(group, number) for group in (0, 1) for number in (3, 0, 5)]
CONTEXTS = [HERE._replace(hash=bytes([group, number])) for group, number in ALL]


def test_blocks_of_pages_are_messages_of_the_sealer_and_the_reverse(server, key):
    sealer, messages = BlockSealer(key), server.messages(ALL)
    assert server.pages.sizes() == [40_000, 96]
    assert server.paged.store(CONTEXTS, ALL, messages).result() == [True] * len(ALL)
    for context, block, message in zip(CONTEXTS, ALL, messages, strict=True):
        opened = bytearray(server.pages.sizes()[block.group])
        assert sealer.open(context, message, opened)
        assert opened == server.plain(block)
    plain = [bytes(reversed(server.plain(block))) for block in ALL]
    for context, block, message in zip(CONTEXTS, plain, messages, strict=True):
        sealer.seal(context, block, message)
    before = server.copy()
    assert server.paged.load(CONTEXTS, ALL, messages).result() == [True] * len(ALL)
    assert [server.plain(block) for block in ALL] == plain
    others = sorted(set(range(BLOCKS)) - {3, 0, 5})
    for now, then in zip(server.copy(), before, strict=True):
        assert (now[others] == then[others]).all()  # the blocks that were not named
    assert (server.packed[:, 1] == before[2][:, 1]).all()  # the layer that is not in the group
    assert dict(server.paged.sealer.counts) == {"sealed": 6, "opened": 6}


@pytest.mark.parametrize("place", [0, 30, HEADER_SIZE, HEADER_SIZE + 20_000, -1])
@pytest.mark.parametrize("bad", [{0}, {1, 4}, set(range(6))])
def test_exactly_the_blocks_that_are_bad_are_cleared_and_told(server, place, bad):
    messages = server.messages(ALL)
    server.paged.store(CONTEXTS, ALL, messages).result()
    plain, before = [server.plain(block) for block in ALL], server.copy()
    for number in bad:
        messages[number][min(place, messages[number].size - 1)] ^= 1
    server.keys[[3, 0, 5]] = server.values[[3, 0, 5]] = 9
    server.packed[[3, 0, 5]] = 9
    found = server.paged.load(CONTEXTS, ALL, messages).result()
    assert found == [number not in bad for number in range(len(ALL))]
    for number, block in enumerate(ALL):
        expected = bytes(len(plain[number])) if number in bad else plain[number]
        assert server.plain(block) == expected
    assert (server.keys[1] == before[0][1]).all()
    assert server.paged.sealer.counts["refused"] == len(bad)


def test_swapped_blocks_and_those_of_another_context_or_key_are_cleared(server):
    messages = server.messages(ALL)
    server.paged.store(CONTEXTS, ALL, messages).result()
    swapped = [messages[1], messages[0], *messages[2:]]
    assert server.paged.load(CONTEXTS, ALL, swapped).result() == [False, False, True, True, True, True]
    assert not any(server.plain(ALL[0]))
    assert not any(server.plain(ALL[1]))
    for member in ("model", "layout", "ranks", "salt"):
        others = [context._replace(**{member: "another"}) for context in CONTEXTS]
        assert server.paged.load(others, ALL, messages).result() == [False] * 6
        assert not any(any(server.plain(block)) for block in ALL)
    server.paged.sealer.key = Key.generate()
    assert server.paged.load(CONTEXTS, ALL, messages).result() == [False] * 6


class Broken(HostPages):
    """Pages of a device that fails once it has done its work, or that waits."""

    fails = False
    turn = threading.Event()
    turn.set()

    def seal(self, *arguments):
        self.turn.wait(10)
        super().seal(*arguments)
        self.fail()

    def open(self, *arguments):
        found = super().open(*arguments)
        self.fail()
        return found

    def fail(self):
        if self.fails:
            raise DeviceError("a launch was lost")


@pytest.fixture
def broken(key):
    made = Server(key, Broken)
    yield made
    made.paged.close()


def test_a_device_that_fails_leaves_messages_that_do_not_open_and_raises_nothing(broken, monkeypatch):
    messages = broken.messages(ALL)
    monkeypatch.setattr(Broken, "fails", True)
    assert broken.paged.store(CONTEXTS, ALL, messages).result() == [False] * 6
    monkeypatch.setattr(Broken, "fails", False)
    assert broken.paged.load(CONTEXTS, ALL, messages).result() == [False] * 6
    assert broken.paged.store(CONTEXTS, ALL, messages).result() == [True] * 6
    monkeypatch.setattr(Broken, "fails", True)
    assert broken.paged.load(CONTEXTS, ALL, messages).result() == [False] * 6
    assert dict(broken.paged.sealer.counts) == {"unstored": 6, "refused": 6, "sealed": 6, "failed": 6}


@pytest.mark.parametrize("error", [DeviceError, ClosedError])
def test_a_device_without_a_mark_of_the_callers_work_moves_no_block_and_raises_nothing(broken, monkeypatch, error):
    messages, before = broken.messages(ALL), broken.copy()

    def mark(_):
        raise error("it does not answer")

    monkeypatch.setattr(Broken, "mark", mark)
    assert broken.paged.store(CONTEXTS, ALL, messages).result(0) == [False] * 6
    assert broken.paged.load(CONTEXTS, ALL, messages).result(0) == [False] * 6
    assert all(np.array_equal(each, old) for each, old in zip(broken.copy(), before, strict=True))
    assert dict(broken.paged.sealer.counts) == {"failed": 12}


def test_loads_do_not_wait_for_stores_and_the_end_waits_for_both(broken, monkeypatch):
    messages = broken.messages(ALL)
    broken.paged.store(CONTEXTS, ALL, messages).result()
    monkeypatch.setattr(Broken, "turn", turn := threading.Event())
    waiting = broken.paged.store(CONTEXTS, ALL, broken.messages(ALL))
    assert broken.paged.load(CONTEXTS, ALL, messages).result(10) == [True] * 6
    assert not waiting.done()
    threading.Timer(0.1, turn.set).start()
    broken.paged.close()
    assert waiting.result(0) == [True] * 6


def test_no_plaintext_stays_in_memory_that_blocks_pass_through(server):
    messages = server.messages(ALL)
    server.paged.store(CONTEXTS, ALL, messages).result()
    server.paged.load(CONTEXTS, ALL, messages).result()
    memories = server.paged._pages._memory.values()
    assert all(memory.any() for memory in memories)
    server.paged.close()
    assert not any(memory.any() for memory in memories)


def test_a_forked_child_has_threads_of_its_own(server):
    messages = server.messages(ALL)
    server.paged.store(CONTEXTS, ALL, messages).result()
    child = os.fork()
    if not child:
        is_right = server.paged.load(CONTEXTS, ALL, messages).result(20) == [True] * 6
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_without_memory_for_keys_stores_and_loads_nothing(server, monkeypatch):
    messages = server.messages(ALL)
    server.paged.store(CONTEXTS, ALL, messages).result()
    made = _paged.MessageKeys

    def keys(count):
        if count:
            raise MemoryError
        return made(count)

    monkeypatch.setattr(_paged, "MessageKeys", keys)
    assert server.paged.store(CONTEXTS, ALL, server.messages(ALL)).result() == [False] * 6
    assert server.paged.load(CONTEXTS, ALL, messages).result() == [False] * 6
