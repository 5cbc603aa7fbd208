"""The parts of the suite for GPUs where there is none: what they measure and check, on a stand-in of host memory."""

import os
import threading

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from helpers import fake_cuda
from helpers.fake_kernels import SCALARS
from helpers.stand_in_gpu import TINY, StandIn

from bench.gpu import (
    ablation,
    host_data,
    kernels,
    known,
    latency,
    needs,
    plan,
    slowdown,
    sweep,
    timeline,
    transfers,
)
from bench.gpu.gpu import WrongResultError
from bench.gpu.stages import loop
from bench.gpu.targets import check_targets
from bench.gpu.timing import Row, Times
from fastrack import Channel, Key, seal
from fastrack._devices.cuda import cupy_driver
from fastrack.errors import DeviceError
from fastrack.format import CHUNK_SIZE


@pytest.fixture
def gpu(monkeypatch):
    fake_cuda.install(monkeypatch)
    stand_in = StandIn()
    yield stand_in
    assert stand_in.driver.violations == []


# What is measured.


@pytest.mark.slow
def test_every_path_is_measured_at_every_size(gpu):
    rows = list(transfers.measure(gpu, TINY))
    assert len(rows) == 2 * 10
    assert len({(row.path, row.size) for row in rows}) == 20
    rows = list(ablation.measure(gpu, TINY))
    assert len({(row.settings["direction"], row.path, row.size) for row in rows}) == len(rows) == 2 * 2 * 5
    rows = list(kernels.measure(gpu, TINY))
    assert len(rows) == 2 * 2 * 5
    assert {row.settings.get("share") for row in rows} == {"1", "1/2", None}


@pytest.fixture
def filling(gpu, monkeypatch):
    """The numbers of threads that fill staging buffers, on a host of five CPUs, as they come."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    issue, found = gpu.driver.issue, []

    def record(commands, *, threads=1, hold=False):
        if commands.copies:
            found.append(threads)
        issue(commands, threads=threads, hold=hold)

    monkeypatch.setattr(gpu.driver, "issue", record)
    return found


def test_staging_buffers_are_filled_by_as_many_threads_as_in_the_channel_of_a_user(gpu, filling, monkeypatch):
    monkeypatch.setattr(cupy_driver, "CupyDriver", lambda _: gpu.driver)
    key = Key.generate()
    with Channel("cuda:0", keys=key) as channel:
        channel.to_device(seal(np.zeros(1000, np.uint8), key), framework="cupy")
    assert set(filling) == {5}
    for part in (ablation, latency, slowdown, timeline, transfers):
        del filling[:]
        show = [lambda _: None] if part is timeline else []
        assert list(part.measure(gpu, TINY, *show))
        assert set(filling) == {5}, part


def test_every_setting_of_a_transfer_is_swept(gpu, filling):
    rows = list(sweep.measure(gpu, TINY))
    settings = "slab", "depth", "share", "threads"
    assert [row.settings["varied"] for row in rows] == [each for each in settings for _ in range(2)] + ["lead"] * 3
    assert {row.settings["depth"] for row in rows if row.settings["varied"] == "depth"} == {2, 3}
    assert {row.settings["threads"] for row in rows} == set(filling) == {1, 2, 5}
    leads = [(row.size, row.settings["lead"]) for row in rows if row.settings["varied"] == "lead"]
    assert leads == [(CHUNK_SIZE, CHUNK_SIZE), (20 * CHUNK_SIZE, CHUNK_SIZE), (20 * CHUNK_SIZE, 2 * CHUNK_SIZE)]


@pytest.mark.slow
def test_the_product_is_measured_beside_everything(gpu):
    before = set(threading.enumerate())
    rows = list(slowdown.measure(gpu, TINY))
    streams = ["to_device, sealed, share 1", "to_device, sealed, share 1/4"]
    assert [row.settings["beside"] for row in rows] == ["nothing", "page-locked copies", *streams]
    assert rows[0].settings["slowed"] == 1
    swept = [row.settings["beside"] for row in slowdown.sweep(gpu, TINY)]
    grid = [f"slab {slab}, depth {depth}" for slab in (32768, 65536) for depth in (2, 3)]
    assert [name for name in swept if name != "nothing"] == [*grid, "lead 16384", "lead 32768"]
    assert swept.count("nothing") == 3
    assert [row.settings["lanes"] for row in slowdown.lanes(gpu, TINY)] == [1, 2, 3, 4, "nothing"]
    # Helpers of the engine stay, for the next call.
    assert all(thread.name.startswith("fastrack") for thread in set(threading.enumerate()) - before)


@pytest.mark.slow
def test_a_training_loop_is_fed_in_three_ways():
    pytest.importorskip("torch")
    rows = list(loop.measure("cpu", TINY))
    assert len(rows) == 3 * len(TINY.loop_products)
    assert {row.path for row in rows} == {loop.THERE, loop.PINNED, loop.WRAPPED}
    assert {row.size for row in rows} == {2 * TINY.loop_rows * loop.WIDTH}


# What goes wrong.


# Where what a kernel writes stands among the arguments, and the size of the plaintext: both in the table to open.
OPENING = "open", "gather", "small", "pick"
TARGETS = {**{kernel: SCALARS[kernel] for kernel in OPENING}, "seal": 3, "keep": 2}
SIZES = {**{kernel: SCALARS[kernel] + 2 for kernel in OPENING}, "seal": 6, "keep": 2}


def test_a_kernel_that_is_wrong_is_found(gpu, monkeypatch):
    """A byte is wrong in what it writes, or is written beside that."""
    original = fake_cuda.run_kernel
    for kernel, place, told in (
        *((kernel, 0, "another answer") for kernel in SIZES),
        ("open", -1, "outside its buffer"),
    ):

        def run(space, violations, name, arguments, kernel=kernel, place=place):
            original(space, violations, name, arguments)
            if name.startswith(kernel) and (place < 0 or arguments[SIZES[kernel]] > 300):
                space.at(arguments[TARGETS[kernel]] + place, 1)[0] ^= 1

        monkeypatch.setattr(fake_cuda, "run_kernel", run)
        with pytest.raises(WrongResultError, match=told):
            known.check(gpu)


def test_what_arrives_wrong_is_found(gpu):
    memory, stream = gpu.driver.memory(100), gpu.driver.stream(high_priority=False)
    with pytest.raises(WrongResultError, match="something else arrived"):
        host_data.require_same("it", gpu, memory.pointer, np.zeros(100, np.uint8), stream)


def test_something_beside_the_product_that_fails_is_told():
    def fail(_):
        raise DeviceError("lost")

    with pytest.raises(DeviceError, match="lost"), slowdown._repeated(fail):
        pass


# Known answers.


def test_the_published_cases_are_those_of_the_specification():
    for number, key, nonce, plain, sealed in known.CASES:
        found = AESGCM(bytes.fromhex(key)).encrypt(bytes.fromhex(nonce), bytes.fromhex(plain), None)
        assert found.hex() == sealed, number


# Figures.


def rows_of(**seconds):
    """Rows at 256 MiB as a run would give them."""
    times = {
        transfers.SEALED: seconds.get("sealed", 0.005),
        transfers.LOCKED: 0.005,
        transfers.BOUNCE: seconds.get("bounce", 0.1),
    }
    rows = [Row("transfers", path, 256 * plan.MIB, Times([taken])) for path, taken in times.items()]
    opened = Times([seconds.get("open", 0.001)])
    rows.append(Row("kernels", "open", 256 * plan.MIB, opened, {"bits": 256, "share": "1"}))
    slowed = {"beside": slowdown.beside(1 / 4), "slowed": seconds.get("slowed", 1.05)}
    return [*rows, Row("slowdown", "matrix product", 1, Times([1.0]), slowed)]


def test_targets_are_met_missed_or_not_measured():
    found = check_targets(rows_of())
    assert [each.is_met for each in found] == [True] * 4
    assert [each.value for each in found] == pytest.approx([268.4, 1, 20, 1.05], abs=0.1)
    for place, worse in enumerate(({"open": 0.002}, {"sealed": 0.006}, {"bounce": 0.04}, {"slowed": 1.2})):
        assert [each.is_met for each in check_targets(rows_of(**worse))] == [place != number for number in range(4)]
    assert [each.is_met for each in check_targets([])] == [None] * 4


# Packages.


def test_old_packages_are_named(monkeypatch):
    monkeypatch.setattr(needs, "version", lambda name: "45.0.7")
    problem = needs.Need("cryptography", ("cryptography",), 50).problem()
    assert problem == "cryptography 45.0.7 is older than 50"
    assert needs.Need("cryptography", ("cryptography",), 45).problem() is None
    assert needs.Need("no_such_module", ("none",)).problem() == "none is not installed"
