"""Which tensors are one and the same memory under several names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np


def storage_key(array: Any) -> Hashable:
    """What two arrays of one framework have in common if and only if they show the same memory in the same way.

    An array without memory, one that is empty or on torch's meta device, is the same as itself alone. Good as long as
    the arrays live.
    """
    if isinstance(array, np.ndarray):
        if not array.size:
            return id(array)
        return array.__array_interface__["data"][0], array.dtype, array.shape, array.strides
    if not array.numel() or array.is_meta:
        return id(array)
    shown = (array.dtype, tuple(array.shape), array.stride(), array.is_conj(), array.is_neg())
    return str(array.device), array.data_ptr(), *shown
