"""The scales of quantised values: the part of a context that binds values to them, and their geometry."""

from __future__ import annotations

import math
from typing import NamedTuple

from fastrack._util.pickles import unpickle
from fastrack.errors import FormatError

WIDENED = "BF16"
"""The dtype that values are widened to."""
_VALUES = ("F8_E4M3", "F8_E5M2", "I8")
_SCALES = ("F32", "BF16")


class Scale(NamedTuple):
    """The scales that values are bound to, by their context: another tensor of the same file.

    `block` has the rows and the columns of values that share a scale. All dimensions of the values but the last count
    as rows. The scales are in the order of their blocks.
    """

    block: tuple[int, int]
    dtype: str
    name: str
    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return unpickle, ("Scale", *self)

    def encode(self, quoted: str) -> str:
        """Return this as canonical JSON, given its name as JSON."""
        block, shape = (",".join(map(int.__repr__, extents)) for extents in (self.block, self.shape))
        return f'{{"block":[{block}],"dtype":"{self.dtype}","name":{quoted},"shape":[{shape}]}}'

    def check(self, dtype: str, shape: tuple[int, ...]) -> None:
        """Raise FormatError unless these are scales of values of this dtype and shape."""
        rows, columns = grid(shape)
        tall, wide = self.block
        if (
            dtype not in _VALUES
            or self.dtype not in _SCALES
            or not (0 < tall <= rows and 0 < wide <= columns)
            or math.prod(self.shape) != -(-rows // tall) * -(-columns // wide)
        ):
            raise FormatError(
                f"expected scales of {' or '.join(_SCALES)}, one for each block of values of {', '.join(_VALUES)}, got "
                f"{self.dtype} {list(self.shape)!s:.80} for blocks of {list(self.block)} of {dtype} {list(shape)!s:.80}"
            )


def grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and the columns of values: their last dimension, and all others."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def scale_of(
    dtype: str, shape: tuple[int, ...], scale_dtype: str, scale_shape: tuple[int, ...], name: str,
    block: tuple[int, int] | None = None,
) -> Scale:  # fmt: skip
    """Return the scale of values by the dtypes and shapes of both. Raise ValueError if it is none.

    There is one scale in all, or as many dimensions as the values have. Unless it is given, the block of a dimension is
    the power of two, or the whole fraction of the extent, that gives as many scales; it must be the only one.
    """
    try:
        if block is None:
            block = _block(shape, scale_shape) if dtype in _VALUES else (1, 1)  # which is refused for its dtype
        scale = Scale(block, scale_dtype, name, scale_shape)
        scale.check(dtype, shape)
    except FormatError as error:
        raise ValueError(
            f"scales {name!r:.200}: {error}. Give one for all values, for each row, or for each block"
        ) from None
    return scale


def _block(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = grid(shape)
    if math.prod(scale_shape) == 1:
        return rows, columns
    if len(scale_shape) != len(shape):
        raise FormatError(f"expected one scale, or scales of {len(shape)} dimensions, got {list(scale_shape)!s:.80}")
    height, *_ = shape[-2:-1] or (1,)
    tall, *_ = scale_shape[-2:-1] or (1,)
    tall = _extent(height, tall)
    # A block has rows of only one matrix.
    if shape[:-2] != scale_shape[:-2] or (height % tall and len(shape) > 2):
        raise FormatError(f"expected scales for each matrix of {list(shape)!s:.80}, got {list(scale_shape)!s:.80}")
    return tall, _extent(columns, scale_shape[-1])


def _extent(extent: int, count: int) -> int:
    """Return how many of `extent` share one of `count` scales."""
    found = {1 << bits for bits in range(extent.bit_length()) if count > 1 and -(-extent >> bits) == count}
    if count and extent % count == 0:
        found.add(extent // count)
    if len(found) != 1:
        raise FormatError(f"{count} scales for {extent} values in a row or column do not say how many share one")
    return found.pop()
