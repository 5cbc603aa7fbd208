// One chunk by one thread block: AES-GCM without associated data (NIST SP 800-38D, sections 7.1 and 7.2).
//
// Two teams of 512 threads share a thread block and its tables, each with chunks of its own. While one of them hashes, the
// other one ciphers: they meet whenever both have done so, and change places.
//
// A chunk has at most 1024 cipher blocks and a team 512 threads, each with two of them in registers: they are dealt so that
// the last of a chunk always falls to the last thread, whatever the chunk's length. So a thread's power of H never changes. What a thread has authenticated is what it decrypts; nothing is read twice.

#define CHUNK 16384
#define TAG 16
#define STRIDE (CHUNK + TAG)
#define BLOCKS 1024  // of 16 bytes, in a full chunk
#define TEAM 512
#define THREADS (2 * TEAM)
#define WARPS (TEAM / 32)
#define MEETING 1  // a named barrier: the teams reach it at different places of the code

// What the host makes of a message key (fastrack/_devices/cuda/key_state.py), in device memory.
struct State {
    u32 schedule[60];       // FIPS 197, section 5.2; it starts with the key
    u32 nonce[4];           // the last is not used
    u32 length_of_full[4];  // the last GHASH block of a full chunk, times H
    u32 powers[514][4];     // H, H^2, ... from 1 on, divided by x
    u32 rest[52];           // zeros
};
static_assert(sizeof(State) == FASTRACK_STATE_BYTES, "the host knows this size");

// What the threads of a block share. Two of some for each team, for this chunk and the next.
struct Shared {
    u8 tables[TABLE_BYTES];
    u32 schedule[2][60];  // of each team
    u32 spare[4];
    struct {
        Start start;
        u32 length;
        u32 spare;
        uint4 rest;  // what makes the sum over the blocks a tag or, to open, the difference of two
    } chunk[4];
    u32 sums[4][WARPS][4];
};
static_assert(sizeof(Shared) == FASTRACK_SHARED_BYTES, "the host knows this size");

struct Plain {
    Shared shared;
    u8 bytes[2][CHUNK];
};
static_assert(sizeof(Plain) == FASTRACK_GATHER_SHARED_BYTES, "the host knows this size");

__device__ __forceinline__ Tables tables_of_lane() {
    return {static_cast<u32>(__cvta_generic_to_shared(shared_memory)) + (threadIdx.x & 31) * 4};
}

__device__ __forceinline__ u32 team() { return threadIdx.x / TEAM; }
__device__ __forceinline__ u32 member() { return threadIdx.x % TEAM; }  // this thread's number in its team
__device__ __forceinline__ void change_places() { __barrier_sync_count(MEETING, THREADS); }

// Loads another key for a team, after the end of its last chunk.
template <int BITS>
__device__ __forceinline__ void change_key(Shared* shared, const State* state) {
    // The first warp, which reads it first; the others read it after the teams have met.
    if (member() >= 32) return;
    for (u32 i = member(); i < Aes<BITS>::SCHEDULE_WORDS; i += 32) shared->schedule[team()][i] = state->schedule[i];
    __syncwarp();
}

// Leaves no key behind for the next to use this multiprocessor.
__device__ __forceinline__ void leave(Shared* shared) {
    __syncthreads();
    u32* secrets = shared->schedule[0];
    for (u32 i = threadIdx.x; i < (sizeof(Shared) - TABLE_BYTES) / 4; i += THREADS) secrets[i] = 0;
}

__device__ __forceinline__ uint4 operator^(uint4 a, uint4 b) {
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

// What a chunk's keystream starts from. For one whole warp.
__device__ __forceinline__ void start_chunk(Shared* shared, const State* state, u64 number, u32 length, int side) {
    // Nonce = base nonce XOR chunk number, big-endian.
    const Start made = start(tables_of_lane(), shared->schedule[team()], state->nonce[0],
                             state->nonce[1] ^ swap_bytes(static_cast<u32>(number >> 32)),
                             state->nonce[2] ^ swap_bytes(static_cast<u32>(number)));
    if ((threadIdx.x & 31) == 0) {
        shared->chunk[side].start = made;
        shared->chunk[side].length = length;
    }
    __syncwarp();
}

// What belongs to its tag besides the sum over its blocks: the block of the lengths, the keystream block that hides it
// all and, to open, the tag that is `claimed`. For the same warp.
template <int BITS>
__device__ __forceinline__ void finish_chunk(Shared* shared, const State* state, uint4 claimed, int side) {
    const u32 length = shared->chunk[side].length;
    Field lengths = load_field(state->length_of_full);
    if (length != CHUNK) lengths = product({{8 * length, 0, 0, 0}}, load_field(state->powers[1]));
    const uint4 hidden = keystream<BITS>(tables_of_lane(), shared->schedule[team()], shared->chunk[side].start, 1);
    if ((threadIdx.x & 31) == 0) shared->chunk[side].rest = claimed ^ from_field(lengths) ^ hidden;
}

// Where a thread's two blocks lie in a chunk of `length` bytes: number `block(0)` and `block(1)`, negative for none.
struct Share {
    int shift;
    u32 length;

    __device__ __forceinline__ explicit Share(u32 length)
        : shift(BLOCKS - static_cast<int>((length + 15) / 16)), length(length) {}
    __device__ __forceinline__ int block(int i) const { return static_cast<int>(member()) + i * TEAM - shift; }
    // Bytes of that block: 16, but maybe for the last one of the chunk.
    __device__ __forceinline__ u32 size(int i) const {
        return i == 1 && member() == TEAM - 1 ? (length - 1) % 16 + 1 : 16;
    }
};

// The first `size` bytes of a block, then zeros.
__device__ __forceinline__ uint4 first_bytes(uint4 block, u32 size) {
    if (size == 16) return block;
    u32 words[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 kept = size < 4 * i ? 0 : size - 4 * i;
        words[i] = kept >= 4 ? words[i] : words[i] & ((1u << 8 * kept) - 1);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ u32 byte_of(uint4 block, u32 i) {
    const u32 low = i & 4 ? block.y : block.x, high = i & 4 ? block.w : block.z;
    return (i & 8 ? high : low) >> 8 * (i & 3) & 0xff;
}

__device__ __forceinline__ void set_byte(uint4& block, u32 i, u32 byte) {
    const u32 bits = byte << 8 * (i & 3), word = i / 4;
    block.x |= word == 0 ? bits : 0;
    block.y |= word == 1 ? bits : 0;
    block.z |= word == 2 ? bits : 0;
    block.w |= word == 3 ? bits : 0;
}

// `size` bytes at any address, then zeros.
__device__ __forceinline__ uint4 load(const u8* place, u32 size) {
    if (size == 16 && (reinterpret_cast<u64>(place) & 15) == 0) return *reinterpret_cast<const uint4*>(place);
    uint4 block = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (u32 i = 0; i < size; ++i) set_byte(block, i, place[i]);
    return block;
}

__device__ __forceinline__ void store(u8* place, uint4 block, u32 size) {
    if (size == 16 && (reinterpret_cast<u64>(place) & 15) == 0) {
        *reinterpret_cast<uint4*>(place) = block;
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < size; ++i) place[i] = static_cast<u8>(byte_of(block, i));
}

// This warp's part of a chunk's GHASH, from every thread's two blocks. Horner's rule with H^512, then each thread by a
// power of its own: of the last block's thread H^2, as the block of the lengths follows it with H.
__device__ __forceinline__ void authenticate(Shared* shared, const State* state, const Field& first, const Field& second,
                                             int side) {
    Field sum = first;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (i == 1) sum = sum ^ second;
        sum = product(sum, load_field(state->powers[i == 0 ? TEAM : TEAM + 1 - member()]));
    }
    sum = sum_of_warp(sum);
    if ((threadIdx.x & 31) == 0) store_field(shared->sums[side][member() / 32], sum);
}

// The chunk's tag or, to open, what distinguishes it from the one that is claimed; in every thread, after a barrier.
__device__ __forceinline__ uint4 tag_of(const Shared* shared, int side) {
    const u32 lane = threadIdx.x & 31;
    Field sum = {{0, 0, 0, 0}};
    if (lane < WARPS) sum = load_field(shared->sums[side][lane]);
    return from_field(sum_of_warp(sum)) ^ shared->chunk[side].rest;
}

// All ones for zero, else zero, in a time that does not tell where a difference lies.
__device__ __forceinline__ u32 is_zero(uint4 difference) {
    const u32 any = difference.x | difference.y | difference.z | difference.w;
    return ((any | (0 - any)) >> 31) - 1;
}

// Adds their keystream to a thread's two blocks, to the one that is not there as well.
template <int BITS>
__device__ __forceinline__ void cipher(const Shared* shared, const Share& share, int side, uint4 (&text)[2]) {
    const Two keys = keystreams<BITS>(tables_of_lane(), shared->schedule[team()], shared->chunk[side].start, 2 + share.block(0),
                                      2 + share.block(1));
    text[0] = text[0] ^ keys.a;
    text[1] = text[1] ^ keys.b;
}

// Opens one chunk into `target`, or puts zeros there; tells whether it was good.
template <int BITS>
__device__ __forceinline__ bool open_chunk(Shared* shared, const State* state, const u8* chunk, u32 length, u8* target,
                                           u64 number, int side) {
    Field sealed[2];  // a loaded uint4 takes four registers in a row and would be spilled as a whole
    {
        const Share share(length);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = share.block(i);
            sealed[i] = {{0, 0, 0, 0}};
            if (block < 0) continue;
            // A short last block is followed by the tag, so there are 16 bytes to read.
            sealed[i] = to_field(first_bytes(*reinterpret_cast<const uint4*>(chunk + 16 * block), share.size(i)));
        }
    }
    if (member() < 32) {
        start_chunk(shared, state, number, length, side);
        finish_chunk<BITS>(shared, state, load(chunk + length, TAG), side);
    }
    authenticate(shared, state, sealed[0], sealed[1], side);
    change_places();
    const u32 good = is_zero(tag_of(shared, side));
    const Share share(shared->chunk[side].length);  // not kept in a register, which are scarce above
    if (share.block(1) >= 0) {
        uint4 text[2] = {from_field(sealed[0]), from_field(sealed[1])};
        cipher<BITS>(shared, share, side, text);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = share.block(i);
            if (block < 0) continue;
            const uint4 plain = make_uint4(text[i].x & good, text[i].y & good, text[i].z & good, text[i].w & good);
            store(target + 16 * block, plain, share.size(i));
        }
    }
    return good != 0;
}

// Seals one chunk that was started. Meanwhile the next one is, if there is one, on the other side.
template <int BITS>
__device__ __forceinline__ void seal_chunk(Shared* shared, const State* state, const u8* source, u32 length, u8* chunk,
                                           u64 next, u32 next_length, int side) {
    const Share share(length);
    uint4 text[2] = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
    if (share.block(1) >= 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (share.block(i) >= 0) text[i] = load(source + 16 * share.block(i), share.size(i));
        }
        cipher<BITS>(shared, share, side, text);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int block = share.block(i);
            text[i] = block < 0 ? make_uint4(0, 0, 0, 0) : first_bytes(text[i], share.size(i));
            if (block >= 0) store(chunk + 16 * block, text[i], share.size(i));
        }
    }
    change_places();
    if (member() < 32) {
        finish_chunk<BITS>(shared, state, make_uint4(0, 0, 0, 0), side);
        start_chunk(shared, state, next, next_length, side ^ 1);
    }
    authenticate(shared, state, to_field(text[0]), to_field(text[1]), side);
    change_places();
    const uint4 tag = tag_of(shared, side);
    if (member() == 0) store(chunk + length, tag, TAG);
}

// Copies `size` bytes from shared memory to any address, by the `members` threads of a team. Whole words where the target
// has them; the source is read in words and shifted.
__device__ __forceinline__ void copy_out(u8* target, const u8* bytes, u32 offset, u32 size, u32 member, u32 members) {
    const u32 ahead = 0 - static_cast<u32>(reinterpret_cast<u64>(target)) & 3, head = ahead < size ? ahead : size;
    const u32 words = (size - head) / 4, tail = head + 4 * words;
    for (u32 i = member; i < head; i += members) target[i] = bytes[offset + i];
    for (u32 i = member; i < words; i += members) {
        const u32 from = offset + head + 4 * i;
        const u32* word = reinterpret_cast<const u32*>(bytes) + from / 4;
        u32 value = word[0];
        if (from & 3) value = __funnelshift_r(value, word[1], 8 * (from & 3));
        *reinterpret_cast<u32*>(target + head + 4 * i) = value;
    }
    for (u32 i = tail + member; i < size; i += members) target[i] = bytes[offset + i];
}
