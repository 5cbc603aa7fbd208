// Device memory and page-locked memory, both mapped from the host's, and copies between them.

#include <sys/mman.h>

#include <cstring>
#include <iterator>
#include <map>

#include "emulator.h"

namespace emulator {

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t noisy = 64 << 20;  // up to this size fresh memory is filled with noise
constexpr int noise = 0xA5;

struct Range {
    std::size_t size, mapped;
    Kind kind;
    int device;
};

std::map<std::uintptr_t, Range>& ranges = *new std::map<std::uintptr_t, Range>;
std::map<int, std::size_t>& used = *new std::map<int, std::size_t>;
std::size_t page_locked = 0;

// The range that holds these bytes; null if there is none. Called with the mutex held.
const Range* find_range(const void* pointer, std::size_t size) {
    const auto start = reinterpret_cast<std::uintptr_t>(pointer);
    auto after = ranges.upper_bound(start);
    if (after == ranges.begin()) return nullptr;
    const auto& [first, range] = *std::prev(after);
    return start + size <= first + range.size ? &range : nullptr;
}

Status require_device_memory(const char* call, const void* pointer, std::size_t size) {
    if (find_memory(pointer, size, Kind::device)) return success;
    violate(std::string(call) + ": " + std::to_string(size) + " bytes that are not device memory");
    return invalid_value;
}

Direction infer(const void* target, const void* source) {
    const bool to = find_memory(target, 1, Kind::device), from = find_memory(source, 1, Kind::device);
    return static_cast<Direction>(2 * from + to);
}

}  // namespace

Status allocate(void** pointer, std::size_t size, Kind kind) {
    *pointer = nullptr;
    if (!size) return success;
    if (Status status = require_safe()) return status;
    std::lock_guard guard(mutex);
    const int device = current_device();
    if (kind == Kind::device && used[device] + size > settings().memory) return out_of_memory;
    if (kind == Kind::pinned && page_locked + size > settings().page_locked) return out_of_memory;
    // A page without access follows, so that a kernel which writes far beyond the end does not go unnoticed.
    const std::size_t mapped = (size + page - 1) / page * page + page;
    void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return out_of_memory;
    mprotect(static_cast<char*>(memory) + mapped - page, page, PROT_NONE);
    if (kind == Kind::device) {
        used[device] += size;
        if (size <= noisy) std::memset(memory, noise, size);
    } else {
        page_locked += size;
    }
    ranges[reinterpret_cast<std::uintptr_t>(memory)] = {size, mapped, kind, device};
    *pointer = memory;
    return success;
}

Status release(void* pointer, Kind kind) {
    if (!pointer) return success;
    if (Status status = require_safe()) return status;
    drain_all();
    {
        std::lock_guard guard(mutex);
        auto found = ranges.find(reinterpret_cast<std::uintptr_t>(pointer));
        if (found != ranges.end() && found->second.kind == kind) {
            (kind == Kind::device ? used[found->second.device] : page_locked) -= found->second.size;
            munmap(pointer, found->second.mapped);
            ranges.erase(found);
            return success;
        }
    }
    violate("memory is freed that is not allocated");
    return invalid_value;
}

Status memory_info(std::size_t* free, std::size_t* total) {
    std::lock_guard guard(mutex);
    *total = settings().memory;
    *free = *total - used[current_device()];
    return success;
}

bool find_memory(const void* pointer, std::size_t size, Kind kind, int* device) {
    std::lock_guard guard(mutex);
    const Range* range = find_range(pointer, size);
    if (!range || range->kind != kind) return false;
    if (device) *device = range->device;
    return true;
}

Status copy(void* target, const void* source, std::size_t size, Direction direction, Stream* stream) {
    if (!size) return success;
    on_wrong_device(stream);
    if (direction == any_direction) direction = infer(target, source);
    const bool to_device = direction == host_to_device || direction == device_to_device;
    const bool from_device = direction == device_to_host || direction == device_to_device;
    if (to_device)
        if (Status status = require_device_memory("copy to", target, size)) return status;
    if (from_device)
        if (Status status = require_device_memory("copy from", source, size)) return status;
    if (direction == host_to_device && !find_memory(source, size, Kind::pinned)) {
        // Pageable memory is staged before the call returns.
        count("copy from pageable memory");
        const auto* start = static_cast<const char*>(source);
        auto staged = std::make_shared<std::vector<char>>(start, start + size);
        return enqueue(stream, [=] { std::memcpy(target, staged->data(), size); }, Crossing::staged);
    }
    const Crossing crossing = to_device != from_device ? Crossing::awaited : Crossing::none;
    if (Status status = enqueue(stream, [=] { std::memmove(target, source, size); }, crossing)) return status;
    if (direction == device_to_host && !find_memory(target, size, Kind::pinned)) {
        count("copy to pageable memory");
        return synchronize_stream(stream);
    }
    return success;
}

Status copy_and_wait(void* target, const void* source, std::size_t size, Direction direction) {
    if (Status status = copy(target, source, size, direction, nullptr)) return status;
    return synchronize_stream(nullptr);
}

Status fill(void* target, int value, std::size_t size, Stream* stream) {
    if (!size) return success;
    on_wrong_device(stream);
    if (Status status = require_device_memory("fill of", target, size)) return status;
    return enqueue(stream, [=] { std::memset(target, value, size); });
}

}  // namespace emulator
