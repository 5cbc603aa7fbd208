"""Crossings to a device, and starts of kernels there: each has a price in confidential mode."""

from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from helpers import cuda_rig
from helpers.crossings import ACTIONS, KEY, counted
from helpers.cuda_rig import Message, begin, large, whole
from helpers.fake_cuda import CONFIDENTIAL, MODES
from helpers.forking import in_forked_child
from helpers.messages import messages_of
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, DeviceError, LeaseError
from fastrack._crypto import base
from fastrack._devices.base import Segment, Slab
from fastrack._keys.leases import LeasePage, Moment
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE, chunk_offset

EVERY = (*MODES, "held")
HOST = "upload", "download", "fill", "launch", "record", "wait", "synchronize"  # calls of CUDA that a list makes
# Copies in and out, launches and fills, and at most so many calls of CUDA: not more than before keys were wrapped.
SMALL = {
    "to_device 4 KiB": (1, 1, 1, 13),
    "to_device 1 MiB": (1, 1, 1, 13),
    "nest, 200 x 8 KiB": (1, 1, 2, 18),
    "batch of 32 rows": (1, 1, 2, 20),
    "to_host 4 KiB": (0, 1, 1, 18),
    "to_host 1 MiB": (0, 1, 1, 18),
}
LARGE = {
    True: {"to_device 64 MiB": (4, 1, 6, 73), "16 calls of 4 KiB": (16, 1, 16, 320)},
    False: {"to_device 64 MiB": (10, 1, 12, 71), "16 calls of 4 KiB": (16, 16, 16, 256)},
}


def cost(name, mode):
    calls = counted(name, mode)[0]
    return calls["upload"], calls["download"], calls["launch"] + calls["fill"], sum(calls[each] for each in HOST)


@pytest.mark.parametrize("mode", EVERY)
@pytest.mark.slow
def test_calls_cost_at_most_what_was_agreed_on(mode):
    expected = {**SMALL, **LARGE[mode in {"serial", *CONFIDENTIAL}]}
    found = {name: cost(name, mode) for name in ACTIONS}
    assert {name: each[:3] for name, each in found.items()} == {name: each[:3] for name, each in expected.items()}
    assert {name: each for name, each in found.items() if each[3] > expected[name][3]} == {}


@pytest.fixture(params=EVERY)
def device(request):
    device = large(request.param)
    yield device
    device.close()


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_a_small_tensor_goes_and_comes_back(device, size):
    plain = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    out = device.array(size)
    device.channel.to_device(fastrack.seal(plain, KEY), out=out)
    assert np.array_equal(device.driver.read(out), plain)
    assert np.array_equal(fastrack.unseal(device.channel.to_host(out, key=KEY), KEY, framework="numpy"), plain)


def searched(device, secrets):
    """Search all memory after each command for secrets: a list that gets what was found."""
    found, run = [], device.driver._run

    def search(operation):
        run(operation)
        found.extend(name for name, secret in secrets.items() if device.driver.holds(secret))

    device.driver._run = search
    return found


def move(device, message, stage="open"):
    size = message.plain.size
    memory = device.channel._device.view(device.array(size), writable=True)
    messages = messages_of([message.key()], [size], [memory], sealed=[message.sealed])
    return cuda_rig.move(device.channel, messages, stage).result()


@pytest.mark.parametrize("stage", ["open", "seal"])
def test_no_memory_but_that_of_blocks_ever_has_the_key_of_a_small_message(device, stage):
    message = Message(5000)
    found = searched(device, {"key": message.secret, "nonce": message.nonce})
    searched_steps = Counter(device.driver.calls)
    assert move(device, message, stage) is None
    device.driver.finish()
    assert device.driver.calls["launch"] > searched_steps["launch"]
    assert found == []


def test_the_link_has_one_place_and_none_after_closing():
    for mode in EVERY:
        device = large(mode)
        key = device.channel._device._link._key
        secret = device.driver.space.at(key.state, 32).tobytes()
        assert sum(secret in each.tobytes() for each in device.driver.hosts()) == 0
        blocks = [memory for memory in device.driver.space.blocks.values() if secret in memory.tobytes()]
        assert len(blocks) == 1
        assert blocks[0].tobytes().count(secret) == 1
        move(device, Message(5000))
        device.close()
        assert not device.driver.holds(secret)


@pytest.mark.nightly
def test_the_link_stays_in_its_place_after_failures_and_a_forked_child_has_none(device):
    key = device.channel._device._link._key
    secret = device.driver.space.at(key.state, 32).tobytes()
    sealed, out = fastrack.seal(np.arange(5000, dtype=np.uint8), KEY), device.array(5000)
    for number in range(1, 20):
        device.driver.fail_at(number)
        with suppress(DeviceError):
            device.channel.to_device(sealed, out=out)
        device.driver.fail_at(None)
        device.driver.finish()
        blocks = [memory.tobytes() for memory in device.driver.space.blocks.values()]
        assert [block.count(secret) for block in blocks if secret in block] == [1], number
        assert not any(secret in host.tobytes() for host in device.driver.hosts()), number
    assert key._schedule is not None
    assert in_forked_child(lambda: key._schedule is None)


def test_the_verdict_of_a_bad_call_is_not_that_of_the_next(device):
    plain = np.arange(5000, dtype=np.uint8)
    sealed, out = fastrack.seal(plain, KEY, name="x"), device.array(5000)
    bad = tampered(sealed, chunk_offset(0))
    for _ in range(40):  # longer than the states take to come round
        with pytest.raises(AuthenticationError, match="chunk 0"):
            device.channel.to_device(bad, out=out)
        device.channel.to_device(sealed, out=out)
    assert np.array_equal(device.driver.read(out), plain)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
def test_a_byte_of_chunks_keys_or_plan_that_the_bus_turns_over_is_told_and_leaves_zeros(device, rows):
    plain = np.random.default_rng(0).integers(1, 256, (300, 257), np.uint8)
    nest = [fastrack.seal(plain, KEY, name=name) for name in "ab"]
    chosen, expected = ([each[[299, 0, 17]] for each in nest], plain[[299, 0, 17]]) if rows else (nest, plain)
    outs = [device.array(*expected.shape) for _ in nest]
    sizes, upload = [], device.driver.upload

    def note(pointer, source, size, stream):
        sizes.append(size)
        upload(pointer, source, size, stream)

    device.driver.upload = note
    device.channel.to_device(chosen, out=outs)
    device.driver.upload = upload
    (size,) = sizes
    told = 0
    places = [*range(0, size, size // 50), *range(size - 600, size, 7)]
    for place in places:
        device.driver.flips = {device.driver.calls["upload"] + 1: place}
        try:
            device.channel.to_device(chosen, out=outs)
        except AuthenticationError:
            told += 1
            assert not any(device.driver.read(out).any() for out in outs)
        else:  # padding
            assert all(np.array_equal(device.driver.read(out), expected) for out in outs)
    device.driver.flips = {}
    assert told > 0.9 * len(places)
    device.channel.to_device(chosen, out=outs)
    assert all(np.array_equal(device.driver.read(out), expected) for out in outs)


# What is lost on its way.


@pytest.mark.parametrize(("kind", "number"), [("upload", 0), ("launch", 0), ("launch", 1), ("download", 0)])
@pytest.mark.parametrize("what", ["small", "bulk", "rows"])
@pytest.mark.slow
def test_what_is_lost_is_told_and_gives_nothing_of_another_call(device, what, kind, number):
    """The call before has left the rows, the plan, the states and the verdict of another in the same places."""
    size = 5 << 20 if what == "bulk" else 300 * 257
    plain = np.random.default_rng(0).integers(1, 256, size, np.uint8).reshape(-1, 257 if what == "rows" else 1)
    other = np.random.default_rng(1).integers(1, 256, plain.shape, np.uint8)
    before, after = (fastrack.seal(each, KEY, name=name) for each, name in ((other, "a"), (plain, "b")))
    if what == "rows":
        before, after = before[[5, 299, 3]], after[[299, 0, 17]]
    out = device.array(*after.shape)
    device.channel.to_device(before, out=out)
    launches = device.driver.calls["launch"]
    device.channel.to_device(before, out=out)
    launches = device.driver.calls["launch"] - launches
    for state in device.channel._device._states._blocks[0].states:  # and whichever the call is given
        assert device.driver.done(state.finished)
    if number >= launches:
        pytest.skip("the call has no such launch")
    device.lose(kind, number)
    with pytest.raises((AuthenticationError, DeviceError)):
        device.channel.to_device(after, out=out)
    assert not device.driver.read(out).any()


@pytest.mark.parametrize("size", [5000, 5 << 20])
@pytest.mark.parametrize("kind", ["launch", "download"])
@pytest.mark.slow
def test_a_seal_that_is_lost_is_told_and_leaves_nothing_of_another(device, size, kind):
    """Else an opened plan that was left in the staging memory would be downloaded as the message."""
    plain = np.random.default_rng(0).integers(1, 256, (300, 257), np.uint8)
    device.channel.to_device(fastrack.seal(plain, KEY)[[5, 299, 3]], framework="cupy")
    x = device.channel.to_device(np.full(size, 7, np.uint8))
    device.channel.to_host(x, key=KEY)
    sealed = fastrack.seal(np.full(size, 7, np.uint8), KEY)
    message = np.zeros(len(sealed.message), np.uint8)
    device.lose(kind, 0)
    with pytest.raises(DeviceError, match="seals"):
        device.channel.seal_message(x, sealed.context, KEY, message)
    assert not message[56:].any()


def test_a_seal_that_is_lost_clears_its_own_chunks_only(device):
    """Of a message that is sealed in runs only one is in memory: what lies around it is of others."""
    message, cuda = Message(3 * CHUNK_SIZE + 9), device.channel._device
    array, buffer = device.array(message.plain.size), cuda.staging_buffer(1 << 20)
    memory = np.full(message.sealed.size + SEALED_CHUNK_SIZE, 7, np.uint8)
    before = memory.ctypes.data  # that of the run's second chunk lies where the memory begins
    sealed = base.HostMemory(before - SEALED_CHUNK_SIZE, 3 * SEALED_CHUNK_SIZE, memory)
    device.lose("launch", 0)
    work = begin(cuda, message, array, sealed=sealed, writable=False)
    run = Segment(0, 2, 2 * CHUNK_SIZE, 3 * CHUNK_SIZE, SEALED_CHUNK_SIZE)
    work.seal(Slab([run], SEALED_CHUNK_SIZE), buffer)
    work.finish()
    with pytest.raises(DeviceError, match="seals"):
        work.result()
    assert not memory[SEALED_CHUNK_SIZE : 2 * SEALED_CHUNK_SIZE].any()
    assert (memory[:SEALED_CHUNK_SIZE] == 7).all()
    assert (memory[2 * SEALED_CHUNK_SIZE :] == 7).all()
    buffer.wipe()


def test_a_list_that_is_lost_whole_is_told(device):
    """As if the driver had taken it and the device had never run it."""
    plain = np.arange(5000, dtype=np.uint8)
    sealed, out = fastrack.seal(plain, KEY, name="x"), device.array(5000)
    for _ in range(33):  # each state has had a good verdict
        device.channel.to_device(sealed, out=out)
    for kind in ("upload", "launch", "fill"):
        device.driver.__dict__[kind] = lambda *_: None
    with pytest.raises(AuthenticationError):
        device.channel.to_device(sealed, out=out)
    for kind in ("upload", "launch", "fill"):
        del device.driver.__dict__[kind]


# The key of the link.


def test_the_key_of_the_link_is_replaced_and_wiped_when_its_last_call_has_ended(device, limited):
    plain = np.arange(5000, dtype=np.uint8)
    sealed, out = fastrack.seal(plain, KEY), device.array(5000)
    limited(link_calls=3)
    secrets = set()
    for number in range(10):
        device.channel.to_device(sealed, out=out, non_blocking=number % 2 == 0)
        secrets.add(device.driver.space.at(device.channel._device._link._key.state, 32).tobytes())
    device.channel.synchronize()
    assert np.array_equal(device.driver.read(out), plain)
    assert len(secrets) == 4
    device.channel.to_device(sealed, out=out)
    device.driver.finish()
    assert sum(map(device.driver.holds, secrets)) == 1


@pytest.mark.parametrize("reason", [{"link_chunks": 1}, {"link_pause": -1}], ids=["chunks", "pause"])
def test_the_key_of_the_link_is_replaced_for_chunks_and_pauses(device, reason, limited):
    keys = device.channel._device._link
    first = keys._key
    limited(**reason)
    for _ in range(3):
        assert move(device, Message(5000)) is None
    assert keys._key is not first


def test_a_call_under_a_replaced_key_ends_well_and_only_then_the_key_is_wiped(device, limited):
    limited(link_pause=-1)  # a new key for each call
    message, cuda = Message(5000), device.channel._device
    array, buffer = device.array(5000), cuda.staging_buffer(1 << 20)
    work = begin(cuda, message, array)
    secret = device.driver.space.at(work._recorder._key.state, 32).tobytes()
    for _ in range(3):
        assert move(device, Message(700, seed=1)) is None
    assert device.driver.holds(secret)
    work.open(whole(message), buffer)
    work.finish()
    assert work.result() is None
    assert np.array_equal(device.driver.read(array), message.plain)
    for _ in range(2):
        assert move(device, Message(700, seed=1)) is None
    device.driver.finish()
    assert not device.driver.holds(secret)
    buffer.wipe()


def test_the_end_of_a_lease_replaces_the_key_of_the_link_and_calls_go_on(device):
    plain = np.arange(5000, dtype=np.uint8)
    key, out = fastrack.Key.generate(), device.array(5000)
    sealed, other = fastrack.seal(plain, key), fastrack.seal(plain[::-1], KEY)
    page = LeasePage.create([key], Moment.now().after(60))
    device.channel.to_device(sealed, out=out, keys=page.keys[0])
    first = device.channel._device._link._key
    secret = device.driver.space.at(first.state, 32).tobytes()
    page.end()
    assert device.channel._device._link._key is not first
    device.driver.finish()
    assert not device.driver.holds(secret)
    with pytest.raises(LeaseError):
        device.channel.to_device(sealed, out=out, keys=page.keys[0])
    device.channel.to_device(other, out=out)
    assert np.array_equal(device.driver.read(out), plain[::-1])


def test_the_end_of_a_lease_leaves_a_closed_device_and_one_of_the_parent_alone():
    device = large("lazy")
    try:
        page, key = (LeasePage.create([fastrack.Key.generate()], Moment.now().after(60)) for _ in range(2))
        link = device.channel._device._link
        assert in_forked_child(lambda: key.end() or link._key is None) is False
        assert link._key.calls == 0
    finally:
        device.close()
    calls = Counter(device.driver.calls)
    page.end()
    key.end()
    assert Counter(device.driver.calls) == calls
