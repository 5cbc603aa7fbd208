"""Find arrays that share memory, such as tied weights."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np


def storage_key(array: Any) -> Hashable:
    """Return a key that two arrays of one framework share if and only if they view one memory in the same way.

    An array without memory, which is empty or on torch's meta device, shares its key with no other. A key is valid as
    long as its array lives.
    """
    if isinstance(array, np.ndarray):
        if not array.size:
            return id(array)
        return array.__array_interface__["data"][0], array.dtype, array.shape, array.strides
    if not array.numel() or array.is_meta:
        return id(array)
    shown = (array.dtype, tuple(array.shape), array.stride(), array.is_conj(), array.is_neg())
    return str(array.device), array.data_ptr(), *shown
