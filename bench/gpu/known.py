"""Known answers, through the kernels themselves: published cases, and random messages as pyca/cryptography has them."""

import os

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bench.gpu.gpu import WrongResultError
from bench.gpu.launches import ByteRuns
from bench.gpu.widened import FORMATS, places, scales_of, widened
from fastrack._crypto.base import Scaling
from fastrack._crypto.cobblestone import chunk_nonce
from fastrack._crypto.gather import GatherPlan
from fastrack.format import CHUNK_SIZE, SEALED_CHUNK_SIZE

_KEY = "feffe9928665731c6d6a8f9467308308"
_NONCE = "cafebabefacedbaddecaf888"
_TEXT = (
    "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
    "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255"
)

# McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)", appendix B, as submitted to NIST for SP 800-38D: the
# cases with a nonce of 96 bits and no associated data. Number, key, nonce, plaintext, ciphertext and tag.
CASES = (
    (1, "00" * 16, "00" * 12, "", "58e2fccefa7e3061367f1d57a4e7455a"),
    (2, "00" * 16, "00" * 12, "00" * 16, "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf"),
    (
        3,
        _KEY,
        _NONCE,
        _TEXT,
        (
            "42831ec2217774244b7221b784d0d49ce3aa212f2c02a4e035c17e2329aca12e"
            "21d514b25466931c7d8f6a5aac84aa051ba30b396a0aac973d58e091473f5985"
            "4d5c2af327cd64a62cf35abd2ba6fab4"
        ),
    ),
    (13, "00" * 32, "00" * 12, "", "530f8afbc74536b9a963b4f1c4cb738b"),
    (14, "00" * 32, "00" * 12, "00" * 16, "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
    (
        15,
        2 * _KEY,
        _NONCE,
        _TEXT,
        (
            "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
            "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad"
            "b094dac5d93471bdec1a502270e3cc6c"
        ),
    ),
)
# Bytes of plaintext of random messages: ends that are empty, short, odd and full but for a byte.
SIZES = (0, 1, 16, 17, CHUNK_SIZE - 1, CHUNK_SIZE, 2 * CHUNK_SIZE + 8191, 5 * CHUNK_SIZE + 1234)


def check(gpu, sizes=SIZES, blocks=(1, 3), columns=(64, 63)):
    """Run them all, and return how many answers were right; raise at the first that was not."""
    runs = ByteRuns(gpu)
    done = sum(_published(runs, *case) for case in CASES)
    for bits in (128, 256):
        for number, size in enumerate(sizes):
            done += _random(runs, bits, size, number % 16, blocks[number % len(blocks)])
        done += _wrapped(runs, bits) + _paged(runs, bits, blocks[-1])
        done += sum(_widened(runs, bits, values, each) for values in FORMATS for each in columns)
    return done


def seal(key, nonce, plain, first=0):
    """A whole run by pyca, with its last chunk."""
    cipher = AESGCM(key)
    starts = range(0, len(plain) + 1, CHUNK_SIZE)
    return b"".join(
        cipher.encrypt(chunk_nonce(nonce, first + index), plain[start : start + CHUNK_SIZE], None)
        for index, start in enumerate(starts)
    )


def _published(runs, number, key, nonce, plain, sealed):
    key, nonce, plain, sealed = (bytes.fromhex(field) for field in (key, nonce, plain, sealed))
    state = runs.prepare(key, nonce)
    case = f"GCM test case {number}"
    _expect(f"{case}, opened", runs.open_run(state, sealed), (None, plain))
    _expect(f"{case}, opened under a wrapped key", runs.small_run(state, sealed), (None, plain))
    _expect(f"{case}, sealed", runs.seal_run(state, plain), sealed)
    wrong = bytes([*sealed[:-1], sealed[-1] ^ 1])
    _expect(f"{case}, its tag altered", runs.open_run(state, wrong), (0, bytes(len(plain))))
    return 4


def _random(runs, bits, size, offset, blocks):
    key, nonce, plain = os.urandom(bits // 8), os.urandom(12), os.urandom(size)
    first = 2**33 + 5
    sealed, state = seal(key, nonce, plain, first), runs.prepare(key, nonce)
    case, options = f"AES-{bits}, {size} bytes at offset {offset}", {"blocks": blocks, "offset": offset}
    _expect(f"{case}, opened", runs.open_run(state, sealed, first, **options), (None, plain))
    _expect(f"{case}, sealed", runs.seal_run(state, plain, first, **options), sealed)
    last = size // CHUNK_SIZE
    wrong = bytes([*sealed[:-1], sealed[-1] ^ 0x80])
    expected = (first + last, plain[: last * CHUNK_SIZE] + bytes(size - last * CHUNK_SIZE))
    _expect(f"{case}, its last tag altered", runs.open_run(state, wrong, first, **options), expected)
    _expect(f"{case}, opened under a wrapped key", runs.small_run(state, sealed, first, **options), (None, plain))
    _expect(f"{case}, that tag altered", runs.small_run(state, wrong, first, **options), expected)
    return 5 + _gather(runs, state, case, seal(key, nonce, plain), plain, options)


def _wrapped(runs, bits):
    """A row as it was wrapped, and an altered one, under which nothing opens or is sealed."""
    key, nonce, plain = os.urandom(bits // 8), os.urandom(12), os.urandom(700)
    sealed, state, case = seal(key, nonce, plain), runs.prepare(key, nonce), f"AES-{bits}, a wrapped key"
    _expect(case, runs.unwrap(key, nonce).data.tobytes(), state.data.tobytes())
    wrong = {"altered": 0x80}
    _expect(f"{case}, altered", runs.unwrap(key, nonce, **wrong).data.tobytes(), bytes(len(state.data)))
    _expect(f"{case}, altered, to open", runs.small_run(state, sealed, **wrong), (0, bytes(len(plain))))
    _expect(f"{case}, altered, to seal", runs.seal_run(state, plain, **wrong), 0)
    pieces = GatherPlan(np.array([0]), np.array([0, 1]), np.array([[5, 0, 100]]))
    _expect(f"{case}, altered, to gather", runs.pick(state, sealed, pieces, 700, 100, **wrong), (0, bytes(100)))
    return 5


def _paged(runs, bits, blocks):
    """A block of pieces that chunks cross, sealed from there and opened into there, and one that was altered."""
    sizes = [4096, 16, 18432, 10224]  # twice the bytes of a chunk, so that the last one is empty
    key, nonce, plain = os.urandom(bits // 8), os.urandom(12), os.urandom(sum(sizes))
    sealed, state, case = seal(key, nonce, plain), runs.prepare(key, nonce), f"AES-{bits}, a block of paged memory"
    _expect(f"{case}, sealed", runs.keep_run(state, plain, sizes, blocks=blocks), sealed)
    _expect(f"{case}, opened", runs.restore_run(state, sealed, sizes, blocks=blocks), (None, True, plain))
    wrong = bytes([sealed[0] ^ 1, *sealed[1:]])
    expected = 0, False, bytes(CHUNK_SIZE) + plain[CHUNK_SIZE:]
    _expect(f"{case}, altered", runs.restore_run(state, wrong, sizes, blocks=blocks), expected)
    return 3


def _widened(runs, bits, values, columns):
    """Every value, in rows with scales of their own, 16 at once and one by one."""
    key, nonce, plain = os.urandom(bits // 8), os.urandom(12), bytes(range(256)) * 68
    scales = np.random.default_rng(columns).normal(0, 1, -(-len(plain) // columns)).astype(np.float32)
    how = Scaling(scales.tobytes(), "F32", values, columns, 1, columns)
    found = runs.widen_run(runs.prepare(key, nonce), seal(key, nonce, plain), how)
    indices = places(len(plain), columns, 1, columns)
    expected = None, widened(plain, values, scales_of(how.memory, "F32"), indices)
    _expect(f"AES-{bits}, {values} in rows of {columns}, widened", found, expected)
    return 1


def _gather(runs, state, case, sealed, plain, options):
    """100 bytes out of every 300, of all chunks, in another order; the message's last one stays last."""
    last = len(plain) // CHUNK_SIZE
    order = [*reversed(range(last)), last]
    table, starts, expected = [], [0], b""
    for number in order:
        here = plain[number * CHUNK_SIZE : (number + 1) * CHUNK_SIZE]
        for start in range(0, max(len(here) - 100, 0), 300):
            table.append((start, len(expected), 100))
            expected += here[start : start + 100]
        starts.append(len(table))
    packed = b"".join(sealed[number * SEALED_CHUNK_SIZE : (number + 1) * SEALED_CHUNK_SIZE] for number in order)
    pieces = GatherPlan(np.array(order, np.int64), np.array(starts, np.int64), np.array(table, np.int64).reshape(-1, 3))
    result = runs.gather(state, packed, pieces, len(plain), len(expected), **options)
    _expect(f"{case}, gathered", result, (None, expected))
    result = runs.pick(state, packed, pieces, len(plain), len(expected), **options)
    _expect(f"{case}, gathered under a wrapped key", result, (None, expected))
    return 2


def _expect(what, found, expected):
    if found != expected:
        raise WrongResultError(f"{what}: the kernel gave another answer")
