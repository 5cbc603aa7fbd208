// What a kernel takes from CUDA, for g++: forced in front of every .cu file. The rest stands in shim.cpp.

#pragma once

#include <math.h>

#define FASTRACK_SHIM 1

#define __global__
#define __device__
#define __host__
#define __constant__
#ifndef __forceinline__  // which compiles sooner if it is `inline` alone
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __restrict__ __restrict

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Set anew whenever a thread goes on.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// Dynamic shared memory.
unsigned char* shim_shared();

void __syncthreads();
// Waits for all lanes of the warp, which `mask` always names.
unsigned __reduce_xor_sync(unsigned mask, unsigned value);
inline void __syncwarp() { __reduce_xor_sync(0xffffffffu, 0); }
inline void __nanosleep(unsigned) {}

// CUDA C++ Programming Guide, integer intrinsics. nvcc 13 masks a selector with 0x7777, as that says: there is no sign
// mode, which is for PTX alone.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selectors) {
    unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (unsigned place = 0; place < 4; ++place) {
        unsigned selector = selectors >> 4 * place & 7;
        result |= static_cast<unsigned>(bytes >> 8 * selector & 0xff) << 8 * place;
    }
    return result;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both << (shift & 31) >> 32);
}

inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    unsigned long long both = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(both >> (shift & 31));
}

inline float __uint_as_float(unsigned bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The sum of the products of four bytes each.
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (unsigned place = 0; place < 32; place += 8) sum += (a >> place & 0xff) * (b >> place & 0xff);
    return sum;
}

// What `clmad` adds to c: the lower and the upper half of a carry-less product.
inline unsigned long long clmad_low(unsigned long long a, unsigned long long b, unsigned long long c) {
    for (int bit = 0; bit < 64; ++bit) c ^= a >> bit & 1 ? b << bit : 0;
    return c;
}

inline unsigned long long clmad_high(unsigned long long a, unsigned long long b, unsigned long long c) {
    for (int bit = 1; bit < 64; ++bit) c ^= a >> bit & 1 ? b >> (64 - bit) : 0;
    return c;
}

// Addresses within shared memory do not start at zero on a GPU either.
constexpr unsigned long shim_window = 1024;
inline unsigned long __cvta_generic_to_shared(const void* address) {
    return static_cast<unsigned long>(static_cast<const unsigned char*>(address) - shim_shared()) + shim_window;
}
inline void* __cvta_shared_to_generic(unsigned long address) { return shim_shared() + (address - shim_window); }

// Threads take turns, so a plain change is atomic.
inline void atomicMin(unsigned long long* address, unsigned long long value) {
    if (value < *address) *address = value;
}
inline void atomicAnd(unsigned* address, unsigned value) { *address &= value; }
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
    const unsigned long long before = *address;
    *address = before + value;
    return before;
}
inline void __threadfence() {}
