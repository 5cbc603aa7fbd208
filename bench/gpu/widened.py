"""Widen values of 8 bits by their scales to BF16, by Python's numbers and one multiplication of NumPy."""

import numpy as np

FORMATS = ("F8_E4M3", "F8_E5M2", "I8")
NAN = 0x7FC0


def value_of(kind, byte):
    """Return the value of a byte."""
    if kind == "I8":
        return float(byte - 256 if byte > 127 else byte)
    bits, bias = (3, 7) if kind == "F8_E4M3" else (2, 15)
    sign, exponent, mantissa = byte >> 7, byte >> bits & (1 << 7 - bits) - 1, byte & (1 << bits) - 1
    if kind == "F8_E4M3" and byte & 0x7F == 0x7F:
        size = float("nan")
    elif kind == "F8_E5M2" and exponent == 31:
        size = float("nan") if mantissa else float("inf")
    elif exponent == 0:
        size = mantissa * 2.0 ** (1 - bias - bits)
    else:
        size = (1 + mantissa / 2**bits) * 2.0 ** (exponent - bias)
    return -size if sign else size


VALUES = {kind: np.array([value_of(kind, byte) for byte in range(256)], np.float32) for kind in FORMATS}


def to_bf16(numbers):
    """Round floats to BF16, as `uint16`."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    rounded = (bits.astype(np.uint64) + 0x7FFF + odd >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(NAN), rounded)


def scales_of(content, dtype):
    """Return scales as floats, from their bytes."""
    if dtype == "F32":
        return np.frombuffer(content, np.float32)
    return (np.frombuffer(content, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def places(count, columns, rows_a_scale, columns_a_scale, first=0):
    """Return the index of the scale of each value."""
    row, column = np.divmod(np.arange(first, first + count), columns)
    return row // rows_a_scale * -(-columns // columns_a_scale) + column // columns_a_scale


def widened(values, kind, scales, indices):
    """Return the bytes of values times the scales with these indices."""
    numbers = VALUES[kind][np.frombuffer(values, np.uint8)]
    with np.errstate(all="ignore"):
        return to_bf16(numbers * scales[indices]).tobytes()
