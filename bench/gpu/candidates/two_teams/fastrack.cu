// The kernels of fastrack: they open chunks, seal chunks, and gather rows out of opened chunks.
//
// See DESIGN.md beside this file. Compiled at run time by NVRTC, so no system header is included. Every parameter is
// 64 bits wide. A grid of any size does the work; a block takes chunks in turn.

#define FASTRACK_THREADS 1024
#define FASTRACK_STATE_BYTES 8704
#define FASTRACK_SHARED_BYTES 67008
#define FASTRACK_GATHER_SHARED_BYTES 99776

#ifdef FASTRACK_SHIM
#define shared_memory (shim_shared())
#else
extern __shared__ __align__(256) unsigned char shared_memory[];
#endif

#include "aes.cuh"
#include "ghash.cuh"
#include "chunk.cuh"
#include "plan.cuh"

// A block of 1024 threads fills a multiprocessor's registers, at 64 a thread.
#define KERNEL extern "C" __global__ void __launch_bounds__(FASTRACK_THREADS, 1)

// The size of chunk `index` of `size` bytes of plaintext.
__device__ __forceinline__ u32 length_of(u64 index, u64 size) {
    const u64 left = size - index * CHUNK;
    return left < CHUNK ? static_cast<u32>(left) : CHUNK;
}

// Chunks are dealt to the first teams of all blocks, then to the second ones, and so on. Both teams of a block meet as
// often: the second one once before it starts, the first one once when it has ended, and each without a chunk as well.
#define FOR_EACH_CHUNK                                                                                             \
    if (team() == 1) change_places();                                                                              \
    for (u32 turn = 0, i = blockIdx.x + team() * gridDim.x; i - team() * gridDim.x < count; ++turn, i += 2 * gridDim.x)

template <int BITS>
__device__ __forceinline__ void open(const State* state, const u8* sealed, u8* target, u64 first, u64 count, u64 size,
                                     u64* verdict) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    enter<BITS>(shared, state);
    FOR_EACH_CHUNK {
        const int side = 2 * team() + (turn & 1);
        if (i < count) {
            const bool good = open_chunk<BITS>(shared, state, sealed + static_cast<u64>(i) * STRIDE, length_of(i, size),
                                               target + static_cast<u64>(i) * CHUNK, first + i, side);
            if (!good && member() == 0) atomicMin(verdict, first + i);
        } else {
            change_places();
        }
        change_places();
    }
    if (team() == 0) change_places();
    leave(shared);
}

template <int BITS>
__device__ __forceinline__ void seal(const State* state, const u8* source, u8* sealed, u64 first, u64 count, u64 size) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    enter<BITS>(shared, state);
    const u32 begin = blockIdx.x + team() * gridDim.x;
    if (member() < 32) start_chunk(shared, state, first + begin, begin < count ? length_of(begin, size) : 0, 2 * team());
    __syncthreads();
    FOR_EACH_CHUNK {
        const int side = 2 * team() + (turn & 1);
        if (i < count) {
            const u32 next = i + 2 * gridDim.x;
            seal_chunk<BITS>(shared, state, source + static_cast<u64>(i) * CHUNK, length_of(i, size),
                             sealed + static_cast<u64>(i) * STRIDE, first + next,
                             next < count ? length_of(next, size) : 0, side);
        } else {
            change_places();
            change_places();
        }
    }
    if (team() == 0) change_places();
    leave(shared);
}

template <int BITS>
__device__ __forceinline__ void gather(const State* state, const u8* sealed, u8* target, const Plan& plan, u64 count,
                                       u64* verdict) {
    Plain* plain = reinterpret_cast<Plain*>(shared_memory);
    Shared* shared = &plain->shared;
    enter<BITS>(shared, state);
    FOR_EACH_CHUNK {
        const int side = 2 * team() + (turn & 1);
        u8* bytes = plain->bytes[team()];
        if (i >= count) {
            change_places();
            change_places();
            continue;
        }
        const bool good = open_chunk<BITS>(shared, state, sealed + static_cast<u64>(i) * STRIDE,
                                           plan.length(plan.chunks[i]), bytes, plan.chunks[i], side);
        if (!good && member() == 0) atomicMin(verdict, plan.known(i));
        change_places();
        // The teams meet once more before the next chunk's plaintext is written.
        const u32 length = shared->chunk[side].length;
        if (!plan.scatter<TEAM>(i, length, target, bytes, member())) atomicMin(verdict, plan.known(i));
    }
    if (team() == 0) change_places();
    leave(shared);
    for (u32 i = threadIdx.x; i < 2 * CHUNK / 4; i += THREADS) reinterpret_cast<u32*>(plain->bytes[0])[i] = 0;
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
