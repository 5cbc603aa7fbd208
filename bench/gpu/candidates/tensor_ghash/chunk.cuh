// One chunk by one thread block: AES-GCM without associated data (NIST SP 800-38D, sections 7.1 and 7.2).
//
// A chunk has at most 1024 cipher blocks and a thread block 512 threads, each with two of them in registers: they are dealt
// so that the last of a chunk always falls to the last thread, whatever the chunk's length. What a thread has authenticated is what it decrypts; nothing is read twice.
//
// GHASH runs on the tensor cores. A chunk is 32 groups of 32 blocks; the sum over the blocks of a group, times H^32 to H, is
// a matrix of bits that the key gives, times the bits of the group as they lie in memory. 32 products of the field remain.

#define CHUNK 16384
#define TAG 16
#define STRIDE (CHUNK + TAG)
#define BLOCKS 1024  // of 16 bytes, in a full chunk
#define THREADS FASTRACK_THREADS
#define WARPS (THREADS / 32)

// What the host makes of a message key (fastrack/_devices/cuda/key_state.py), in device memory.
struct State {
    u32 schedule[60];       // FIPS 197, section 5.2; it starts with the key
    u32 nonce[4];           // the last is not used
    u32 length_of_full[4];  // the last GHASH block of a full chunk, times H
    u32 powers[514][4];     // H, H^2, ... from 1 on, divided by x
    u32 rest[52];           // zeros
    // What `candidate.py` adds: H^(1 + 32 n), divided by x, and 128 rows of 4096 bits, as the lanes of a warp take them.
    u32 group_powers[32][4];
    uint4 matrix[8][8][2][32];
};
static_assert(sizeof(State) == FASTRACK_STATE_BYTES, "the host knows this size");

// What the threads of a block share. Two of some, for this chunk and the next: then one barrier a chunk is enough.
struct Shared {
    u8 tables[TABLE_BYTES];
    u32 schedule[60];
    u32 spare[4];
    struct {
        Start start;
        u32 length;
        u32 spare;
        uint4 rest;  // what makes the sum over the blocks a tag or, to open, the difference of two
    } chunk[2];
    u32 sums[2][WARPS][16][4];  // of 16 groups, by a warp that has 4 blocks of each
    uint4 tag[2];
};
static_assert(sizeof(Shared) == FASTRACK_SHARED_BYTES, "the host knows this size");

struct Plain {
    Shared shared;
    u8 bytes[CHUNK];
};
static_assert(sizeof(Plain) == FASTRACK_GATHER_SHARED_BYTES, "the host knows this size");

__device__ __forceinline__ Tables tables_of_lane() {
    return {static_cast<u32>(__cvta_generic_to_shared(shared_memory)) + (threadIdx.x & 31) * 4};
}

// Loads a key, after the last chunk under the key before.
template <int BITS>
__device__ __forceinline__ void change_key(Shared* shared, const State* state) {
    __syncthreads();
    if (threadIdx.x < Aes<BITS>::SCHEDULE_WORDS) shared->schedule[threadIdx.x] = state->schedule[threadIdx.x];
    __syncthreads();
}

// Leaves no key behind for the next to use this multiprocessor.
__device__ __forceinline__ void leave(Shared* shared) {
    __syncthreads();
    u32* secrets = shared->schedule;
    for (u32 i = threadIdx.x; i < (sizeof(Shared) - TABLE_BYTES) / 4; i += THREADS) secrets[i] = 0;
}

__device__ __forceinline__ uint4 operator^(uint4 a, uint4 b) {
    return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}

// What a chunk's keystream starts from. For one whole warp.
__device__ __forceinline__ void start_chunk(Shared* shared, const State* state, u64 number, u32 length, int side) {
    // Nonce = base nonce XOR chunk number, big-endian.
    const Start made = start(tables_of_lane(), shared->schedule, state->nonce[0],
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
    const uint4 hidden = keystream<BITS>(tables_of_lane(), shared->schedule, shared->chunk[side].start, 1);
    if ((threadIdx.x & 31) == 0) shared->chunk[side].rest = claimed ^ from_field(lengths) ^ hidden;
}

// Where a thread's two blocks lie in a chunk of `length` bytes: number `block(0)` and `block(1)`, negative for none. A warp
// has 4 blocks of 16 groups; a lane the same block of two groups, 8 apart: two columns of `multiply_bits`.
__device__ __forceinline__ u32 first_block() {  // of this thread, in a full chunk
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return 512 * (warp / 8) + 32 * (lane / 4) + 4 * (warp % 8) + lane % 4;
}

struct Share {
    int shift;
    u32 length;

    __device__ __forceinline__ explicit Share(u32 length)
        : shift(BLOCKS - static_cast<int>((length + 15) / 16)), length(length) {}
    __device__ __forceinline__ int block(int i) const { return static_cast<int>(first_block() + 256 * i) - shift; }
    // Bytes of that block: 16, but maybe for the last one of the chunk.
    __device__ __forceinline__ u32 size(int i) const {
        return i == 1 && threadIdx.x == THREADS - 1 ? (length - 1) % 16 + 1 : 16;
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

// This warp's part of the sums over 16 groups. Sums of bits count modulo 2: they are XORs.
__device__ __forceinline__ void authenticate(Shared* shared, const State* state, const uint4 (&text)[2], int side) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 bits[4] = {0, 0, 0, 0};  // of four groups, 16 rows each
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        const uint4* rows = state->matrix[warp % 8][tile][0];
        const uint4 low = rows[lane], high = rows[32 + lane];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            u32 sum[4] = {0, 0, 0, 0};
            multiply_bits(sum, low, text[i].x, text[i].y);
            multiply_bits(sum, high, text[i].z, text[i].w);
#pragma unroll
            for (int k = 0; k < 4; ++k) bits[2 * i + k % 2] |= (sum[k] & 1) << (2 * tile + k / 2);
        }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        u32* group = shared->sums[side][warp][8 * (k / 2) + 2 * (lane % 4) + k % 2];
        reinterpret_cast<unsigned short*>(group)[lane / 4] = static_cast<unsigned short>(bits[k]);
    }
}

// The chunk's tag or, to open, what distinguishes it from the one that is claimed. By one warp, between two barriers.
__device__ __forceinline__ void sum_up(Shared* shared, const State* state, int side) {
    const u32 lane = threadIdx.x % 32;
    Field sum = {{0, 0, 0, 0}};
#pragma unroll 1
    for (int i = 0; i < 8; ++i) sum = sum ^ load_field(shared->sums[side][8 * (lane / 16) + i][lane % 16]);
    sum = sum_of_warp(product(sum, load_field(state->group_powers[31 - lane])));
    if (lane == 0) shared->tag[side] = from_field(sum) ^ shared->chunk[side].rest;
}

// All ones for zero, else zero, in a time that does not tell where a difference lies.
__device__ __forceinline__ u32 is_zero(uint4 difference) {
    const u32 any = difference.x | difference.y | difference.z | difference.w;
    return ((any | (0 - any)) >> 31) - 1;
}

// Adds their keystream to a thread's two blocks, to the one that is not there as well.
template <int BITS>
__device__ __forceinline__ void cipher(const Shared* shared, const Share& share, int side, uint4 (&text)[2]) {
    const Two keys = keystreams<BITS>(tables_of_lane(), shared->schedule, shared->chunk[side].start, 2 + share.block(0),
                                      2 + share.block(1));
    text[0] = text[0] ^ keys.a;
    text[1] = text[1] ^ keys.b;
}

// Opens one chunk into `target`, or puts zeros there; tells whether it was good.
template <int BITS>
__device__ __forceinline__ bool open_chunk(Shared* shared, const State* state, const u8* chunk, u32 length, u8* target,
                                           u64 number, int side) {
    const Share share(length);
    uint4 text[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int block = share.block(i);
        text[i] = make_uint4(0, 0, 0, 0);
        // A short last block is followed by the tag, so there are 16 bytes to read.
        if (block >= 0) text[i] = first_bytes(*reinterpret_cast<const uint4*>(chunk + 16 * block), share.size(i));
    }
    if (threadIdx.x < 32) {
        start_chunk(shared, state, number, length, side);
        finish_chunk<BITS>(shared, state, load(chunk + length, TAG), side);
    }
    authenticate(shared, state, text, side);
    __syncthreads();
    // Another warp each time sums up, while the others decipher what they keep to themselves until the verdict.
    if (threadIdx.x / 32 == (number & (WARPS - 1))) sum_up(shared, state, side);
    if (share.block(1) >= 0) cipher<BITS>(shared, share, side, text);
    __syncthreads();
    const u32 good = is_zero(shared->tag[side]);
    if (share.block(1) >= 0) {
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

// Seals one chunk.
template <int BITS>
__device__ __forceinline__ void seal_chunk(Shared* shared, const State* state, const u8* source, u32 length, u8* chunk,
                                           u64 number, int side) {
    if (threadIdx.x < 32) start_chunk(shared, state, number, length, side);
    __syncthreads();
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
    if (threadIdx.x < 32) finish_chunk<BITS>(shared, state, make_uint4(0, 0, 0, 0), side);
    authenticate(shared, state, text, side);
    __syncthreads();
    if (threadIdx.x / 32 == (number & (WARPS - 1))) {
        sum_up(shared, state, side);
        __syncwarp();
        if (threadIdx.x % 32 == 0) store(chunk + length, shared->tag[side], TAG);
    }
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
