// The plan of a gather: which bytes of which chunks go where.
//
// The host seals it under a key of its own, and a launch of `open_256` before that of the gather authenticates it. If that
// launch reports a bad chunk, the gather reads nothing of the plan and fills the result with zeros. As a second line of
// defence, a piece outside of the message or of the result is left out, and reported as its chunk.

constexpr u64 GOOD = ~0ull;  // the verdict on a run without a bad chunk

struct Plan {
    const u64* chunks;  // numbers of the chunks, as they lie side by side
    const u64* starts;  // the pieces of chunk i are those from starts[i] to starts[i + 1]
    const u64* table;   // three words a piece: its offset in the chunk, its offset in the result, its size
    u64 pieces;         // how many pieces there are
    u64 total;          // bytes of the message
    u64 limit;          // bytes of the result

    // Fills the result with zeros, by the first block: the compilers spill registers of the gather if all blocks do.
    __device__ __forceinline__ void clear(u8* target) const {
        if (blockIdx.x != 0) return;
        for (u64 i = threadIdx.x; i < limit; i += FASTRACK_THREADS) target[i] = 0;
    }

    __device__ __forceinline__ u64 last() const { return total / CHUNK; }

    // What chunk `i` is reported as: its number, unless the message has no such chunk.
    __device__ __forceinline__ u64 known(u64 i) const { return chunks[i] < last() ? chunks[i] : last(); }

    // The size of a chunk, and 0 for a number that no chunk has: no tag was ever made for that.
    __device__ __forceinline__ u32 length(u64 chunk) const {
        if (chunk > last()) return 0;
        const u64 left = total - chunk * CHUNK;
        return left < CHUNK ? static_cast<u32>(left) : CHUNK;
    }

    // Copies the pieces of chunk `i`, which has `length` bytes, by the threads of a team. Tells whether all that this
    // thread saw are where they may be. A warp a piece if there are many, else all of the team together.
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
