"""The product of bit matrices that a candidate gets from the tensor cores: its twin on the host, by PTX's layout."""

import numpy as np
import pytest
from helpers.buffers import Fenced
from helpers.kernel_host import Library, read_only

from bench.gpu.candidates import FOLDER

SOURCE = """
#include "aes.cuh"
#include "mma.cuh"

extern "C" __global__ void multiply_matrices(const uint4* a, const uint2* b, u32* sums) {
    u32 sum[4];
    for (int k = 0; k < 4; ++k) sum[k] = sums[4 * threadIdx.x + k];
    multiply_bits(sum, a[threadIdx.x], b[threadIdx.x].x, b[threadIdx.x].y);
    for (int k = 0; k < 4; ++k) sums[4 * threadIdx.x + k] = sum[k];
}
"""


@pytest.fixture(scope="module")
def library(build, tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    source = folder / "matrix.cu"
    source.write_text(SOURCE.replace('"mma.cuh"', f'"{FOLDER / "tensor_ghash/mma.cuh"}"'))
    return Library.load(build(source))


def test_bits_are_multiplied_and_counted(library):
    random = np.random.default_rng(1)
    a, b = random.integers(0, 2, (16, 256)), random.integers(0, 2, (256, 8))
    before = random.integers(0, 1000, (16, 8))
    rows = np.packbits(a, axis=1, bitorder="little").view("<u4")  # 16, 8
    columns = np.packbits(b.T.copy(), axis=1, bitorder="little").view("<u4")  # 8, 8
    group, item = np.arange(32) // 4, np.arange(32) % 4
    # PTX ISA, figures for .b1 fragments of m16n8k256.
    lanes_a = np.stack([rows[group + 8 * (i % 2), item + 4 * (i // 2)] for i in range(4)], axis=1)
    lanes_b = np.stack([columns[group, item + 4 * i] for i in range(2)], axis=1)
    places = [(group + 8 * (i // 2), 2 * item + i % 2) for i in range(4)]
    sums = Fenced.holding(np.stack([before[place] for place in places], axis=1).astype("<u4").tobytes(), 16)
    given = (read_only(Fenced.holding(np.ascontiguousarray(lanes).tobytes(), 16)) for lanes in (lanes_a, lanes_b))
    library.launch("multiply_matrices", *given, sums.data, threads=32)
    expected = np.stack([(before + a @ b)[place] for place in places], axis=1)
    assert np.array_equal(sums.data.view("<u4").reshape(32, 4), expected)
