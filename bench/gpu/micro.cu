// How many lanes a multiprocessor serves a clock, for each instruction that the kernels consist of.
//
// Every kernel runs ROUNDS x 32 instructions of a kind a warp, on eight or four values that depend on each other in
// turn, and notes the clocks that its block took. The results are compared with a constant, so that nothing is left out.

typedef unsigned int u32;
typedef unsigned long long u64;

#define ROUNDS 64
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(512, 2) name(u32* out, u64* clocks, u32 seed)
#define END(value)                                          \
    u64 stop = clock64();                                   \
    if (threadIdx.x == 0) clocks[blockIdx.x] = stop - start; \
    if ((value) == 0x12345677u) out[0] = 1;

// Instructions of two values.
#define LOP3(x, y) asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x) : "r"(y), "r"(seed));
#define PRMT(x, y) asm volatile("prmt.b32 %0, %0, %1, 0x1032;" : "+r"(x) : "r"(y));
#define SHF(x, y) asm volatile("shf.l.wrap.b32 %0, %0, %1, 7;" : "+r"(x) : "r"(y));
#define IMAD(x, y) asm volatile("mad.lo.u32 %0, %1, %2, %0;" : "+r"(x) : "r"(y), "r"(seed));
#define IDP4A(x, y) asm volatile("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(x) : "r"(y), "r"(seed));
#define WIDE(x, y) asm volatile("mul.wide.u32 %0, %1, %2;" : "=l"(x) : "r"((u32)(y)), "r"((u32)((x) >> 32)));
#define LOAD(x, y) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(x));

#define EIGHT(OP) OP(a, b) OP(b, c) OP(c, d) OP(d, e) OP(e, f) OP(f, g) OP(g, h) OP(h, a)
#define LOOP(OP)                          \
    u64 start = clock64();                \
    _Pragma("unroll 1") for (int i = 0; i < ROUNDS; ++i) { EIGHT(OP) EIGHT(OP) EIGHT(OP) EIGHT(OP) }
#define VALUES(type)                                                                                     \
    type a = seed + threadIdx.x, b = a * 3 + 1, c = a * 5 + 2, d = a * 7 + 3, e = a * 9 + 4, f = a * 11 + 5, \
         g = a * 13 + 6, h = a * 15 + 7;
#define ALL (u32)(a ^ b ^ c ^ d ^ e ^ f ^ g ^ h)

KERNEL(lop3) { VALUES(u32) LOOP(LOP3) END(ALL) }
KERNEL(prmt) { VALUES(u32) LOOP(PRMT) END(ALL) }
KERNEL(shf) { VALUES(u32) LOOP(SHF) END(ALL) }
KERNEL(imad) { VALUES(u32) LOOP(IMAD) END(ALL) }
KERNEL(idp4a) { VALUES(u32) LOOP(IDP4A) END(ALL) }
KERNEL(imad_wide) { VALUES(u64) LOOP(WIDE) END(ALL) }

// Half of each: whether the multiplier and the logic unit work at the same time.
KERNEL(lop3_and_wide) {
    u64 a = threadIdx.x + 1, b = a + 2, c = a + 3, d = a + 4;
    u32 p = seed + threadIdx.x, q = p * 3, r = p * 5, s = p * 7;
    u64 start = clock64();
#pragma unroll 1
    for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            WIDE(a, b) LOP3(p, q) LOP3(q, r) WIDE(b, c) LOP3(r, s) WIDE(c, d) LOP3(s, p) WIDE(d, a)
        }
    }
    END((u32)(a ^ b ^ c ^ d) ^ p ^ q ^ r ^ s)
}

extern __shared__ __align__(256) u32 shared[];

// Table look-ups: every lane reads a word of its own bank, and where it reads next.
KERNEL(shared_word) {
    for (u32 i = threadIdx.x; i < 16384; i += 512) {
        shared[i] = (u32)__cvta_generic_to_shared(shared) + ((((i * 2654435761u) >> 5) & 0x1ff) << 7) + (i & 31) * 4;
    }
    __syncthreads();
    u32 lane = threadIdx.x & 31;
    u32 a = shared[lane], b = shared[lane + 32], c = shared[lane + 64], d = shared[lane + 96];
    u32 e = shared[lane + 128], f = shared[lane + 160], g = shared[lane + 192], h = shared[lane + 224];
    LOOP(LOAD)
    END(ALL)
}

// Round keys: all lanes read the same 16 bytes.
KERNEL(shared_16_bytes_same) {
    for (u32 i = threadIdx.x; i < 16384; i += 512) shared[i] = i * seed;
    __syncthreads();
    u32 sum = 0;
    u64 start = clock64();
#pragma unroll 1
    for (int i = 0; i < ROUNDS; ++i) {
#pragma unroll
        for (int k = 0; k < 32; ++k) {
            u32 x, y, z, w;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                         : "r"((u32)__cvta_generic_to_shared(shared) + (u32)(i * 512 + k * 16)));
            sum ^= x ^ y ^ z ^ w;
        }
    }
    END(sum)
}

// Tensor cores: products of bits, and of bytes.
#define PRODUCT(shape, r)                                                                             \
    asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])                                      \
                 : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
#define PRODUCTS(shape)                                                                                \
    VALUES(u32)                                                                                        \
    int r0[4] = {}, r1[4] = {}, r2[4] = {}, r3[4] = {};                                                \
    u64 start = clock64();                                                                             \
    _Pragma("unroll 1") for (int i = 0; i < ROUNDS; ++i) {                                             \
        _Pragma("unroll") for (int k = 0; k < 8; ++k) {                                                \
            PRODUCT(shape, r0) PRODUCT(shape, r1) PRODUCT(shape, r2) PRODUCT(shape, r3)                \
        }                                                                                              \
    }                                                                                                  \
    END((u32)(r0[0] ^ r1[1] ^ r2[2] ^ r3[3] ^ g ^ h))

KERNEL(product_of_bits) { PRODUCTS("m16n8k256.row.col.s32.b1.b1.s32.and.popc") }
KERNEL(product_of_bytes) { PRODUCTS("m16n8k32.row.col.s32.u8.u8.s32") }

// Carry-less products of two words, which CUDA knows since 13.3; on eight values, as above.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1303
#define LOW(x, y) asm volatile("clmad.lo.u64 %0, %1, %2, %0;" : "+l"(x) : "l"(y), "l"(m));
#define HIGH(x, y) asm volatile("clmad.hi.u64 %0, %1, %2, %0;" : "+l"(x) : "l"(y), "l"(m));
#define BOTH(x, y) LOW(x, y) HIGH(y, x)
#define WORDS                                                                                          \
    u64 m = seed * 0x9e3779b97f4a7c15ull + threadIdx.x, a = m + 1, b = m * 3, c = m * 5, d = m * 7, e = m * 9, \
        f = m * 11, g = m * 13, h = m * 15;

KERNEL(clmad_low) { WORDS LOOP(LOW) END(ALL) }
KERNEL(clmad_high) { WORDS LOOP(HIGH) END(ALL) }
KERNEL(clmad_both) {
    WORDS
    u64 start = clock64();
    _Pragma("unroll 1") for (int i = 0; i < ROUNDS; ++i) { EIGHT(BOTH) EIGHT(BOTH) }
    END(ALL)
}

// One of them to three of the logic unit: whether they share a pipe.
KERNEL(clmad_beside_lop3) {
    WORDS
    u32 p = seed + threadIdx.x, q = p * 3, r = p * 5, s = p * 7;
    u64 start = clock64();
    _Pragma("unroll 1") for (int i = 0; i < ROUNDS; ++i) {
        _Pragma("unroll") for (int k = 0; k < 8; ++k) { LOW(a, b) LOP3(p, q) LOP3(q, r) LOP3(r, s) }
    }
    END(ALL ^ p ^ q ^ r ^ s)
}
#endif

// On which multiprocessor each block runs. All blocks stay there long enough to be there together.
KERNEL(place) {
    u32 number;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
    u64 start = clock64();
    while (clock64() - start < 200000) {
    }
    if (threadIdx.x == 0) out[blockIdx.x] = number;
}
