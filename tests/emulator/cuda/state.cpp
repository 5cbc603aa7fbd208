// Settings, counters, violations, and the contexts of threads. Nothing here is destroyed: streams run until the process
// has ended.

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "emulator.h"

namespace emulator {

namespace {

std::map<std::string, std::uint64_t>& calls = *new std::map<std::string, std::uint64_t>;
std::uint64_t violations = 0;
std::atomic<bool> forked{false};
std::atomic<std::uint64_t> calls_after_fork{0};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });

thread_local std::vector<Context*> contexts;  // the thread's stack

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Keep the calling thread busy, as a call of a real driver does.
void spend(unsigned microseconds) {
    if (!microseconds) return;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
    while (std::chrono::steady_clock::now() < end) {
    }
}

}  // namespace

std::mutex& mutex = *new std::mutex;

const Settings& settings() {
    static const Settings read = [] {
        const char* kernels = std::getenv("EMU_KERNELS");
        return Settings{static_cast<int>(from_environment("EMU_DEVICES", 1)),
                        from_environment("EMU_MEMORY", std::uint64_t{16} << 30),
                        from_environment("EMU_PAGE_LOCKED", std::uint64_t{16} << 30),
                        static_cast<unsigned>(from_environment("EMU_DELAY", 0)),
                        static_cast<unsigned>(from_environment("EMU_CALL_TIME", 0)),
                        static_cast<unsigned>(from_environment("EMU_TOLL", 0)),
                        from_environment("EMU_CONFIDENTIAL", 0) != 0, from_environment("EMU_READY", 1) != 0,
                        !kernels || std::strcmp(kernels, "noop") != 0,
                        static_cast<int>(from_environment("EMU_COMPUTE", 90)),
                        static_cast<int>(from_environment("EMU_PTX", 90))};
    }();
    return read;
}

void count(const char* call) {
    spend(settings().call_time);
    std::lock_guard guard(mutex);
    ++calls[call];
}

void violate(const std::string& what) {
    std::lock_guard guard(mutex);
    ++violations;
    std::fprintf(stderr, "emulator: violation: %s\n", what.c_str());
}

bool is_forked() {
    // The mutex may be held by a thread that the child does not have.
    if (forked) ++calls_after_fork;
    return forked;
}

// ---- contexts ----

Context* primary_context(int device) {
    static std::vector<Context>& all = *new std::vector<Context>([] {
        std::vector<Context> made;
        for (int index = 0; index < settings().devices; ++index) made.push_back({index, 0});
        return made;
    }());
    return device >= 0 && device < settings().devices ? &all[device] : nullptr;
}

Context* current_context() { return contexts.empty() ? nullptr : contexts.back(); }

int current_device() {
    const Context* context = current_context();
    return context ? context->device : 0;
}

void push_context(Context* context) { contexts.push_back(context); }

Status pop_context(Context** context) {
    if (contexts.empty()) return invalid_context;
    if (context) *context = contexts.back();
    contexts.pop_back();
    return success;
}

void ensure_context() {
    if (!current_context()) set_device(0);
}

Status set_device(int device) {
    Context* context = primary_context(device);
    if (!context) return invalid_device;
    if (contexts.empty()) contexts.push_back(nullptr);
    contexts.back() = context;
    return success;
}

// ---- for Python ----

// Write the calls so far as lines of a name and a number.
EXPORTED std::uint64_t emulator_calls(char* text, std::uint64_t room) {
    std::lock_guard guard(mutex);
    std::string lines;
    for (const auto& [name, number] : calls) lines += name + " " + std::to_string(number) + "\n";
    if (lines.size() >= room) return 1;
    std::copy_n(lines.c_str(), lines.size() + 1, text);
    return 0;
}

EXPORTED void emulator_reset() {
    std::lock_guard guard(mutex);
    calls.clear();
    violations = 0;
}

EXPORTED std::uint64_t emulator_calls_after_fork() { return calls_after_fork; }

EXPORTED std::uint64_t emulator_violations() {
    std::lock_guard guard(mutex);
    return violations;
}

}  // namespace emulator
