// Runs a kernel on the host, one block after another. Every CUDA thread of a block is a fibre. Fibres take turns in one
// order, and each runs until it must wait for others: for its warp, or for its block.
//
// This shows results and nothing else. The interpreter of bench/gpu/ptx looks for races and wrong accesses.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "shim.h"

#if !defined(__x86_64__)
#error "the shim switches fibres on x86-64 only"
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" void shim_switch(void** save, void* load);

namespace {

constexpr std::size_t max_threads = 1024, max_arguments = 12, lanes = 32;
constexpr std::size_t stack_size = 128 * 1024, page = 4096, max_shared = 227 * 1024;

enum class State { ready, block, warp, done };

struct Fibre {
    void* stack_pointer;
    State state;
    unsigned value;  // which is exchanged within the warp
};

Fibre fibres[max_threads];
unsigned threads;
void* scheduler;
void* kernel;
std::uint64_t arguments[max_arguments];
unsigned char* stacks;
alignas(16) unsigned char shared[max_shared + 16];

// Saves what a call must keep, and goes on where another stack was left.
asm(R"(
.text
.globl shim_switch
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, .-shim_switch
)");

void wait(State state) {
    Fibre& fibre = fibres[threadIdx.x];
    fibre.state = state;
    shim_switch(&fibre.stack_pointer, scheduler);
}

void run_fibre() {
    using U = std::uint64_t;
    const U* a = arguments;
    // A kernel with fewer parameters leaves the rest alone.
    const auto call = reinterpret_cast<void (*)(U, U, U, U, U, U, U, U, U, U, U, U)>(kernel);
    call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    wait(State::done);
}

void start_fibre(unsigned thread) {
    auto* top = reinterpret_cast<std::uint64_t*>(stacks + (thread + 1) * (stack_size + page));
    *--top = 0;  // as after a call, the stack is 8 off a multiple of 16
    *--top = reinterpret_cast<std::uint64_t>(&run_fibre);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    fibres[thread] = {top, State::ready, 0};
}

bool all_are(State state, unsigned start, unsigned end) {
    for (unsigned thread = start; thread < end; ++thread)
        if (fibres[thread].state != state) return false;
    return true;
}

// Lets the lanes of a warp go on with the sum of their values, if all are there.
bool resolve_warp(unsigned start) {
    const unsigned end = start + lanes < threads ? start + lanes : threads;
    if (!all_are(State::warp, start, end)) return false;
    unsigned sum = 0;
    for (unsigned thread = start; thread < end; ++thread) sum ^= fibres[thread].value;
    for (unsigned thread = start; thread < end; ++thread) {
        fibres[thread].state = State::ready;
        fibres[thread].value = sum;
    }
    return true;
}

// False if some threads wait for others that will never come.
bool run_block() {
    for (unsigned thread = 0; thread < threads; ++thread) start_fibre(thread);
    for (;;) {
        for (unsigned thread = 0; thread < threads; ++thread) {
            if (fibres[thread].state != State::ready) continue;
            threadIdx = {thread, 0, 0};
            shim_switch(&scheduler, fibres[thread].stack_pointer);
        }
        bool any = false;
        for (unsigned start = 0; start < threads; start += lanes) any |= resolve_warp(start);
        if (any) continue;
        if (all_are(State::done, 0, threads)) return true;
        if (!all_are(State::block, 0, threads)) return false;
        for (unsigned thread = 0; thread < threads; ++thread) fibres[thread].state = State::ready;
    }
}

}  // namespace

unsigned char* shim_shared() { return shared + 16; }  // 16-aligned and no better

void __syncthreads() { wait(State::block); }

unsigned __reduce_xor_sync(unsigned, unsigned value) {
    fibres[threadIdx.x].value = value;
    wait(State::warp);
    return fibres[threadIdx.x].value;
}

// Runs the blocks of a grid from number `first` on: null, or what went wrong.
extern "C" const char* shim_launch(void* function, const std::uint64_t* values, std::uint64_t count,
                                   std::uint64_t first, std::uint64_t grid, std::uint64_t block,
                                   std::uint64_t shared_size) {
    if (count > max_arguments || !block || block > max_threads || shared_size > max_shared)
        return "no launch has these sizes";
    if (!stacks) {
        constexpr std::size_t each = page + stack_size;
        constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        stacks = static_cast<unsigned char*>(mmap(nullptr, max_threads * each, PROT_READ | PROT_WRITE, kind, -1, 0));
        for (std::size_t thread = 0; thread < max_threads; ++thread) mprotect(stacks + thread * each, page, PROT_NONE);
    }
    kernel = function;
    std::memcpy(arguments, values, count * sizeof *values);
    threads = static_cast<unsigned>(block);
    gridDim = {static_cast<unsigned>(grid), 1, 1};
    blockDim = {threads, 1, 1};
    for (std::uint64_t number = first; number < grid; ++number) {
        blockIdx = {static_cast<unsigned>(number), 0, 0};
        std::memset(shim_shared(), 0xa5, shared_size);
        if (!run_block()) return "some threads wait for others that have ended or wait elsewhere";
    }
    return nullptr;
}

// What the last block of a launch left in shared memory.
extern "C" const unsigned char* shim_remains() { return shim_shared(); }
