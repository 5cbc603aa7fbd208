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
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

// Set anew whenever a thread goes on.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// A line of a kernel. Two calls of one line are one place, however often the compiler copies them.
struct shim_place {
    const char* file;
    int line;
};
constexpr shim_place shim_here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
}

enum class shim_vote { sync, exchange, exclusive_or, ballot };

// Dynamic shared memory, 16-aligned and no better.
unsigned char* shim_shared();
#define FASTRACK_SHARED(name) unsigned char* const name = shim_shared()

void shim_barrier(shim_place place, unsigned name);
void shim_named_barrier(shim_place place, unsigned name, unsigned threads);
// Waits for the lanes that `mask` names. `source` is the lane to take a value from.
unsigned long long shim_meet(shim_vote vote, unsigned mask, unsigned long long value, unsigned source,
                             shim_place place);
// Says that this thread is about to change what other threads change too.
void shim_atomic(const void* address, unsigned long long size);

inline void __syncthreads(shim_place place = shim_here()) { shim_barrier(place, 0); }

// A named barrier, of the whole block: threads may reach it at different places.
inline void __barrier_sync_count(unsigned name, unsigned threads, shim_place place = shim_here()) {
    shim_named_barrier(place, name, threads);
}

inline void __nanosleep(unsigned) {}

inline void __syncwarp(unsigned mask = 0xffffffffu, shim_place place = shim_here()) {
    shim_meet(shim_vote::sync, mask, 0, 0, place);
}

template <typename T>
inline T shim_exchange(unsigned mask, T value, unsigned source, shim_place place) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves 4 or 8 bytes");
    return static_cast<T>(
        shim_meet(shim_vote::exchange, mask, static_cast<unsigned long long>(value), source, place));
}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32, shim_place place = shim_here()) {
    unsigned self = threadIdx.x % 32, last = static_cast<unsigned>(width) - 1;
    return shim_exchange(mask, value, (self & ~last) | (static_cast<unsigned>(lane) & last), place);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, shim_place place = shim_here()) {
    unsigned self = threadIdx.x % 32, last = static_cast<unsigned>(width) - 1;
    unsigned other = (self ^ static_cast<unsigned>(lanes)) & 31;
    // A lane of a later segment is out of reach.
    return shim_exchange(mask, value, other > (self | last) ? self : other, place);
}

inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, shim_place place = shim_here()) {
    return static_cast<unsigned>(shim_meet(shim_vote::exclusive_or, mask, value, 0, place));
}

inline unsigned __ballot_sync(unsigned mask, int predicate, shim_place place = shim_here()) {
    return static_cast<unsigned>(shim_meet(shim_vote::ballot, mask, predicate != 0, 0, place));
}

inline int __any_sync(unsigned mask, int predicate, shim_place place = shim_here()) {
    return __ballot_sync(mask, predicate, place) != 0;
}

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

inline unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) result |= (value >> bit & 1u) << (31 - bit);
    return result;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

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

template <typename T>
inline T __ldg(const T* address) {
    return *address;
}

// Threads of a launch take turns, so a plain change is atomic.
template <typename T, typename Change>
inline T shim_change(T* address, Change change) {
    shim_atomic(address, sizeof(T));
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    __atomic_store_n(address, change(old), __ATOMIC_RELAXED);
    return old;
}

#define SHIM_ATOMICS(T)                                                                                        \
    inline T atomicMin(T* address, T value) {                                                                  \
        return shim_change(address, [value](T old) { return value < old ? value : old; });                     \
    }                                                                                                          \
    inline T atomicAdd(T* address, T value) {                                                                  \
        return shim_change(address, [value](T old) { return static_cast<T>(old + value); });                   \
    }                                                                                                          \
    inline T atomicOr(T* address, T value) {                                                                   \
        return shim_change(address, [value](T old) { return static_cast<T>(old | value); });                   \
    }                                                                                                          \
    inline T atomicExch(T* address, T value) {                                                                 \
        return shim_change(address, [value](T) { return value; });                                             \
    }
SHIM_ATOMICS(unsigned)
SHIM_ATOMICS(unsigned long long)
#undef SHIM_ATOMICS
