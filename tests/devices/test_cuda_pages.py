"""Blocks of a server's arrays on a GPU made for tests: sealed from their pieces, opened into them, and lost."""

import itertools
import threading
from contextlib import suppress

import numpy as np
import pytest
from helpers import reference
from helpers.cuda_rig import MULTIPROCESSORS, within
from helpers.fake_cuda import CONFIDENTIAL, MODES, FakeArray, FakeDriver
from helpers.forking import in_forked_child
from helpers.paged import LAYOUTS, pieces_of

from fastrack import DeviceError
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.message_keys import MessageKeys
from fastrack._devices.cuda.device import CudaDevice
from fastrack._devices.paged.base import PagedBlock, Piece
from fastrack._devices.paged.cuda import CudaPages
from fastrack.format import SEALED_CHUNK_SIZE, ciphertext_size

EVERY = (*MODES, "held")
SLAB = 8 * SEALED_CHUNK_SIZE


class Cache:
    """Groups of arrays on a device made for tests, and the blocks that lie in them."""

    def __init__(
        self, mode="lazy", seed=0, groups=((("LBHNC"), 5, 2, 2),), blocks=9, slab=SLAB, tokens=16, content=256
    ):
        self.driver = FakeDriver(mode, seed, MULTIPROCESSORS)
        self.device = CudaDevice(self.driver)
        self.random, self.blocks = np.random.default_rng(seed), blocks
        self.arrays, self.groups = [], []
        for layout, layers, heads, width in groups:
            outer, size = pieces_of(layout, L=layers, H=heads, N=tokens, C=content * width)
            array = FakeArray(self.driver, "V16", (outer * blocks * size // 16,))  # at a multiple of 16
            self.arrays.append((array, outer, size))
            self.groups.append([Piece(array.pointer + place * blocks * size, size, size) for place in range(outer)])
        self.fill()
        self.pages = CudaPages(self.device.resources, self.groups, self.arrays[0][0], slab)

    def bytes_of(self, group):
        array, outer, size = self.arrays[group]
        return self.driver.space.at(array.pointer, array.nbytes).reshape(outer, self.blocks, size)

    def fill(self):
        for group in range(len(self.arrays)):
            self.bytes_of(group)[:] = self.random.integers(0, 256, self.bytes_of(group).shape, np.uint8)

    def plain(self, block):
        return self.bytes_of(block.group)[:, block.number].tobytes()

    def every(self, count=None):
        return [PagedBlock(group, number) for number in range(self.blocks) for group in range(len(self.groups))][:count]

    def keys(self, count, bits=256):
        pairs = [(self.random.bytes(bits // 8), self.random.bytes(12)) for _ in range(count)]
        return pairs, MessageKeys.of([MessageKey.raw(*pair) for pair in pairs])

    def targets(self, blocks):
        return [np.full(ciphertext_size(self.pages.sizes()[block.group]), 7, np.uint8) for block in blocks]

    def stored(self, blocks, bits=256):
        """Seal blocks, and return their keys and ciphertexts."""
        _, keys = self.keys(len(blocks), bits)
        sealed = self.targets(blocks)
        self.pages.seal(keys, blocks, sealed, self.pages.mark())
        return keys, sealed

    def counted(self, action):
        before = self.driver.calls.copy()
        result = within(60, action)
        made = self.driver.calls - before
        return result, (made["upload"], made["download"], made["launch"] + made["fill"])

    def close(self):
        within(60, self.pages.close)
        within(60, self.device.close)
        self.driver.stop()
        assert self.driver.violations == []


@pytest.fixture
def make():
    made = []

    def cache(*arguments, **options):
        made.append(Cache(*arguments, **options))
        return made[-1]

    yield cache
    for each in made:
        each.close()


@pytest.mark.parametrize("heads", [1, 4], ids=["MLA", "MHA"])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_every_layout_are_sealed_as_messages_and_opened_in_other_places(make, layout, width, heads):
    cache = make(mode="threads", groups=[(layout, 3, heads, width), (layout, 2, heads, 2 * width)])
    blocks = cache.every()
    pairs, keys = cache.keys(len(blocks), 128 * width)
    sealed = cache.targets(blocks)
    cache.pages.seal(keys, blocks, sealed, cache.pages.mark())
    plain = [cache.plain(block) for block in blocks]
    assert [each.tobytes() for each in sealed] == [
        reference.seal(*pair, text) for pair, text in zip(pairs, plain, strict=True)
    ]
    cache.fill()
    places = [PagedBlock(group, cache.blocks - 1 - number) for group, number in blocks]
    assert cache.pages.open(keys, places, sealed, cache.pages.mark()) == [True] * len(blocks)
    assert [cache.plain(place) for place in places] == plain


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize("seed", range(3))
def test_many_slabs_go_and_come_back_in_any_order_of_streams(make, mode, seed):
    cache = make(mode=mode, seed=seed, blocks=40)
    blocks = [block for block in cache.every() if block.number % 3]
    keys, sealed = cache.stored(blocks)
    before = cache.bytes_of(0).copy()
    cache.fill()
    left = cache.bytes_of(0)[:, ::3].copy()
    assert all(cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
    for block in blocks:
        assert cache.plain(block) == before[:, block.number].tobytes()
    assert np.array_equal(cache.bytes_of(0)[:, ::3], left)


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.parametrize("bad", [{0}, {7}, {12}, {0, 7, 12}, set(range(13))], ids=str)
@pytest.mark.slow
def test_exactly_the_bad_blocks_are_told_and_hold_zeros(make, mode, bad):
    cache = make(mode=mode, blocks=13)
    blocks = cache.every()
    keys, sealed = cache.stored(blocks)
    plain = [cache.plain(block) for block in blocks]
    for number in bad:
        sealed[number][cache.random.integers(sealed[number].size)] ^= 1
    for _ in range(2):  # the second call finds no trace of the first
        cache.fill()
        good = cache.pages.open(keys, blocks, sealed, cache.pages.mark())
        assert {number for number, is_good in enumerate(good) if not is_good} == bad
        for number, block in enumerate(blocks):
            assert cache.plain(block) == (bytes(len(plain[number])) if number in bad else plain[number])
    _, sealed = cache.stored(blocks)
    assert not any((each == 7).all() for each in sealed)


def test_blocks_that_changed_places_are_told(make):
    cache = make()
    blocks = cache.every()
    keys, sealed = cache.stored(blocks)
    sealed[2], sealed[3] = sealed[3], sealed[2]
    good = cache.pages.open(keys, blocks, sealed, cache.pages.mark())
    assert [number for number, is_good in enumerate(good) if not is_good] == [2, 3]


@pytest.mark.parametrize("mode", EVERY)
def test_copies_launches_and_fills_are_what_was_agreed_on(make, mode):
    """32 layers of K and V by 100 blocks, whose sizes are a 64th: a slab has as many blocks as one of 32 MiB."""
    cache = make(mode=mode, groups=[("LHBNC", 32, 2, 1)], blocks=100, slab=1 << 19, tokens=1, content=512)
    blocks = cache.every()
    cache.stored(blocks[:2])
    (keys, sealed), cost = cache.counted(lambda: cache.stored(blocks))
    assert cost == (1, 7, 9)
    _, cost = cache.counted(lambda: cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
    assert cost == (7, 1, 9)
    (keys, sealed), cost = cache.counted(lambda: cache.stored(blocks[:13]))
    assert cost == (1, 1, 3)
    _, cost = cache.counted(lambda: cache.pages.open(keys, blocks[:13], sealed, cache.pages.mark()))
    assert cost == (1, 1, 3)


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("kernel", ["unwrap", "keep", "restore"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_lost_launch_is_told_and_nothing_is_taken_for_done(make, opens, kernel, number):
    if kernel == ("keep" if opens else "restore") or (kernel == "unwrap" and number):
        pytest.skip("the call has no such launch")
    cache = make(mode="serial", blocks=40)
    blocks = cache.every()
    keys, sealed = cache.stored(blocks)
    plain = [cache.plain(block) for block in blocks]
    launch, left = cache.driver.launch, [number]

    def lose(function, *arguments):
        name = list(cache.driver.functions)[function]
        left[0] -= name.startswith(kernel)
        if left[0] != -1 or not name.startswith(kernel):
            launch(function, *arguments)

    cache.driver.launch = lose
    if opens:
        assert not any(cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
        assert not cache.bytes_of(0).any()
    else:
        with pytest.raises(DeviceError, match="has not run all that seals"):
            cache.pages.seal(keys, blocks, sealed, cache.pages.mark())
        assert not any(each.any() for each in sealed)
    cache.driver.launch = launch
    cache.fill()
    plain = [cache.plain(block) for block in blocks]
    keys, sealed = cache.stored(blocks)
    assert all(cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
    assert [cache.plain(block) for block in blocks] == plain


@pytest.mark.parametrize("opens", [False, True])
def test_after_a_call_that_fails_nothing_is_taken_for_done_and_the_next_works(make, opens):
    cache = make(mode="serial", blocks=10)
    blocks = cache.every()
    keys, sealed = cache.stored(blocks)
    for number in itertools.count(1):
        cache.driver.fail_at(number)
        targets = []
        with suppress(DeviceError):
            mark = cache.pages.mark()
            targets = cache.targets(blocks)
            if opens:
                cache.pages.open(keys, blocks, sealed, mark)
            else:
                cache.pages.seal(keys, blocks, targets, mark)
        assert opens or cache.driver.failed is None or not any(each.any() for each in targets)
        cache.driver.finish()
        if cache.driver.failed is None:
            break
    cache.driver.fail_at(0)
    assert number > 10
    cache.fill()
    plain = [cache.plain(block) for block in blocks]
    keys, sealed = cache.stored(blocks)
    assert all(cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
    assert [cache.plain(block) for block in blocks] == plain


@pytest.mark.parametrize("mode", CONFIDENTIAL)
def test_no_copy_is_issued_behind_the_work_of_a_model(make, mode):
    cache = make(mode=mode)
    blocks, busy = cache.every(), threading.Event()
    keys, _ = cache.stored(blocks)
    cache.driver.later(busy.wait)
    before, marks = cache.driver.calls.copy(), []
    within(20, lambda: marks.append(cache.pages.mark()))  # does not wait
    thread = threading.Thread(target=cache.pages.seal, args=(keys, blocks, cache.targets(blocks), marks[0]))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert (cache.driver.calls - before)["download"] == 0
    # Another call's copies are not kept waiting.
    within(20, lambda: cache.device.staging_buffer(4096).wipe())
    busy.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_block_is_read_after_the_work_before_its_mark(make):
    cache = make(mode="lazy")
    blocks = cache.every()
    cache.driver.later(cache.fill)
    _, keys = cache.keys(len(blocks))
    sealed = cache.targets(blocks)
    cache.pages.seal(keys, blocks, sealed, cache.pages.mark())
    plain = [cache.plain(block) for block in blocks]
    cache.driver.later(cache.fill)  # before it is opened
    assert all(cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
    assert [cache.plain(block) for block in blocks] == plain


def test_nothing_of_a_block_or_a_key_stays_in_page_locked_memory(make):
    cache = make(mode="threads")
    blocks = cache.every()
    pairs, keys = cache.keys(len(blocks))
    sealed = cache.targets(blocks)
    cache.pages.seal(keys, blocks, sealed, cache.pages.mark())
    assert all(cache.pages.open(keys, blocks, sealed, cache.pages.mark()))
    cache.driver.finish()
    assert not any(cache.driver.holds(secret) for secret, _ in pairs)
    hosts = [block.tobytes() for block in cache.driver.hosts()]
    assert any(sealed[-1].tobytes()[:64] in block for block in hosts)  # the search finds what is there
    assert not any(cache.plain(block)[:64] in host for block in blocks for host in hosts)


def test_a_forked_child_is_refused(make):
    cache = make(mode="serial")

    def child():
        try:
            cache.pages.mark()
        except DeviceError as error:
            return str(error)

    assert "forked" in in_forked_child(child)


def test_a_call_of_other_numbers_or_sizes_is_refused(make):
    cache = make()
    blocks = cache.every(2)
    keys, sealed = cache.stored(blocks)
    with pytest.raises(ValueError, match="other numbers"):
        cache.pages.open(keys, blocks[:1], sealed, cache.pages.mark())
    with pytest.raises(ValueError, match="another size"):
        cache.pages.open(keys, blocks, [sealed[0], sealed[1][:-1]], cache.pages.mark())


@pytest.mark.parametrize("odd", [(8, 64, 64), (0, 72, 64), (0, 64, 40)])
def test_pieces_that_the_kernels_cannot_take_are_refused_at_the_start(make, odd):
    cache = make()
    address, stride, size = odd
    groups = [*cache.groups, [Piece(cache.arrays[0][0].pointer + address, stride, size)]]
    with pytest.raises(ValueError, match="multiples of 16"):
        CudaPages(cache.device.resources, groups, cache.arrays[0][0])


def test_marks_use_their_events_again(make, monkeypatch):
    """A driver destroys an event only when memory is taken, which a server that stores and loads never does."""
    cache, made = make(), []
    blocks = cache.every(4)
    keys, sealed = cache.stored(blocks)
    sealed[1][5] ^= 1
    assert cache.pages.open(keys, blocks, sealed, cache.pages.mark()) == [True, False, True, True]
    event = cache.driver.event
    monkeypatch.setattr(
        cache.driver, "event", lambda *arguments, **options: made.append(1) or event(*arguments, **options)
    )
    for _ in range(5):
        cache.stored(blocks)
        cache.pages.open(keys, blocks, sealed, cache.pages.mark())
    assert not made
    first, second = cache.pages.mark(), cache.pages.mark()
    assert first.event is not second.event
