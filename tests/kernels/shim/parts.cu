// Parts of fastrack's kernels, one at a time.

#include "aes.cuh"
#include "ghash.cuh"

// The product of two blocks as GHASH takes it, with bytes in memory order.
extern "C" __global__ void multiply_blocks(const uint4* a, const uint4* b, uint4* products, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        products[i] = from_field(product(to_field(a[i]), over_x(to_field(b[i]))));
    }
}
