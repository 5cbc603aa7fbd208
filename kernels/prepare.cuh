// Expansion of message keys: the key schedule (FIPS 197, section 5.2) and the powers of H.

constexpr u32 LAST_POWER = BLOCKS / 2 + 1;

// A message key, as the host gives it.
struct Key {
    u32 material[11];  // the key, of 4 or 8 words, and the base nonce behind it
    u32 kind;          // bits of the key, plus 65536 times the number of powers of H that the chunks of the message need
};
static_assert(sizeof(Key) == FASTRACK_KEY_BYTES, "the host knows this size");

// Returns S[x] for each byte of a word. S[x] is the second byte of T0[x].
__device__ __forceinline__ u32 substitute(Tables t, u32 word) {
    const u32 low = __byte_perm(t.at<T0, 0>(word), t.at<T0, 1>(word), 0x0051);
    const u32 high = __byte_perm(t.at<T0, 2>(word), t.at<T0, 3>(word), 0x0051);
    return __byte_perm(low, high, 0x5410);
}

// Expands a key. For one thread.
template <int BITS>
__device__ __forceinline__ void expand_key(Tables t, const u32* key, u32* schedule) {
    constexpr int WORDS = Aes<BITS>::KEY_WORDS;
#pragma unroll 1
    for (int i = 0; i < WORDS; ++i) schedule[i] = key[i];
    u32 constant = 1;
    for (int i = WORDS; i < Aes<BITS>::SCHEDULE_WORDS; ++i) {
        u32 word = schedule[i - 1];
        if (i % WORDS == 0) {
            word = substitute(t, word);
            word = __funnelshift_r(word, word, 8) ^ constant;
            constant = constant << 1 ^ (constant >> 7) * 0x11b;
        } else if (WORDS == 8 && i % 4 == 0) {
            word = substitute(t, word);
        }
        schedule[i] = schedule[i - WORDS] ^ word;
    }
}

// Writes the schedule and H of one message. For one whole warp.
template <int BITS>
__device__ __forceinline__ void start_state(u32* schedule, const Key& key, State* state) {
    const Tables tables = tables_of_lane();
    if (threadIdx.x == 0) expand_key<BITS>(tables, key.material, schedule);
    __syncwarp();
    for (u32 i = threadIdx.x; i < Aes<BITS>::SCHEDULE_WORDS; i += 32) state->schedule[i] = schedule[i];
    if (threadIdx.x < 3) state->nonce[threadIdx.x] = key.material[Aes<BITS>::KEY_WORDS + threadIdx.x];
    // H is the cipher of a block of zeros: of counter 0 under the nonce 0.
    const Start zero = start(tables, schedule, 0, 0, 0);
    const Field h = divided_by_x(to_field(keystream<BITS>(tables, schedule, zero, 0)));
    if (threadIdx.x == 0) store_field(state->powers[1], h);
}

// Writes the powers of H from 2 to `count`, with all threads of a block. A power that no chunk of the message needs is
// left out, as it would be multiplied by zero. The last thread computes what a full chunk needs besides.
__device__ __forceinline__ void finish_state(State* state, u32 count) {
    const u32 last = count < LAST_POWER ? count : LAST_POWER;
    // Powers 1 to n give n + 1 to 2n. A product of two that are divided by x is divided by x again.
#pragma unroll 1
    for (u32 n = 1; n < last; n *= 2) {
        const u32 power = threadIdx.x + 1;
        const bool is_length = n == 1 && power == THREADS;
        if ((power <= n && power + n <= last) || is_length) {
            Field factor = {{8 * CHUNK, 0, 0, 0}};
            if (!is_length) factor = load_field(state->powers[power]);
            store_field(is_length ? state->length_of_full : state->powers[power + n],
                        product(factor, load_field(state->powers[n])));
        }
        __syncthreads();
    }
}
