// The kernels of fastrack: they prepare message keys, open chunks, seal chunks, and gather rows out of opened chunks.
//
// See DESIGN.md beside this file. Compiled at run time by NVRTC, so no system header is included. Every parameter is
// 64 bits wide, but for the table of segments. A grid of any size does the work; a block takes chunks in turn.

#define FASTRACK_THREADS 1024
#define FASTRACK_STATE_BYTES 8704
#define FASTRACK_SHARED_BYTES 67248
#define FASTRACK_GATHER_SHARED_BYTES 100016
#define FASTRACK_KEY_BYTES 48
#define FASTRACK_SEGMENT_BYTES 40
#define FASTRACK_SEGMENTS 100

#ifdef FASTRACK_SHIM
#define shared_memory (shim_shared())
#define TABLE_PARAMETER const Table&
#else
#define TABLE_PARAMETER const __grid_constant__ Table
extern __shared__ __align__(256) unsigned char shared_memory[];
#endif

#include "aes.cuh"
#include "ghash.cuh"
#include "chunk.cuh"
#include "prepare.cuh"
#include "table.cuh"
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
__device__ __forceinline__ void open(const State* states, u64 mask, const u8* sealed, u64 count, u64 segments,
                                     u64* verdict, const Table& table) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    fill_tables(shared->tables);
    __syncthreads();
    const State* before = nullptr;
    FOR_EACH_CHUNK {
        const int side = 2 * team() + (turn & 1);
        if (i < count) {
            const Segment& segment = table.at[table.find(i, segments)];
            const State* state = segment.state(states, mask);
            const u32 index = i - segment.start;
            if (state != before) change_key<BITS>(shared, before = state);
            const bool good = open_chunk<BITS>(shared, state, segment.chunk(sealed, index),
                                               length_of(index, segment.size),
                                               segment.target + static_cast<u64>(index) * CHUNK,
                                               (segment.name & NUMBERS) + index, side);
            if (!good && member() == 0) atomicMin(verdict, segment.name + index);
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
    fill_tables(shared->tables);
    change_key<BITS>(shared, state);
    __syncthreads();
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
__device__ __forceinline__ void gather(const State* states, u64 mask, const u8* sealed, const Plan& plan, u64 count,
                                       u64 segments, u64* verdict, const Table& table) {
    Plain* plain = reinterpret_cast<Plain*>(shared_memory);
    Shared* shared = &plain->shared;
    fill_tables(shared->tables);
    __syncthreads();
    u32 before = FASTRACK_SEGMENTS;
    FOR_EACH_CHUNK {
        const int side = 2 * team() + (turn & 1);
        u8* bytes = plain->bytes[team()];
        if (i >= count) {
            change_places();
            change_places();
            continue;
        }
        const u32 found = table.find(i, segments);
        const Segment& segment = table.at[found];
        if (found != before) change_key<BITS>(shared, segment.state(states, mask));
        before = found;
        const bool good = open_chunk<BITS>(shared, segment.state(states, mask),
                                           segment.chunk(sealed, i - segment.start), plan.length(i, segment), bytes,
                                           plan.chunks[i], side);
        if (!good && member() == 0) atomicMin(verdict, plan.known(i, segment));
        change_places();
        // The teams meet once more before the next chunk's plaintext is written.
        const u32 length = shared->chunk[side].length;
        if (!plan.scatter<TEAM>(i, length, segment, bytes, member())) atomicMin(verdict, plan.known(i, segment));
    }
    if (team() == 0) change_places();
    leave(shared);
    for (u32 i = threadIdx.x; i < 2 * CHUNK / 4; i += THREADS) reinterpret_cast<u32*>(plain->bytes[0])[i] = 0;
}

KERNEL prepare(const Key* keys, State* states, u64 mask, u64 first, u64 count) {
    Shared* shared = reinterpret_cast<Shared*>(shared_memory);
    fill_tables(shared->tables);
    for (u64 i = first + blockIdx.x; i < first + count; i += gridDim.x) {
        __syncthreads();
        State* state = states + (i & mask);
        const u32 kind = keys[i].kind;
        if (threadIdx.x < 32) {
            if ((kind & 0xffff) == 128) {
                start_state<128>(shared->schedule[0], keys[i], state);
            } else {
                start_state<256>(shared->schedule[0], keys[i], state);
            }
        }
        __syncthreads();
        finish_state(state, kind >> 16);
    }
    leave(shared);
}

#define KERNELS_FOR(BITS)                                                                                            \
    KERNEL open_##BITS(const State* states, u64 mask, const u8* sealed, u64 count, u64 segments, u64* verdict,       \
                       TABLE_PARAMETER table) {                                                                                \
        open<BITS>(states, mask, sealed, count, segments, verdict, table);                                           \
    }                                                                                                                \
    KERNEL seal_##BITS(const State* state, const u8* source, u8* sealed, u64 first, u64 count, u64 size) {           \
        seal<BITS>(state, source, sealed, first, count, size);                                                       \
    }                                                                                                                \
    KERNEL gather_##BITS(const State* states, u64 mask, const u8* sealed, u64 count, u64 segments, u64* verdict,     \
                         const u64* chunks, const u64* starts, const u64* pieces, u64 piece_count,                   \
                         const u64* plan_verdict, TABLE_PARAMETER table) {                                           \
        if (*plan_verdict != GOOD) return clear(table, segments);                                                    \
        const Plan plan{chunks, starts, pieces, piece_count};                                                        \
        gather<BITS>(states, mask, sealed, plan, count, segments, verdict, table);                                   \
    }

KERNELS_FOR(128)
KERNELS_FOR(256)
