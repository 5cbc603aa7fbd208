// CUDA devices on host memory. A stream is a thread, an event refers to a mark that a stream sets, a context is a device.
//
// The runtime API (runtime.cpp) and the driver API (driver.cpp) are two sets of names for the functions declared here.
// cudaError_t and CUresult use the same numbers, so that one `Status` serves both.

#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace emulator {

using Status = int;
enum : Status {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    no_binary_for_gpu = 209,
    invalid_ptx = 218,
    unsupported_ptx_version = 222,
    file_not_found = 301,
    invalid_handle = 400,
    not_found = 500,
    not_ready = 600,
    launch_out_of_resources = 701,
    launch_failed = 719,
    not_supported = 801,
    system_not_ready = 802,
    capture_unsupported = 900,
    capture_invalidated = 901,
    capture_merge = 902,
    capture_unmatched = 903,
    capture_isolation = 905,
    capture_implicit = 906,
    captured_event = 907,
    capture_wrong_thread = 908,
};

// The properties of an H100 SXM that the emulated devices report.
constexpr int multiprocessors = 132;
constexpr int max_threads = 1024, warp_size = 32, registers_per_block = 65536;
constexpr int shared_default = 49152, shared_optin = 232448, shared_reserved = 1024;

// Settings, from environment variables; see README.md.
struct Settings {
    int devices;
    std::size_t memory;
    std::size_t page_locked;  // bytes of page-locked memory that the host gives
    unsigned delay, call_time, toll;
    bool confidential, ready, kernels;
    int compute, ptx;  // the compute capability, and the version of PTX that the driver compiles, both times ten
};
const Settings& settings();

// ---- bookkeeping: state.cpp ----

// Guards everything below. Never held while work runs.
extern std::mutex& mutex;

void count(const char* call);
// Report a use that CUDA forbids or leaves undefined. Takes the mutex.
void violate(const std::string& what);
// Whether this is a forked child, in which CUDA does not work. Counts how often that was asked there.
bool is_forked();

template <typename Body>
Status counted(const char* call, Body body) {
    if (is_forked()) return not_initialized;
    count(call);
    // What asks for versions and addresses starts nothing.
    if (!settings().ready && !std::strstr(call, "Version") && !std::strstr(call, "GetProcAddress")) return system_not_ready;
    return body();
}

// ---- contexts: state.cpp ----

struct Context {
    int device;
    int retained;
};

Context* current_context();  // null if this thread has none
int current_device();        // that of the current context, or 0
Status set_device(int device);
void ensure_context();  // as the runtime API does before most calls
void push_context(Context* context);
Status pop_context(Context** context);
Context* primary_context(int device);  // null if there is no such device

// ---- streams, events, captures: streams.cpp ----

// A point in a stream, passed when the work before it is done.
struct Mark {
    bool passed = false;
    std::chrono::steady_clock::time_point time;
};
using MarkPointer = std::shared_ptr<Mark>;
using Action = std::function<void()>;

struct Stream;
struct Event;
struct Graph {
    std::vector<Action> nodes;
};

constexpr unsigned stream_non_blocking = 1, event_disable_timing = 2;

Status create_stream(Stream** stream, unsigned flags, int priority);
Status destroy_stream(Stream* stream);
Status stream_properties(Stream* stream, unsigned* flags, int* priority, int* device);
Status query_stream(Stream* stream);
Status synchronize_stream(Stream* stream);
Status synchronize_device();
// Wait for all devices, as freeing memory does. Takes the mutex.
void drain_all();

// A copy between host and device: one of page-locked memory makes its caller wait in confidential mode, and one of
// memory that was staged before does not.
enum class Crossing { none, staged, awaited };

// Queue an action. In confidential mode one at a time crosses, and `awaited` waits for it and for all before it.
Status enqueue(Stream* stream, Action action, Crossing crossing = Crossing::none);
// Count a call on a stream of another device than the current one, and return whether it was one.
bool on_wrong_device(Stream* stream);

Status create_event(Event** event, unsigned flags);
Status destroy_event(Event* event);
Status record_event(Event* event, Stream* stream);
Status wait_event(Stream* stream, Event* event);
Status query_event(Event* event);
Status synchronize_event(Event* event);
Status elapsed_time(float* milliseconds, Event* start, Event* stop);

Status begin_capture(Stream* stream, int mode);
Status end_capture(Stream* stream, Graph** graph);
Status is_capturing(Stream* stream, int* status);
// Exchange the mode of this thread, which says whose captures refuse it unsafe calls. A thread begins with that of 0, global.
Status exchange_mode(int* mode);
Status launch_graph(Graph* graph, Stream* stream);
// Refuse a call that is unsafe while a capture is under way, and invalidate that capture. Takes the mutex.
Status require_safe();

// ---- memory: memory.cpp ----

enum class Kind { device, pinned };
enum Direction { host_to_host, host_to_device, device_to_host, device_to_device, any_direction };

Status allocate(void** pointer, std::size_t size, Kind kind);
Status release(void* pointer, Kind kind);
Status memory_info(std::size_t* free, std::size_t* total);
// Whether memory of that kind holds [pointer, pointer + size); `device` receives whose it is.
bool find_memory(const void* pointer, std::size_t size, Kind kind, int* device = nullptr);
Status copy(void* target, const void* source, std::size_t size, Direction direction, Stream* stream);
Status copy_and_wait(void* target, const void* source, std::size_t size, Direction direction);
Status fill(void* target, int value, std::size_t size, Stream* stream);

// ---- kernels: cubin.cpp, kernels.cpp ----

struct Parameter {
    std::size_t offset, size;
};

// What a cubin says of a kernel.
struct Kernel {
    std::string name;
    std::vector<Parameter> parameters;
    int max_threads = emulator::max_threads, registers = 0, static_shared = 0, frame = 0;
    // Set by attributes.
    int dynamic_shared = shared_default, carveout = -1;
};

struct Module {
    std::vector<std::unique_ptr<Kernel>> kernels;
};

// Read the kernels of a cubin, or of PTX, if the device and the driver take it.
Status read_image(const void* image, std::vector<std::unique_ptr<Kernel>>* kernels);

struct Grid {
    unsigned x, y, z;
    std::uint64_t threads() const { return std::uint64_t{x} * y * z; }
};

Status load_module(Module** module, const void* image);
Status find_kernel(Kernel** kernel, Module* module, const char* name);
Status set_attribute(Kernel* kernel, int attribute, int value);
Status get_attribute(int* value, int attribute, Kernel* kernel);
Status launch(Kernel* kernel, Grid grid, Grid block, unsigned shared, Stream* stream, void** parameters, void** extra);

}  // namespace emulator

#define EXPORTED extern "C" __attribute__((visibility("default")))
