"""Describe scales to the kernels that widen, after checks that the kernels rely on."""

from __future__ import annotations

from typing import Final

from fastrack._crypto.base import Scaling
from fastrack._devices.cuda.table import Divisor, Widening

_VALUES: Final = {"F8_E4M3": 0, "F8_E5M2": 1, "I8": 2}
_SCALES: Final = {"F32": (0, 4), "BF16": (16, 2)}  # flag and bytes
_MOST: Final = 1 << 30  # of a divisor: with a chunk's values, a number that is divided stays below 2^31


def widening_of(scaling: Scaling, nbytes: int) -> Widening:
    """Return the widening of a message of `nbytes` values.

    Raise ValueError if the kernels do not know the dtypes, or if there are fewer scales than the values need.
    """
    if scaling.values not in _VALUES or scaling.dtype not in _SCALES:
        raise ValueError(f"the kernels cannot widen {scaling.values} with scales of {scaling.dtype}")
    flag, size = _SCALES[scaling.dtype]
    columns, rows_a_scale, columns_a_scale = scaling.columns, scaling.rows_a_scale, scaling.columns_a_scale
    if min(columns, rows_a_scale, columns_a_scale) < 1:
        raise ValueError(f"scales of {rows_a_scale} rows and {columns_a_scale} of {columns} columns are none")
    rows, scales_a_row = -(-nbytes // columns), -(-columns // columns_a_scale)
    needed = -(-rows // rows_a_scale) * scales_a_row
    if needed * size > scaling.memory.size or scaling.memory.address % size or needed >> 32:
        raise ValueError(f"values need {needed} scales of {size} bytes, which are not in their memory")
    # Kernels are faster where 16 values always share a scale, and no divisor may be larger than needed.
    divisors = (columns, min(rows_a_scale, rows), min(columns_a_scale, columns)) if needed > 1 else (_MOST,) * 3
    if max(divisors) > _MOST:
        raise ValueError(f"the kernels widen at most {_MOST} columns, got {columns}, and as many rows of one scale")
    return Widening(scaling.memory.address, _VALUES[scaling.values] | flag, scales_a_row, *map(Divisor.of, divisors))
