// Modules, functions and launches. fastrack's kernels run through the shim of tests/kernels, in a library that Python
// names; of CuPy's own there is an addition, which tests use to put work on a stream.

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator.h"

namespace emulator {

namespace {

constexpr int carveout_default = -1, carveout_max_shared = 100;
enum FunctionAttribute {
    max_threads_per_block = 0,
    shared_size = 1,
    local_size = 3,
    register_count = 4,
    max_dynamic_shared = 8,
    preferred_carveout = 9,
};

using ShimLaunch = const char* (*)(void*, const std::uint64_t*, std::uint64_t, std::uint64_t, std::uint64_t,
                                   std::uint64_t, std::uint64_t);
void* shim;
ShimLaunch shim_launch;

// The values of a launch's parameters, as they lie behind each other.
using Values = std::vector<unsigned char>;

Status collect_values(const Kernel& kernel, void** parameters, void** extra, Values* values) {
    std::size_t size = 0;
    if (!kernel.parameters.empty()) size = kernel.parameters.back().offset + kernel.parameters.back().size;
    values->resize(size);
    if (parameters) {
        for (std::size_t index = 0; index < kernel.parameters.size(); ++index) {
            const Parameter& parameter = kernel.parameters[index];
            std::memcpy(values->data() + parameter.offset, parameters[index], parameter.size);
        }
        return success;
    }
    // CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE
    const void* buffer = nullptr;
    std::size_t given = 0;
    for (void** item = extra; item && *item; item += 2) {
        if (*item == reinterpret_cast<void*>(1)) buffer = item[1];
        if (*item == reinterpret_cast<void*>(2)) given = *static_cast<std::size_t*>(item[1]);
    }
    if (given < size || (size && !buffer)) return invalid_value;
    if (size) std::memcpy(values->data(), buffer, size);
    return success;
}

Status check_sizes(const Kernel& kernel, Grid grid, Grid block, unsigned shared) {
    if (!grid.threads() || !block.threads() || block.threads() > max_threads) return invalid_value;
    if (static_cast<int>(shared) > kernel.dynamic_shared) return invalid_value;
    if (block.threads() > static_cast<unsigned>(kernel.max_threads)) return launch_out_of_resources;
    if (block.threads() * kernel.registers > registers_per_block) return launch_out_of_resources;
    return success;
}

std::mutex shim_use;  // the shim runs one launch at once

void run_in_shim(const Kernel& kernel, void* function, const Values& values, Grid grid, Grid block, unsigned shared) {
    // What is larger than a word, the shim takes by its address.
    std::vector<std::uint64_t> words;
    for (const Parameter& parameter : kernel.parameters) {
        const unsigned char* value = values.data() + parameter.offset;
        words.push_back(reinterpret_cast<std::uint64_t>(value));
        if (parameter.size <= sizeof words[0]) std::memcpy(&words.back(), value, parameter.size);
    }
    std::lock_guard guard(shim_use);
    if (const char* message = shim_launch(function, words.data(), words.size(), 0, grid.x, block.x, shared))
        violate("kernel " + kernel.name + ": " + message);
}

// Leaves the ticket of a launch whose kernel does nothing, as if it had found nothing bad. The tickets of kernels/verdict.cuh
// stand behind the address of the verdict.
void leave_ticket(const Kernel& kernel, const Values& values) {
    const std::string kind = kernel.name.substr(0, kernel.name.find('_'));
    const bool keys = kind == "small" || kind == "pick" || kind == "seal";
    const bool paged = kind == "keep" || kind == "restore";
    if (!keys && !paged && kind != "open" && kind != "gather" && kind != "widen") return;
    const std::uint64_t* words = reinterpret_cast<const std::uint64_t*>(values.data());
    const std::size_t place = keys ? 7 : paged ? 4 : 5;
    std::uint64_t* verdict = reinterpret_cast<std::uint64_t*>(words[place]);
    const std::uint64_t ticket = words[place + 1], plan = std::uint64_t{1} << 63;
    verdict[2] = ticket & ~plan;
    if (ticket & plan) verdict[4] = verdict[2];
    if (kind != "seal" && kind != "keep") return;
    std::uint64_t* told = reinterpret_cast<std::uint64_t*>(words[place + 2]);
    told[0] = verdict[2];
    told[1] = verdict[0];
}

// cupy.add of an array of bytes and a byte: two arrays (CArray: data, size, shape, strides), the scalar between them.
void add_bytes(const Values& values) {
    struct Array {
        std::uint8_t* data;
        std::int64_t size, shape, stride;
    };
    Array source, target;
    std::memcpy(&source, values.data(), sizeof source);
    const std::uint8_t addend = values[sizeof source];
    std::memcpy(&target, values.data() + sizeof source + 8, sizeof target);
    for (std::int64_t i = 0; i < source.size; ++i) target.data[i] = static_cast<std::uint8_t>(source.data[i] + addend);
}

}  // namespace

EXPORTED int emulator_load_kernels(const char* path) {
    shim = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!shim) return 1;
    shim_launch = reinterpret_cast<ShimLaunch>(dlsym(shim, "shim_launch"));
    return 0;
}

Status load_module(Module** module, const void* image) {
    std::vector<std::unique_ptr<Kernel>> kernels;
    if (Status status = read_image(image, &kernels)) return status;
    *module = new Module{std::move(kernels)};
    return success;
}

Status find_kernel(Kernel** kernel, Module* module, const char* name) {
    for (const auto& each : module->kernels) {
        if (each->name != name) continue;
        *kernel = each.get();
        return success;
    }
    return not_found;
}

Status set_attribute(Kernel* kernel, int attribute, int value) {
    if (attribute == max_dynamic_shared) {
        // The reserved kibibyte is part of what a cubin counts as static.
        if (value < 0 || value + std::max(kernel->static_shared - shared_reserved, 0) > shared_optin)
            return invalid_value;
        kernel->dynamic_shared = value;
        return success;
    }
    if (attribute == preferred_carveout) {
        if (value < carveout_default || value > carveout_max_shared) return invalid_value;
        kernel->carveout = value;
        return success;
    }
    return invalid_value;
}

Status get_attribute(int* value, int attribute, Kernel* kernel) {
    switch (attribute) {
        case max_threads_per_block: *value = kernel->max_threads; return success;
        case shared_size: *value = std::max(kernel->static_shared - shared_reserved, 0); return success;
        case local_size: *value = kernel->frame; return success;
        case register_count: *value = kernel->registers; return success;
        case max_dynamic_shared: *value = kernel->dynamic_shared; return success;
        case preferred_carveout: *value = kernel->carveout; return success;
        default: return invalid_value;
    }
}

Status launch(Kernel* kernel, Grid grid, Grid block, unsigned shared, Stream* stream, void** parameters, void** extra) {
    if (Status status = check_sizes(*kernel, grid, block, shared)) {
        violate("kernel " + kernel->name + " is launched with sizes that it does not support");
        return status;
    }
    if (on_wrong_device(stream)) {
        violate("kernel " + kernel->name + " is launched on a stream of another device");
        return invalid_handle;
    }
    Values values;
    if (Status status = collect_values(*kernel, parameters, extra, &values)) return status;
    if (void* function = shim ? dlsym(shim, kernel->name.c_str()) : nullptr) {
        if (!settings().kernels) return enqueue(stream, [=] { leave_ticket(*kernel, values); });
        return enqueue(stream, [=] { run_in_shim(*kernel, function, values, grid, block, shared); });
    }
    if (kernel->name.rfind("cupy_add__", 0) == 0) return enqueue(stream, [=] { add_bytes(values); });
    std::fprintf(stderr, "emulator: kernel %s is not emulated; its parameters:", kernel->name.c_str());
    for (const Parameter& parameter : kernel->parameters) std::fprintf(stderr, " %zu", parameter.size);
    std::fprintf(stderr, "\n");
    return not_supported;
}

}  // namespace emulator
