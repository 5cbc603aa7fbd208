// A product of matrices of bits on the tensor cores, by a warp: PTX ISA, mma.sync with .b1 operands, shape m16n8k256.
//
// sum[row][column] += popcount over k of a[row][k] AND b[k][column]; 16 rows, 8 columns, 256 bits. Of lane 4 * group + item
//
//   a.x, a.y    rows group and group + 8, bits 32 * item and up; a.z, a.w the same, 128 bits further
//   b0, b1      column group, bits 32 * item and up; the same, 128 bits further
//   sum[0..3]   rows group (0, 1) and group + 8 (2, 3), columns 2 * item (0, 2) and 2 * item + 1 (1, 3)

__device__ __forceinline__ void multiply_bits(u32 (&sum)[4], uint4 a, u32 b0, u32 b1) {
#ifdef FASTRACK_SHIM
    const int item = threadIdx.x & 3, group = threadIdx.x >> 2 & 7;
    const u64 low = static_cast<u64>(a.z) << 32 | a.x, high = static_cast<u64>(a.w) << 32 | a.y;
    const u64 columns = static_cast<u64>(b1) << 32 | b0;
    for (int k = 0; k < 4; ++k) {
        const u64 rows[2] = {__shfl_sync(~0u, low, 4 * group + k), __shfl_sync(~0u, high, 4 * group + k)};
        for (int i = 0; i < 2; ++i) {
            const u64 bits = __shfl_sync(~0u, columns, 4 * (2 * item + i) + k);
            for (int j = 0; j < 2; ++j) {
                const u64 both = rows[j] & bits;
                sum[2 * j + i] += static_cast<u32>(__popc(static_cast<u32>(both)) + __popc(static_cast<u32>(both >> 32)));
            }
        }
    }
#else
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}
