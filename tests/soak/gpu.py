"""The same on a CUDA device that is made of host memory, by the driver that the tests have for it."""

import threading

import numpy as np
import pytest
from helpers import fake_cuda
from helpers.cuda_rig import sized
from helpers.fake_cuda import MODES, FakeDriver
from helpers.tampering import tampered

from fastrack import AuthenticationError, Channel, DeviceError, unseal
from fastrack._transfer import channel
from fastrack.format import CHUNK_SIZE, HEADER_SIZE, SEALED_CHUNK_SIZE, TAG_SIZE
from soak.worker import KEYS, RING, Violation

LARGEST = 40 * CHUNK_SIZE
# Asking whether a slot is free: if that fails, the device is asked to settle, and does. And making one more slot: if
# that fails, those there are have to do.
SETTLED = {"synchronize", "done", "host", "memory", "event"}

_local = threading.local()


SmallDevice = sized(most=4, first=1)


def install():
    """Have channels to "cuda:0" use the driver of their thread from now on."""
    fake_cuda.install(pytest.MonkeyPatch())
    open_device = channel.open_device

    def choose(name, *options):
        return open_device(name, *options) if name == "cpu" else SmallDevice(_local.driver)

    channel.open_device = choose


def fake_gpu(worker):
    """One channel, a few transfers, and a fault among them."""
    driver = _local.driver = FakeDriver(worker.random.choice(MODES), worker.random.randrange(1000))
    with Channel("cuda:0", keys=KEYS) as opened:
        for _ in range(worker.random.randrange(1, 6)):
            action = worker.random.choice(ACTIONS)
            action(worker, driver, opened)
    driver.stop()
    if driver.violations:
        raise Violation(f"what no program may do on a GPU: {driver.violations}")


def _there(worker, driver, opened):
    array = worker.array(min(worker.size(), LARGEST))
    waits = worker.random.random() < 0.5
    worker.check(driver.read(opened.to_device(array, non_blocking=not waits)), array, "a transfer to the GPU")
    opened.synchronize()


def _there_and_back(worker, driver, opened):
    array = worker.array(min(worker.size(), LARGEST))
    sealed = opened.to_host(opened.to_device(array, non_blocking=True), key=worker.key())
    worker.check(unseal(sealed, RING, framework="numpy"), array, "back from the GPU")
    worker.check(driver.read(opened.to_device(sealed, framework="cupy")), array, "back to the GPU")


def _rows(worker, driver, opened):
    sealed, array = worker.sealed(min(max(worker.size(), 4096), LARGEST), rows=17)
    chosen = [worker.random.randrange(17) for _ in range(9)]
    worker.check(driver.read(opened.to_device(sealed[chosen], framework="cupy")), array[chosen], "rows on the GPU")


def _spoilt(worker, driver, opened):
    sealed, array = worker.sealed(worker.random.randrange(1, 20) * CHUNK_SIZE)
    chunk = worker.random.randrange(array.nbytes // CHUNK_SIZE + 1)
    out = opened.to_device(np.ones_like(array))
    spoilt = tampered(sealed, HEADER_SIZE + SEALED_CHUNK_SIZE * chunk)
    error = worker.fault("bit in a chunk, GPU", lambda: opened.to_device(spoilt, out=out), AuthenticationError)
    _require_zeros(driver, out)
    if error.chunk != chunk:
        raise Violation(f"chunk {chunk} was altered, and {error!r} was raised")


def _flipped_by_the_bus(worker, driver, opened):
    array = worker.array(worker.random.randrange(1, 20) * CHUNK_SIZE)
    _flip(worker, driver, opened, "bit on the bus, GPU", array, array, worker.random.randrange(CHUNK_SIZE))


def _flipped_plan(worker, driver, opened):
    sealed, array = worker.sealed(worker.random.randrange(1, 20) * CHUNK_SIZE, rows=17)
    chosen = [worker.random.randrange(17) for _ in range(9)]
    # The upload is a slab: its chunks, its wrapped key, its plan, and the tag of the plan.
    place = -worker.random.randrange(1, TAG_SIZE + 8 * 3 * 9)
    _flip(worker, driver, opened, "bit of a plan, GPU", sealed[chosen], array[chosen], place)


def _flip(worker, driver, opened, kind, given, array, place):
    """Move what is given with a bit flipped at a place of its first upload, then once more without."""
    out = opened.to_device(np.ones_like(array))
    opened.synchronize()
    driver.flips[driver.calls["upload"] + 1] = place
    worker.fault(kind, lambda: opened.to_device(given, out=out), AuthenticationError)
    driver.flips.clear()
    _require_zeros(driver, out)
    worker.check(driver.read(opened.to_device(given, out=out)), array, "the transfer after a failure")


def _failing(worker, driver, opened):
    """Some call of the driver fails, if there are so many."""
    array = worker.array(worker.random.randrange(1, 20) * CHUNK_SIZE)
    driver.fail_at(worker.random.randrange(1, 25))
    error = None
    try:
        worker.check(driver.read(opened.to_device(array)), array, "a transfer to a GPU that may fail")
    except DeviceError as caught:
        error = caught
    failed = driver.failed
    driver.fail_at(None)
    require_told(worker, failed, error)
    worker.check(driver.read(opened.to_device(array)), array, "the transfer after a failure")


def require_told(worker, failed, error):
    """The call that failed was told, and nothing else was; what the device could settle need not be."""
    if failed is None and error is not None:
        raise Violation("no call of the driver was made to fail") from error
    if failed is None or (error is None and failed in SETTLED):
        return
    worker.injected["failing driver, GPU"] += 1
    if error is None:
        raise Violation(f"{failed} of the driver failed, and nothing was raised")
    worker.caught["failing driver, GPU"] += 1


def _require_zeros(driver, out):
    if driver.read(out).view(np.uint8).any():
        raise Violation("out= on the GPU does not hold zeros")


ACTIONS = [_there, _there_and_back, _rows, _spoilt, _flipped_by_the_bus, _flipped_plan, _failing]
JOBS = {fake_gpu: 1}
