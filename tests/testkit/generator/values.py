"""Widen quantised values to BF16: section "Quantised values" of the page."""

import math
import struct

from generator.drafts import Tensor, tensor

NAN = 0x7FC0


def float32(value: float) -> float:
    """Return the nearest float32, ties to even; infinite past the largest."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16(value: float) -> int:
    """Return the bits of the nearest BF16, ties to even, of a float32."""
    if math.isnan(value):
        return NAN
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def float8(bits: int, dtype: str) -> float:
    """Return the value of 8 bits (OCP 8-bit floating point, revision 1.0, tables 1 and 2)."""
    sign = -1.0 if bits & 0x80 else 1.0
    if dtype == "F8_E4M3":
        exponent, mantissa, fraction, bias = bits >> 3 & 15, bits & 7, 8, 7
        if exponent == 15 and mantissa == 7:
            return math.nan
    else:
        exponent, mantissa, fraction, bias = bits >> 2 & 31, bits & 3, 4, 15
        if exponent == 31:
            return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa / fraction * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / fraction) * 2.0 ** (exponent - bias)


def elements(one: Tensor) -> list[float]:
    """Return the values of a tensor of a dtype that values or scales have."""
    if one.dtype == "I8":
        return [float(value) for value in struct.unpack(f"{len(one.data)}b", one.data)]
    if one.dtype == "F32":
        return list(struct.unpack(f"<{len(one.data) // 4}f", one.data))
    if one.dtype == "BF16":
        halves = struct.unpack(f"<{len(one.data) // 2}H", one.data)
        return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    return [float8(bits, one.dtype) for bits in one.data]


def bf16_values(values: Tensor, scales: Tensor, block: list[int]) -> bytes:
    """Return the bytes of the widened values."""
    columns = values.shape[-1] if values.shape else 1
    across = -(-columns // block[1])
    factors = elements(scales)
    made = bytearray()
    for number, value in enumerate(elements(values)):
        row, column = divmod(number, columns)
        scale = factors[row // block[0] * across + column // block[1]]
        # The product of a float8 or int8 and a float32 is exact in float64, and so is rounded once.
        made += bf16(float32(value * scale)).to_bytes(2, "little")
    return bytes(made)


def quantised_tensors() -> tuple[Tensor, Tensor]:
    """Return values of I8 and a scale for each row."""
    scales = struct.pack("<4f", 0.5, 0.0123, 3e-5, 1.0)
    return tensor("w", "I8", [4, 8]), Tensor("w_scale", "F32", [4, 1], scales)
