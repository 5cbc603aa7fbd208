"""A CUDA device is closed, dropped or forked, in the middle of work too: no key stays, nothing waits for ever."""

import threading

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import MESSAGE, PIECES, Message, Rig, cut, opened, read_words, within
from helpers.fake_cuda import MODES
from helpers.forking import in_forked_child

from fastrack import ClosedError, DeviceError
from fastrack._devices.base import BAD_PLAN
from fastrack._devices.cuda.buffers import MessageState
from fastrack.format import CHUNK_SIZE

SECONDS = 60


# Closing.


@each("mode", MODES)
def test_closing_in_the_middle_wipes_the_key_and_stops_the_work(mode):
    rig = Rig(mode)
    device, array = rig.device, rig.array(MESSAGE.plain.size)
    work = rig.begin(MESSAGE, array)
    slot = rig.take()
    slab = next(rig.slabs(MESSAGE))
    work.open(slab, slot.memory, slot)
    within(SECONDS, device.close)
    assert not rig.driver.holds(MESSAGE.secret)
    with pytest.raises(ClosedError):
        work.open(slab, slot.memory, slot)
    within(SECONDS, work.finish)
    with pytest.raises(DeviceError, match="closed"):
        work.result()
    device.close()
    rig.close()


def test_a_closed_device_does_nothing_more():
    rig = Rig()
    view = rig.device.view(rig.array(10), writable=True)
    rig.device.close()
    for use in (
        lambda: rig.begin(MESSAGE, rig.array(10)),
        lambda: rig.begin_message(MESSAGE.key(), view),
        lambda: rig.device.staging_buffer(100),
        lambda: rig.device.empty("U8", (1,), "cupy"),
        lambda: rig.device.view(view.array, writable=True),
        lambda: rig.device.clear(view),
    ):
        with pytest.raises(ClosedError):
            use()


def test_a_verdict_can_be_had_after_closing():
    rig = Rig()
    messages = MESSAGE, Message(CHUNK_SIZE).spoilt(0)
    arrays = [rig.array(message.plain.size) for message in messages]
    works = [rig.open(message, array) for message, array in zip(messages, arrays, strict=True)]
    rig.device.close()
    assert [work.result() for work in works] == [None, 0]


def test_no_thread_is_started_outside_of_confidential_mode_or_before_there_is_work():
    before = set(threading.enumerate())
    rig = Rig()
    assert opened(rig)
    Rig("serial")
    assert set(threading.enumerate()) == before
    rig.close()


# Forks.


def test_a_forked_child_is_told_and_touches_nothing():
    rig = Rig("serial")
    array = rig.array(MESSAGE.plain.size)
    view = rig.device.view(array, writable=True)
    assert opened(rig)
    work = rig.begin(MESSAGE, array)
    slot = rig.take()
    slab = next(rig.slabs(MESSAGE))
    work.open(slab, slot.memory, slot)
    work.issue()
    slot.wait()
    content = slot.memory.copy()

    def child():
        told = 0
        for use in (
            lambda: rig.begin_message(MESSAGE.key(), view),
            lambda: rig.device.empty("U8", (1,), "cupy"),
            lambda: rig.device.view(array, writable=True),
            lambda: rig.device.clear(view),
            lambda: rig.device.staging_buffer(10),
            lambda: work.open(slab, slot.memory, slot),
            lambda: work.open(next(cut(PIECES, MESSAGE.plain.size, 2)), slot.memory, slot),
            lambda: work.seal(slab, slot.memory, slot),
            work.result,
        ):
            try:
                use()
            except DeviceError as error:
                told += "does not survive a fork" in str(error) and "'spawn' or 'forkserver'" in str(error)
        work.finish()
        slot.wipe()
        slot.wait()
        rig.device.close()
        return told, work.done(), slot.ready(), np.array_equal(slot.memory, content)

    assert in_forked_child(child) == (9, True, True, True)
    work.finish()
    assert work.result() == 0  # it was given what another message left in the slot
    rig.close()


def test_a_child_does_not_wait_for_a_thread_it_does_not_have():
    rig = Rig("serial")
    gate = threading.Event()
    begun, uploads = threading.Event(), rig.driver.upload
    rig.driver.upload = lambda *arguments: (begun.set(), gate.wait(SECONDS), uploads(*arguments))
    work = rig.begin(MESSAGE, rig.array(MESSAGE.plain.size))
    slot = rig.take()
    work.open(next(rig.slabs(MESSAGE)), slot.memory, slot)
    issuing = threading.Thread(target=work.issue, daemon=True)
    issuing.start()
    assert begun.wait(SECONDS)

    def child():
        slot.wait()
        work.finish()
        slot.wipe()
        rig.device.close()
        return slot.ready()

    assert in_forked_child(child, seconds=20)
    gate.set()
    issuing.join(SECONDS)
    work.finish()
    rig.close()


# Interrupts.


def _interrupt(*_, **__):
    raise KeyboardInterrupt


def interrupted(patch, target, name):
    """Have a function interrupted once it has returned."""
    function = getattr(target, name)

    def call(*operands):
        function(*operands)
        raise KeyboardInterrupt

    patch.setattr(target, name, call)
    return pytest.raises(KeyboardInterrupt)


def test_an_interrupt_at_the_end_of_a_message_leaves_its_key_to_no_other(monkeypatch):
    rig = Rig("serial")
    assert opened(rig)  # the control that comes next has been used, and its events happened
    array = rig.array(MESSAGE.plain.size)
    work = rig.begin(MESSAGE, array)
    with monkeypatch.context() as patch, interrupted(patch, work.operation, "_execute"):
        work.finish()
    other = Message(5000, seed=2)
    sealing = rig.begin(other, rig.driver.array(other.plain), writable=False)
    assert sealing._state is not work._state
    with pytest.raises(DeviceError, match="interrupted"):
        within(SECONDS, work.result)
    assert not rig.driver.holds(MESSAGE.secret)
    within(SECONDS, sealing.finish)
    within(SECONDS, rig.close)


@each("mode", MODES)
@each("after", [False, True])
def test_a_list_that_an_interrupt_lost_leaves_no_good_verdict(mode, after, monkeypatch):
    rig = Rig(mode)
    array = rig.array(MESSAGE.plain.size)
    work = rig.begin(MESSAGE, array)
    slab, slot = next(rig.slabs(MESSAGE)), rig.take()
    work.open(slab, MESSAGE.sealed[: slab.sealed_size], slot)
    execute = work.operation._execute

    def be_interrupted(commands):
        if after:
            execute(commands)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(work.operation, "_execute", be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            work.issue()
    with pytest.raises(DeviceError, match="interrupted"):
        work.open(slab, MESSAGE.sealed[: slab.sealed_size], slot)
    within(SECONDS, work.finish)
    with pytest.raises(DeviceError, match="interrupted"):
        work.result()
    assert not rig.driver.holds(MESSAGE.secret)
    assert opened(rig)
    within(SECONDS, rig.close)


class _Interrupting(int):
    """A word of the device, at whose comparison an interrupt arrives."""

    __hash__ = int.__hash__

    def __ne__(self, _):
        raise KeyboardInterrupt


@pytest.mark.parametrize(("place", "bad"), [(0, 2), (1, BAD_PLAN)])
def test_an_interrupt_while_a_bad_verdict_is_read_leaves_no_good_one(place, bad, monkeypatch):
    rig = Rig()
    message = MESSAGE if bad == BAD_PLAN else Message(5 * CHUNK_SIZE + 77).spoilt(bad)
    rig.driver.flips = {rig.driver.calls["upload"] + 1: -1} if bad == BAD_PLAN else {}
    array = rig.array(200)
    work = rig.gather(message, PIECES, array)
    good = MessageState.words

    def words(control):
        found = list(good.__get__(control))
        found[place] = _Interrupting(found[place])
        return tuple(found)

    with monkeypatch.context() as patch:
        read_words(patch, words)
        with pytest.raises(KeyboardInterrupt):
            work.result()
    assert work.result() == bad
    rig.close()
