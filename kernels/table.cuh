// The segments of a launch: which chunks of which messages it opens, where they lie, and where their plaintext goes.
//
// The table is a parameter of the kernel. So it comes the way that every address came before there were tables, with
// the command that starts the kernel, and not through the staging memory.

#define NUMBER_BITS 38  // of a chunk's number

constexpr u64 NUMBERS = (1ull << NUMBER_BITS) - 1;

// Chunks of one message, one after the other. A gather takes its chunks' numbers, and where their bytes go, from a plan.
struct Segment {
    u8* target;  // the place of its first chunk or, to gather, the result
    u64 name;    // the number of its message, times 2^38, plus that of its first chunk or, to gather, zero
    u64 size;    // bytes of plaintext from its first chunk to its end or, to gather, of the whole message
    u64 limit;   // number of its chunks or, to gather, bytes of the result
    u32 start;   // number of chunks in the segments before it
    u32 place;   // of its first sealed chunk in the staging memory, in units of 16 bytes

    __device__ __forceinline__ u32 message() const { return static_cast<u32>(name >> NUMBER_BITS); }

    // Returns the key of the message. `mask` is the number of states minus one, and that number is a power of two.
    __device__ __forceinline__ const State* state(const State* states, u64 mask) const {
        return states + (name >> NUMBER_BITS & mask);
    }

    // Returns where its sealed chunk `index` lies.
    __device__ __forceinline__ const u8* chunk(const u8* sealed, u32 index) const {
        return sealed + 16ull * place + static_cast<u64>(index) * STRIDE;
    }
};
static_assert(sizeof(Segment) == FASTRACK_SEGMENT_BYTES, "the host knows this size");

// Returns the place of chunk `index` of a segment.
__device__ __forceinline__ u8* place_of(const Segment& segment, u32 index, Shared*, int) {
    return segment.target + static_cast<u64>(index) * CHUNK;
}

template <class Row, u32 ROWS>
struct TableOf {
    Row at[ROWS];

    // Returns the row that has number `i`, of those from `low` on and before `end`: the last that starts there or before.
    __device__ __forceinline__ u32 find(u32 i, u32 end, u32 low = 0) const {
        u32 high = end;
#pragma unroll 1
        while (high - low > 1) {
            const u32 middle = (low + high) / 2;
            if (at[middle].start <= i) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
};

typedef TableOf<Segment, FASTRACK_SEGMENTS> Table;
static_assert(sizeof(Table) + 12 * 8 <= 4096, "CUDA before 12.1 allows no more as the parameters of a kernel");
