"""Cases of `widened`: quantised values as BF16."""

import json
import math
import struct

from generator.parts.case import Cases, draw, flip, sha256
from generator.parts.drafts import KEY, KEY128, OTHER_FILE, OTHER_KEY, Draft, Tensor, draft, scaled
from generator.parts.values import bf16, bf16_values, float8, float32

RULES = {
    "values": ("quantised-values", "A value is the value as float32, which is exact."),
    "scale": ("quantised-values", "The scale of a value is found by its row, its column and the block."),
    "rounding": ("quantised-values", "The product is rounded to float32, and then to BF16, each to nearest even."),
    "nan": ("quantised-values", "Every NaN is `0x7fc0`."),
    "authentic": ("the-message", "Values and scales are authentic."),
    "context": ("quantised-values", "The scale is in the context of the values."),
    "listed": ("what-a-reader-must-check", "The scales are of the same file id as the values."),
}


def floats(*values: float, dtype: str = "F32") -> bytes:
    """Return scales as bytes; those of BF16 are rounded to it."""
    if dtype == "BF16":
        return b"".join(bf16(value).to_bytes(2, "little") for value in values)
    return struct.pack(f"<{len(values)}f", *values)


def file_of(values: Tensor, scales: Tensor, block: list[int], key: bytes = KEY) -> Draft:
    """Return a file of values and scales."""
    one = draft(values, scales, key=key)
    scaled(one, values.name, scales.name, block)
    return one


def cases() -> Cases:
    """Return the cases of widened values."""
    made = Cases("widened", RULES)
    for add in (all_values, blocks, roundings, special, refused):
        add(made)
    return made


def opens(
    made: Cases, name: str, rule: str, values: Tensor, scales: Tensor, block: list[int], key: bytes = KEY
) -> None:
    """Add values that are widened."""
    result = {"sha256": sha256(bf16_values(values, scales, block)), "shape": values.shape}
    fields = [("key", key.hex()), ("tensor", json.dumps(values.name))]
    made.opens(name, rule, file_of(values, scales, block, key).write(), result, fields)


EVERY = bytes(range(256))


def label(dtype: str) -> str:
    """Return a dtype as a part of a name."""
    return dtype.lower().replace("_", "-")


def all_values(made: Cases) -> None:
    """Add each value of each dtype, under scales of both dtypes."""
    for dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        for scale in ("F32", "BF16"):
            values = Tensor("w", dtype, [4, 64], EVERY)
            scales = Tensor("s", scale, [4, 1], floats(1.0, 0.37, -2.5e-3, 96.0, dtype=scale))
            opens(made, f"all-{label(dtype)}-{label(scale)}", "values", values, scales, [1, 64])
    opens(
        made,
        "128-bits",
        "values",
        Tensor("w", "I8", [4, 64], EVERY),
        Tensor("s", "F32", [1, 1], floats(0.1)),
        [4, 64],
        KEY128,
    )
    opens(
        made,
        "name",
        "values",
        Tensor('größe/"w"', "I8", [256], EVERY),
        Tensor("s", "F32", [1, 1], floats(0.1)),
        [1, 256],
    )


def blocks(made: Cases) -> None:
    """Add blocks of all forms."""
    for name, shape, block in (
        ("tensor", [6, 10], [6, 10]),
        ("rows", [6, 10], [1, 10]),
        ("columns", [6, 10], [6, 1]),
        ("each", [6, 10], [1, 1]),
        ("blocks", [6, 10], [3, 5]),
        ("uneven-blocks", [7, 11], [3, 4]),
        ("groups", [4, 12], [1, 4]),
        ("three-dimensions", [2, 3, 8], [3, 4]),
        ("rows-over-matrices", [2, 3, 8], [4, 8]),
        ("vector", [10], [1, 3]),
        ("one", [1, 1], [1, 1]),
        ("96-rows-of-192", [192, 2], [96, 2]),
        ("128-rows-of-192", [192, 2], [128, 2]),
    ):
        rows = math.prod(shape[:-1])
        count = [-(-rows // block[0]), -(-shape[-1] // block[1])]
        values = Tensor("w", "I8", shape, draw(f"values {name}", math.prod(shape)))
        factors = [0.5 + number / 7 for number in range(math.prod(count))]
        opens(made, f"scale-of-{name}", "scale", values, Tensor("s", "F32", count, floats(*factors)), block)
    values = Tensor("w", "F8_E4M3", [3, 8], draw("vector of scales", 24))
    opens(made, "scales-as-vector", "scale", values, Tensor("s", "F32", [3], floats(1.5, 0.2, 7.0)), [1, 8])
    opens(made, "scales-as-scalar", "scale", values, Tensor("s", "F32", [], floats(0.3)), [3, 8])
    large = Tensor("w", "I8", [40, 1024], draw("several chunks", 40960))
    factors = [0.01 * (row + 1) for row in range(40)]
    opens(made, "three-chunks", "scale", large, Tensor("s", "F32", [40, 1], floats(*factors)), [1, 1024])


def bf16_once(value: float) -> int:
    """Return the nearest BF16 of a float64: what a reader that rounds once would make."""
    exponent = math.frexp(value)[1]
    step = math.ldexp(1.0, exponent - 8)
    return bf16(round(value / step) * step)


def twice_rounded() -> list[tuple[int, float]]:
    """Return values and scales whose product is another if it is rounded to BF16 at once."""
    found = []
    for number in range(128):
        tie = 1 + (2 * number + 1) / 256
        for value in (3, 7, 11, 125):
            scale = float32(tie / value)
            product = value * scale
            if bf16(float32(product)) != bf16_once(product):
                found.append((value, scale))
    return found[:32]


def roundings(made: Cases) -> None:
    """Add products that are ties, and those that are rounded twice."""
    twice = twice_rounded()
    values = Tensor("w", "I8", [len(twice), 2], bytes(byte for value, _ in twice for byte in (value, 256 - value)))
    scales = Tensor("s", "F32", [len(twice), 1], floats(*(scale for _, scale in twice)))
    opens(made, "rounded-twice", "rounding", values, scales, [1, 2])
    ties = [struct.unpack("<f", struct.pack("<I", 0x3F800000 + (number << 16) + 0x8000))[0] for number in range(8)]
    values = Tensor("w", "I8", [8, 2], bytes([1, 255] * 8))
    opens(made, "ties", "rounding", values, Tensor("s", "F32", [8, 1], floats(*ties)), [1, 2])
    values = Tensor("w", "I8", [4, 64], EVERY)
    small = Tensor("s", "F32", [4, 1], floats(1e-45, 3e-39, 1.2e-38, 2e-40))
    opens(made, "subnormal", "rounding", values, small, [1, 64])
    large = Tensor("s", "F32", [4, 1], floats(3.4028234e38, 1e37, 2.7e36, 2.6e36))
    opens(made, "overflow", "rounding", values, large, [1, 64])
    edge = [
        struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F7F0000)
    ]
    ones = Tensor("w", "I8", [4, 2], bytes([1, 255] * 4))
    opens(made, "largest-bf16", "rounding", ones, Tensor("s", "F32", [4, 1], floats(*edge)), [1, 2])


def special(made: Cases) -> None:
    """Add values and scales that are not finite, or zero with a sign."""
    factors = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1e-30)
    for dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        values = Tensor("w", dtype, [8, 256], EVERY * 8)
        opens(made, f"special-{label(dtype)}", "nan", values, Tensor("s", "F32", [8, 1], floats(*factors)), [1, 256])
    halves = struct.pack("<4H", 0x7FC1, 0xFFFF, 0x7F81, 0xFF80)
    opens(
        made,
        "special-bf16-scales",
        "nan",
        Tensor("w", "I8", [4, 64], EVERY),
        Tensor("s", "BF16", [4, 1], halves),
        [1, 64],
    )
    payload = struct.pack("<4I", 0x7FC00001, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)
    opens(
        made, "nan-of-all-kinds", "nan", Tensor("w", "I8", [4, 64], EVERY), Tensor("s", "F32", [4, 1], payload), [1, 64]
    )
    if not math.isnan(float8(0x7F, "F8_E4M3")) or float8(0x7E, "F8_E4M3") != 448:
        raise ValueError("F8_E4M3 has no infinities, and 448 is its largest value")


def refused(made: Cases) -> None:
    """Add values and scales that were altered or swapped."""
    values = Tensor("w", "I8", [4, 64], EVERY)
    scales = Tensor("s", "F32", [4, 1], floats(1.0, 2.0, 3.0, 4.0))
    fields = [("key", KEY.hex()), ("tensor", '"w"')]

    def usual() -> Draft:
        return file_of(values, scales, [1, 64])

    made.fails("key-unknown", "authentic", "unknown-key", usual().write(), [("key", OTHER_KEY.hex()), fields[1]])
    for name, tensor_name, index in (
        ("values-tag", "w", -1),
        ("values-ciphertext", "w", 60),
        ("values-commitment", "w", 30),
        ("scales-tag", "s", -1),
        ("scales-ciphertext", "s", 60),
        ("scales-commitment", "s", 30),
    ):
        one = usual()
        one.alter(tensor_name, lambda data, index=index: flip(data, index))
        made.fails(name, "authentic", "authentication", one.write(), fields)
    for name, member, value in (("block", "block", [2, 32]), ("block-turned", "block", [4, 16])):
        one = usual()
        one.entries["w"]["scale"][member] = value
        made.fails(f"{name}-altered", "context", "authentication", one.write(), fields, "as many scales")
    two = draft(values, scales, Tensor("t", "F32", [4, 1], floats(5.0, 6.0, 7.0, 8.0)))
    scaled(two, "w", "s", [1, 64])
    two.entries["w"]["scale"]["name"] = "t"
    made.fails("scales-of-another-name", "context", "authentication", two.write(), fields)
    two.entries["w"]["scale"]["name"] = "s"
    two.stored["s"], two.stored["t"] = two.stored["t"], two.stored["s"]
    made.fails("scales-exchanged", "authentic", "authentication", two.write(), fields)
    apart = usual()
    apart.move("s", OTHER_FILE)
    made.fails("scales-of-another-file", "listed", "format", apart.write(), fields)
    both = usual()
    both.move("w", OTHER_FILE)
    both.move("s", OTHER_FILE)
    result = {"sha256": sha256(bf16_values(values, scales, [1, 64])), "shape": values.shape}
    made.opens("moved", "listed", both.write(), result, fields)
