"""Expansion of a message key on the host into the state that the CUDA kernels read.

The layout is that of `State` in ``kernels/chunk.cuh``: the key schedule (FIPS 197, section 5.2), the base nonce, the
last GHASH block of a full chunk times H, and the powers of H from 1 to 513, divided by x for the reason in
``kernels/ghash.cuh``.

It is machine code of `key_state_ir`, which takes a CPU with instructions for AES and GHASH: no table is looked up, and
no branch depends on a secret.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fastrack._crypto import native
from fastrack._crypto.base import Bytes
from fastrack._crypto.cobblestone import MessageKey
from fastrack._crypto.forms import narrow_form

# The layout of `State` in ``kernels/chunk.cuh``, in bytes. The key schedule comes first.
STATE_SIZE = 8704
NONCE_OFFSET = 240
LENGTH_OFFSET = 256  # last GHASH block of a full chunk, times H
POWERS_OFFSET = 272  # power 0, which is not used
LAST_POWER = 513


def write_state(key: MessageKey, target: Bytes) -> None:
    """Expand a message key into the state that the kernels read, and write every byte of `target`.

    The target has `STATE_SIZE` bytes, writable and contiguous, at a multiple of 8, such as page-locked memory. Raise
    ValueError if it differs from that. Native code relies on this check.
    """
    flags = target.flags
    if target.dtype != np.uint8 or target.shape != (STATE_SIZE,) or not (flags.c_contiguous and flags.writeable):
        raise ValueError(
            f"expected a writable, contiguous uint8 array of {STATE_SIZE} bytes for the state of a key, "
            f"got {target.dtype} of shape {target.shape}"
        )
    material = np.frombuffer(key.material, np.uint8)
    _writer()(material, material.size, target)


@cache
def _writer() -> Any:
    form = narrow_form()
    assert form is not None, "open_device refuses a CPU without the instructions"
    return native.functions(form).write_state
