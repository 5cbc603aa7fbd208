"""All messages of a call on a CUDA device: one launch for a hundred segments of a slab, and one wait."""

import gc

import numpy as np
import pytest
from helpers.cases import each
from helpers.cuda_rig import Message, Opened, device_of, read_words, within
from helpers.fake_cuda import MODES, FakeDriver
from helpers.fake_kernels import SCALARS, table_rows
from helpers.messages import messages_of
from helpers.tampering import tampered

import fastrack
from fastrack import AuthenticationError, DeviceError
from fastrack._crypto.cobblestone import segment_size
from fastrack._devices.base import BAD_PLAN, NO_VERDICT, BadChunk, Segment, Slab
from fastrack._devices.cuda import launches, link, nvrtc, table
from fastrack._devices.paged import cuda as paged
from fastrack.format import CHUNK_SIZE

KEY, SHORT = Opened.KEY, Opened.SHORT
SIZES = [100, 0, CHUNK_SIZE, 1, 2 * CHUNK_SIZE + 777, 5 * CHUNK_SIZE, 16, CHUNK_SIZE - 1]


def arrays(sizes=SIZES, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, np.uint8) for size in sizes]


def sealed(plain, key=KEY):
    return [fastrack.seal(each, key, name=f"x{number}") for number, each in enumerate(plain)]


def same(found, expected):
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


# A whole nest.


def test_the_host_knows_the_sizes_of_the_kernels():
    constants = nvrtc.find_kernels().constants
    assert (constants["KEY_BYTES"], constants["ROW_BYTES"]) == (link.KEY_SIZE, link.ROW_SIZE)
    assert (constants["STATE_BYTES"], constants["VERDICT_BYTES"]) == (link.STATE_SIZE, paged.VERDICT_SIZE)
    assert (constants["SEGMENTS"], constants["WIDENINGS"]) == (table.MAX_SEGMENTS, table.MAX_WIDENINGS)


@pytest.mark.slow
def test_a_thousand_tensors_take_a_launch_for_each_hundred_and_one_wait():
    opened = Opened("lazy", device=device_of)
    plain = arrays([8192] * 1000)
    nest = sealed(plain)
    waits = []
    issue = opened.driver.issue
    opened.driver.issue = lambda commands, **options: (waits.append(0), issue(commands, **options))
    before = opened.driver.calls.copy()
    found = opened.channel.to_device(nest, framework="cupy")
    calls = opened.driver.calls - before
    names = opened.launched()
    # Slabs of 2, 3 and the rest of 8 MB: one launch for each hundred segments of a slab.
    slabs = calls["upload"]
    assert slabs == 3
    assert names.count("open_256") <= slabs + 1000 // table.MAX_SEGMENTS
    assert names.count("unwrap") == names.count("open_256")
    segments = [arguments[4] for name, _, arguments in opened.driver.launches if name == "open_256"]
    assert sum(segments) == 1000
    assert calls["download"] == 1
    assert len(waits) <= 2 + slabs
    assert same(opened.read(found), plain)
    opened.close()


def test_a_slab_of_up_to_a_hundred_segments_takes_one_launch(opened):
    plain = arrays([50] * table.MAX_SEGMENTS)
    found = opened.channel.to_device(sealed(plain), framework="cupy")
    assert opened.launched() == ["unwrap", "open_256"]
    assert same(opened.read(found), plain)


def test_a_single_tensor_takes_one_launch(opened):
    (found,) = opened.channel.to_device(sealed(arrays([70])), framework="cupy")
    assert opened.launched() == ["small_256"]
    assert np.array_equal(opened.driver.read(found), *arrays([70]))


@each("seed", range(15))
def test_a_nest_keeps_its_order(seed):
    opened = Opened("lazy", seed)
    plain = arrays(seed=seed)
    for _ in range(2):
        found = opened.channel.to_device(sealed(plain), framework="cupy", non_blocking=seed % 2 == 0)
        assert same(opened.read(found), plain)
    opened.close()


def test_keys_of_both_sizes_and_plain_tensors_share_a_call(opened):
    plain = arrays()
    one, other = sealed(plain), sealed(plain, SHORT)
    nest = [plain[0], one[4], other[4], other[0], one[0], plain[4], other[5], plain[1]]
    expected = [plain[number] for number in (0, 4, 4, 0, 0, 4, 5, 1)]
    found = opened.channel.to_device(nest, framework="cupy")
    assert same(opened.read(found), expected)
    assert {"small_128", "small_256"} <= set(opened.launched())


def test_rows_of_several_tensors_share_a_launch(opened):
    plain = [each.reshape(-1, 100) for each in arrays([100 * 400, 100 * 700, 100 * 10])]
    rows = [[399, 0, 17], [1, 2, 650, 3], [9]]
    nest = [tensor[row] for tensor, row in zip(sealed(plain), rows, strict=True)]
    found = opened.channel.to_device(nest, framework="cupy")
    assert same(opened.read(found), [each[row] for each, row in zip(plain, rows, strict=True)])
    names = opened.launched()
    gathers = [arguments for name, _, arguments in opened.driver.launches if name == "pick_256"]
    assert sum(arguments[6] for arguments in gathers) >= 3  # segments
    assert len(gathers) == names.count("open_256")  # one plan each
    assert len(gathers) < 5


def test_more_messages_than_slots_share_them_in_turn():
    for sizes in ([30] * (launches.SPREAD + 30), [70_000] * (launches.SPREAD + 5), [0, 40_000, 5] * 60):
        opened = Opened("lazy", len(sizes))
        plain = arrays(sizes)
        found = opened.channel.to_device(sealed(plain), framework="cupy")
        assert same(opened.read(found), plain)
        opened.close()


@each("together", [True, False])
def test_messages_that_share_a_slot_are_opened_in_any_order(together):
    driver = FakeDriver("lazy", multiprocessors=1)
    device = device_of(driver)
    slots = [device.staging_buffer(9 * CHUNK_SIZE) for _ in range(2)]
    size = 3 * CHUNK_SIZE  # more chunks than blocks, so that the keys are expanded
    sizes = [size, *[30] * (launches.SPREAD - 1), size]
    work = begin(device, driver, sizes)
    length = segment_size(0, size, size)
    segments = [run(launches.SPREAD, size), run(0, size, length if together else 0)]
    slabs = [Slab(segments, 2 * length)] if together else [Slab([segment], length) for segment in segments]
    for slab, buffer in zip(slabs, slots, strict=False):
        work.open(slab, buffer)
    work.finish()
    assert work.result() is None
    assert [name for name, *_ in driver.launches] == ["prepare", *["unwrap", "open_256"] * 2]
    device.close()
    driver.stop()


# What was altered.


@each("waits", [True, False])
@each(("number", "chunk"), [(0, 0), (4, 2), (5, 3), (7, 0)])
def test_the_tensor_and_the_chunk_that_were_altered_are_named_and_all_arrays_are_cleared_or_right(
    opened, number, chunk, waits
):
    plain = arrays()
    nest = sealed(plain)
    nest[number] = tampered(nest[number], 56 + 16400 * chunk)
    out = [opened.channel.to_device(np.full_like(each, 7)) for each in plain]

    def move():
        opened.channel.to_device(nest, out=out, non_blocking=not waits)
        opened.channel.synchronize()

    with pytest.raises(AuthenticationError) as failure:
        move()
    assert (failure.value.tensor, failure.value.chunk) == (f"x{number}", chunk)
    found = opened.read(out)
    if waits:
        assert not any(each.any() for each in found)
    else:
        expected = [each.copy() for each in plain]
        expected[number][chunk * CHUNK_SIZE : (chunk + 1) * CHUNK_SIZE] = 0
        assert same(found, expected)
    opened.channel.to_device(sealed(plain), out=out)
    assert same(opened.read(out), plain)


def test_of_several_bad_chunks_the_first_of_the_first_tensor_is_named(opened):
    nest = sealed(arrays())
    for number, chunk in ((7, 0), (5, 4), (5, 2), (6, 0)):
        nest[number] = tampered(nest[number], 56 + 16400 * chunk)
    with pytest.raises(AuthenticationError) as failure:
        opened.channel.to_device(nest, framework="cupy")
    assert (failure.value.tensor, failure.value.chunk) == ("x5", 2)


@each(("sizes", "kernel"), [([100, 5, 0, 60, 7000], "small_256"), (SIZES, "open_256")])
def test_keys_that_were_altered_on_the_bus_open_nothing(sizes, kernel):
    """Some bytes of the wrapped keys, which are one chunk of the link, and of its tag."""
    opened = Opened(device=device_of)
    plain = arrays(sizes)
    nest, size = sealed(plain), len(sizes) * link.ROW_SIZE + 16
    for place in (*range(-size, 0, 37), -16, -1):
        out = [opened.channel.to_device(np.full_like(each, 7)) for each in plain]
        opened.driver.flips = {opened.driver.calls["upload"] + 1: place}
        opened.channel.to_device(nest, out=out, non_blocking=True)
        with pytest.raises(AuthenticationError) as failure:
            opened.channel.synchronize()
        assert (failure.value.tensor, opened.launched()[-1]) == ("x0", kernel)
        assert not any(each.any() for each in opened.read(out))
    opened.close()


def test_a_plan_of_several_messages_that_was_altered_clears_the_results_of_all(opened):
    plain = [each.reshape(-1, 100) for each in arrays([100 * 40, 100 * 70])]
    nest = [tensor[[3, 1]] for tensor in sealed(plain)]
    out = [opened.channel.to_device(np.full((2, 100), 7, np.uint8)) for _ in nest]
    opened.driver.flips = {opened.driver.calls["upload"] + 1: -1}
    opened.channel.to_device(nest, out=out, non_blocking=True)
    with pytest.raises(AuthenticationError) as failure:
        opened.channel.synchronize()
    assert failure.value.tensor in {"x0", "x1"}
    assert failure.value.chunk is None
    assert not any(each.any() for each in opened.read(out))


def test_a_table_is_part_of_the_command_and_crosses_no_staging_memory():
    opened = Opened()
    plain = arrays()
    found = opened.channel.to_device(sealed(plain), framework="cupy")
    targets = {x.pointer for x in found}
    rows = [
        row
        for name, _, arguments in opened.driver.launches
        if name == "small_256"
        for row in table_rows(arguments[SCALARS["small"] :])[: arguments[6]]
    ]
    assert targets <= {target for target, *_ in rows}
    staged = b"".join(host.tobytes() for host in opened.driver.hosts())
    assert not any(target.to_bytes(8, "little") in staged for target in targets)
    opened.close()


# What the device is asked.


def begin(device, driver, sizes):
    messages = [Message(size, seed=number) for number, size in enumerate(sizes)]
    targets = [driver.empty("U8", (size,), "cupy") for size in sizes]
    views = [device.view(target, writable=True) for target in targets]
    keys, chunks = [message.key() for message in messages], [message.sealed for message in messages]
    work = device.begin(messages_of(keys, sizes, views, sealed=chunks))
    work.targets = targets  # which stay alive as long as it
    return work


def run(message, size, offset=0, first=0):
    start = first * CHUNK_SIZE
    return Segment(message, first, start, size, segment_size(first, size - start, size), offset)


@each(
    "segments",
    [
        [run(0, 100), run(1, 200, 112)],  # over the end of the one before
        [run(0, 100), run(1, 200, 120)],  # at no multiple of 16
        [run(1, 200, 128), run(0, 100)],  # in another order in the buffer
        [run(0, 100), run(1, 201, 128)],  # past its array
        [run(0, 100), run(2, CHUNK_SIZE + 50, 128)],  # past the buffer
        [run(0, 100), run(2, CHUNK_SIZE + 50, 128, 1)._replace(start=0)],  # at another chunk's place
        [run(0, 100), run(1, 200, 128)._replace(sealed_size=200)],  # without its tag
        [run(0, 100), run(1, 200, 128)._replace(first_chunk=2**38, start=2**52, stop=2**52 + 200)],
        [run(0, 100), run(1, 200, 2**32)],
        [run(0, 100, -16)],
    ],
)
def test_a_segment_that_reaches_outside_is_refused_before_anything_is_asked_for(segments):
    driver = FakeDriver("lazy")
    device = device_of(driver)
    buffer = device.staging_buffer(CHUNK_SIZE)
    work = begin(device, driver, [100, 200, CHUNK_SIZE + 50])
    size = max(segment.offset + segment.sealed_size for segment in segments)
    with pytest.raises(ValueError, match=r"outside|run of|chunks below"):
        work.open(Slab(segments, size), buffer)
    work.finish()
    assert work.result() is None
    assert [name for name, *_ in driver.launches] == ["prepare"]
    device.close()


def open_two(device, driver):
    """Begin to open two messages, and return the operation with both in one slab."""
    buffer = device.staging_buffer(CHUNK_SIZE)
    work = begin(device, driver, [100, 200])
    work.open(Slab([run(0, 100), run(1, 200, 128)], 128 + 216), buffer)
    return work


def test_a_verdict_that_never_came_names_no_chunk():
    driver = FakeDriver("lazy")
    device = device_of(driver)
    driver.download = lambda *_: None
    work = open_two(device, driver)
    work.finish()
    assert work.result() == BadChunk(0, NO_VERDICT)
    device.close()


def test_a_verdict_that_makes_no_sense_names_a_message_that_there_is(monkeypatch):
    driver = FakeDriver("lazy")
    device = device_of(driver)
    for lowest in (2**63 - 1, 2**64 - 2):
        work = open_two(device, driver)
        work.finish()
        ticket = work._recorder._last_ticket
        with monkeypatch.context() as patch:
            read_words(patch, lambda _, words=(lowest, 2**64 - 1, ticket): words)
            assert work.result().message == 1
    device.close()
    assert BAD_PLAN < 0


# Keys.


@each("mode", MODES)
def test_all_keys_are_wiped_at_the_end_and_after_a_failure(mode):
    sizes = [100, CHUNK_SIZE + 5, 30]
    secrets = [Message(size, seed=number).secret for number, size in enumerate(sizes)]
    for fails in (None, 1, 2, 3, 5, 8, 13):
        driver = FakeDriver(mode)
        device = device_of(driver)
        buffer = device.staging_buffer(4 * CHUNK_SIZE)
        work = begin(device, driver, sizes)
        driver.fail_at(fails)
        try:
            segments = [run(0, 100), run(1, sizes[1], 128), run(2, 30, 128 + 16432)]
            work.open(Slab(segments, 128 + 16432 + 46), buffer)
            work.finish()
            assert work.result() is None
        except DeviceError:
            assert fails is not None
        driver.fail_at(None)
        driver.finish()
        assert not any(map(driver.holds, secrets)), fails
        del work
        buffer.wipe()
        device.close()
        driver.stop()


def test_states_are_used_again_and_their_slots_are_zeros_between():
    driver = FakeDriver("lazy")
    device = device_of(driver)
    states = []
    for _ in range(3):
        work = begin(device, driver, [10, 20, 30])
        states.append(work._state)
        work.finish()
        assert work.result() is None
        driver.finish()
        state = work._state
        assert not driver.space.at(state.states, link.STATE_SIZE * state.slots).any()
    assert states[0] is states[1] is states[2]
    device.close()


@each("mode", MODES)
@each("sizes", [[10], [10, 20, 30]])
@pytest.mark.slow
def test_states_are_used_again_after_failures_with_nothing_left_in_them(mode, sizes):
    """A transfer while another thread captures a CUDA graph fails, and so may each that is tried after it."""
    driver = FakeDriver(mode)
    device = device_of(driver)
    work = begin(device, driver, sizes)
    asked = driver.calls["host"]
    for number in range(40):
        if number:
            work = begin(device, driver, sizes)
        driver.fail_at(1)
        within(60, work.finish)
        driver.fail_at(None)
        with pytest.raises(DeviceError, match="injected"):
            work.result()
        driver.finish()
        state = work._state
        assert not driver.space.at(state.states, link.STATE_SIZE * state.slots).any()
        with pytest.raises(DeviceError, match="injected"):
            work.result()
        work.finish()
    assert driver.calls["host"] == asked
    released = device._states._released_of(work._state.slots)
    assert len(released) == len(set(map(id, released)))
    del work
    gc.collect()
    work = begin(device, driver, sizes)
    work.finish()
    assert work.result() is None
    within(60, device.close)
    driver.stop()
