"""Every step of the ablation moves the same bytes, refuses what was altered, and is counted as it says."""

import dataclasses
from contextlib import contextmanager, nullcontext
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from helpers import measuring
from helpers.cuda_rig import sized
from helpers.fake_cuda import MODES, FakeDriver
from helpers.host_gpu import standing_in

from fastrack import AuthenticationError
from fastrack._bench import endpoints, measure, paths, runner, steps
from fastrack.format import CHUNK_SIZE

NBYTES = 5 * CHUNK_SIZE + 77


SmallDevice = sized(most=2, first=1)


@pytest.fixture
def driver(monkeypatch):
    """A GPU of host memory, for the steps and for the channel."""
    with stand_in(monkeypatch, "lazy") as driver:
        yield driver


@pytest.fixture(params=["cpu", "lazy"])
def device(request, monkeypatch):
    """The name of a device: `cpu`, or a GPU of host memory."""
    with nullcontext() if request.param == "cpu" else stand_in(monkeypatch, request.param):
        yield "cpu" if request.param == "cpu" else "cuda:0"


@contextmanager
def stand_in(monkeypatch, mode):
    with standing_in(monkeypatch, FakeDriver(mode), SmallDevice) as driver:
        yield driver
    assert driver.left() == 0


# What arrives.


@pytest.mark.parametrize("device", ["cpu", *MODES], indirect=True)
@pytest.mark.slow
def test_every_step_delivers_what_it_was_given(device):
    for direction, nbytes, bits in product(endpoints.DIRECTIONS, (1, CHUNK_SIZE, NBYTES), (128, 256)):
        with steps.open_steps(direction, nbytes, device=device, bits=bits) as opened:
            assert tuple(step.name for step in opened.steps) == steps.STEPS
            opened.check()
            opened.check()


def test_a_step_that_delivers_something_else_is_noticed(device):
    for direction in endpoints.DIRECTIONS:
        with steps.open_steps(direction, NBYTES, device=device) as opened:
            for number, step in enumerate(opened.steps):
                spoilt = dataclasses.replace(step, run=lambda: None, read=lambda _: np.zeros(NBYTES, np.uint8))
                others = steps.Steps([*opened.steps[:number], spoilt], opened._plain, opened._forget)
                with pytest.raises(RuntimeError, match="other bytes"):
                    others.check()


def test_what_an_earlier_step_left_behind_is_not_taken_for_a_result(device):
    with steps.open_steps("to_device", NBYTES, device=device) as opened:
        opened.check()
        idle = dataclasses.replace(opened.steps[-1], run=lambda: None)
        with pytest.raises(RuntimeError, match="plain copy"):
            steps.Steps([*opened.steps[:-1], idle], opened._plain, opened._forget).check()


def step_of(opened, name):
    return next(step for step in opened.steps if step.name == name)


@contextmanager
def tampered(place):
    """Turn over a byte of every sealed message that goes by, at its place or counted from its end."""

    def spoil(target, source):
        original(target, source)
        target[place] ^= 1

    original = paths.copy
    with patch.object(paths, "copy", spoil), patch.object(steps, "copy", spoil):
        yield


PLACES = (0, NBYTES // 2, -30)


def test_an_altered_message_is_refused_on_cpu_and_leaves_zeros():
    for name, place in product((measure.BOUNCE, steps.DIRECT, steps.PARALLEL), PLACES):
        with steps.open_steps("to_device", NBYTES) as opened:
            step = step_of(opened, name)
            with tampered(place), pytest.raises(AuthenticationError):
                step.run()
            assert not step.read(None).any(), (name, place)


def test_what_was_altered_on_the_way_to_the_host_is_refused_there_and_by_the_owner():
    with steps.open_steps("to_host", NBYTES) as opened:
        for place in PLACES:
            with tampered(place), pytest.raises(AuthenticationError):
                step_of(opened, measure.BOUNCE).run()
        for name in (steps.DIRECT, steps.PARALLEL):
            step = step_of(opened, name)
            with tampered(NBYTES // 2), pytest.raises(AuthenticationError):
                step.read(step.run())


# What a step does and does not do on a GPU.


def launched(driver, step):
    del driver.launches[:]
    step.run()
    return [(kernel, blocks) for kernel, blocks, _ in driver.launches if kernel not in {"prepare", "unwrap"}]


def test_one_block_works_a_chain_and_all_of_them_work_what_is_parallel(driver):
    for direction, kernel, small in (("to_device", "open_256", "small_256"), ("to_host", "seal_256", "seal_256")):
        with steps.open_steps(direction, NBYTES, device="cuda:0") as opened:
            by_name = {step.name: launched(driver, step) for step in opened.steps}
        assert by_name[measure.BOUNCE] == by_name[steps.DIRECT] == [(kernel, 1)]
        assert by_name[steps.PARALLEL] == [(small, 6)]  # as many as there are chunks
        assert len(by_name[endpoints.OVERLAP]) > 1
        assert by_name[measure.COPY] == []


# How it is counted.


@pytest.mark.usefixtures("driver")
def test_on_a_gpu_overlap_hides_passes_and_saves_none():
    with steps.open_steps("to_device", NBYTES, device="cuda:0") as opened:
        traffic = {step.name: step.traffic for step in opened.steps}
    assert traffic == {measure.BOUNCE: 8, steps.DIRECT: 6, steps.PARALLEL: 6, endpoints.OVERLAP: 6, measure.COPY: 2}


def test_a_hundred_runs_have_a_p99_and_fewer_have_none():
    assert measure.Times([1.0] * 99, 1.0).p99 is None
    p99 = measure.Times([1.0] * 99 + [101.0], 1.0).p99
    assert p99 == pytest.approx(2.0)  # between the last two, a hundredth of the way
    assert measure.Times([1.0, 2.0, 3.0, 4.0, 5.0], 1.0).quartiles == (2.0, 4.0)
    assert measure.Times([1.0], 1.0).quartiles == (1.0, 1.0)


def test_rounds_call_each_in_turn_after_it_has_settled():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.timed_rounds(runs, 2, settle=1)
    assert "".join(order) == "aabb" * 2
    assert [len(found.seconds) for found in times.values()] == [2, 2]
    assert all(found.cpu >= 0 for found in times.values())
    order.clear()
    assert [len(seconds) for seconds in measure.interleave(runs, 2).values()] == [2, 2]
    assert "".join(order) == "ab" * 3  # the first to warm up


@pytest.fixture
def few(monkeypatch):
    measuring.shorten(monkeypatch)


@pytest.mark.usefixtures("few")
def test_ratios_follow_from_times():
    rows = runner.ablate([1 / 16], repeat=3)[: len(steps.STEPS)]
    seconds = {row.step: row.seconds for row in rows}
    for row, previous in zip(rows, [None, *steps.STEPS], strict=False):
        assert row.over_bounce == pytest.approx(seconds[measure.BOUNCE] / row.seconds)
        assert row.of_copy == pytest.approx(seconds[measure.COPY] / row.seconds)
        assert row.cost == pytest.approx(row.seconds / seconds[measure.COPY])
        assert row.gbps == pytest.approx((1 << 16) / row.seconds / 1e9)
        if row.step in {measure.BOUNCE, measure.COPY}:
            assert row.over_previous is None
        else:
            assert row.over_previous == pytest.approx(seconds[previous] / row.seconds)
