// The plan of a gather: pieces of chunks, and their destinations in the result.
//
// The host seals it under a key of its own, and a launch of `open_256` before the gather authenticates it. If that
// launch reports a bad chunk, the gather does not read the plan and fills the result with zeros. As a second line of
// defence, a piece outside the message or the result is not copied, and its chunk is reported as bad.

constexpr u64 GOOD = ~0ull;  // verdict on a run without a bad chunk

struct Plan {
    const u64* chunks;  // numbers of the chunks, in the order of their sealed bytes
    const u64* starts;  // the pieces of chunk i are number starts[i] up to starts[i + 1]
    const u64* table;   // three words for each piece: its offset in the chunk, its offset in the result, its size
    u64 pieces;         // number of pieces
    u64 total;          // bytes of the message
    u64 limit;          // bytes of the result

    // Fills the result with zeros, in the first block only: if all blocks did, the compilers would spill registers of
    // the gather.
    __device__ __forceinline__ void clear(u8* target) const {
        if (blockIdx.x != 0) return;
        for (u64 i = threadIdx.x; i < limit; i += FASTRACK_THREADS) target[i] = 0;
    }

    __device__ __forceinline__ u64 last() const { return total / CHUNK; }

    // Returns the number to report for chunk `i`: its own, or that of the last chunk if the message has no such chunk.
    __device__ __forceinline__ u64 known(u64 i) const { return chunks[i] < last() ? chunks[i] : last(); }

    // Returns the size of a chunk, and 0 for a number that the message does not have, for which no tag exists.
    __device__ __forceinline__ u32 length(u64 chunk) const {
        if (chunk > last()) return 0;
        const u64 left = total - chunk * CHUNK;
        return left < CHUNK ? static_cast<u32>(left) : CHUNK;
    }

    // Copies the pieces of chunk `i`, of `length` bytes, with the threads of a team: one warp for each piece if there
    // are many, else the whole team. Returns whether all pieces that this thread checked are within bounds.
    template <int THREADS_OF_TEAM>
    __device__ __forceinline__ bool scatter(u64 i, u32 length, u8* target, const u8* bytes, u32 thread) const {
        const u64 begin = starts[i], end = starts[i + 1];
        if (begin > end || end > pieces) return false;
        const u32 members = end - begin >= THREADS_OF_TEAM / 32 ? 32 : THREADS_OF_TEAM, member = thread % members;
        bool fits = true;
        for (u64 p = begin + thread / members; p < end; p += THREADS_OF_TEAM / members) {
            const u64 offset = table[3 * p], place = table[3 * p + 1], size = table[3 * p + 2];
            if (offset <= length && size <= length - offset && place <= limit && size <= limit - place) {
                copy_out(target + place, bytes, static_cast<u32>(offset), static_cast<u32>(size), member, members);
            } else {
                fits = false;
            }
        }
        return fits;
    }
};
