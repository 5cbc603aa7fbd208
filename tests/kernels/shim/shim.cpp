// Runs a kernel on the host. Every CUDA thread of a block is a fibre; fibres take turns in an order drawn from a seed.
//
// A fibre runs until it must wait for others. When none can go on, the waits that are complete are resolved: a warp's
// vote when every lane that it names is there, the barrier when every thread of the block is. Anything else is an error.
//
// In the watched build g++ calls a function before every access of a kernel to memory (-fsanitize=thread, without the
// library that usually comes with it). It refuses what lies outside the buffers of the launch, and two accesses to a byte
// by two threads with no barrier between them, one of them a write. What is not aligned is refused with the help of
// -fsanitize=alignment.

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "shim.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SHIM_ADDRESS_SANITIZER 1
#endif

#if !defined(__x86_64__)
#error "the shim switches fibres on x86-64 only"
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

extern "C" {
struct ShimBuffer {
    std::uint64_t start, size, writable;
};
std::uint64_t shim_launch(void* kernel, const std::uint64_t* arguments, std::uint64_t count, std::uint64_t grid,
                          std::uint64_t block, std::uint64_t shared, std::uint64_t seed, const ShimBuffer* buffers,
                          std::uint64_t buffer_count, char* message, std::uint64_t room);
decltype(shim_launch) shim_launch_last;
const unsigned char* shim_remains();
void shim_switch(void** save, void* load);
}

namespace {

constexpr std::size_t max_threads = 1024, max_arguments = 12, lanes = 32;
constexpr std::size_t stack_size = 128 * 1024, page = 4096, max_shared = 227 * 1024;
constexpr std::uint64_t huge = 1ull << 31;
constexpr std::size_t fence = 4096;       // around shared memory
[[maybe_unused]] constexpr std::size_t buffer_fence = 32;  // around every other buffer; the caller sees to it

enum class State { ready, barrier, vote, done };

struct Fibre {
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;
    void* fake_stack = nullptr;  // AddressSanitizer's
    State state = State::done;
    shim_place place{};
    shim_vote vote{};
    unsigned mask = 0, source = 0;
    unsigned barrier = 0;  // its name; all threads reach that of no name, 0, at one place
    std::uint64_t value = 0, result = 0;
};

// The last writer of a byte, and its readers since. Times count barriers, over all blocks of a launch.
constexpr std::uint16_t no_warp = 0xffff, several_warps = 0xfffe, whole_warp = 0x8000;
struct Trace {
    std::uint32_t written_at = 0, read_at = 0;
    std::uint16_t writer = no_warp, reader = no_warp;
    std::uint16_t written_in = 0, read_in = 0;  // the warp's own time
};

struct Buffer {
    std::uintptr_t start, end;
    bool writable, shared;
    std::vector<Trace> traces;
};

struct Launch {
    void* kernel = nullptr;
    std::uint64_t arguments[max_arguments] = {};
    std::vector<Buffer> buffers;  // shared memory first
    std::vector<Fibre> fibres;
    std::vector<std::uint16_t> warp_times;
    std::uint32_t time = 1, block_start = 1;
    unsigned threads = 0;
    unsigned current = 0;
    std::string error;
};

Launch launch;
void* scheduler_stack_pointer;
[[maybe_unused]] const void* scheduler_stack;
[[maybe_unused]] std::size_t scheduler_stack_size;
unsigned char* stacks;
unsigned char* shared_arena;
std::uintptr_t image_start, image_end;

[[noreturn]] void leave();

void describe(const char* format, ...) {
    if (!launch.error.empty()) return;
    char text[512];
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(text, sizeof text, format, rest);
    va_end(rest);
    launch.error = text;
}

const char* name_of(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// ---- fibres ----

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

void to_fibre(unsigned thread) {
    Fibre& fibre = launch.fibres[thread];
    launch.current = thread;
    threadIdx = {thread, 0, 0};
#ifdef SHIM_ADDRESS_SANITIZER
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fibre.stack, stack_size);
#endif
    shim_switch(&scheduler_stack_pointer, fibre.stack_pointer);
#ifdef SHIM_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void to_scheduler(bool for_good = false) {
    Fibre& fibre = launch.fibres[launch.current];
#ifdef SHIM_ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fibre.fake_stack, scheduler_stack, scheduler_stack_size);
#else
    (void)for_good;
#endif
    shim_switch(&fibre.stack_pointer, scheduler_stack_pointer);
#ifdef SHIM_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fibre.fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
}

void leave() {
    launch.fibres[launch.current].state = State::done;
    to_scheduler(true);
    __builtin_unreachable();
}

void run_fibre() {
#ifdef SHIM_ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    using U = std::uint64_t;
    const U* a = launch.arguments;
    // A kernel with fewer parameters leaves the rest alone.
    using Kernel = void (*)(U, U, U, U, U, U, U, U, U, U, U, U);
    const auto kernel = reinterpret_cast<Kernel>(launch.kernel);
    kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
    leave();
}

void start_fibre(Fibre& fibre) {
#ifdef SHIM_ADDRESS_SANITIZER
    __asan_unpoison_memory_region(fibre.stack, stack_size);
#endif
    fibre.state = State::ready;
    fibre.fake_stack = nullptr;
    auto* top = reinterpret_cast<std::uint64_t*>(fibre.stack + stack_size);
    *--top = 0;  // as after a call, the stack is 8 off a multiple of 16
    *--top = reinterpret_cast<std::uint64_t>(&run_fibre);
    for (int saved = 0; saved < 6; ++saved) *--top = 0;
    fibre.stack_pointer = top;
}

// ---- waits ----

bool same_place(const Fibre& a, const Fibre& b) {
    return a.place.line == b.place.line && !std::strcmp(a.place.file, b.place.file);
}

std::string where(const Fibre& fibre) {
    if (fibre.state == State::done) return "has ended";
    char text[256];
    const char* file = name_of(fibre.place.file);
    if (fibre.state == State::barrier)
        std::snprintf(text, sizeof text, "waits for the block at %s:%d", file, fibre.place.line);
    else
        std::snprintf(text, sizeof text, "waits for lanes %08x at %s:%d", fibre.mask, file, fibre.place.line);
    return text;
}

// Lets the lanes go on that `thread` waits for, if all are there.
bool resolve_vote(unsigned thread) {
    const Fibre& one = launch.fibres[thread];
    const unsigned base = thread / lanes * lanes;
    std::uint64_t combined = 0;
    unsigned live = 0;
    for (unsigned lane = 0; lane < lanes && base + lane < launch.threads; ++lane) {
        const Fibre& other = launch.fibres[base + lane];
        live |= static_cast<unsigned>(other.state != State::done) << lane;
        if (!(one.mask >> lane & 1)) continue;
        if (other.state != State::vote || other.mask != one.mask || other.vote != one.vote || !same_place(one, other))
            return false;
        combined ^= one.vote == shim_vote::ballot ? other.value << lane : other.value;
    }
    for (unsigned lane = 0; lane < lanes; ++lane) {
        if (!(one.mask >> lane & 1)) continue;
        Fibre& fibre = launch.fibres[base + lane];
        fibre.result = one.vote == shim_vote::exchange ? launch.fibres[base + fibre.source].value : combined;
    }
    const unsigned mask = one.mask;
    // A shuffle orders no memory.
    if (one.vote == shim_vote::sync && (mask & live) == live) ++launch.warp_times[thread / lanes];
    for (unsigned lane = 0; lane < lanes; ++lane)
        if (mask >> lane & 1) launch.fibres[base + lane].state = State::ready;
    return true;
}

bool resolve_votes() {
    bool any = false;
    for (unsigned thread = 0; thread < launch.threads; ++thread)
        if (launch.fibres[thread].state == State::vote) any |= resolve_vote(thread);
    return any;
}

bool resolve_barrier() {
    const Fibre& first = launch.fibres[0];
    const auto differs = [&](const Fibre& fibre) {
        return fibre.state != first.state || fibre.barrier != first.barrier ||
               (!first.barrier && !same_place(first, fibre));
    };
    const auto odd = std::find_if(launch.fibres.begin(), launch.fibres.end(), differs);
    if (odd == launch.fibres.end() && first.state == State::barrier) {
        ++launch.time;
        for (Fibre& fibre : launch.fibres) fibre.state = State::ready;
        return true;
    }
    const Fibre& other = odd == launch.fibres.end() ? launch.fibres.back() : *odd;
    describe("a divergent wait in block %u: thread 0 %s, thread %zu %s", blockIdx.x, where(first).c_str(),
             static_cast<std::size_t>(&other - &first), where(other).c_str());
    return false;
}

bool run_block(const std::vector<unsigned>& order) {
    for (Fibre& fibre : launch.fibres) start_fibre(fibre);
    for (;;) {
        for (unsigned thread : order) {
            if (launch.fibres[thread].state != State::ready) continue;
            to_fibre(thread);
            if (!launch.error.empty()) return false;
        }
        if (resolve_votes()) continue;
        const auto ended = [](const Fibre& fibre) { return fibre.state == State::done; };
        if (std::all_of(launch.fibres.begin(), launch.fibres.end(), ended)) return true;
        if (!resolve_barrier()) return false;
    }
}

// Seed 0 runs threads in order, seed 1 backwards, any other shuffles the warps and the lanes of each.
std::vector<unsigned> draw_order(std::uint64_t seed, std::mt19937_64& random) {
    std::vector<unsigned> order(launch.threads);
    std::iota(order.begin(), order.end(), 0u);
    if (seed == 1) std::reverse(order.begin(), order.end());
    if (seed < 2) return order;
    std::vector<unsigned> warps((launch.threads + lanes - 1) / lanes);
    std::iota(warps.begin(), warps.end(), 0u);
    std::shuffle(warps.begin(), warps.end(), random);
    order.clear();
    for (unsigned warp : warps) {
        const auto start = order.size();
        for (unsigned thread = warp * lanes; thread < std::min<unsigned>(launch.threads, (warp + 1) * lanes); ++thread)
            order.push_back(thread);
        std::shuffle(order.begin() + static_cast<std::ptrdiff_t>(start), order.end(), random);
    }
    return order;
}

// ---- memory ----

void poison_shared(std::mt19937_64& random) {
    unsigned char* start = shim_shared();
    const std::size_t size = launch.buffers[0].end - launch.buffers[0].start;
    std::uint64_t word = random() | 1;
    for (std::size_t place = 0; place < size; place += sizeof word) {
        word ^= word << 13, word ^= word >> 7, word ^= word << 17;
        std::memcpy(start + place, &word, std::min(sizeof word, size - place));
    }
}

void make_room() {
    if (stacks) return;
    constexpr std::size_t each = stack_size + page;
    constexpr int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks = static_cast<unsigned char*>(mmap(nullptr, max_threads * each, access, kind, -1, 0));
    for (std::size_t thread = 0; thread < max_threads; ++thread) mprotect(stacks + thread * each, page, PROT_NONE);
    shared_arena = static_cast<unsigned char*>(mmap(nullptr, max_shared + 2 * fence, access, kind, -1, 0));
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void*) {
            const auto here = reinterpret_cast<std::uintptr_t>(&launch);
            std::uintptr_t low = UINTPTR_MAX, high = 0;
            for (int index = 0; index < info->dlpi_phnum; ++index) {
                const auto& part = info->dlpi_phdr[index];
                if (part.p_type != PT_LOAD) continue;
                low = std::min<std::uintptr_t>(low, info->dlpi_addr + part.p_vaddr);
                high = std::max<std::uintptr_t>(high, info->dlpi_addr + part.p_vaddr + part.p_memsz);
            }
            if (here < low || here >= high) return 0;
            image_start = low, image_end = high;
            return 1;
        },
        nullptr);
}

bool is_ordered(std::uint16_t who, std::uint32_t at, std::uint16_t in) {
    if (who == no_warp || at < launch.block_start || at != launch.time) return true;
    if (who == several_warps) return false;
    const unsigned warp = launch.current / lanes;
    if (who & whole_warp) return (who & ~whole_warp) == warp && in != launch.warp_times[warp];
    return who == launch.current || (who / lanes == warp && in != launch.warp_times[warp]);
}

// Notes an access, or says what is wrong with it.
bool mark(Trace& trace, bool shared, bool writes, const char*& trouble) {
    const auto self = static_cast<std::uint16_t>(launch.current);
    const auto warp_time = launch.warp_times[self / lanes];
    const bool other_block = trace.written_at && trace.written_at < launch.block_start && !shared;
    const bool read_by_other = trace.read_at && trace.read_at < launch.block_start && !shared;
    if (other_block || !is_ordered(trace.writer, trace.written_at, trace.written_in)) {
        trouble = writes ? "writes what another wrote" : "reads what another writes";
        return false;
    }
    if (writes) {
        if (read_by_other || !is_ordered(trace.reader, trace.read_at, trace.read_in)) {
            trouble = "writes what another reads";
            return false;
        }
        trace.writer = self, trace.written_at = launch.time, trace.written_in = warp_time;
        return true;
    }
    const bool earlier = trace.reader == no_warp || trace.read_at != launch.time;
    if (earlier || trace.reader == self) {
        trace.reader = self;
    } else if (trace.reader != several_warps) {
        const auto warp = static_cast<std::uint16_t>(self / lanes);
        const bool whole = trace.reader & whole_warp;
        const auto their = static_cast<std::uint16_t>(whole ? trace.reader & ~whole_warp : trace.reader / lanes);
        if (their != warp) trace.reader = several_warps;
        else if (trace.read_in != warp_time) trace.reader = self;
        else trace.reader = static_cast<std::uint16_t>(whole_warp | warp);
    }
    trace.read_at = launch.time, trace.read_in = warp_time;
    return true;
}

// AddressSanitizer sees every byte in front of and behind the buffers, but for those that share eight with them in front.
void fence_buffers([[maybe_unused]] bool stands) {
#ifdef SHIM_ADDRESS_SANITIZER
    for (std::size_t index = 1; index < launch.buffers.size(); ++index) {
        const auto& buffer = launch.buffers[index];
        const auto change = stands ? __asan_poison_memory_region : __asan_unpoison_memory_region;
        change(reinterpret_cast<void*>(buffer.start - buffer_fence), buffer_fence);
        change(reinterpret_cast<void*>(buffer.end), buffer_fence);
    }
    for (std::size_t index = 1; index < launch.buffers.size(); ++index) {
        const auto& buffer = launch.buffers[index];
        __asan_unpoison_memory_region(reinterpret_cast<void*>(buffer.start), buffer.end - buffer.start);
    }
#endif
}

[[noreturn]] void refuse(const char* what, std::uintptr_t address, std::size_t size, void* caller) {
    char place[64] = "";
    if (address >= launch.buffers[0].start && address < launch.buffers[0].end + fence)
        std::snprintf(place, sizeof place, " of shared memory, offset %zu",
                      static_cast<std::size_t>(address - launch.buffers[0].start));
    for (std::size_t index = 1; index < launch.buffers.size() && !*place; ++index)
        if (address >= launch.buffers[index].start && address < launch.buffers[index].end)
            std::snprintf(place, sizeof place, " of buffer %zu, offset %zu", index - 1,
                          static_cast<std::size_t>(address - launch.buffers[index].start));
    describe("thread %u of block %u %s: %zu bytes%s, by code before %#zx", launch.current, blockIdx.x, what, size, place,
             static_cast<std::size_t>(reinterpret_cast<std::uintptr_t>(caller) - image_start));
    leave();
}

enum class Access { read, write, atomic };

[[maybe_unused]] void watch(const void* pointer, std::size_t size, Access access, std::size_t alignment, void* caller) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    const Fibre& fibre = launch.fibres[launch.current];
    const auto stack = reinterpret_cast<std::uintptr_t>(fibre.stack);
    if (address >= stack && address < stack + stack_size) return;
    if (address % alignment) refuse("makes a misaligned access", address, size, caller);
    for (Buffer& buffer : launch.buffers) {
        if (address < buffer.start || address >= buffer.end) continue;
        if (address + size > buffer.end) refuse("reaches over the end of a buffer", address, size, caller);
        if (access != Access::read && !buffer.writable) refuse("writes what is not its own", address, size, caller);
        if (access == Access::atomic || buffer.traces.empty()) return;
        const char* trouble = nullptr;
        for (std::size_t place = 0; place < size; ++place)
            if (!mark(buffer.traces[address - buffer.start + place], buffer.shared, access == Access::write, trouble))
                refuse(trouble, address + place, size, caller);
        return;
    }
    if (access == Access::read && address >= image_start && address + size <= image_end) return;
    refuse(access == Access::read ? "reads out of bounds" : "writes out of bounds", address, size, caller);
}

}  // namespace

// ---- what kernels call ----

unsigned char* shim_shared() { return shared_arena + fence + 16; }

void shim_barrier(shim_place place, unsigned name) {
    Fibre& fibre = launch.fibres[launch.current];
    fibre.state = State::barrier;
    fibre.barrier = name;
    fibre.place = place;
    to_scheduler();
}

void shim_named_barrier(shim_place place, unsigned name, unsigned threads) {
    if (!name || name > 15 || threads != launch.threads) {
        describe("thread %u of block %u meets %u threads at barrier %u, %s:%d: expected all %u, and a name from 1 to 15",
                 launch.current, blockIdx.x, threads, name, name_of(place.file), place.line, launch.threads);
        leave();
    }
    shim_barrier(place, name);
}

unsigned long long shim_meet(shim_vote vote, unsigned mask, unsigned long long value, unsigned source,
                             shim_place place) {
    Fibre& fibre = launch.fibres[launch.current];
    const unsigned lane = launch.current % lanes, base = launch.current - lane;
    const bool present = launch.threads - base >= lanes || !(mask >> (launch.threads - base));
    if (!(mask >> lane & 1) || !present || (vote == shim_vote::exchange && !(mask >> source & 1))) {
        describe("thread %u of block %u names the wrong lanes at %s:%d: mask %08x, lane %u asks lane %u",
                 launch.current, blockIdx.x, name_of(place.file), place.line, mask, lane, source);
        leave();
    }
    fibre.state = State::vote;
    fibre.place = place, fibre.vote = vote, fibre.mask = mask, fibre.source = source, fibre.value = value;
    to_scheduler();
    return launch.fibres[launch.current].result;
}

void shim_atomic(const void* address, unsigned long long size) {
#ifdef SHIM_WATCH
    watch(address, size, Access::atomic, size, __builtin_return_address(0));
#else
    (void)address, (void)size;
#endif
}

// ---- what Python calls ----

namespace {

// Runs the blocks of a grid from number `start` on.
std::uint64_t run_grid(void* kernel, const std::uint64_t* arguments, std::uint64_t count, std::uint64_t grid,
                       std::uint64_t start, std::uint64_t block, std::uint64_t shared, std::uint64_t seed,
                       const ShimBuffer* buffers, std::uint64_t buffer_count, char* message, std::uint64_t room) {
    make_room();
    launch = Launch{};
    if (count > max_arguments || !block || block > max_threads || shared > max_shared) {
        std::snprintf(message, room, "no launch has these sizes");
        return 1;
    }
    launch.kernel = kernel;
    std::copy_n(arguments, count, launch.arguments);
    launch.threads = static_cast<unsigned>(block);
    launch.fibres.resize(block);
    for (std::size_t thread = 0; thread < block; ++thread)
        launch.fibres[thread].stack = stacks + thread * (stack_size + page) + page;
    launch.warp_times.assign((block + lanes - 1) / lanes, 0);

    const auto base = reinterpret_cast<std::uintptr_t>(shim_shared());
    launch.buffers.push_back({base, base + shared, true, true, std::vector<Trace>(shared)});
    for (std::size_t index = 0; index < buffer_count; ++index) {
        const ShimBuffer& given = buffers[index];
        // Read-only memory has no races. A trace is larger than the byte that it is of, too large for gigabytes.
        const bool traced = given.writable && given.size < huge;
        launch.buffers.push_back({given.start, given.start + given.size, given.writable != 0, false,
                                  std::vector<Trace>(traced ? given.size : 0)});
    }
#ifdef SHIM_ADDRESS_SANITIZER
    __asan_poison_memory_region(shared_arena, max_shared + 2 * fence);
    __asan_unpoison_memory_region(shim_shared(), shared);
#endif
    fence_buffers(true);
    std::mt19937_64 random(seed);
    gridDim = {static_cast<unsigned>(grid), 1, 1};
    blockDim = {launch.threads, 1, 1};
    for (std::uint64_t number = start; number < grid; ++number) {
        // Blocks of one launch end in any order, too.
        blockIdx = {static_cast<unsigned>(seed == 1 ? grid - 1 - (number - start) : number), 0, 0};
        poison_shared(random);
        launch.block_start = ++launch.time;
        if (!run_block(draw_order(seed, random))) break;
    }
    fence_buffers(false);
    std::snprintf(message, room, "%s", launch.error.c_str());
    return !launch.error.empty();
}

}  // namespace

std::uint64_t shim_launch(void* kernel, const std::uint64_t* arguments, std::uint64_t count, std::uint64_t grid,
                          std::uint64_t block, std::uint64_t shared, std::uint64_t seed, const ShimBuffer* buffers,
                          std::uint64_t buffer_count, char* message, std::uint64_t room) {
    return run_grid(kernel, arguments, count, grid, 0, block, shared, seed, buffers, buffer_count, message, room);
}

// Runs only the last block of a grid.
std::uint64_t shim_launch_last(void* kernel, const std::uint64_t* arguments, std::uint64_t count, std::uint64_t grid,
                               std::uint64_t block, std::uint64_t shared, std::uint64_t seed, const ShimBuffer* buffers,
                               std::uint64_t buffer_count, char* message, std::uint64_t room) {
    return run_grid(kernel, arguments, count, grid, grid - 1, block, shared, seed, buffers, buffer_count, message, room);
}

// What the last block of a launch left in shared memory.
const unsigned char* shim_remains() { return shim_shared(); }

// ---- what the compiler calls in the watched build ----

#ifdef SHIM_WATCH
extern "C" {
#define SHIM_CALLER __builtin_return_address(0)
#define SHIM_HOOKS(n)                                                                                   \
    void __tsan_read##n(void* p) { watch(p, n, Access::read, n, SHIM_CALLER); }                         \
    void __tsan_write##n(void* p) { watch(p, n, Access::write, n, SHIM_CALLER); }                       \
    void __tsan_unaligned_read##n(void* p) { watch(p, n, Access::read, 1, SHIM_CALLER); }               \
    void __tsan_unaligned_write##n(void* p) { watch(p, n, Access::write, 1, SHIM_CALLER); }             \
    void __tsan_volatile_read##n(void* p) { watch(p, n, Access::read, n, SHIM_CALLER); }                \
    void __tsan_volatile_write##n(void* p) { watch(p, n, Access::write, n, SHIM_CALLER); }
SHIM_HOOKS(1)
SHIM_HOOKS(2)
SHIM_HOOKS(4)
SHIM_HOOKS(8)
SHIM_HOOKS(16)
void __tsan_read_range(void* p, unsigned long n) { watch(p, n, Access::read, 1, SHIM_CALLER); }
void __tsan_write_range(void* p, unsigned long n) { watch(p, n, Access::write, 1, SHIM_CALLER); }
void __tsan_init() {}

// What -fsanitize=alignment reports, as libubsan reads it.
struct ShimMismatch {
    const char* file;
    std::uint32_t line, column;
    const void* type;
    unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1_abort(ShimMismatch* what, std::uintptr_t address) {
    describe("thread %u of block %u makes a misaligned access at %s:%u: address %#zx, alignment %u", launch.current,
             blockIdx.x, name_of(what->file), what->line, static_cast<std::size_t>(address), 1u << what->log_alignment);
    leave();
}

// The atomics of shim.h have announced themselves.
unsigned __tsan_atomic32_load(const volatile unsigned* p, int) { return *p; }
void __tsan_atomic32_store(volatile unsigned* p, unsigned value, int) { *p = value; }
unsigned long long __tsan_atomic64_load(const volatile unsigned long long* p, int) { return *p; }
void __tsan_atomic64_store(volatile unsigned long long* p, unsigned long long value, int) { *p = value; }
}
#endif
