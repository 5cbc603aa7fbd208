"""Widen quantised values to BF16 with NumPy, for the engine without the native extension."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fastrack._crypto.base import Bytes, Scaling


def widen(values: Bytes, start: int, scaling: Scaling) -> npt.NDArray[np.uint16]:
    """Return values, from element `start` on, as words of BF16: each by its scale, as `Scaling` defines it.

    No table is indexed by a value.
    """
    rows, columns = np.divmod(np.arange(start, start + values.size), scaling.columns)
    across = -(-scaling.columns // scaling.columns_a_scale)
    places = rows // scaling.rows_a_scale * across + columns // scaling.columns_a_scale
    memory = scaling.memory.array
    words = memory.view(np.uint32) if scaling.dtype == "F32" else memory.view(np.uint16).astype(np.uint32) << 16
    scales = words.view(np.float32)
    with np.errstate(all="ignore"):
        bits = (_decode(values, scaling.values) * scales[places]).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).astype(np.uint16)


def _decode(values: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "I8":
        return values.view(np.int8).astype(np.float32)
    if dtype == "F8_E5M2":  # the upper half of float16
        return (values.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    bits = values.astype(np.uint16)
    # Float16 has an exponent of one bit more, whose bias is greater by 8, and subnormal values too.
    exact = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    return np.where(bits & 0x7F == 0x7F, np.float32(np.nan), exact)
