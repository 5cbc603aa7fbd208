// The plan of a gather: pieces of chunks, and their destinations in the results.
//
// The host seals it under the key of the link, and a launch of `open_256` right before the gather authenticates it. If
// that launch was lost or reports a bad chunk, the gather does not read the plan and fills the results with zeros. As a
// second line of defence, a piece outside the message or the result is not copied, and its chunk is reported as bad.

struct Plan {
    __device__ __forceinline__ Plan(const u64* plan, u64 count, u64 pieces)
        : chunks(plan), starts(plan + count), table(plan + 2 * count + 1), pieces(pieces) {}

    const u64* chunks;  // numbers of the chunks, in the order of their sealed bytes
    const u64* starts;  // the pieces of chunk i are number starts[i] up to starts[i + 1]
    const u64* table;   // three words for each piece: its offset in the chunk, its offset in the result, its size
    u64 pieces;         // number of pieces

    __device__ __forceinline__ static u64 last(const Segment& segment) { return segment.size / CHUNK; }

    // Returns the name to report for chunk `i`: with its own number, or with that of the last chunk if the message has
    // no such chunk.
    __device__ __forceinline__ u64 known(u64 i, const Segment& segment) const {
        return segment.name + (chunks[i] < last(segment) ? chunks[i] : last(segment));
    }

    // Returns the size of chunk `i`, and 0 for a number that the message does not have, for which no tag exists.
    __device__ __forceinline__ u32 length(u64 i, const Segment& segment) const {
        if (chunks[i] > last(segment)) return 0;
        const u64 left = segment.size - chunks[i] * CHUNK;
        return left < CHUNK ? static_cast<u32>(left) : CHUNK;
    }

    // Copies the pieces of chunk `i`, of `length` bytes, with the threads of a team: one warp for each piece if there
    // are many, else the whole team. Returns whether all pieces that this thread checked are within bounds.
    template <int THREADS_OF_TEAM>
    __device__ __forceinline__ bool scatter(u64 i, u32 length, const Segment& segment, const u8* bytes,
                                            u32 thread) const {
        const u64 begin = starts[i], end = starts[i + 1], limit = segment.limit;
        if (begin > end || end > pieces) return false;
        const u32 members = end - begin >= THREADS_OF_TEAM / 32 ? 32 : THREADS_OF_TEAM, member = thread % members;
        bool fits = true;
        for (u64 p = begin + thread / members; p < end; p += THREADS_OF_TEAM / members) {
            const u64 offset = table[3 * p], place = table[3 * p + 1], size = table[3 * p + 2];
            if (offset <= length && size <= length - offset && place <= limit && size <= limit - place) {
                copy_out(segment.target + place, bytes, static_cast<u32>(offset), static_cast<u32>(size), member,
                         members);
            } else {
                fits = false;
            }
        }
        return fits;
    }
};

// Fills the results of gathers with zeros, in the first block only: if all blocks did, the compilers would spill
// registers of the gather.
__device__ __forceinline__ void clear(const Table& table, u64 segments) {
    if (blockIdx.x != 0) return;
    for (u32 segment = 0; segment < segments; ++segment) {
        u8* target = table.at[segment].target;
        for (u64 i = threadIdx.x; i < table.at[segment].limit; i += FASTRACK_THREADS) target[i] = 0;
    }
}
