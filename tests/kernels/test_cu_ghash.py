"""The multiplication of GHASH, with operands that a random key would not bring about in a lifetime."""

import itertools

import numpy as np
import pytest
from helpers.buffers import Fenced
from helpers.kernel_host import SHIM, Library, read_only
from helpers.reference import X, times

WORDS = [0, 0xFFFFFFFF, 0x11111111, 0x88888888, 0xEEEEEEEE, 0x80000000, 1]


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["holes", "clmad", "clmad-reduces"])
def library(build, request):
    return Library.load(build(SHIM / "parts.cu", clmad=request.param))


def by_kernel(library, pairs):
    sides = ([pair[side].to_bytes(16) for pair in pairs] for side in (0, 1))
    a, b = (read_only(Fenced.holding(b"".join(blocks), 16)) for blocks in sides)
    result = Fenced(16 * len(pairs), 16)
    library.launch("multiply_blocks", a, b, result.data, len(pairs), threads=64)
    assert result.stands
    blocks = result.data.tobytes()
    return [int.from_bytes(blocks[start : start + 16]) for start in range(0, len(blocks), 16)]


def block(words):
    return sum(word << 32 * place for place, word in enumerate(words))


@pytest.mark.slow
def test_random_blocks_are_multiplied(library):
    random = np.random.default_rng(1)
    pairs = [(int.from_bytes(random.bytes(16)), int.from_bytes(random.bytes(16))) for _ in range(500)]
    assert by_kernel(library, pairs) == [times(*pair) for pair in pairs]


def test_single_bits_are_multiplied(library):
    pairs = [(1 << i, 1 << j) for i in range(0, 128, 3) for j in (0, 1, 31, 32, 63, 64, 95, 96, 126, 127)]
    assert by_kernel(library, pairs) == [times(*pair) for pair in pairs]


def test_words_full_of_ones_carry_nothing_into_each_other(library):
    # The kernel keeps multipliers divided by x, so they are multiplied by it: then it is the kernel's that are full.
    extremes = [block(words) for words in itertools.product(WORDS[:2], repeat=4)]
    random = np.random.default_rng(2)
    extremes += [block(random.choice(WORDS, 4).tolist()) for _ in range(40)]
    pairs = [(a, times(b, X)) for a in extremes for b in extremes]
    assert by_kernel(library, pairs) == [times(*pair) for pair in pairs]
