// Values of 8 bits, which are widened to BF16 while they are opened: bf16(f32(value) * f32(scale)).
//
// The product is rounded to a float, and that float to a BF16, each to the nearest and to even. Every NaN becomes 0x7fc0.
// No branch and no address depends on a value or on a scale.

#define SCALES_BF16 16  // in `Widening.kind`, beside the number of a `Format`; else the scales are floats

#ifdef FASTRACK_SHIM
__device__ __forceinline__ float times(float a, float b) { return a * b; }
__device__ __forceinline__ float times_plus(float a, float b, float c) { return a * b + c; }
#else
// Return a times b, and that plus c, with subnormal floats, which CuPy's options take for zero elsewhere.
__device__ __forceinline__ float times(float a, float b) {
    float d;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

__device__ __forceinline__ float times_plus(float a, float b, float c) {
    float d;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
    return d;
}
#endif

// How 8 bits become a float: shifted down from the top of a word, masked and flipped, they are a float which is the value,
// times `unit` plus `offset`. Both are exact. A value that reaches `limit` is infinite or no number.
struct Format {
    u32 shift, mask, flip;
    float unit, offset, limit;

    // Returns a format by its number: E4M3, E5M2 (OCP 8-bit Floating Point, 5.1) or a signed integer.
    __device__ __forceinline__ static Format of(u32 number) {
        // The exponents of floats have a bias of 127, these one of 7 or 15. To add -0 keeps the sign of a zero.
        if (number == 0) return {4, 0x87f00000, 0, power_of_two(127 - 7), -0.0f, 480};
        if (number == 1) return {3, 0x8fe00000, 0, power_of_two(127 - 15), -0.0f, 65536};
        // From 2^23 on, the lowest bit of a float counts one.
        return {24, 0xff, 0x4b000080, 1, -8388608 - 128, power_of_two(127)};
    }
    __device__ __forceinline__ static float power_of_two(u32 power) { return __uint_as_float((power + 127) << 23); }

    // Returns the value in the highest byte of a word.
    __device__ __forceinline__ float value(u32 word) const {
        const u32 bits = static_cast<u32>(static_cast<int>(word) >> shift) & mask ^ flip;
        const float value = times_plus(__uint_as_float(bits), unit, offset);
        return fabsf(value) >= limit ? __uint_as_float(__float_as_uint(value) | 0x7f800000) : value;
    }
};

// Returns the BF16 nearest to a float in the upper half of a word; the lower half has no meaning.
__device__ __forceinline__ u32 to_bf16(float a) {
    const u32 bits = __float_as_uint(a);
    return a == a ? bits + 0x7fff + (bits >> 16 & 1) : 0x7fc00000;
}

// A divisor of numbers below 2^31. The host has found what to multiply by (Granlund and Montgomery, "Division by Invariant
// Integers using Multiplication"), as a division takes six times the instructions.
struct Divisor {
    u32 value, times, shift;

    __device__ __forceinline__ u32 quotient(u32 number) const {
        return static_cast<u32>(static_cast<u64>(number) * times >> shift);
    }
};

// A segment whose values are widened.
struct Widening : Segment {
    const u8* scales;         // of the whole message
    u32 kind;                 // the format of the values, and that of the scales
    u32 scales_a_row;         // scales of a row
    Divisor columns;          // values of a row
    Divisor rows_a_scale;     // rows that share a scale
    Divisor columns_a_scale;  // columns that share a scale

    __device__ __forceinline__ float scale(u32 index) const {
        if ((kind & SCALES_BF16) == 0) return reinterpret_cast<const float*>(scales)[index];
        return __uint_as_float(static_cast<u32>(reinterpret_cast<const unsigned short*>(scales)[index]) << 16);
    }
};
static_assert(sizeof(Widening) == FASTRACK_WIDENING_BYTES, "the host knows this size");

typedef TableOf<Widening, FASTRACK_WIDENINGS> WideningTable;
static_assert(sizeof(WideningTable) + 7 * 8 <= 4096, "as of `Table`");

// The place of a widened chunk.
struct Widened {
    const Widening& widening;
    u8* target;

    // Returns the scale of value `offset` of the chunk.
    __device__ __forceinline__ float scale(const Shared* shared, u32 offset, int side) const {
        const u32 place = shared->chunk[side].column + offset, row = widening.columns.quotient(place);
        const u32 column = place - row * widening.columns.value;
        const u32 row_of_scales = widening.rows_a_scale.quotient(shared->scales[side].row + row);
        return widening.scale(shared->scales[side].first + row_of_scales * widening.scales_a_row +
                              widening.columns_a_scale.quotient(column));
    }
};

// Returns the place of chunk `index` of a segment. One thread finds the chunk's first scale, by the only divisions of 64
// bits; a barrier must follow.
__device__ __forceinline__ Widened place_of(const Widening& segment, u32 index, Shared* shared, int side) {
    if (threadIdx.x == THREADS - 1) {
        const u64 value = ((segment.name & NUMBERS) + index) * CHUNK, row = value / segment.columns.value;
        const u64 row_of_scales = row / segment.rows_a_scale.value;
        shared->chunk[side].column = static_cast<u32>(value - row * segment.columns.value);
        shared->scales[side].row = static_cast<u32>(row - row_of_scales * segment.rows_a_scale.value);
        shared->scales[side].first = static_cast<u32>(row_of_scales) * segment.scales_a_row;
    }
    return {segment, segment.target + 2ull * CHUNK * index};
}

// Stores the `size` values of block `block`, or zeros unless `good` is all ones.
__device__ __forceinline__ void store_block(const Widened& place, int block, uint4 values, u32 size, u32 good,
                                            const Shared* shared, int side) {
    const Format format = Format::of(place.widening.kind % SCALES_BF16);
    u8* target = place.target + 32 * block;
    const bool share_a_scale = ((place.widening.columns.value | place.widening.columns_a_scale.value) & 15) == 0;
    if (share_a_scale && size == 16 && (reinterpret_cast<u64>(target) & 15) == 0) {
        const float scale = place.scale(shared, 16 * block, side);
        const u32 words[4] = {values.x, values.y, values.z, values.w};
        u32 wide[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const u32 word = words[i / 2] << 16 - 16 * (i & 1);
            const u32 low = to_bf16(times(format.value(word << 8), scale));
            wide[i] = __byte_perm(low, to_bf16(times(format.value(word), scale)), 0x7632) & good;
        }
        reinterpret_cast<uint4*>(target)[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
        reinterpret_cast<uint4*>(target)[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
        return;
    }
#pragma unroll 1
    for (u32 i = 0; i < size; ++i) {
        const float product = times(format.value(byte_of(values, i) << 24), place.scale(shared, 16 * block + i, side));
        reinterpret_cast<unsigned short*>(target)[i] = static_cast<unsigned short>((to_bf16(product) & good) >> 16);
    }
}
