"""Extend a state for GHASH on the tensor cores: powers of H for groups of blocks, and a matrix of bits."""

# ruff: noqa: E501 - lines of the kernels keep their length

import numpy as np

_POWERS = 272  # where power 0 lies in a state; powers are divided by x, and little-endian words
_GROUP = 32  # blocks

# Where `chunk.cuh` differs: blocks are laid out by groups, whose bits are multiplied by the matrix.
_CHUNK = [
    (
        """\
    u32 rest[52];           // not used""",
        """\
    u32 rest[52];           // zeros
    // What `candidate.py` adds: H^(1 + 32 n), divided by x, and 128 rows of 4096 bits, as the lanes of a warp take them.
    u32 group_powers[32][4];
    uint4 matrix[8][8][2][32];""",
    ),
    (
        """\
    u32 sums[2][WARPS][4];""",
        """\
    u32 sums[2][WARPS][16][4];  // of 16 groups, by a warp that has 4 blocks of each
    uint4 tag[2];""",
    ),
    (
        """\
// The two blocks of a thread in a chunk of `length` bytes: number `block(0)` and `block(1)`, negative for none.""",
        """\
// Where a thread's two blocks lie in a chunk of `length` bytes: number `block(0)` and `block(1)`, negative for none. A warp
// has 4 blocks of 16 groups; a lane the same block of two groups, 8 apart: two columns of `multiply_bits`.
__device__ __forceinline__ u32 first_block() {  // of this thread, in a full chunk
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return 512 * (warp / 8) + 32 * (lane / 4) + 4 * (warp % 8) + lane % 4;
}
""",
    ),
    (
        """\
    __device__ __forceinline__ int block(int i) const { return static_cast<int>(threadIdx.x) + i * THREADS - shift; }""",
        """\
    __device__ __forceinline__ int block(int i) const { return static_cast<int>(first_block() + 256 * i) - shift; }""",
    ),
    (
        """\
// a power for each thread. That of the last block's thread is H^2, as the block of the lengths follows it with H.
__device__ __forceinline__ void authenticate(Shared* shared, const State* state, const Field& first, const Field& second,
                                             int side) {
    Field sum = first;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (i == 1) sum = sum ^ second;
        sum = product(sum, load_field(state->powers[i == 0 ? THREADS : THREADS + 1 - threadIdx.x]));
    }
    sum = sum_of_warp(sum);
    if ((threadIdx.x & 31) == 0) store_field(shared->sums[side][threadIdx.x / 32], sum);
}

// Returns the chunk's tag or, to open, its difference from the claimed tag, in every thread. A barrier must precede.
__device__ __forceinline__ uint4 tag_of(const Shared* shared, int side) {
    const u32 lane = threadIdx.x & 31;
    Field sum = {{0, 0, 0, 0}};
    if (lane < WARPS) sum = load_field(shared->sums[side][lane]);
    return from_field(sum_of_warp(sum)) ^ shared->chunk[side].rest;""",
        """\
__device__ __forceinline__ void authenticate(Shared* shared, const State* state, const uint4 (&text)[2], int side) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 bits[4] = {0, 0, 0, 0};  // of four groups, 16 rows each
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        const uint4* rows = state->matrix[warp % 8][tile][0];
        const uint4 low = rows[lane], high = rows[32 + lane];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 sum[4] = {0, 0, 0, 0};
            multiply_bits(sum, low, text[i].x, text[i].y);
            multiply_bits(sum, high, text[i].z, text[i].w);
#pragma unroll
            for (int k = 0; k < 4; ++k) bits[2 * i + k % 2] |= (sum[k] & 1) << (2 * tile + k / 2);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32* group = shared->sums[side][warp][8 * (k / 2) + 2 * (lane % 4) + k % 2];
        reinterpret_cast<unsigned short*>(group)[lane / 4] = static_cast<unsigned short>(bits[k]);
    }
}

// The chunk's tag or, to open, what distinguishes it from the one that is claimed. By one warp, between two barriers.
__device__ __forceinline__ void sum_up(Shared* shared, const State* state, int side) {
    const u32 lane = threadIdx.x % 32;
    Field sum = {{0, 0, 0, 0}};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) sum = sum ^ load_field(shared->sums[side][8 * (lane / 16) + i][lane % 16]);
    sum = sum_of_warp(product(sum, load_field(state->group_powers[31 - lane])));
    if (lane == 0) shared->tag[side] = from_field(sum) ^ shared->chunk[side].rest;""",
    ),
    (
        """\
    Field sealed[2];  // a loaded uint4 takes four consecutive registers, which would be spilled together
    {
        const Share share(length);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = share.block(i);
            sealed[i] = {{0, 0, 0, 0}};
            if (block < 0) continue;
            // The tag follows a short last block, so 16 bytes can be read.
            sealed[i] = to_field(first_bytes(*reinterpret_cast<const uint4*>(chunk + 16 * block), share.size(i)));
        }""",
        """\
    const Share share(length);
    uint4 text[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int block = share.block(i);
        text[i] = make_uint4(0, 0, 0, 0);
        // A short last block is followed by the tag, so there are 16 bytes to read.
        if (block >= 0) text[i] = first_bytes(*reinterpret_cast<const uint4*>(chunk + 16 * block), share.size(i));""",
    ),
    (
        """\
    authenticate(shared, state, sealed[0], sealed[1], side);
    __syncthreads();
    const u32 good = is_zero(tag_of(shared, side));
    const Share share(shared->chunk[side].length);  // read again, as registers are scarce above
    if (share.block(1) >= 0) {
        uint4 text[2] = {from_field(sealed[0]), from_field(sealed[1])};
        cipher<BITS>(shared, share, side, text);""",
        """\
    authenticate(shared, state, text, side);
    __syncthreads();
    // Another warp each time sums up, while the others decipher what they keep to themselves until the verdict.
    if (threadIdx.x / 32 == (number & (WARPS - 1))) sum_up(shared, state, side);
    if (share.block(1) >= 0) cipher<BITS>(shared, share, side, text);
    __syncthreads();
    const u32 good = is_zero(shared->tag[side]);
    if (share.block(1) >= 0) {""",
    ),
    (
        """\
    authenticate(shared, state, to_field(text[0]), to_field(text[1]), side);
    __syncthreads();
    const uint4 tag = tag_of(shared, side);
    if (threadIdx.x == 0) store(chunk + length, tag, TAG);""",
        """\
    authenticate(shared, state, text, side);
    __syncthreads();
    if (threadIdx.x / 32 == (number & (WARPS - 1))) {
        sum_up(shared, state, side);
        __syncwarp();
        if (threadIdx.x % 32 == 0) store(chunk + length, shared->tag[side], TAG);
    }""",
    ),
]

EDITS = {
    "fastrack.cu": [
        ("STATE_BYTES 8704", "STATE_BYTES 74752"),
        ("FASTRACK_SHARED_BYTES 66400", "FASTRACK_SHARED_BYTES 74112"),
        ("GATHER_SHARED_BYTES 82784", "GATHER_SHARED_BYTES 90496"),
        ('#include "chunk.cuh"', '#include "mma.cuh"\n#include "chunk.cuh"'),
    ],
    "chunk.cuh": _CHUNK,
}


def extend_state(state):
    """Append H^(1 + 32 n) for n from 0 to 31, and the matrix that multiplies a group's bits."""
    powers = (_power(state, 1 + _GROUP * n).to_bytes(16, "little") for n in range(32))
    return bytes(state) + b"".join(powers) + _matrix(state).tobytes()


def _power(state, exponent):
    """Return a power of H, divided by x. A state has powers up to 513, so later ones are products."""
    if exponent > 513:
        return _product(_power(state, exponent - 512), _power(state, 512))
    offset = _POWERS + 16 * exponent
    return int.from_bytes(state[offset : offset + 16], "little")


def _product(a, b):
    """Multiply two elements that are divided by x; so is the product."""
    total = 0
    b = _times_x(b)  # the true second factor
    for bit in range(127, -1, -1):
        total ^= b if a >> bit & 1 else 0
        b = _times_x(b)
    return total


def _times_x(a):
    """Multiply by x: one place down, and x^128 = x^7 + x^2 + x + 1 at the top."""
    return a >> 1 ^ (0xE1 << 120 if a & 1 else 0)


def _matrix(state):
    """The matrix, in the order that the lanes of a warp read: (slice, tile, half, lane, word).

    Column (block of the group, byte, bit) is what that bit, alone, adds to the sum: x^e H^(32 - block). Row n is bit n
    of that sum as a number. A lane gets the sums of 16 rows, by `mma.cuh`: they are chosen to lie side by side.
    """
    columns = np.empty((_GROUP, 128, 16), np.uint8)  # block, bit of the block in memory order, bytes of the sum
    for block in range(_GROUP):
        element = _times_x(_power(state, _GROUP - block))
        for exponent in range(128):  # of x: byte exponent / 8, its highest bit first
            columns[block, exponent // 8 * 8 + 7 - exponent % 8] = np.frombuffer(
                element.to_bytes(16, "little"), np.uint8
            )
            element = _times_x(element)
    bits = np.unpackbits(columns, axis=2, bitorder="little")  # block, bit, row
    rows = bits.transpose(2, 0, 1).reshape(128, _GROUP, 4, 32)  # row, block, word, bit
    words = np.packbits(rows, axis=3, bitorder="little").view("<u4")[..., 0]  # row, block, word
    part, tile, half, lane, word = np.indices((8, 8, 2, 32, 4), sparse=True)  # words: a.x, a.y, a.z, a.w
    return words[16 * (lane // 4) + 2 * tile + word % 2, 4 * part + lane % 4, 2 * half + word // 2]
