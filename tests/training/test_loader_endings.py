"""However an iteration of a wrapped loader ends, it leaves nothing behind, and its errors come where they belong."""

import gc
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import own_channels
from helpers.cases import each
from helpers.cuda_on_host import in_confidential_mode
from helpers.loading import PATIENCE, Numbers, fail_on_five, loader_threads, threads_left, wait_until
from helpers.staged import Gate, fail_at, staged_channel
from helpers.tampering import tampered
from torch.utils.data import DataLoader

import fastrack
import fastrack._training.prefetch
import fastrack._transfer.api
from fastrack import AuthenticationError, DeviceError, Key, wrap


@pytest.fixture(params=[0, 1, 2, 5])
def prefetch(request):
    return request.param


@pytest.fixture(params=[1, 3])
def ahead(request):
    """A prefetch that takes a thread."""
    return request.param


@pytest.fixture(autouse=True)
def _leave_no_thread():
    yield
    assert not threads_left()


class Watched:
    """A loader that knows how many of its iterators there are, and what was fetched."""

    def __init__(self, count, fail=lambda i: None):
        self.count, self.fail = count, fail
        self.alive, self.fetched = 0, []

    def __iter__(self):
        return WatchedIterator(self)


class WatchedIterator:
    def __init__(self, loader):
        self.loader = loader
        self.next = 0
        loader.alive += 1

    def __iter__(self):
        return self

    def __next__(self):
        number = self.next
        self.next += 1
        if number == self.loader.count:
            raise StopIteration
        self.loader.fetched.append(number)
        self.loader.fail(number)
        return number

    def __del__(self):
        self.loader.alive -= 1


class TestEndings:
    def test_by_the_last_batch(self, prefetch):
        loader = Watched(5)
        iterator = iter(wrap(loader, prefetch=prefetch))
        assert list(iterator) == [0, 1, 2, 3, 4]
        assert not loader_threads()  # at once
        assert loader.alive == 0
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        iterator.close()
        assert list(iterator) == []

    def test_by_break(self, prefetch):
        loader = Watched(1000)
        for i in wrap(loader, prefetch=prefetch):
            if i == 3:
                break
        assert not threads_left()
        assert loader.alive == 0
        assert len(loader.fetched) <= 4 + prefetch

    @each("fetched", [0, 1])
    def test_by_del(self, prefetch, fetched):
        loader = Watched(1000)
        iterator = iter(wrap(loader, prefetch=prefetch))
        assert [next(iterator) for _ in range(fetched)] == list(range(fetched))
        del iterator
        assert not threads_left()
        assert loader.alive == 0

    def test_by_garbage_collection(self, prefetch):
        loader = Watched(1000)
        ring = [iter(wrap(loader, prefetch=prefetch))]
        next(ring[0])
        ring.append(ring)
        reference = weakref.ref(ring[0])
        del ring
        gc.collect()
        assert reference() is None
        assert not threads_left()
        assert loader.alive == 0

    def test_by_closing(self, prefetch):
        loader = Watched(1000)
        iterator = iter(wrap(loader, prefetch=prefetch))
        next(iterator)
        iterator.close()
        assert not loader_threads()  # at once
        assert loader.alive == 0
        assert list(iterator) == []
        iterator.close()

    def test_by_an_exception_in_the_loop(self, prefetch):
        loader = Watched(1000)

        def train():
            for i in wrap(loader, prefetch=prefetch):
                1 / (3 - i)

        with pytest.raises(ZeroDivisionError):
            train()
        gc.collect()  # the frames of the error hold the iterator
        assert not threads_left()
        assert loader.alive == 0

    def test_while_a_batch_is_fetched_fetch_no_other(self, ahead):
        may_go = threading.Event()
        loader = Watched(100, lambda i: i < 1 or may_go.wait(PATIENCE))
        iterator = iter(wrap(loader, prefetch=ahead))
        assert next(iterator) == 0
        wait_until(lambda: 1 in loader.fetched)
        del iterator  # does not wait
        assert loader_threads()
        may_go.set()
        assert not threads_left()
        assert loader.fetched == [0, 1]

    def test_while_a_batch_is_fetched_let_the_next_iteration_wait(self, ahead):
        """Workers that persist serve one iteration at a time."""
        busy, overlaps = threading.Lock(), []

        def fetch(i):
            if not busy.acquire(blocking=False):
                overlaps.append(i)
                return
            time.sleep(0.002)
            busy.release()

        wrapped = wrap(Watched(5, fetch), prefetch=ahead)
        for _ in range(10):
            for i in wrapped:
                if i == 1:
                    break
        assert list(wrapped) == [0, 1, 2, 3, 4]
        assert not overlaps

    def test_by_another_thread_free_who_waits(self, ahead):
        may_go = threading.Event()
        loader = Watched(100, lambda i: i < 1 or may_go.wait(PATIENCE))
        iterator = iter(wrap(loader, prefetch=ahead))
        next(iterator)
        rest = []
        consumer = threading.Thread(target=lambda: rest.extend(iterator))
        consumer.start()
        wait_until(lambda: 1 in loader.fetched)
        closer = threading.Thread(target=iterator.close)
        closer.start()
        may_go.set()
        consumer.join(PATIENCE)
        closer.join(PATIENCE)
        assert not consumer.is_alive()
        assert not closer.is_alive()
        assert len(rest) <= 2

    def test_are_told_to_all_who_share_an_iterator(self, prefetch):
        iterator = iter(wrap(range(1000), prefetch=prefetch))
        with ThreadPoolExecutor(4) as pool:
            received = pool.map(lambda _: list(iterator), range(4), timeout=PATIENCE)
            assert sorted(number for each in received for number in each) == list(range(1000))

    def test_let_the_wrapper_go(self, prefetch):
        wrapped = wrap(Watched(100), prefetch=prefetch)
        iterator = iter(wrapped)
        reference = weakref.ref(wrapped)
        del wrapped
        assert reference() is None
        assert len(list(iterator)) == 100


class TestErrors:
    def test_come_where_their_batch_would(self, prefetch):
        iterator = iter(wrap(DataLoader(Numbers(20, fail_on_five)), prefetch=prefetch))
        for i in range(5):
            time.sleep(0.002)  # in which the thread gets ahead
            assert next(iterator).tolist() == [[i, 0]]
        with pytest.raises(LookupError, match="item 5") as caught:
            next(iterator)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "fail_on_five"
        assert frames[0].name == "test_come_where_their_batch_would"
        assert not loader_threads()
        assert list(iterator) == []

    def test_let_go_of_the_loaders_iterator(self, prefetch):
        key = Key.generate()
        sealed = [fastrack.seal(np.arange(3), key), tampered(fastrack.seal(np.arange(3), key, name="bad"), -1)]

        class Batches(Watched):
            def __iter__(self):
                return map(sealed.__getitem__, super().__iter__())

        loader = Batches(2)
        with pytest.raises(AuthenticationError) as caught:
            list(wrap(loader, keys=key, prefetch=prefetch))
        assert (caught.value.tensor, caught.value.chunk) == ("bad", 0)
        assert caught.value.__traceback__ is not None  # whose frames hold much, but not that
        assert loader.alive == 0

    def test_are_not_kept_by_what_raised_them(self, prefetch):
        class TellingError(LookupError):
            pass

        def fail(i):
            if i == 1:
                raise TellingError

        iterator = iter(wrap(Watched(3, fail), prefetch=prefetch))
        next(iterator)
        gc.disable()
        try:
            try:
                next(iterator)
            except TellingError as error:
                reference = weakref.ref(error)
            assert reference() is None
        finally:
            gc.enable()

    def test_of_the_start_come_at_the_start(self, prefetch):
        class Broken:
            def __iter__(self):
                raise OSError("no such data")

        with pytest.raises(OSError, match="no such data"):
            iter(wrap(Broken(), prefetch=prefetch))
        assert not loader_threads()

    @each("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_that_are_no_exceptions_come_through_too(self, prefetch, error):
        def fail(i):
            if i == 1:
                raise error

        iterator = iter(wrap(Watched(3, fail), prefetch=prefetch))
        assert next(iterator) == 0
        with pytest.raises(error):
            next(iterator)
        assert list(iterator) == []

    def test_that_nobody_came_for_leave_nothing(self, ahead):
        loader = Watched(3, lambda i: 1 / (1 - i))
        iterator = iter(wrap(loader, prefetch=ahead))
        next(iterator)
        wait_until(lambda: 1 in loader.fetched)
        del iterator
        assert not threads_left()
        gc.collect()
        assert loader.alive == 0

    def test_of_an_interrupted_wait_lose_no_place(self, ahead, monkeypatch):
        """After a KeyboardInterrupt in `next`, an iteration may go on."""
        may_go = threading.Event()
        loader = Watched(10, lambda i: i < 1 or may_go.wait(PATIENCE))
        iterator = iter(wrap(loader, prefetch=ahead))
        assert next(iterator) == 0
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for _ in range(3):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with pytest.raises(KeyboardInterrupt):
                    next(iterator)
        finally:
            signal.signal(signal.SIGALRM, before)
        may_go.set()
        assert list(iterator) == list(range(1, 10))


class TestOnADeviceThatFails:
    @pytest.fixture(params=[pytest.param(staged_channel, id="staged"), *in_confidential_mode()])
    def channel(self, request, monkeypatch):
        """Return the channel of "cuda:0" and of the process, which stages everything."""
        with request.param() as channel:
            own_channels.share(monkeypatch, {"cuda:0": channel})
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            yield channel
            for pool in channel._pools:
                wait_until(lambda pool=pool: len(pool._returned) == len(pool._buffers))  # no buffer is out
                assert len(pool._buffers) <= fastrack._transfer.channel.DEPTH
            assert all(work.done() for work in channel._device.begun)

    @each("bad", [0, 6])
    def test_a_forged_batch_is_refused_in_its_turn(self, channel, prefetch, bad):
        key = Key.generate()
        batches = [fastrack.seal(np.full(50_000, i, np.uint8), key, name=f"batch {i}") for i in range(12)]
        batches[bad] = tampered(batches[bad], 56 + 2 * 16400)
        iterator = iter(wrap([{"x": batch} for batch in batches], "cuda", keys=key, prefetch=prefetch))
        for i in range(bad):
            time.sleep(0.002)  # in which the thread gets ahead
            assert next(iterator)["x"].tolist() == [i] * 50_000
        with pytest.raises(AuthenticationError, match=f"'batch {bad}', chunk 2"):
            next(iterator)
        assert not loader_threads()
        with pytest.raises(StopIteration):
            next(iterator)
        assert channel.to_device(batches[11], keys=key, framework="numpy").tolist() == [11] * 50_000

    @pytest.mark.parametrize("channel", [staged_channel], indirect=True)
    def test_so_is_a_batch_that_the_device_fails_for(self, channel, prefetch):
        channel._device.meddle = fail_at("open", 1)
        iterator = iter(
            wrap((np.full(size, 1, np.uint8) for size in (100, 100, 40_000, 100)), "cuda", prefetch=prefetch)
        )
        for _ in range(2):
            assert next(iterator).tolist() == [1] * 100
        with pytest.raises(DeviceError, match="fell off the bus"):
            next(iterator)
        assert list(iterator) == []

    @pytest.mark.slow
    def test_a_break_while_a_batch_is_on_its_way_leaves_no_buffer(self, channel, prefetch):
        gate = Gate()
        iterator = iter(wrap([np.ones(100_000)] * 9, "cuda", prefetch=prefetch))
        next(iterator)
        channel._device.meddle = gate
        del iterator
        gate.open()
        assert not threads_left()


PROGRAM = """
import sys, threading, time
import numpy as np
import fastrack
from fastrack._training.loader import wrap

def batches():
    for i in range(1000):
        if i == {slow}:
            print("waiting", flush=True)
            time.sleep({seconds})
        yield np.full(10, i)
"""


def run_program(code, slow=-1, seconds=0):
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM.format(slow=slow, seconds=seconds) + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class TestTheEndOfTheProcess:
    @pytest.mark.slow
    @each(
        "code",
        [
            "iterator = iter(wrap(batches())); next(iterator)",
            "iterator = iter(wrap(batches())); next(iterator); sys.exit()",
            "for batch in wrap(batches(), prefetch=5): break",
            "keep = [iter(wrap(batches())) for _ in range(3)]; keep.append(keep)",
        ],
    )
    def test_is_not_held_up(self, code):
        process = run_program(code)
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, "")

    @pytest.mark.slow
    def test_waits_for_a_batch_that_is_being_fetched(self):
        process = run_program("iterator = iter(wrap(batches())); next(iterator); time.sleep(0.2)", slow=1, seconds=0.5)
        assert process.communicate(timeout=PATIENCE) == ("waiting\n", "")
        assert process.returncode == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_comes_soon_after_an_interrupt(self, prefetch):
        code = f"for batch in wrap(batches(), prefetch={prefetch}): pass"
        process = run_program(code, slow=3, seconds=1 if prefetch else 60)
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert process.returncode == -signal.SIGINT

    def test_does_not_wait_forever(self, limited, ahead):
        has_begun, may_go = threading.Event(), threading.Event()
        iterator = iter(wrap(Watched(3, lambda i: has_begun.set() or may_go.wait(PATIENCE)), prefetch=ahead))
        waiting = threading.Thread(target=next, args=(iterator, None))
        waiting.start()
        assert has_begun.wait(PATIENCE)
        limited(prefetch_end=0.05)
        fastrack._training.prefetch._stop_all()
        assert loader_threads()
        may_go.set()
        waiting.join(PATIENCE)
        assert list(iterator) == []
