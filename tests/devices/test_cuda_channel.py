"""The transfer loop over a CUDA device: the same results as on the host, in both directions."""

import functools
from contextlib import suppress

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import Opened, within
from helpers.fake_cuda import MODES, FakeArray
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, DeviceError
from fastrack.format import CHUNK_SIZE

KEY = Opened.KEY
PLAIN = np.random.default_rng(0).integers(0, 1 << 30, (300, 257), np.int32)  # 18 chunks and a bit


def test_a_sealed_tensor_arrives(opened):
    sealed = fastrack.seal(PLAIN, KEY, name="x")
    x = opened.channel.to_device({"a": sealed, "b": 5}, framework="cupy")
    opened.assert_holds(x["a"], PLAIN)
    assert x["b"] == 5
    assert set(opened.launched()) <= {"small_256", "unwrap", "open_256"}


@each(
    ("plain", "rows"),
    [
        (PLAIN, [299, 0, 17, 16, 15, 200, 201, 17]),
        (np.arange(30000, dtype=np.int16).reshape(-1, 2), np.random.default_rng(1).permutation(15000)[:6000]),
    ],
)
def test_rows_of_a_sealed_tensor_arrive(opened, plain, rows):
    x = opened.channel.to_device(fastrack.seal(plain, KEY, name="x")[rows], framework="cupy")
    opened.assert_holds(x, plain[rows])


EDGES = [np.arange(nbytes, dtype=np.uint8) for nbytes in (0, 1, CHUNK_SIZE, 2 * CHUNK_SIZE)]


@each("plain", [PLAIN, *EDGES])
def test_a_plain_tensor_arrives_and_comes_back_sealed(opened, plain):
    x = opened.channel.to_device(plain)
    assert isinstance(x, FakeArray)
    opened.assert_holds(x, plain)
    sealed = opened.channel.to_host(x, key=KEY, name="back")
    assert np.array_equal(fastrack.unseal(sealed, keys=KEY, framework="numpy"), plain)


def test_a_spoilt_chunk_is_told_and_the_result_is_cleared(opened):
    sealed = fastrack.seal(PLAIN, KEY, name="x")
    x = opened.channel.to_device(PLAIN)
    with pytest.raises(AuthenticationError, match="chunk 7") as failure:
        opened.channel.to_device(tampered(sealed, 56 + 16400 * 7), out=x)
    assert failure.value.chunk == 7
    assert not opened.driver.read(x).any()
    opened.assert_holds(opened.channel.to_device(sealed, out=x), PLAIN)


@each("waits", [True, False])
def test_a_plan_that_was_altered_is_told_and_the_result_holds_zeros(opened, waits):
    sealed = fastrack.seal(PLAIN, KEY, name="x")
    rows = [299, 0, 17]
    x = opened.channel.to_device(PLAIN[rows])
    opened.driver.flips[opened.driver.calls["upload"] + 1] = -1

    def move():
        opened.channel.to_device(sealed[rows], out=x, non_blocking=not waits)
        opened.channel.synchronize()

    with pytest.raises(AuthenticationError, match="rows of") as failure:
        move()
    assert (failure.value.tensor, failure.value.chunk) == ("x", None)
    assert not opened.driver.read(x).any()
    opened.driver.flips.clear()
    opened.assert_holds(opened.channel.to_device(sealed[rows], out=x), PLAIN[rows])


def test_transfers_that_are_not_waited_for_arrive(opened):
    results = [opened.channel.to_device(PLAIN + n, non_blocking=True) for n in range(5)]
    for n, x in enumerate(results):
        opened.assert_holds(x, PLAIN + n)
    opened.channel.synchronize()


@each("seed", range(25))
def test_a_channel_keeps_its_order(seed):
    opened = Opened("lazy", seed)
    x = opened.channel.to_device(PLAIN, non_blocking=seed % 2 == 0)
    sealed = opened.channel.to_host(x, key=KEY)
    y = opened.channel.to_device(sealed, framework="cupy", non_blocking=True)
    opened.assert_holds(y, PLAIN)
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "confidential" else pytest.mark.nightly) for mode in MODES]
)
def test_calls_that_fail_leave_a_channel_that_works(mode):
    for number in range(1, 1000, 7):
        opened = Opened(mode, number)
        opened.driver.fail_at(number)
        try:
            x = within(60, functools.partial(opened.channel.to_device, PLAIN))
            within(60, functools.partial(opened.channel.to_host, x, key=KEY))
        except DeviceError:
            opened.driver.fail_at(None)
        failed, opened.driver._fail_at = opened.driver.failed, None
        x = within(60, functools.partial(opened.channel.to_device, PLAIN))
        opened.assert_holds(x, PLAIN)
        opened.close()
        if failed is None and number > 300:
            return


@each("slabs", [4, 7, 8, 12])
def test_a_plain_tensor_behind_a_long_sealed_one_arrives(opened, slabs):
    """It is not filled into a buffer that waits for a list which this thread has still to issue."""
    plain = np.random.default_rng(0).integers(0, 256, slabs * 4 * CHUNK_SIZE, np.uint8)
    sealed = fastrack.seal(plain, KEY)
    x, y = within(20, lambda: opened.channel.to_device([sealed, np.arange(5)], framework="cupy"))
    opened.assert_holds(x, plain)
    opened.assert_holds(y, np.arange(5))


def test_an_interrupt_of_reading_a_verdict_leaves_a_good_message_good(opened, monkeypatch):
    x = opened.channel.to_device(fastrack.seal(PLAIN, KEY), framework="cupy", non_blocking=True)
    opened.driver.finish()
    issue = opened.driver.issue

    def interrupted(*given, **options):
        issue(*given, **options)  # the verdict is downloaded
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(opened.driver, "issue", interrupted)
        opened.channel.synchronize()
    opened.channel.synchronize()
    opened.assert_holds(x, PLAIN)
