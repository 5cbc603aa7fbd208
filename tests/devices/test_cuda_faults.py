"""Whatever fails on a CUDA device: it is told, nothing waits for ever, no key stays, and the next transfer works."""

import gc
import threading
import time
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import MESSAGE, PIECES, Rig, opened, within
from helpers.fake_cuda import MODES

from fastrack import DeviceError
from fastrack._devices.base import NO_VERDICT
from fastrack._devices.cuda.recorder import MessageRecorder
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

ROWS = np.concatenate([MESSAGE.plain[CHUNK_SIZE * chunk :][:50] for chunk in PIECES.chunks])
SECONDS = 60


def sealed(rig):
    work, out = rig.seal(MESSAGE, rig.driver.array(MESSAGE.plain))
    assert work.result() is None
    return np.array_equal(out, MESSAGE.sealed)


def gathered(rig):
    array = rig.array(ROWS.size)
    assert rig.gather(MESSAGE, PIECES, array).result() is None
    return np.array_equal(rig.driver.read(array), ROWS)


def polled(rig):
    """One whose caller asks whether it is done, and whether slots are ready, before it waits."""
    array = rig.array(MESSAGE.plain.size)
    work = rig.open(MESSAGE, array)
    while not (work.done() and all(slot.ready() for slot in rig.slots)):
        time.sleep(0)
    assert work.result() is None
    return np.array_equal(rig.driver.read(array), MESSAGE.plain)


def cleared(rig):
    array = rig.driver.array(MESSAGE.plain)
    rig.device.clear(rig.device.view(array, writable=True))
    return not rig.driver.read(array).any()


def outcome(action):
    """Return the result of an action, and the error if it failed as it should."""
    try:
        return within(SECONDS, action), None
    except DeviceError as error:
        return None, error


ACTIONS = [opened, sealed, gathered, polled, cleared]


# Calls that fail.


@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(["threads", "confidential"], marks=pytest.mark.slow),
        pytest.param(["lazy", "serial", "held"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
@each("action", ACTIONS)
def test_a_call_that_fails_is_told_and_leaves_nothing_behind(action, modes):
    for mode in modes:
        fail_each_call(action, mode)


def fail_each_call(action, mode):
    """The first one, the second, and so on, until none is left to fail."""
    for number in range(1, 500):
        rig = Rig(mode, seed=number)
        driver = rig.driver
        driver.fail_at(number)
        good, error = outcome(lambda rig=rig: action(rig))
        failed = driver.failed
        driver.fail_at(None)
        if error is None:
            # The query of an unused staging buffer may fail: then all streams are synchronized, and the work goes on.
            assert good, number
            assert failed in {None, "synchronize", "done"}, number
        else:
            assert f"injected into {failed}" in str(error)
            driver.finish()
            assert not driver.holds(MESSAGE.secret), number
        assert outcome(lambda rig=rig: opened(rig)) == (True, None), number
        within(SECONDS, rig.close)
        if failed is None:
            assert number > 5
            return
    pytest.fail("there is no end to the calls")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "confidential" else pytest.mark.nightly) for mode in MODES]
)
@each("action", ACTIONS)
def test_a_device_that_no_longer_works_is_given_up(action, mode):
    for number in range(1, 5 if action is cleared else 60, 3):
        rig = Rig(mode, seed=number)
        rig.driver.fail_at(number, sticky=True)
        while outcome(lambda rig=rig: action(rig)) == (True, None):
            pass
        for again in ACTIONS:
            assert isinstance(outcome(lambda rig=rig, again=again: again(rig))[1], DeviceError)
        within(SECONDS, rig.leave)
        rig.driver.stop()
        assert not any(MESSAGE.secret in block.tobytes() for block in rig.driver.hosts())


def test_a_device_that_was_given_up_is_not_trusted_again():
    rig = Rig("serial")
    array = rig.array(MESSAGE.plain.size)
    view = rig.device.view(array, writable=True)
    work = rig.begin(MESSAGE, array)
    slot = rig.take()
    rig.driver.fail_at(1, sticky=True)
    work.open(next(rig.slabs(MESSAGE)), slot.memory, slot)
    work.finish()
    within(SECONDS, slot.wait)
    rig.driver.fail_at(None)
    with pytest.raises(DeviceError, match="injected"):
        work.result()
    with pytest.raises(DeviceError, match="answer"):
        rig.begin_message(MESSAGE.key(), view)


def test_what_fails_while_a_device_is_closed_is_no_error():
    for number in range(1, 100):
        rig = Rig(seed=number)
        work = rig.begin(MESSAGE, rig.array(MESSAGE.plain.size))  # never ended: its key is there to be wiped
        rig.driver.fail_at(number)
        within(SECONDS, rig.leave)
        rig.driver.finish()
        if rig.driver.failed is None:
            assert not rig.driver.holds(MESSAGE.secret)
            assert number > 5
            return
        del work
    pytest.fail("there is no end to the calls")


@each("mode", MODES)
def test_slabs_after_a_failure_are_refused_and_the_next_message_is_not(mode):
    rig = Rig(mode)
    array = rig.array(MESSAGE.plain.size)
    work = rig.begin(MESSAGE, array)
    (first, second, *_), slot = rig.slabs(MESSAGE), rig.take()
    work.open(first, slot.memory, slot)
    work.issue()
    slot.wait()
    rig.driver.fail_at(1)
    work.open(second, slot.memory, slot)
    work.issue()
    slot.wait()
    with pytest.raises(DeviceError, match=r"cuda:0 .* injected"):
        work.seal(second, slot.memory, slot)
    with pytest.raises(DeviceError, match=r"cuda:0 .* injected") as failure:
        work.open(second, slot.memory, slot)
    assert isinstance(failure.value.__cause__, DeviceError)
    work.finish()
    assert work.done()
    with pytest.raises(DeviceError, match="injected"):
        work.result()
    assert not rig.driver.holds(MESSAGE.secret)
    assert opened(rig)


@each("mode", MODES)
def test_buffers_of_a_list_after_a_failure_are_freed(mode):
    rig = Rig(mode)
    work = rig.begin(MESSAGE, rig.array(MESSAGE.plain.size))
    (first, second, *_), slots = rig.slabs(MESSAGE), (rig.take(), rig.take())
    work.open(first, MESSAGE.sealed[: first.sealed_size], slots[0])
    rig.driver.fail_at(1)
    work.issue()
    with suppress(DeviceError):  # where it is known already
        work.open(second, MESSAGE.sealed[second.first_chunk * SEALED_CHUNK_SIZE :][: second.sealed_size], slots[1])
    with suppress(DeviceError):
        within(SECONDS, work.issue)
    within(SECONDS, work.finish)
    for slot in slots:
        within(SECONDS, slot.wait)
    with pytest.raises(DeviceError, match="injected"):
        work.result()
    rig.driver.fail_at(None)
    assert within(SECONDS, lambda: opened(rig))
    within(SECONDS, rig.close)


def test_a_message_that_cannot_begin_leaves_the_key_of_the_next_alone(monkeypatch):
    rig = Rig("serial")
    array = rig.array(MESSAGE.plain.size)

    def refuse(*_):
        raise DeviceError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(MessageRecorder, "start", refuse)
        with pytest.raises(DeviceError) as caught:
            rig.begin(MESSAGE, array)
    rig.device._states._released_of(1).rotate(1)  # its state comes next
    work = rig.begin(MESSAGE, array)
    del caught
    gc.collect()
    rig._open_slabs(work, MESSAGE)
    work.finish()
    assert work.result() is None
    rig.close()


def test_a_key_does_not_stay_here_when_the_device_was_given_up():
    for mode in MODES:
        rig = Rig(mode)
        works = [rig.begin(MESSAGE, rig.array(MESSAGE.plain.size)) for _ in range(2)]
        rig.driver.fail_at(1, sticky=True)
        for work in works:
            within(SECONDS, work.finish)
            with pytest.raises(DeviceError):
                work.result()
        assert not any(MESSAGE.secret in block.tobytes() for block in rig.driver.hosts())
        rig.driver.fail_at(None)
        rig.driver.stop()


def test_a_verdict_of_another_message_is_not_used():
    """Should a list be lost, the device holds the verdict on the message before, which was good."""
    rig = Rig()
    assert opened(rig)
    rig.device._states._released_of(1).rotate(1)  # what that one used comes next
    work = rig.begin(MESSAGE, rig.array(MESSAGE.plain.size))
    rig._open_slabs(work, MESSAGE)
    work._list.commands.code[:] = array("q")
    work.finish()
    assert work.result() == NO_VERDICT
    rig.close()


def test_a_verdict_that_never_came_is_not_good_and_a_slab_that_never_arrived_is_found_out():
    rig = Rig()
    rig.driver.download = lambda *_: None
    array = rig.array(MESSAGE.plain.size)
    assert rig.open(MESSAGE, array).result() == NO_VERDICT
    rig = Rig()
    rig.driver.upload = lambda *_: None
    array = rig.array(MESSAGE.plain.size)
    assert rig.open(MESSAGE, array).result() == 0
    assert not rig.driver.read(array).any()


# Keys.


@each("mode", MODES)
def test_the_key_is_nowhere_at_any_time(mode):
    """Not even expanded, as no memory of the device has what is in that of a block."""
    rig = Rig(mode)
    array = rig.array(MESSAGE.plain.size)
    work = rig.begin(MESSAGE, array)
    assert not rig.driver.holds(MESSAGE.secret)
    work.open(next(rig.slabs(MESSAGE)), MESSAGE.sealed[: 2 * SEALED_CHUNK_SIZE], rig.take())
    assert not rig.driver.holds(MESSAGE.secret)
    work.finish(wait=True)
    assert not rig.driver.holds(MESSAGE.secret)
    assert not rig.driver.holds(MESSAGE.nonce)


def test_a_key_is_not_looked_at_after_begin():
    rig = Rig("lazy")
    key = MESSAGE.key()
    array = rig.array(MESSAGE.plain.size)
    work = rig.begin_message(key, rig.device.view(array, writable=True))
    key.wipe()
    rig._open_slabs(work, MESSAGE)
    work.finish()
    assert work.result() is None


def test_what_a_message_needs_is_used_again_whether_or_not_its_verdict_was_asked_for():
    rig = Rig()
    array, asked = rig.array(MESSAGE.plain.size), rig.driver.calls["host"]
    for turn in range(40):
        work = rig.open(MESSAGE, array)
        rig.driver.finish()
        if turn % 2:
            assert work.result() is None
    assert rig.driver.calls["host"] - asked <= 2


def test_threads_that_ask_for_one_result_release_one_state():
    rig = Rig("threads")
    array = rig.array(MESSAGE.plain.size)
    work = rig.open(MESSAGE, array)
    gate = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(lambda: (gate.wait(SECONDS), work.result())) for _ in range(8)]
    assert [answer.result()[1] for answer in asked] == [None] * 8
    returned = rig.device._states._released_of(1)
    assert len(returned) == len(set(map(id, returned)))


def test_an_operation_that_finished_does_not_hold_its_array():
    rig = Rig()
    array = rig.array(MESSAGE.plain.size)
    there = weakref.ref(array)
    work = rig.open(MESSAGE, array)
    del array
    gc.collect()
    assert there() is None
    work.finish()


@each("seed", range(20))
def test_a_buffer_is_wiped_here_and_there_after_the_device_has_finished_with_it(seed):
    rig = Rig(seed=seed)
    array = rig.array(MESSAGE.plain.size)
    work = rig.open(MESSAGE, array)
    slot = rig.slots[0]
    there = rig.driver.space.at(slot.device_ptr, slot.memory.size)
    if seed == 0:
        rig.driver.finish()
        assert slot.memory.any()
        assert there.any()
    slot.wipe()
    assert np.array_equal(rig.driver.read(array), MESSAGE.plain)
    assert work.result() is None
    assert not slot.memory.any()
    assert not there.any()
    rig.close()
