"""Values that the CUDA kernels open and widen in one launch, against Python's numbers, NumPy and torch."""

import numpy as np
import pytest
from helpers import reference
from helpers.cases import each
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import flip

from bench.gpu.widened import FORMATS, VALUES, places, scales_of, to_bf16, widened
from fastrack._crypto.base import HostMemory, Scaling
from fastrack._devices.cuda.table import MAX_WIDENINGS, Divisor, name_of, pack_table, widening_of

# Among them subnormal scales, subnormal products, those that overflow or lie between two BF16, and what is no number.
SCALES = [1.0, -1.0, 0.0, -0.0, 0.1, 1 / 3, 448.0, 1.00390625, 2.0**-126, 3e-39, 1e-45, 2.0**-133, 7.7e-40]
SCALES += [2.0**120, 3.3e38, float("inf"), float("-inf"), float("nan"), 1 + 2**-8, 1 + 2**-7 + 2**-8, 1.00390637]


def scaling(kind, scales, columns, rows_a_scale=1, columns_a_scale=1, dtype="F32"):
    scales = np.asarray(scales, np.float32)
    content = scales.tobytes() if dtype == "F32" else (scales.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return Scaling(content, dtype, kind, columns, rows_a_scale, columns_a_scale)


def expected(plain, how, first=0):
    indices = places(len(plain), how.columns, how.rows_a_scale, how.columns_a_scale, first * CHUNK_SIZE)
    return widened(plain, how.values, scales_of(how.memory, how.dtype), indices)


def random_scaling(kind, count, columns, rows_a_scale, columns_a_scale, dtype="F32"):
    rows = -(-count // columns)
    needed = -(-rows // rows_a_scale) * -(-columns // columns_a_scale)
    scales = np.random.default_rng(count + columns).normal(0, 3, needed)
    return scaling(kind, scales, columns, rows_a_scale, columns_a_scale, dtype)


@each("kind", FORMATS)
def test_the_reference_says_what_torch_says(kind):
    torch = pytest.importorskip("torch")
    dtype = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8}[kind]
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    assert np.array_equal(values.numpy(), VALUES[kind], equal_nan=True)
    for scale in SCALES:
        product = values * torch.tensor(scale, dtype=torch.float32)
        found = product.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).copy()
        found[product.isnan().numpy()] = 0x7FC0
        assert np.array_equal(to_bf16(product.numpy()), found)


@each("dtype", ["F32", "BF16"])
@each("kind", FORMATS)
def test_every_value_is_widened_with_every_scale(host, state, key, nonce, kind, dtype):
    """By the fast path, and one by one: columns are a multiple of 16, and not."""
    for columns in (256, 255):
        plain = bytes(range(columns)) * len(SCALES)
        how = scaling(kind, SCALES, columns, 1, columns, dtype)
        result = host.widen_run(state, reference.seal(key, nonce, plain), how)
        assert result == (None, expected(plain, how))


GEOMETRIES = {
    "of a tensor": (100, 10**6, 100),
    "of a row": (4096, 1, 4096),
    "of a short row": (7, 1, 7),
    "of several rows": (48, 3, 48),
    "of a group": (1024, 1, 64),
    "of a short group": (1024, 1, 8),
    "of a group that does not divide": (1000, 1, 48),
    "of a block": (384, 128, 128),
    "of a block that does not divide": (200, 128, 128),
    "of a value": (16, 1, 1),
    "of one column": (1, 5, 1),
    "of rows beyond a chunk": (50_000, 1, 16),
}


@each("geometry", GEOMETRIES)
@each("first", [0, 3])
def test_each_value_meets_its_own_scale_in_any_chunk(host, state, key, nonce, geometry, first):
    plain = noise(2 * CHUNK_SIZE + 1237, seed=first).tobytes()
    how = random_scaling("F8_E4M3", first * CHUNK_SIZE + len(plain), *GEOMETRIES[geometry])
    sealed = reference.seal(key, nonce, plain, first)
    for blocks, offset in ((1, 0), (2, 2), (3, 16)):
        found = host.widen_run(state, sealed, how, first, blocks=blocks, offset=offset)
        assert found == (None, expected(plain, how, first))


@each("length", [0, 1, 15, 16, 17, 31, 8192, 8193, 16383, 16384])
def test_a_last_chunk_of_any_length_is_widened(host, state, key, nonce, length):
    plain = noise(length, seed=length).tobytes()
    how = random_scaling("I8", max(length, 1), 64, 2, 32)
    assert host.widen_run(state, reference.seal(key, nonce, plain), how) == (None, expected(plain, how))


def test_a_chunk_far_into_a_message_is_widened(host, state, key, nonce):
    """Beyond 4 GiB, where a row of scales takes 2 GiB of values."""
    first, columns = 2**18 + 1, 1 << 30
    plain = noise(CHUNK_SIZE, seed=2).tobytes()
    how = scaling("I8", [1, 2, 3, 4, 5, 6], columns, 1, columns)
    assert host.widen_run(state, reference.seal(key, nonce, plain, first), how, first) == (
        None,
        expected(plain, how, first),
    )


@each("chunk", [0, 1, 2])
@each("columns", [64, 63])
def test_a_bad_chunk_is_zeros_whatever_the_scale_and_reported(host, state, key, nonce, chunk, columns):
    plain = noise(2 * CHUNK_SIZE + 100).tobytes()
    how = random_scaling("I8", len(plain), columns, 1, columns)
    how = scaling("I8", np.where(scales_of(how.memory, "F32") < 0, -np.inf, np.nan), columns, 1, columns)
    sealed = flip(reference.seal(key, nonce, plain), 8 * chunk * SEALED_CHUNK_SIZE + 3)
    verdict, found = host.widen_run(state, sealed, how, blocks=2)
    wanted = bytearray(expected(plain, how))
    part = slice(2 * CHUNK_SIZE * chunk, 2 * min(CHUNK_SIZE * (chunk + 1), len(plain)))
    wanted[part] = bytes(len(wanted[part]))
    assert (verdict, found) == (chunk, bytes(wanted))


@each("blocks", [1, 2, 9])
def test_segments_of_several_messages_are_widened_each_by_its_own_scales(host, key, blocks):
    sizes = [100, 0, CHUNK_SIZE, 2 * CHUNK_SIZE + 777, 16]
    keys = [(noise(len(key), n + 9).tobytes(), noise(12, n).tobytes()) for n in range(len(sizes))]
    plain = [noise(size, n).tobytes() for n, size in enumerate(sizes)]
    hows = [random_scaling(FORMATS[n % 3], max(len(p), 1), 10 + 6 * n, 2, 8) for n, p in enumerate(plain)]
    states = host.prepare_all(keys)
    sealed = [reference.seal(*pair, text) for pair, text in zip(keys, plain, strict=True)]
    segments = [(n, 0, text, how) for n, (text, how) in enumerate(zip(sealed, hows, strict=True))]
    wanted = [expected(text, how) for text, how in zip(plain, hows, strict=True)]
    assert host.widen_nest(states, 8 * len(key), segments, blocks=blocks) == (None, wanted)
    segments[3] = (3, 1, sealed[3][SEALED_CHUNK_SIZE:], hows[3])
    wanted[3] = wanted[3][2 * CHUNK_SIZE :]
    assert host.widen_nest(states, 8 * len(key), segments, blocks=blocks) == (None, wanted)
    segments[2] = (2, 0, flip(sealed[2], 9), hows[2])
    assert host.widen_nest(states, 8 * len(key), segments)[0] == name_of(2, 0)


# What the host says of scales.


@each("value", [1, 2, 3, 7, 16, 640641, 2**29 + 1, 2**30 - 1, 2**30])
def test_a_divisor_divides_every_number_below_two_gibi(value):
    _, times, shift = Divisor.of(value)
    assert times < 2**32
    numbers = [
        *range(100),
        *range(2**31 - 100, 2**31),
        *(n * value + d for n in (1, 5, 2**31 // value) for d in (-1, 0)),
    ]
    assert all(number * times >> shift == number // value for number in numbers if 0 <= number < 2**31)


def test_scales_that_are_not_there_or_not_known_are_refused():
    def refused(match, nbytes=4096, size=64, address=4096, **changes):
        how = {"dtype": "F32", "values": "I8", "columns": 64, "rows_a_scale": 4, "columns_a_scale": 64} | changes
        with pytest.raises(ValueError, match=match):
            widening_of(Scaling(HostMemory(address, size, None), **how), nbytes)

    refused("17 scales", nbytes=4097)
    refused("16 scales", size=63)
    refused("16 scales", address=4098)
    refused("cannot widen U8", values="U8")
    refused("F16", dtype="F16")
    refused("are none", columns=0)
    refused("at most", nbytes=2**32, columns=2**31, columns_a_scale=2**31, rows_a_scale=1)


def test_one_scale_for_all_needs_no_more_however_large_the_message():
    how = Scaling(HostMemory(4096, 4, None), "F32", "I8", 100, 2**40, 100)
    widening = widening_of(how, 2**40)
    assert [each.value for each in widening[3:]] == [2**30] * 3


def test_a_table_has_room_for_so_many_widenings_and_no_more():
    row = (1, 2, 3, 4, 5, 6)
    one = widening_of(Scaling(HostMemory(4096, 4, None), "F32", "I8", 1, 1, 1), 1)
    assert len(pack_table([row], [one])) == len(pack_table([row] * MAX_WIDENINGS, [one] * MAX_WIDENINGS)) == 4032
    with pytest.raises(ValueError, match="42"):
        pack_table([row] * (MAX_WIDENINGS + 1), [one] * (MAX_WIDENINGS + 1))
