"""Schedules of threads, groups, failures and endings, and what each step must raise: a state machine for hypothesis.

The rule is: the failure of an operation is raised to its owner once, and to no other; or it is reported, once, if
nothing is left that could raise it.
"""

from __future__ import annotations

import gc
import logging
import re
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fastrack import Channel, ClosedError, DeviceError, FastrackError, Key, SealedTensor, seal
from fastrack._devices.cpu import CpuDevice
from fastrack.format import CHUNK_SIZE, chunk_offset
from helpers.staged import Opener, StagedBuffer, stage
from helpers.tampering import tampered

KEY = Key.from_bytes(bytes(range(32)))
PLAIN = np.arange(5, dtype=np.uint8)
THREADS, CHANNELS = 3, 2
GOOD, BAD, BROKEN = "good", "bad", "broken"
TIMEOUT = 30

threads = st.integers(0, THREADS - 1)
channels = st.integers(0, CHANNELS - 1)
nests = st.lists(st.sampled_from([GOOD, BAD, BROKEN]), min_size=1, max_size=2)


class SteppedDevice(CpuDevice):
    """Its operations are done when a step says so, or when a caller waits for them.

    `failing` has for each operation to come the name it fails with, or None; `begun` has those that were begun.
    """

    name = "stepped"
    in_place = False
    max_slab_size = first_slab_size = CHUNK_SIZE

    def __init__(self):
        super().__init__(1)
        self.failing, self.begun = deque(), []

    def staging_buffer(self, size):
        return StagedBuffer(np.empty(size, np.uint8))

    def begin(self, messages, note=None):
        self.begun.append(SteppedWork(self.engine, messages, self.failing.popleft() if self.failing else None))
        return self.begun[-1]

    def close(self):
        pass


class SteppedWork:
    """Opens at once, and does not say so."""

    lane = 0

    def __init__(self, engine, messages, fails):
        self._messages = messages
        self._opener = Opener(engine, messages)
        self._bad = []
        self._fails = fails
        self.is_done = False

    def open(self, slab, buffer):
        stage(slab, self._messages, buffer)
        for segment in slab.segments:
            self._bad += self._opener.open(segment, buffer.memory)

    def seal(self, slab, buffer):
        for segment in slab.segments:
            self._opener.seal(segment, buffer.memory)

    def issue(self):
        pass

    def finish(self, *, wait=False):
        self._opener.wipe()
        self.is_done = self.is_done or wait

    def done(self):
        return self.is_done

    def result(self):
        self.is_done = True
        if self._fails is not None:
            raise DeviceError(f"{self._fails} fell off the bus")
        return min(self._bad, default=None)


@dataclass(eq=False)
class DeviceOperation:
    """Record what was started, and for which thread or group."""

    name: str  # that its failure names
    first: str  # of its tensors
    owner: object
    fails: bool
    work: SteppedWork


@dataclass(eq=False)
class Group:
    """An open group of a thread on a channel."""

    thread: int
    place: int
    channel: Channel
    context: object
    to_device: object


class Stepped(ThreadPoolExecutor):
    """A thread that calls one thing at a time, and is waited for."""

    def __init__(self):
        super().__init__(1)

    def call(self, action):
        """Return the error of fastrack that the action raised, or None."""
        error = self.submit(action).exception(TIMEOUT)
        if error is not None and not isinstance(error, FastrackError):
            raise error
        return error


class Place:
    """A channel, and the operations that were started on it and are not told yet."""

    def __init__(self):
        self.device = SteppedDevice()
        self.channel = Channel._from_device(self.device, keys=KEY)
        self.operations: list[DeviceOperation] = []
        self.ended = set()  # owners that nothing can be raised to any more


class Ownership(RuleBasedStateMachine):
    """Steps of threads that share channels."""

    def __init__(self):
        super().__init__()
        self._number = 0
        self._logged = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self._logged.append(record.getMessage())
        logging.getLogger("fastrack").addHandler(self._handler)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("ignore", ResourceWarning)
        self._threads = [Stepped() for _ in range(THREADS)]
        self._owners = [object() for _ in range(THREADS)]
        self._groups = []
        self._places = [Place() for _ in range(CHANNELS)]

    # Steps

    @rule(thread=threads, number=channels, fates=nests)
    def start(self, thread, number, fates):
        """Start a nest of one or two transfers without waiting."""
        place = self._places[number]
        to_device = partial(place.channel.to_device, non_blocking=True)
        self._start(place, self._owners[thread], fates, thread, to_device)
        self._require_swept(place)

    @precondition(lambda self: self._groups)
    @rule(data=st.data(), fates=nests)
    def start_in_group(self, data, fates):
        group = data.draw(st.sampled_from(self._groups))
        self._start(self._places[group.place], group, fates, group.thread, group.to_device)

    @rule(thread=threads, number=channels)
    def open_group(self, thread, number):
        group = Group(thread, number, self._places[number].channel, None, None)

        def enter():
            group.context = group.channel.group()
            group.to_device = group.context.__enter__()

        assert self._threads[thread].call(enter) is None
        self._groups.append(group)

    @precondition(lambda self: self._groups)
    @rule(data=st.data())
    def close_group(self, data):
        self._end_group(data.draw(st.sampled_from(self._groups)))

    @rule(data=st.data(), number=channels)
    def finish(self, data, number):
        """Have the device be done with one operation, without a call of anything."""
        left = [one for one in self._places[number].operations if not one.work.is_done]
        if left:
            data.draw(st.sampled_from(left)).work.is_done = True

    @rule(thread=threads, number=channels, call=st.sampled_from(["synchronize", "to_device", "to_host"]))
    def wait(self, thread, number, call):
        place = self._places[number]
        channel, given = place.channel, () if call == "synchronize" else (PLAIN,)
        error = self._threads[thread].call(lambda: getattr(channel, call)(*given))
        self._require_raised(place, self._owners[thread], error, waits=True)
        self._require_swept(place)

    @rule(thread=threads)
    def end_thread(self, thread):
        """End a thread, whose groups end before it, and start another one in its place."""
        for group in [group for group in self._groups if group.thread == thread]:
            self._end_group(group)
        self._threads[thread].shutdown()
        for place in self._places:
            place.ended.add(self._owners[thread])
        self._threads[thread], self._owners[thread] = Stepped(), object()

    @rule(thread=threads, number=channels)
    def close(self, thread, number):
        """Close a channel and open another. Its groups end with an error, that of a closed channel."""
        place = self._places[number]
        error = self._threads[thread].call(place.channel.close)
        self._require_raised(place, self._owners[thread], error, waits=True)
        self._require_reported([one for one in place.operations if one.fails])
        place.operations.clear()
        for group in [group for group in self._groups if group.place == number]:
            self._groups.remove(group)
            error = self._threads[group.thread].call(partial(group.context.__exit__, None, None, None))
            assert isinstance(error, ClosedError)
        self._places[number] = Place()

    @rule(number=channels)
    def drop(self, number):
        """Forget a channel that has no groups, and open another: what is not done is reported, too."""
        if any(group.place == number for group in self._groups):
            return
        place, self._places[number] = self._places[number], None
        lost = [one for one in place.operations if one.fails or not one.work.is_done]
        place.channel = None
        if lost and not self._logged:  # an error that was raised may keep the channel, in a cycle
            gc.collect()
        self._require_reported(lost)
        self._places[number] = Place()

    @invariant()
    def nothing_is_reported_that_no_step_expects(self):
        assert self._logged == []

    def teardown(self):
        try:
            for number in range(CHANNELS):
                if self._places[number] is not None:
                    self.close(0, number)
        finally:
            for place in self._places:  # after a step that failed nothing else is to be said
                if place is not None:
                    place.channel._owners.reset_after_fork()
            for thread in self._threads:
                thread.shutdown(wait=False)  # after a step that failed it may be stuck
            self._warnings.__exit__(None, None, None)
            logging.getLogger("fastrack").removeHandler(self._handler)

    # What each step must raise and report

    def _start(self, place, owner, fates, thread, to_device):
        known = [one for one in place.operations if one.owner is owner and one.work.is_done and one.fails]
        given = [self._message(fate) for fate in fates]
        device = place.device
        device.begun.clear()
        # One operation: it fails with the device, or with the first message that is bad.
        failing = [one for kind in (BROKEN, BAD) for one, fate in zip(given, fates, strict=True) if fate == kind]
        name = failing[0].name if failing else None
        device.failing.append(name if BROKEN in fates else None)
        error = self._threads[thread].call(lambda: to_device(given))
        device.failing.clear()
        self._require_raised(place, owner, error, waits=False)
        assert len(device.begun) == (0 if known else 1)
        for work in device.begun:
            place.operations.append(
                DeviceOperation(name or given[0].name, given[0].name, owner, name is not None, work)
            )
        device.begun.clear()

    def _message(self, fate) -> SealedTensor:
        self._number += 1
        sealed = seal(PLAIN, KEY, name=f"op{self._number}-{fate}")
        return tampered(sealed, chunk_offset(0)) if fate == BAD else sealed

    def _end_group(self, group):
        self._groups.remove(group)
        error = self._threads[group.thread].call(partial(group.context.__exit__, None, None, None))
        group.channel = group.context = group.to_device = None  # hypothesis keeps what it drew
        self._require_raised(self._places[group.place], group, error, waits=True)

    def _require_raised(self, place, owner, error, *, waits):
        """The error is of all that is known to have failed for this owner, and of nothing else."""
        mine = [one for one in place.operations if one.owner is owner and (waits or one.work.is_done)]
        expected = [one.name for one in mine if one.fails]
        found = [] if error is None else names_in("\n".join([str(error), *getattr(error, "__notes__", [])]))
        assert sorted(found) == sorted(expected), f"expected failures of {expected}, got {found}: {error!r}"
        assert (error is None) == (not expected)
        place.operations = [one for one in place.operations if one not in mine]

    def _require_swept(self, place):
        """A call of a thread reports what is known to have failed for threads that have ended."""
        swept = [one for one in place.operations if one.owner in place.ended and one.work.is_done]
        self._require_reported([one for one in swept if one.fails])
        place.operations = [one for one in place.operations if one not in swept]

    def _require_reported(self, lost):
        found = names_in("\n".join(self._logged))
        self._logged.clear()
        assert sorted(found) == sorted(one.name if one.work.is_done else one.first for one in lost)


def names_in(text):
    return re.findall(r"op\d+-\w+", text)
