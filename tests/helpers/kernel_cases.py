"""A few cases of every kernel, for a process that runs under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m helpers.kernel_cases LIBRARY
    python -m helpers.kernel_cases LIBRARY KERNEL OFFSET

The second form runs one kernel of the shim's self-test, which reads 40 bytes or 100 of shared memory at an offset.
"""

import sys

import numpy as np

from helpers import reference
from helpers.buffers import Fenced
from helpers.kernel_host import SOURCE, Host, Library, constants, pack
from helpers.reference import CHUNK_SIZE, SEALED_CHUNK_SIZE, noise
from helpers.runs import flip, plan

NONCE = bytes(range(50, 62))
LENGTHS = [0, 1, 15, 16, 17, 33, 8191, 8192, 8193, CHUNK_SIZE - 1]


def main(library, kernel=None, offset=0):
    loaded = Library.load(library)
    if kernel is not None:
        touch(loaded, kernel, int(offset))
        return
    host = Host(loaded, constants(SOURCE))
    for size in (16, 32):
        key = bytes(range(size))
        state = host.prepare(key, NONCE)
        for length in LENGTHS:
            open_and_seal(host, state, key, length)
        open_wrong(host, state, key)
        gather(host, state, key)
    sys.stdout.write("all is right\n")


def open_and_seal(host, state, key, length):
    for chunks in (0, 2):
        plain = noise(chunks * CHUNK_SIZE + length).tobytes()
        sealed = reference.seal(key, NONCE, plain, 9)
        for offset in (0, 1, 8, 13):
            assert host.open_run(state, sealed, 9, blocks=2, offset=offset) == (None, plain)
            assert host.seal_run(state, plain, 9, blocks=2, offset=offset) == sealed


def open_wrong(host, state, key):
    for length in LENGTHS:
        sealed = reference.seal(key, NONCE, noise(length).tobytes(), 9)
        assert host.open_run(state, flip(sealed, 8 * len(sealed) - 1), 9, offset=7) == (9, bytes(length))
    sealed = reference.seal(key, NONCE, noise(2 * CHUNK_SIZE).tobytes(), 9)
    assert host.open_run(state, flip(sealed, 8 * SEALED_CHUNK_SIZE), 9, blocks=3)[0] == 10


def gather(host, state, key):
    total = 3 * CHUNK_SIZE + 77
    plain = noise(total).tobytes()
    sealed = reference.seal(key, NONCE, plain)
    many = [(start, 1 + start % 97) for start in range(0, total - 97, 613)]
    few = [(3 * CHUNK_SIZE, 77), (0, 0), (1, 2)]
    for ranges in (many, few, [(CHUNK_SIZE - 5, CHUNK_SIZE + 11)], [(0, total)], [(total - 1, 1)]):
        pieces, size = plan(ranges)
        expected = b"".join(plain[start : start + length] for start, length in ranges)
        packed = pack(sealed, pieces.chunks.tolist())
        for offset in (0, 3, 14):
            assert host.gather(state, packed, pieces, total, size, blocks=2, offset=offset) == (None, expected)


def touch(library, kernel, offset):
    data, result = (Fenced.holding(np.zeros(size, np.uint8), 16).data for size in (40, 4))
    arguments = (result, offset, 0) if kernel == "touch_shared" else (data, result, offset, 0)
    library.launch(kernel, *arguments, threads=32, shared=100)


if __name__ == "__main__":
    main(*sys.argv[1:])
