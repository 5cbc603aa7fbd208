// AES in counter mode, with tables, for one chunk at a time (FIPS 197; NIST SP 800-38D, section 6.5).
//
// Words are little-endian columns of the state: row 0 in the lowest byte. T0[x] is the column (2s, s, s, 3s) that
// MixColumns computes from s = S[x]; T1 is the same, rotated up by a byte. T2 and T3 are these two, rotated by two
// bytes after the lookup.
//
// Shared memory holds every entry 32 times, once for each lane of a warp. A lane reads only its own bank, so the index
// of a lookup affects neither bank conflicts nor a cache.

#define TABLE_BYTES 65536
#define ROW_BYTES 128
#define T0 0
#define T1 32768

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

template <int BITS>
struct Aes {
    static constexpr int KEY_WORDS = BITS / 32;
    static constexpr int ROUNDS = KEY_WORDS + 6;
    static constexpr int SCHEDULE_WORDS = 4 * (ROUNDS + 1);
};

// The common part of a chunk's keystream: its counter blocks differ only in the last two bytes, so after round 1 only
// two columns differ, and half of round 2 is the same for all.
struct Start {
    u32 first[2];   // round 1: columns 0 and 1, without the part of the counter
    u32 second[4];  // round 2: the part of columns 2 and 3
};

// The tables of one lane.
struct Tables {
    u32 lane;  // address of this lane's column of T0 in shared memory

    template <int TABLE, int BYTE>
    __device__ __forceinline__ u32 at(u32 column) const {
        // A dot product of bytes selects one, multiplies it by the size of a row and adds the start.
        const u32 place = __dp4a(column, static_cast<u32>(ROW_BYTES) << 8 * BYTE, lane);
        return *static_cast<const u32*>(__cvta_shared_to_generic(place + TABLE));
    }
};

__device__ __forceinline__ u32 swap_bytes(u32 word) { return __byte_perm(word, 0, 0x0123); }
__device__ __forceinline__ u32 rotate_16(u32 word) { return __byte_perm(word, 0, 0x1032); }
__device__ __forceinline__ u32 rotate_8(u32 word) { return __byte_perm(word, 0, 0x2103); }

// The S-box (FIPS 197, figure 7). A thread reads the entry of its own number, so that the addresses do not depend on
// data or keys. A read takes a seventh of the instructions of an inversion.
__device__ const u8 SBOX[256] = {
    0x63, 0x7c, 0x77, 0x7b, 0xf2, 0x6b, 0x6f, 0xc5, 0x30, 0x01, 0x67, 0x2b, 0xfe, 0xd7, 0xab, 0x76,
    0xca, 0x82, 0xc9, 0x7d, 0xfa, 0x59, 0x47, 0xf0, 0xad, 0xd4, 0xa2, 0xaf, 0x9c, 0xa4, 0x72, 0xc0,
    0xb7, 0xfd, 0x93, 0x26, 0x36, 0x3f, 0xf7, 0xcc, 0x34, 0xa5, 0xe5, 0xf1, 0x71, 0xd8, 0x31, 0x15,
    0x04, 0xc7, 0x23, 0xc3, 0x18, 0x96, 0x05, 0x9a, 0x07, 0x12, 0x80, 0xe2, 0xeb, 0x27, 0xb2, 0x75,
    0x09, 0x83, 0x2c, 0x1a, 0x1b, 0x6e, 0x5a, 0xa0, 0x52, 0x3b, 0xd6, 0xb3, 0x29, 0xe3, 0x2f, 0x84,
    0x53, 0xd1, 0x00, 0xed, 0x20, 0xfc, 0xb1, 0x5b, 0x6a, 0xcb, 0xbe, 0x39, 0x4a, 0x4c, 0x58, 0xcf,
    0xd0, 0xef, 0xaa, 0xfb, 0x43, 0x4d, 0x33, 0x85, 0x45, 0xf9, 0x02, 0x7f, 0x50, 0x3c, 0x9f, 0xa8,
    0x51, 0xa3, 0x40, 0x8f, 0x92, 0x9d, 0x38, 0xf5, 0xbc, 0xb6, 0xda, 0x21, 0x10, 0xff, 0xf3, 0xd2,
    0xcd, 0x0c, 0x13, 0xec, 0x5f, 0x97, 0x44, 0x17, 0xc4, 0xa7, 0x7e, 0x3d, 0x64, 0x5d, 0x19, 0x73,
    0x60, 0x81, 0x4f, 0xdc, 0x22, 0x2a, 0x90, 0x88, 0x46, 0xee, 0xb8, 0x14, 0xde, 0x5e, 0x0b, 0xdb,
    0xe0, 0x32, 0x3a, 0x0a, 0x49, 0x06, 0x24, 0x5c, 0xc2, 0xd3, 0xac, 0x62, 0x91, 0x95, 0xe4, 0x79,
    0xe7, 0xc8, 0x37, 0x6d, 0x8d, 0xd5, 0x4e, 0xa9, 0x6c, 0x56, 0xf4, 0xea, 0x65, 0x7a, 0xae, 0x08,
    0xba, 0x78, 0x25, 0x2e, 0x1c, 0xa6, 0xb4, 0xc6, 0xe8, 0xdd, 0x74, 0x1f, 0x4b, 0xbd, 0x8b, 0x8a,
    0x70, 0x3e, 0xb5, 0x66, 0x48, 0x03, 0xf6, 0x0e, 0x61, 0x35, 0x57, 0xb9, 0x86, 0xc1, 0x1d, 0x9e,
    0xe1, 0xf8, 0x98, 0x11, 0x69, 0xd9, 0x8e, 0x94, 0x9b, 0x1e, 0x87, 0xe9, 0xce, 0x55, 0x28, 0xdf,
    0x8c, 0xa1, 0x89, 0x0d, 0xbf, 0xe6, 0x42, 0x68, 0x41, 0x99, 0x2d, 0x0f, 0xb0, 0x54, 0xbb, 0x16,
};

// Fills the tables, one entry of one table by each of the 512 threads of a block. A barrier must follow.
__device__ __forceinline__ void fill_tables(u8* tables) {
    const u32 x = threadIdx.x & 255, s = SBOX[x], s2 = s << 1 ^ (s >> 7) * 0x11b;
    u32 entry = s2 | s << 8 | s << 16 | (s2 ^ s) << 24;
    u8* place = tables + x * ROW_BYTES;
    if (threadIdx.x >= 256) {
        entry = rotate_8(entry);
        place += T1;
    }
    // Lanes start at different offsets, so that they write to different banks.
    for (u32 i = 0; i < 8; ++i) {
        reinterpret_cast<uint4*>(place)[i + threadIdx.x & 7] = make_uint4(entry, entry, entry, entry);
    }
}

__device__ __forceinline__ uint4 round_key(const u32* schedule, int round) {
    return reinterpret_cast<const uint4*>(schedule)[round];
}

// Returns a column after one round: SubBytes, ShiftRows, MixColumns, AddRoundKey.
__device__ __forceinline__ u32 mix(Tables t, u32 a, u32 b, u32 c, u32 d, u32 key) {
    return t.at<T0, 0>(a) ^ t.at<T1, 1>(b) ^ key ^ rotate_16(t.at<T0, 2>(c) ^ t.at<T1, 3>(d));
}

// Returns a column after the last round, which has no MixColumns. S[x] is the second byte of T0[x].
__device__ __forceinline__ u32 last(Tables t, u32 a, u32 b, u32 c, u32 d, u32 key) {
    const u32 low = __byte_perm(t.at<T0, 0>(a), t.at<T0, 1>(b), 0x0051);
    const u32 high = __byte_perm(t.at<T0, 2>(c), t.at<T0, 3>(d), 0x5100);
    return __byte_perm(low, high, 0x7610) ^ key;
}

// Returns the common part of all counter blocks nonce || counter, for counters below 65536.
__device__ __forceinline__ Start start(Tables t, const u32* schedule, u32 n0, u32 n1, u32 n2) {
    const uint4 k0 = round_key(schedule, 0), k1 = round_key(schedule, 1), k2 = round_key(schedule, 2);
    const u32 s0 = n0 ^ k0.x, s1 = n1 ^ k0.y, s2 = n2 ^ k0.z, s3 = k0.w;  // only rows 0 and 1 of s3 are used
    Start made;
    made.first[0] = t.at<T0, 0>(s0) ^ t.at<T1, 1>(s1) ^ rotate_16(t.at<T0, 2>(s2)) ^ k1.x;
    made.first[1] = t.at<T0, 0>(s1) ^ t.at<T1, 1>(s2) ^ rotate_16(t.at<T1, 3>(s0)) ^ k1.y;
    const u32 c2 = mix(t, s2, s3, s0, s1, k1.z), c3 = mix(t, s3, s0, s1, s2, k1.w);
    made.second[0] = rotate_16(t.at<T0, 2>(c2) ^ t.at<T1, 3>(c3)) ^ k2.x;
    made.second[1] = t.at<T1, 1>(c2) ^ rotate_16(t.at<T0, 2>(c3)) ^ k2.y;
    made.second[2] = t.at<T0, 0>(c2) ^ t.at<T1, 1>(c3) ^ k2.z;
    made.second[3] = t.at<T0, 0>(c3) ^ rotate_16(t.at<T1, 3>(c2)) ^ k2.w;
    return made;
}

// Returns the last column of a counter block after the first round key.
__device__ __forceinline__ u32 whitened(const u32* schedule, u32 counter) { return swap_bytes(counter) ^ schedule[3]; }

// Returns half of the state after two rounds: what depends on the low byte of the counter, so that counters that differ
// by a multiple of 256 share it.
__device__ __forceinline__ uint4 half_of_two_rounds(Tables t, const Start& made, u32 s3) {
    const u32 r0 = made.first[0] ^ rotate_16(t.at<T1, 3>(s3));
    return make_uint4(t.at<T0, 0>(r0) ^ made.second[0], rotate_16(t.at<T1, 3>(r0)) ^ made.second[1], t.at<T0, 2>(r0),
                      t.at<T1, 1>(r0) ^ made.second[3]);
}

// Returns the state of one counter block after two rounds.
__device__ __forceinline__ uint4 two_rounds(Tables t, const Start& made, uint4 half, u32 s3) {
    const u32 r1 = made.first[1] ^ rotate_16(t.at<T0, 2>(s3));
    return make_uint4(half.x ^ t.at<T1, 1>(r1), half.y ^ t.at<T0, 0>(r1),
                      rotate_16(half.z ^ t.at<T1, 3>(r1)) ^ made.second[2], half.w ^ rotate_16(t.at<T0, 2>(r1)));
}

__device__ __forceinline__ uint4 full_round(Tables t, uint4 s, uint4 k) {
    return make_uint4(mix(t, s.x, s.y, s.z, s.w, k.x), mix(t, s.y, s.z, s.w, s.x, k.y), mix(t, s.z, s.w, s.x, s.y, k.z),
                      mix(t, s.w, s.x, s.y, s.z, k.w));
}

__device__ __forceinline__ uint4 last_round(Tables t, uint4 s, uint4 k) {
    return make_uint4(last(t, s.x, s.y, s.z, s.w, k.x), last(t, s.y, s.z, s.w, s.x, k.y),
                      last(t, s.z, s.w, s.x, s.y, k.z), last(t, s.w, s.x, s.y, s.z, k.w));
}

// Returns the keystream block of one counter, with its bytes in memory order.
template <int BITS>
__device__ __forceinline__ uint4 keystream(Tables t, const u32* schedule, const Start& made, u32 counter) {
    const u32 s3 = whitened(schedule, counter);
    uint4 s = two_rounds(t, made, half_of_two_rounds(t, made, s3), s3);
#pragma unroll
    for (int round = 3; round < Aes<BITS>::ROUNDS; ++round) s = full_round(t, s, round_key(schedule, round));
    return last_round(t, s, round_key(schedule, Aes<BITS>::ROUNDS));
}

struct Two {
    uint4 a, b;
};

// Returns the keystream blocks of two counters that differ by a multiple of 256. Reads every round key once for both.
template <int BITS>
__device__ __forceinline__ Two keystreams(Tables t, const u32* schedule, const Start& made, u32 a, u32 b) {
    const u32 a3 = whitened(schedule, a), b3 = whitened(schedule, b);
    const uint4 half = half_of_two_rounds(t, made, a3);
    Two s = {two_rounds(t, made, half, a3), two_rounds(t, made, half, b3)};
#pragma unroll
    for (int round = 3; round < Aes<BITS>::ROUNDS; ++round) {
        const uint4 k = round_key(schedule, round);
        s.a = full_round(t, s.a, k);
        s.b = full_round(t, s.b, k);
    }
    const uint4 k = round_key(schedule, Aes<BITS>::ROUNDS);
    return {last_round(t, s.a, k), last_round(t, s.b, k)};
}
