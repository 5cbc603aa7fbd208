// Parts of fastrack's kernels, one at a time.

#include "aes.cuh"
#include "ghash.cuh"

// a / x. What falls off at x^0 comes back by x^-1 = x^127 + x^6 + x + 1.
__device__ __forceinline__ Field over_x(const Field& a) {
    const u32 carry = 0 - (a.w[3] >> 31);
    return {{a.w[0] << 1 ^ (carry & 1), __funnelshift_l(a.w[0], a.w[1], 1), __funnelshift_l(a.w[1], a.w[2], 1),
             __funnelshift_l(a.w[2], a.w[3], 1) ^ (carry & 0xc2000000)}};
}

// The product of two blocks as GHASH takes it, with bytes in memory order.
extern "C" __global__ void multiply_blocks(const uint4* a, const uint4* b, uint4* products, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        products[i] = from_field(product(to_field(a[i]), over_x(to_field(b[i]))));
    }
}
