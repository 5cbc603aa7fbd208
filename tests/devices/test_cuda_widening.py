"""Values that a CUDA device widens to BF16 while it opens them, with scales that it opens in the same operation."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import engines
from helpers.cuda_rig import Message, within
from helpers.fake_cuda import MODES, FakeDriver
from helpers.messages import messages_of
from helpers.runs import as_pieces

from bench.gpu.widened import FORMATS, places, scales_of, widened
from fastrack._crypto import base, cobblestone
from fastrack._devices.base import BadChunk, Segment, Slab
from fastrack._devices.cuda import device, table
from fastrack.format import CHUNK_SIZE

ROWS, COLUMNS = 300, 112


def pair(seed, bits=256, dtype="F32", rows=ROWS):
    """A message of scales, one for each row, and the message of its values."""
    scales = Message((4 if dtype == "F32" else 2) * rows, bits, 2 * seed)
    if dtype == "F32":  # any bytes are values, but few are scales
        scales = described(scales, np.random.default_rng(seed).normal(0, 2, rows).astype(np.float32))
    return scales, Message(rows * COLUMNS, bits, 2 * seed + 1)


def described(message, content):
    """A message of other content, under the same key."""
    message.plain = content.view(np.uint8)
    engine = engines.make("openssl")
    engine.seal_run(engine.expand_key(message.key()), message.plain, message.sealed, 0)
    return message


class Rig:
    def __init__(self, mode="lazy", seed=0):
        self.driver = FakeDriver(mode, seed)
        self.device = device.CudaDevice(self.driver)

    def open(self, pairs, dtype="F32", values=FORMATS, change=lambda messages: None, plan=None):
        """Open pairs of scales and values, all scales first: the bad chunk, and the arrays of the results."""
        count = len(pairs)
        every = [scales for scales, _ in pairs] + [message for _, message in pairs]
        shapes = [(each.plain.size // (4 if dtype == "F32" else 2),) for each, _ in pairs]
        arrays = [self.driver.empty(dtype, shape, "cupy") for shape in shapes]
        arrays += [self.driver.empty("BF16", (each.plain.size,), "cupy") for _, each in pairs]
        views = [self.device.view(each, writable=True) for each in arrays]
        scalings = [None] * count
        scalings += [base.Scaling(views[n], dtype, values[n % len(values)], COLUMNS, 1, COLUMNS) for n in range(count)]
        keys, sealed = [each.key() for each in every], [each.sealed for each in every]
        sizes = [each.plain.size for each in every]
        messages = messages_of(keys, sizes, views, sealed=sealed, scalings=scalings)
        change(messages)
        segments, offset = [], 0
        for number, size in enumerate(sizes):
            extent = cobblestone.segment_size(0, size, size)
            segments.append(Segment(number, 0, 0, size, extent, offset, plan if number >= count else None))
            offset += -(-extent // 16) * 16
        buffer = self.device.staging_buffer(offset + len(segments) * self.device.segment_overhead)
        operation = self.device.begin(messages)
        try:
            operation.open(Slab(segments, offset), buffer)
        finally:
            operation.finish()
            bad = operation.result()
            buffer.wipe()
        return bad, arrays[count:]

    def launched(self):
        return [name for name, *_ in self.driver.launches]

    def close(self):
        self.device.close()
        within(60, self.driver.stop)
        assert self.driver.violations == []


def expected(scales, message, kind, dtype="F32"):
    indices = places(message.plain.size, COLUMNS, 1, COLUMNS)
    return widened(message.plain.tobytes(), kind, scales_of(scales.plain.tobytes(), dtype), indices)


def holds(rig, array, content):
    return rig.driver.read(array).tobytes() == content


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [128, 256])
def test_values_are_widened_by_scales_of_the_same_operation(mode, bits):
    rig = Rig(mode, bits)
    pairs = [pair(seed, bits) for seed in range(3)]
    bad, arrays = rig.open(pairs)
    assert bad is None
    for (scales, message), kind, array in zip(pairs, FORMATS, arrays, strict=True):
        assert holds(rig, array, expected(scales, message, kind))
    assert rig.launched() == ["prepare", f"small_{bits}", "unwrap", f"widen_{bits}"]
    rig.close()


def test_scales_may_be_bf16(rig):
    scales, message = pair(5, dtype="BF16")
    bad, (array,) = rig.open([(scales, message)], "BF16")
    assert bad is None
    assert holds(rig, array, expected(scales, message, "F8_E4M3", "BF16"))


def test_many_messages_take_a_launch_for_each_table(rig):
    pairs = [pair(seed, rows=3) for seed in range(table.MAX_WIDENINGS + 1)]
    bad, arrays = rig.open(pairs, values=("I8",))
    assert bad is None
    assert all(holds(rig, array, expected(*each, "I8")) for each, array in zip(pairs, arrays, strict=True))
    assert rig.launched() == ["prepare", *["unwrap", "open_256"], *["unwrap", "widen_256"] * 2]


def test_a_bad_chunk_of_values_is_zeros_and_reported(rig):
    scales, message = pair(1)
    bad, (array,) = rig.open([(scales, message.spoilt(1))], values=("I8",))
    assert bad == BadChunk(1, 1)
    wanted = bytearray(expected(scales, message, "I8"))
    wanted[2 * CHUNK_SIZE : 4 * CHUNK_SIZE] = bytes(2 * CHUNK_SIZE)
    assert holds(rig, array, bytes(wanted))


def test_a_bad_chunk_of_scales_is_reported(rig):
    scales, message = pair(1)
    assert rig.open([(scales.spoilt(0), message)])[0] == BadChunk(0, 0)


def changed(**changes):
    def change(messages):
        old = messages.scalings[1]
        fields = {name: getattr(old, name) for name in old.__slots__} | changes
        messages.scalings[1] = base.Scaling(**fields)

    return change


def shorten(messages):
    messages.memories[1] = replace(messages.memories[1], size=2 * messages.nbytes[1] - 1)


def misplace(messages):
    view = messages.memories[1]
    messages.memories[1] = replace(view, address=view.address + 1)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (changed(values="U8"), "cannot widen U8"),
        (changed(columns=COLUMNS // 2), "600 scales"),
        (changed(rows_a_scale=0), "none"),
        (shorten, "outside"),
        (misplace, "outside"),
    ],
)
def test_what_a_kernel_could_not_bear_is_refused_before_a_launch(rig, change, match):
    with pytest.raises(ValueError, match=match):
        rig.open([pair(1)], change=change)
    assert "widen_256" not in rig.launched()


def test_values_are_not_gathered_and_widened_together(rig):
    plan = as_pieces([0], [0, 1], [[0, 0, 50]])
    with pytest.raises(ValueError, match="gathered and widened"):
        rig.open([pair(1)], plan=plan)
