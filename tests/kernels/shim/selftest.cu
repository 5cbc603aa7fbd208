// Small kernels that are right or wrong on purpose, to try the shim on.

typedef unsigned long long u64;

#define KERNEL extern "C" __global__ void

KERNEL permute(const unsigned* x, const unsigned* y, const unsigned* selectors, unsigned* out, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) out[i] = __byte_perm(x[i], y[i], selectors[i]);
}

KERNEL funnel(const unsigned* low, const unsigned* high, const unsigned* shifts, unsigned* out, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        out[2 * i] = __funnelshift_l(low[i], high[i], shifts[i]);
        out[2 * i + 1] = __funnelshift_r(low[i], high[i], shifts[i]);
    }
}

KERNEL count_bits(const unsigned* x, unsigned* out, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
        out[3 * i] = __brev(__ldg(x + i));
        out[3 * i + 1] = static_cast<unsigned>(__popc(x[i]));
        out[3 * i + 2] = static_cast<unsigned>(__ffs(static_cast<int>(x[i])));
    }
}

KERNEL shuffle(const unsigned* values, unsigned* out, u64 lane, u64 width) {
    const unsigned i = threadIdx.x;
    out[2 * i] = __shfl_sync(0xffffffffu, values[i], static_cast<int>(lane), static_cast<int>(width));
    out[2 * i + 1] = __shfl_xor_sync(0xffffffffu, values[i], static_cast<int>(lane), static_cast<int>(width));
}

KERNEL shuffle_wide(const u64* values, u64* out) { out[threadIdx.x] = __shfl_sync(~0u, values[threadIdx.x], 3); }

KERNEL vote(const unsigned* values, unsigned* out) {
    const unsigned i = threadIdx.x;
    out[3 * i] = __reduce_xor_sync(0xffffffffu, values[i]);
    out[3 * i + 1] = __ballot_sync(0xffffffffu, values[i] & 1);
    out[3 * i + 2] = static_cast<unsigned>(__any_sync(0xffffffffu, values[i] == 7));
}

KERNEL vote_by_halves(const unsigned* values, unsigned* out) {
    const unsigned i = threadIdx.x;
    if (i % 32 < 16) {
        out[i] = __reduce_xor_sync(0x0000ffffu, values[i]);
    } else {
        out[i] = __reduce_xor_sync(0xffff0000u, values[i]);
    }
}

KERNEL vote_without_lane_five(unsigned* out) {
    if (threadIdx.x % 32 != 5) out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
}

KERNEL vote_at_two_places(unsigned* out) {
    if (threadIdx.x % 2) {
        out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
    } else {
        out[threadIdx.x] = __ballot_sync(0xffffffffu, 1);
    }
}

KERNEL vote_for_others(unsigned* out) { out[threadIdx.x] = __ballot_sync(1u, 1); }

KERNEL ask_a_lane_outside(unsigned* out) {
    if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, threadIdx.x, 20);
}

KERNEL barrier_for_some() {
    if (threadIdx.x < 40) __syncthreads();
}

KERNEL barrier_at_two_places() {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

KERNEL meet_at_two_places(unsigned* out) {
    FASTRACK_SHARED(memory);
    unsigned* words = reinterpret_cast<unsigned*>(memory);
    words[threadIdx.x] = threadIdx.x;
    if (threadIdx.x < 64) {
        __barrier_sync_count(1, blockDim.x);
    } else {
        __barrier_sync_count(1, blockDim.x);
    }
    out[threadIdx.x] = words[(threadIdx.x + 64) % blockDim.x];
}

KERNEL meet_at_two_barriers() {
    if (threadIdx.x < 64) {
        __barrier_sync_count(1, blockDim.x);
    } else {
        __barrier_sync_count(2, blockDim.x);
    }
}

KERNEL meet_with_some() { __barrier_sync_count(1, 64); }

KERNEL barrier_or_vote() {
    if (threadIdx.x < 40) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

KERNEL rotate(unsigned* out, u64 barrier, u64 step) {
    FASTRACK_SHARED(memory);
    unsigned* words = reinterpret_cast<unsigned*>(memory);
    words[threadIdx.x] = threadIdx.x;
    if (barrier == 1) __syncwarp();
    if (barrier == 2) __syncthreads();
    out[threadIdx.x] = words[(threadIdx.x + step) % blockDim.x];
}

KERNEL overwrite(unsigned* out, u64 barrier) {
    FASTRACK_SHARED(memory);
    unsigned* words = reinterpret_cast<unsigned*>(memory);
    if (threadIdx.x == 0) words[0] = 1;
    __syncthreads();
    out[threadIdx.x] = words[0];
    if (barrier) __syncthreads();
    if (threadIdx.x == 77) words[0] = 2;
}

KERNEL touch_shared(unsigned* out, u64 offset, u64 writes) {
    FASTRACK_SHARED(memory);
    if (threadIdx.x) return;
    if (writes) memory[offset] = 1;
    else out[0] = memory[offset];
}

KERNEL touch(unsigned char* data, unsigned char* out, u64 offset, u64 writes) {
    if (threadIdx.x) return;
    if (writes) data[offset] = 1;
    else out[0] = data[offset];
}

KERNEL load_sixteen(const unsigned char* data, unsigned char* out, u64 offset) {
    if (threadIdx.x) return;
    const uint4 block = *reinterpret_cast<const uint4*>(data + offset);
    out[0] = static_cast<unsigned char>(block.x ^ block.y ^ block.z ^ block.w);
}

KERNEL show_shared(unsigned char* out, u64 size) {
    FASTRACK_SHARED(memory);
    for (u64 i = threadIdx.x; i < size; i += blockDim.x) out[size * blockIdx.x + i] = memory[i];
}

KERNEL write_one_word(unsigned* out) {
    if (threadIdx.x == 0) out[0] = blockIdx.x;
}

KERNEL count(u64* out) {
    atomicMin(out, static_cast<u64>(blockIdx.x * blockDim.x + threadIdx.x));
    atomicAdd(out + 1, static_cast<u64>(1));
    atomicOr(out + 2, static_cast<u64>(1) << threadIdx.x % 64);
    atomicExch(out + 3, static_cast<u64>(9));
}

KERNEL line_up(unsigned* counter, unsigned* out) { out[threadIdx.x] = atomicAdd(counter, 1u); }

KERNEL dot(const unsigned* x, const unsigned* y, const unsigned* sums, unsigned* out, u64 count) {
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) out[i] = __dp4a(x[i], y[i], sums[i]);
}

KERNEL convert(unsigned* out, u64 offset) {
    FASTRACK_SHARED(memory);
    if (threadIdx.x) return;
    const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    memory[offset] = 77;
    out[0] = *static_cast<const unsigned char*>(__cvta_shared_to_generic(place + offset));
}
