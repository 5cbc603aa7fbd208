// The kernels of fastrack: they open chunks, seal chunks, and gather rows out of opened chunks.
//
// See DESIGN.md beside this file. Compiled at run time by NVRTC, so no system header is included. Every parameter is
// 64 bits wide. A grid of any size does the work; a block takes chunks in turn.

#define FASTRACK_THREADS 512
#define FASTRACK_STATE_BYTES 74752
#define FASTRACK_SHARED_BYTES 74112
#define FASTRACK_GATHER_SHARED_BYTES 90496

#ifdef FASTRACK_SHIM
#define shared_memory (shim_shared())
#else
extern __shared__ __align__(256) unsigned char shared_memory[];
#endif

#include "aes.cuh"
#include "ghash.cuh"
#include "mma.cuh"
#include "chunk.cuh"
#include "plan.cuh"

// Two blocks of 512 threads fill a multiprocessor's registers, at 64 a thread.
#define KERNEL extern "C" __global__ void __launch_bounds__(FASTRACK_THREADS, 2)

// The size of chunk `index` of `size` bytes of plaintext.
__device__ __forceinline__ u32 length_of(u64 index, u64 size) {
    const u64 left = size - index * CHUNK;
    return left < CHUNK ? static_cast<u32>(left) : CHUNK;
}

template <int BITS>
__device__ __forceinline__ void open(const State* state, const u8* sealed, u8* target, u64 first, u64 count, u64 size,
                                     u64* verdict) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    enter<BITS>(shared, state);
    for (u32 turn = 0, i = blockIdx.x; i < count; ++turn, i += gridDim.x) {
        const int side = turn & 1;
        const bool good = open_chunk<BITS>(shared, state, sealed + static_cast<u64>(i) * STRIDE, length_of(i, size),
                                           target + static_cast<u64>(i) * CHUNK, first + i, side);
        if (!good && threadIdx.x == 0) atomicMin(verdict, first + i);
    }
    leave(shared);
}

template <int BITS>
__device__ __forceinline__ void seal(const State* state, const u8* source, u8* sealed, u64 first, u64 count, u64 size) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    enter<BITS>(shared, state);
    for (u32 turn = 0, i = blockIdx.x; i < count; ++turn, i += gridDim.x) {
        const int side = turn & 1;
        seal_chunk<BITS>(shared, state, source + static_cast<u64>(i) * CHUNK, length_of(i, size),
                         sealed + static_cast<u64>(i) * STRIDE, first + i, side);
    }
    leave(shared);
}

template <int BITS>
__device__ __forceinline__ void gather(const State* state, const u8* sealed, u8* target, const Plan& plan, u64 count,
                                       u64* verdict) {
    Plain* plain = reinterpret_cast<Plain*>(shared_memory);
    Shared* shared = &plain->shared;
    enter<BITS>(shared, state);
    for (u32 turn = 0, i = blockIdx.x; i < count; ++turn, i += gridDim.x) {
        const int side = turn & 1;
        const bool good = open_chunk<BITS>(shared, state, sealed + static_cast<u64>(i) * STRIDE,
                                           plan.length(plan.chunks[i]), plain->bytes, plan.chunks[i], side);
        if (!good && threadIdx.x == 0) atomicMin(verdict, plan.known(i));
        __syncthreads();
        // The barrier before the next chunk's plaintext is written keeps it from overtaking.
        const u32 length = shared->chunk[side].length;
        if (!plan.scatter<THREADS>(i, length, target, plain->bytes, threadIdx.x)) atomicMin(verdict, plan.known(i));
    }
    leave(shared);
    for (u32 i = threadIdx.x; i < CHUNK / 4; i += THREADS) reinterpret_cast<u32*>(plain->bytes)[i] = 0;
}

#define KERNELS_FOR(BITS)                                                                                            \
    KERNEL open_##BITS(const State* state, const u8* sealed, u8* target, u64 first, u64 count, u64 size,             \
                       u64* verdict) {                                                                               \
        open<BITS>(state, sealed, target, first, count, size, verdict);                                              \
    }                                                                                                                \
    KERNEL seal_##BITS(const State* state, const u8* source, u8* sealed, u64 first, u64 count, u64 size) {           \
        seal<BITS>(state, source, sealed, first, count, size);                                                       \
    }                                                                                                                \
    KERNEL gather_##BITS(const State* state, const u8* sealed, u8* target, const u64* chunks, const u64* starts,     \
                         const u64* table, u64 count, u64 pieces, u64 total, u64 limit, u64* verdict,                \
                         const u64* plan_verdict) {                                                                  \
        const Plan plan{chunks, starts, table, pieces, total, limit};                                                \
        if (*plan_verdict != GOOD) return plan.clear(target);                                                        \
        gather<BITS>(state, sealed, target, plan, count, verdict);                                                   \
    }

KERNELS_FOR(128)
KERNELS_FOR(256)
