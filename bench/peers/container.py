"""Make the input of ciphers for bytes: a safetensors header and the bytes of the arrays, with nothing copied."""

import json
import math
from itertools import accumulate

import numpy as np

DTYPES = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 1 << 20  # bytes handed to a cipher at a time: small enough for a cache


def header(arrays):
    """Make the header that comes before the bytes of the arrays."""
    ends = list(accumulate(array.nbytes for array in arrays.values()))
    described = {
        name: {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [end - array.nbytes, end]}
        for (name, array), end in zip(arrays.items(), ends, strict=True)
    }
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(arrays):
    yield memoryview(header(arrays))
    for array in arrays.values():
        memory = memoryview(array).cast("B")
        for start in range(0, len(memory), PIECE):
            yield memory[start : start + PIECE]


def describe(text):
    return {name: (DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in json.loads(text).items()}


def split(memory):
    """The arrays in one stretch of memory that holds all of it."""
    start = 8 + int.from_bytes(memory[:8].tobytes(), "little")
    arrays = {}
    for name, (dtype, shape) in describe(memory[8:start].tobytes()).items():
        stop = start + dtype.itemsize * math.prod(shape)
        arrays[name] = memory[start:stop].view(dtype).reshape(shape)
        start = stop
    return arrays
