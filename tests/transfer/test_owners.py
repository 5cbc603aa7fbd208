"""Failures of transfers reach the thread or the group that started them, once, and no other."""

import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import own_channels
from helpers.cuda_on_host import in_confidential_mode
from helpers.ownership import Ownership
from helpers.reports import reports
from helpers.staged import Gate, staged_channel
from helpers.tampering import tamper_file, tampered
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import fastrack
from fastrack import AuthenticationError, ClosedError, Key
from fastrack._transfer import pending
from fastrack.format import CHUNK_SIZE, chunk_offset

KEY = Key.from_bytes(bytes(range(32)))
PLAIN = np.arange(1, 2 * CHUNK_SIZE, 7, dtype=np.uint16)
GOOD = fastrack.seal(PLAIN, KEY, name="good")
BAD = tampered(fastrack.seal(PLAIN, KEY, name="bad"), chunk_offset(0))


@pytest.fixture(params=[pytest.param(staged_channel, id="staged"), *in_confidential_mode(pytest.mark.slow)])
def channel(request):
    channel = request.param(keys=KEY)
    yield channel
    with reports():
        channel._owners.reset_after_fork()
        channel.close()


@pytest.fixture
def shared_channel(channel, monkeypatch):
    """Return the channel that `to_device` and `load_model` use for "cpu"."""
    own_channels.share(monkeypatch, {"cpu": channel})
    return channel


def start(channel, sealed=BAD):
    return channel.to_device(sealed, framework="numpy", non_blocking=True)


def wait_until_done(channel):
    channel._device.settle()


def in_thread(action, *arguments):
    """Call something in a thread that ends with it."""
    result = []
    thread = threading.Thread(target=lambda: result.append(action(*arguments)))
    thread.start()
    thread.join(60)
    return result[0]


def test_calls_of_another_thread_are_not_raised_a_failure_and_do_not_take_it(channel):
    start(channel)
    wait_until_done(channel)
    for call in (
        lambda: channel.to_device(GOOD, framework="numpy"),
        lambda: channel.to_device(PLAIN, non_blocking=True),
        lambda: channel.to_host(PLAIN),
        channel.synchronize,
    ):
        in_thread(call)
    with pytest.raises(AuthenticationError, match="'bad'"):
        channel.synchronize()
    channel.synchronize()


def test_groups_and_their_thread_do_not_take_each_others_failures(channel):
    start(channel)
    wait_until_done(channel)
    with pytest.raises(AuthenticationError, match="'other'"), channel.group() as to_device:
        to_device(tampered(fastrack.seal(PLAIN, KEY, name="other"), -1), framework="numpy")
    with channel.group() as to_device:
        moved = to_device(PLAIN)
    assert np.array_equal(moved, PLAIN)
    with pytest.raises(AuthenticationError, match="'bad'"):
        channel.synchronize()


def test_a_group_raises_what_is_known_before_it_starts_anything_else(channel):
    def start_two(to_device):
        to_device(BAD, framework="numpy")
        wait_until_done(channel)
        to_device(GOOD, framework="numpy")

    with pytest.raises(AuthenticationError), channel.group() as to_device:
        start_two(to_device)
    assert len(channel._device.begun) == 1


def test_a_group_waits_when_its_block_raised_and_notes_what_failed(channel):
    def fail(to_device):
        to_device(BAD, framework="numpy")
        raise KeyError("of the block")

    with pytest.raises(KeyError) as caught, channel.group() as to_device:
        fail(to_device)
    assert channel._device.begun[0].done()
    assert "tensor 'bad'" in caught.value.__notes__[0]
    channel.synchronize()


def test_a_group_whose_channel_is_closed_ends_with_an_error():
    channel = staged_channel(keys=KEY)

    def start_and_close(to_device):
        to_device(BAD, framework="numpy")
        in_thread(channel.close)

    with reports() as reported, pytest.raises(ClosedError), channel.group() as to_device:
        start_and_close(to_device)
    assert len(reported) == 1


def damaged_model(folder):
    """The path of a model with a bad chunk."""
    fastrack.save_model(net(), folder / "good", key=KEY)
    (folder / "bad").write_bytes((folder / "good").read_bytes())
    tamper_file(folder / "bad", "0.weight", chunk_offset(1))
    return folder / "bad"


def net():
    return torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128))


@pytest.mark.parametrize("other", ["to_device", "synchronize", "wrap"])
@pytest.mark.usefixtures("shared_channel")
def test_load_model_refuses_a_bad_chunk_whatever_other_threads_do(tmp_path, other):
    path, over, moved = damaged_model(tmp_path), threading.Event(), threading.Event()

    def move():
        while not over.is_set():
            if other == "to_device":
                fastrack.to_device(GOOD, keys=KEY, framework="numpy")
            elif other == "synchronize":
                fastrack.synchronize()
            else:
                for _ in fastrack.wrap([GOOD] * 4, keys=KEY, prefetch=2):
                    pass
            moved.set()

    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(move)
        try:
            assert moved.wait(60)
            for _ in range(5):
                module = net()
                with pytest.raises(AuthenticationError, match=r"'0\.weight'"):
                    fastrack.load_model(module, path, keys=KEY)
                assert not module[0].weight.any()
        finally:
            over.set()
        moving.result(60)


@pytest.mark.usefixtures("shared_channel")
def test_models_that_threads_load_at_once_do_not_swap_verdicts(tmp_path):
    bad = damaged_model(tmp_path)

    def load(number):
        if number % 2:
            return fastrack.load_model(net(), tmp_path / "good", keys=KEY) == ([], [])
        with pytest.raises(AuthenticationError):
            fastrack.load_model(net(), bad, keys=KEY)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(load, range(12)))


def test_load_model_is_raised_what_its_thread_started_before_it_writes_anything(shared_channel, tmp_path):
    fastrack.save_model(net(), tmp_path / "good", key=KEY)
    start(shared_channel)
    module = net()
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(AuthenticationError, match="'bad'"):
        fastrack.load_model(module, tmp_path / "good", keys=KEY)
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), before, strict=True))


# What nothing can raise any more is reported


def test_a_failure_of_a_thread_that_ended_is_reported_once(channel):
    in_thread(start, channel)
    wait_until_done(channel)
    with reports() as reported:
        channel.synchronize()
        channel.synchronize()
    (message,) = reported
    assert message.startswith("a transfer of thread 'Thread-")
    assert "tensor 'bad', chunk 0" in message
    assert "Call synchronize() in the thread" in message


def test_a_thread_that_ended_leaves_nothing_behind(channel):
    channel._device.meddle = gate = Gate("end")
    for _ in range(3):
        in_thread(start, channel, fastrack.seal(PLAIN[:5], KEY))
    channel.to_device((), non_blocking=True)
    assert len(channel._owners._owners) == 4
    gate.open()
    wait_until_done(channel)
    channel.synchronize()
    assert channel._owners._owners == [channel._owners.current()]


def test_an_error_that_a_filter_makes_of_a_warning_reaches_no_call(channel, monkeypatch):
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_type))
    in_thread(start, channel)
    wait_until_done(channel)
    channel.synchronize()  # warnings are errors in these tests
    assert raised == [ResourceWarning]


def test_closing_raises_failures_of_the_thread_that_closes_and_reports_the_others():
    channel = staged_channel(keys=KEY)
    other = tampered(fastrack.seal(PLAIN, KEY, name="other"), -1)
    with ThreadPoolExecutor(1) as pool, reports() as reported:
        pool.submit(start, channel, other).result(60)
        start(channel)
        with pytest.raises(AuthenticationError, match="'bad'") as caught:
            channel.close()
    assert not hasattr(caught.value, "__notes__")
    assert len(reported) == 1
    assert "tensor 'other'" in reported[0]
    assert channel._device.closed


def test_a_channel_that_is_dropped_reports_its_failures():
    channel = staged_channel(keys=KEY)
    start(channel)
    wait_until_done(channel)
    with reports() as reported:
        del channel
        gc.collect()
    assert len(reported) == 1
    assert "tensor 'bad'" in reported[0]


def test_a_channel_that_is_dropped_reports_what_is_not_done():
    channel = staged_channel(keys=KEY)
    device = channel._device
    device.meddle = gate = Gate("end")
    start(channel, GOOD)
    with reports() as reported:
        del channel
        gc.collect()
    gate.open()
    assert len(reported) == 1
    assert "a transfer of thread 'MainThread' may fail" in reported[0]
    assert "tensor 'good' is on its way" in reported[0]


def test_nothing_is_reported_of_what_went_well_or_was_raised():
    channel = staged_channel(keys=KEY)
    with reports() as reported:
        in_thread(start, channel, GOOD)
        start(channel)
        with pytest.raises(AuthenticationError):
            channel.synchronize()
        start(channel, GOOD)
        channel.close()
        del channel
        gc.collect()
    assert reported == []


PROGRAM = """
import os, sys, threading
sys.path[:0] = sys.argv[1].split(os.pathsep)
import test_owners
channel = test_owners.staged_channel(keys=test_owners.KEY)
sealed = getattr(test_owners, sys.argv[2])
started = threading.Event()
def start():
    test_owners.start(channel, sealed)
    started.set()
    threading.Event().wait()
if sys.argv[3] == "daemon":
    threading.Thread(target=start, daemon=True).start()
    started.wait()
else:
    test_owners.start(channel, sealed)
"""


@pytest.mark.parametrize(
    ("sealed", "thread"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("BAD", "main"), ("GOOD", "daemon")]),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("BAD", "daemon"), ("GOOD", "main")]),
    ],
)
def test_a_process_that_ends_reports_its_failures(sealed, thread, request):
    folders = os.pathsep.join(map(str, [request.path.parent, request.path.parents[1], request.config.rootpath]))
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", PROGRAM, folders, sealed, thread]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.count("tensor 'bad', chunk 0") == (2 if sealed == "BAD" else 0)
    assert ("ResourceWarning: a transfer of thread" in done.stderr) == (sealed == "BAD")


# The rule, over schedules of threads, groups, failures and endings

SCHEDULES = int(os.environ.get("FASTRACK_SCHEDULES", "60"))


def run_schedules(count):
    options = {"max_examples": count, "stateful_step_count": 30, "database": None, "deadline": None}
    options |= {"phases": [Phase.explicit, Phase.generate], "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(Ownership, settings=settings(**options, derandomize=count < 1000))


@pytest.mark.timeout(60 + SCHEDULES)
@pytest.mark.slow
def test_every_failure_is_raised_to_its_owner_once_and_to_no_other():
    run_schedules(SCHEDULES)


def test_the_schedules_find_failures_that_threads_take_from_each_other(monkeypatch):
    """As when a channel keeps those of all its threads and groups in one place."""
    one_for_all = weakref.WeakKeyDictionary()

    def shared_owner(owners):
        if owners not in one_for_all:
            one_for_all[owners] = pending.Owner("all threads", lambda: True)
            owners._owners.append(one_for_all[owners])
        return one_for_all[owners]

    monkeypatch.setattr(pending.Owners, "current", shared_owner)
    monkeypatch.setattr(pending.Owners, "open_group", shared_owner)
    with pytest.raises((AssertionError, ValueError)):  # closing a group lets go of the owner that is not its own
        run_schedules(60)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [("report", pending.Owner.take), ("take", lambda owner: owner._failures.copy())],
    ids=["lost", "raised twice"],
)
def test_the_schedules_find_failures_that_are_lost_or_raised_twice(monkeypatch, method, wrong):
    monkeypatch.setattr(pending.Owner, method, wrong)
    with pytest.raises(AssertionError):
        run_schedules(60)
