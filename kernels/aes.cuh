// AES in counter mode, by table, for one chunk at a time (FIPS 197; NIST SP 800-38D, section 6.5).
//
// Words are little-endian columns of the state: row 0 in the lowest byte. T0[x] is the column (2s, s, s, 3s) that
// MixColumns makes of s = S[x]; T1 is the same, rotated up by a byte. T2 and T3 are these two, rotated by two bytes after
// the lookup.
//
// In shared memory every entry stands 32 times, once for each lane of a warp, so that a lane only ever reads its own bank:
// what it looks up shows neither in conflicts nor in a cache.

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

// What the keystream of a chunk has in common: only the last two bytes of its counter blocks differ, so after round 1
// two columns do, and half of round 2 is the same for all.
struct Start {
    u32 first[2];   // round 1: columns 0 and 1, without what comes from the counter
    u32 second[4];  // round 2: the part that comes from columns 2 and 3
};

// The tables as one lane sees them.
struct Tables {
    u32 lane;  // where this lane's column of T0 starts in shared memory

    template <int TABLE, int BYTE>
    __device__ __forceinline__ u32 at(u32 column) const {
        // A dot product of bytes picks one, scales it to a row and adds the start.
        const u32 place = __dp4a(column, static_cast<u32>(ROW_BYTES) << 8 * BYTE, lane);
        return *static_cast<const u32*>(__cvta_shared_to_generic(place + TABLE));
    }
};

__device__ __forceinline__ u32 word_of(const u8* bytes) {
    return bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<u32>(bytes[3]) << 24;
}

__device__ __forceinline__ u32 swap_bytes(u32 word) { return __byte_perm(word, 0, 0x0123); }
__device__ __forceinline__ u32 rotate_16(u32 word) { return __byte_perm(word, 0, 0x1032); }
__device__ __forceinline__ u32 rotate_8(u32 word) { return __byte_perm(word, 0, 0x2103); }

__device__ __forceinline__ u32 times(u32 a, u32 b) {  // in GF(2^8); not on secrets
    u32 product = 0;
    for (int bit = 0; bit < 8; ++bit) {
        product ^= (b >> bit & 1) * a;
        a = a << 1 ^ (a >> 7) * 0x11b;
    }
    return product;
}

__device__ __forceinline__ u32 substitute(u32 x) {  // the S-box (FIPS 197, section 5.1.1): x^254, then an affine map
    const u32 x2 = times(x, x), x3 = times(x2, x), x6 = times(x3, x3), x12 = times(x6, x6), x15 = times(x12, x3);
    u32 power = x15;
    for (int i = 0; i < 4; ++i) power = times(power, power);
    const u32 inverse = times(times(power, x12), x2);
    const u32 doubled = inverse | inverse << 8;
    return (inverse ^ doubled >> 7 ^ doubled >> 6 ^ doubled >> 5 ^ doubled >> 4 ^ 0x63) & 0xff;
}

// Fills the tables; every thread of a block of 512 takes one entry of one table. Needs a barrier afterwards.
__device__ __forceinline__ void fill_tables(u8* tables) {
    const u32 x = threadIdx.x & 255, s = substitute(x), s2 = times(s, 2);
    u32 entry = s2 | s << 8 | s << 16 | (s2 ^ s) << 24;
    u8* place = tables + x * ROW_BYTES;
    if (threadIdx.x >= 256) {
        entry = rotate_8(entry);
        place += T1;
    }
    // Lanes start at different places, so that their writes fall into different banks.
    for (u32 i = 0; i < 8; ++i) {
        reinterpret_cast<uint4*>(place)[i + threadIdx.x & 7] = make_uint4(entry, entry, entry, entry);
    }
}

// Expands a key (FIPS 197, section 5.2). `schedule` and `key` are not the same memory. For one lane.
template <int BITS>
__device__ __forceinline__ void expand_key(Tables tables, const u8* key, u32* schedule) {
    constexpr int WORDS = Aes<BITS>::KEY_WORDS;
#pragma unroll 1
    for (int i = 0; i < WORDS; ++i) {
        schedule[i] = word_of(key + 4 * i);
    }
    u32 round_constant = 1;
#pragma unroll 1
    for (int i = WORDS; i < Aes<BITS>::SCHEDULE_WORDS; ++i) {
        u32 word = schedule[i - 1];
        if (i % WORDS == 0 || (WORDS == 8 && i % WORDS == 4)) {
            const u32 s0 = tables.at<T0, 0>(word) >> 8 & 0xff, s1 = tables.at<T0, 1>(word) >> 8 & 0xff;
            const u32 s2 = tables.at<T0, 2>(word) >> 8 & 0xff, s3 = tables.at<T0, 3>(word) >> 8 & 0xff;
            word = s0 | s1 << 8 | s2 << 16 | s3 << 24;
            if (i % WORDS == 0) {
                word = __funnelshift_r(word, word, 8) ^ round_constant;
                round_constant = times(round_constant, 2);
            }
        }
        schedule[i] = schedule[i - WORDS] ^ word;
    }
}

__device__ __forceinline__ uint4 round_key(const u32* schedule, int round) {
    return reinterpret_cast<const uint4*>(schedule)[round];
}

// A column of one round: SubBytes, ShiftRows, MixColumns, AddRoundKey.
__device__ __forceinline__ u32 mix(Tables t, u32 a, u32 b, u32 c, u32 d, u32 key) {
    return t.at<T0, 0>(a) ^ t.at<T1, 1>(b) ^ key ^ rotate_16(t.at<T0, 2>(c) ^ t.at<T1, 3>(d));
}

// The same of the last round, which has no MixColumns. S[x] is the second byte of T0[x].
__device__ __forceinline__ u32 last(Tables t, u32 a, u32 b, u32 c, u32 d, u32 key) {
    const u32 low = __byte_perm(t.at<T0, 0>(a), t.at<T0, 1>(b), 0x0051);
    const u32 high = __byte_perm(t.at<T0, 2>(c), t.at<T0, 3>(d), 0x5100);
    return __byte_perm(low, high, 0x7610) ^ key;
}

// What all counter blocks nonce || counter have in common, for counters below 65536.
__device__ __forceinline__ Start start(Tables t, const u32* schedule, u32 n0, u32 n1, u32 n2) {
    const uint4 k0 = round_key(schedule, 0), k1 = round_key(schedule, 1), k2 = round_key(schedule, 2);
    const u32 s0 = n0 ^ k0.x, s1 = n1 ^ k0.y, s2 = n2 ^ k0.z, s3 = k0.w;  // only rows 0 and 1 of s3 are looked at
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

// The keystream block of one counter: bytes in memory order.
template <int BITS>
__device__ __forceinline__ uint4 keystream(Tables t, const u32* schedule, const Start& made, u32 counter) {
    const u32 s3 = swap_bytes(counter) ^ schedule[3];
    const u32 r0 = made.first[0] ^ rotate_16(t.at<T1, 3>(s3)), r1 = made.first[1] ^ rotate_16(t.at<T0, 2>(s3));
    uint4 s;
    s.x = t.at<T0, 0>(r0) ^ t.at<T1, 1>(r1) ^ made.second[0];
    s.y = t.at<T0, 0>(r1) ^ rotate_16(t.at<T1, 3>(r0)) ^ made.second[1];
    s.z = rotate_16(t.at<T0, 2>(r0) ^ t.at<T1, 3>(r1)) ^ made.second[2];
    s.w = t.at<T1, 1>(r0) ^ rotate_16(t.at<T0, 2>(r1)) ^ made.second[3];
#pragma unroll
    for (int round = 3; round < Aes<BITS>::ROUNDS; ++round) {
        const uint4 k = round_key(schedule, round);
        s = make_uint4(mix(t, s.x, s.y, s.z, s.w, k.x), mix(t, s.y, s.z, s.w, s.x, k.y),
                       mix(t, s.z, s.w, s.x, s.y, k.z), mix(t, s.w, s.x, s.y, s.z, k.w));
    }
    const uint4 k = round_key(schedule, Aes<BITS>::ROUNDS);
    return make_uint4(last(t, s.x, s.y, s.z, s.w, k.x), last(t, s.y, s.z, s.w, s.x, k.y),
                      last(t, s.z, s.w, s.x, s.y, k.z), last(t, s.w, s.x, s.y, s.z, k.w));
}
