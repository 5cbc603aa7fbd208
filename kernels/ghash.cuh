// GHASH (NIST SP 800-38D, section 6.4) without tables and without a carry-less multiplier.
//
// A block is read as a big-endian number, so the coefficient of x^i is bit 127 - i of it; `Field.w[0]` is its lowest word.
// The product of two such numbers is the product of the polynomials but for one place. To make that good, multipliers
// are kept divided by x: `product(a, over_x(b))` is a times b.

struct Field {
    u32 w[4];
};

__device__ __forceinline__ Field operator^(Field a, const Field& b) {
    for (int i = 0; i < 4; ++i) a.w[i] ^= b.w[i];
    return a;
}

__device__ __forceinline__ Field to_field(uint4 block) {  // from bytes in memory order
    return {{swap_bytes(block.w), swap_bytes(block.z), swap_bytes(block.y), swap_bytes(block.x)}};
}

__device__ __forceinline__ uint4 from_field(const Field& a) {
    return make_uint4(swap_bytes(a.w[3]), swap_bytes(a.w[2]), swap_bytes(a.w[1]), swap_bytes(a.w[0]));
}

__device__ __forceinline__ Field load_field(const u32* words) {
    const uint4 v = *reinterpret_cast<const uint4*>(words);
    return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ void store_field(u32* words, const Field& a) {
    *reinterpret_cast<uint4*>(words) = make_uint4(a.w[0], a.w[1], a.w[2], a.w[3]);
}

// a / x. What falls off at x^0 comes back by x^-1 = x^127 + x^6 + x + 1.
__device__ __forceinline__ Field over_x(const Field& a) {
    const u32 carry = 0 - (a.w[3] >> 31);
    return {{a.w[0] << 1 ^ (carry & 1), __funnelshift_l(a.w[0], a.w[1], 1), __funnelshift_l(a.w[1], a.w[2], 1),
             __funnelshift_l(a.w[2], a.w[3], 1) ^ (carry & 0xc2000000)}};
}

__device__ __forceinline__ u64 multiply_add(u32 a, u32 b, u64 c) {
#ifdef __CUDA_ARCH__
    u64 d;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(c));
    return d;
#else
    return static_cast<u64>(a) * b + c;
#endif
}

__device__ __forceinline__ u64 multiply(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
    u64 d;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b));
    return d;
#else
    return static_cast<u64>(a) * b;
#endif
}

struct Pair {
    u32 low, high;
};

__device__ __forceinline__ Pair halves(u64 a) { return {static_cast<u32>(a), static_cast<u32>(a >> 32)}; }
__device__ __forceinline__ Pair operator^(Pair a, Pair b) { return {a.low ^ b.low, a.high ^ b.high}; }
__device__ __forceinline__ Pair operator&(Pair a, u32 mask) { return {a.low & mask, a.high & mask}; }
__device__ __forceinline__ Pair operator|(Pair a, Pair b) { return {a.low | b.low, a.high | b.high}; }

// The carry-less product of two words, by integer multiplication with holes (after BearSSL's ctmul): with three zeros
// between its bits, each column of a product is a sum of at most 8, which stays within its four bits; the lowest is the
// XOR that is wanted. Where the longest columns of two products are not the same, 8 + 7 still fits, and they are added.
__device__ __forceinline__ Pair carryless(u32 x, u32 y) {
    const u32 m0 = 0x11111111, m1 = 0x22222222, m2 = 0x44444444, m3 = 0x88888888;
    const u32 x0 = x & m0, x1 = x & m1, x2 = x & m2, x3 = x & m3;
    const u32 y0 = y & m0, y1 = y & m1, y2 = y & m2, y3 = y & m3;
    const Pair z0 = halves(multiply_add(x1, y3, multiply(x0, y0))) ^ halves(multiply(x2, y2)) ^ halves(multiply(x3, y1));
    const Pair z1 = halves(multiply_add(x2, y3, multiply(x0, y1))) ^ halves(multiply_add(x3, y2, multiply(x1, y0)));
    const Pair z2 = halves(multiply_add(x3, y3, multiply(x0, y2))) ^ halves(multiply(x1, y1)) ^ halves(multiply(x2, y0));
    const Pair z3 = halves(multiply(x0, y3)) ^ halves(multiply(x1, y2)) ^ halves(multiply(x2, y1)) ^ halves(multiply(x3, y0));
    return (z3 & m3) | (z2 & m2) | (z1 & m1) | (z0 & m0);  // in this order it takes fewest registers
}

struct Quad {
    u32 w[4];
};

// The same of two words each (Karatsuba).
__device__ __forceinline__ Quad carryless(u32 a0, u32 a1, u32 b0, u32 b1) {
    const Pair low = carryless(a0, b0), high = carryless(a1, b1);
    const Pair middle = carryless(a0 ^ a1, b0 ^ b1) ^ low ^ high;
    return {{low.low, low.high ^ middle.low, high.low ^ middle.high, high.high}};
}

// a times b, for a multiplier that is kept divided by x.
__device__ __forceinline__ Field product(const Field& a, const Field& b) {
    const Quad low = carryless(a.w[0], a.w[1], b.w[0], b.w[1]), high = carryless(a.w[2], a.w[3], b.w[2], b.w[3]);
    Quad middle = carryless(a.w[0] ^ a.w[2], a.w[1] ^ a.w[3], b.w[0] ^ b.w[2], b.w[1] ^ b.w[3]);
    for (int i = 0; i < 4; ++i) middle.w[i] ^= low.w[i] ^ high.w[i];
    const u32 p0 = low.w[0], p1 = low.w[1], p2 = low.w[2] ^ middle.w[0];
    u32 p3 = low.w[3] ^ middle.w[1];
    // The low half holds x^128 and up: x^128 = x^7 + x^2 + x + 1. What that moves past the end is folded in first.
    p3 ^= p0 << 31 ^ p0 << 30 ^ p0 << 25;
    const u32 p[5] = {p0, p1, p2, p3, 0};
    Field r = {{high.w[0] ^ middle.w[2], high.w[1] ^ middle.w[3], high.w[2], high.w[3]}};
    for (int i = 0; i < 4; ++i) {
        r.w[i] ^= p[i] ^ __funnelshift_r(p[i], p[i + 1], 1) ^ __funnelshift_r(p[i], p[i + 1], 2) ^
                  __funnelshift_r(p[i], p[i + 1], 7);
    }
    return r;
}

// The sum over the 32 lanes of a warp, in all of them.
__device__ __forceinline__ Field sum_of_warp(Field a) {
    for (int i = 0; i < 4; ++i) a.w[i] = __reduce_xor_sync(0xffffffff, a.w[i]);
    return a;
}
