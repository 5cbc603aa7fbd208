// The runtime API, as far as CuPy and fastrack use it. CuPy links its runtime statically: Python writes jumps to these
// functions over the ones in CuPy's library (attach.py).

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "emulator.h"

using namespace emulator;

namespace {

Stream* of(cudaStream_t stream) { return reinterpret_cast<Stream*>(stream); }
Event* of(cudaEvent_t event) { return reinterpret_cast<Event*>(event); }
Graph* of(cudaGraph_t graph) { return reinterpret_cast<Graph*>(graph); }
Graph* of(cudaGraphExec_t graph) { return reinterpret_cast<Graph*>(graph); }

const char* name_of(Status status) {
    switch (status) {
        case success: return "cudaSuccess";
        case invalid_value: return "cudaErrorInvalidValue";
        case out_of_memory: return "cudaErrorMemoryAllocation";
        case not_initialized: return "cudaErrorInitializationError";
        case no_device: return "cudaErrorNoDevice";
        case invalid_device: return "cudaErrorInvalidDevice";
        case invalid_handle: return "cudaErrorInvalidResourceHandle";
        case not_ready: return "cudaErrorNotReady";
        case not_supported: return "cudaErrorNotSupported";
        case system_not_ready: return "cudaErrorSystemNotReady";
        case capture_unsupported: return "cudaErrorStreamCaptureUnsupported";
        case capture_invalidated: return "cudaErrorStreamCaptureInvalidated";
        case capture_implicit: return "cudaErrorStreamCaptureImplicit";
        case captured_event: return "cudaErrorCapturedEvent";
        default: return "an error that the emulator does not name";
    }
}

}  // namespace

#define RUNTIME_WITHOUT_CONTEXT(name, parameters, ...)                                           \
    EXPORTED cudaError_t emulated_##name parameters {                                            \
        return static_cast<cudaError_t>(counted(#name, [&]() -> Status __VA_ARGS__));            \
    }
#define RUNTIME(name, parameters, ...)                                                           \
    EXPORTED cudaError_t emulated_##name parameters {                                            \
        return static_cast<cudaError_t>(counted(#name, [&]() -> Status {                         \
            ensure_context();                                                                    \
            return [&]() -> Status __VA_ARGS__();                                                \
        }));                                                                                     \
    }

// ---- devices ----

RUNTIME_WITHOUT_CONTEXT(cudaGetDeviceCount, (int* count), {
    *count = settings().devices;
    return settings().devices ? success : no_device;
})
RUNTIME_WITHOUT_CONTEXT(cudaGetDevice, (int* device), {
    *device = current_device();
    return success;
})
RUNTIME_WITHOUT_CONTEXT(cudaSetDevice, (int device), { return set_device(device); })
RUNTIME_WITHOUT_CONTEXT(cudaDriverGetVersion, (int* version), {
    *version = CUDART_VERSION;
    return success;
})
RUNTIME_WITHOUT_CONTEXT(cudaRuntimeGetVersion, (int* version), {
    *version = CUDART_VERSION;
    return success;
})
RUNTIME_WITHOUT_CONTEXT(cudaDeviceGetAttribute, (int* value, cudaDeviceAttr attribute, int device), {
    if (!primary_context(device)) return invalid_device;
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = settings().compute / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = settings().compute % 10; break;
        case cudaDevAttrMultiProcessorCount: *value = multiprocessors; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_optin; break;
        case cudaDevAttrWarpSize: *value = warp_size; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = max_threads; break;
        default: *value = 1;
    }
    return success;
})
RUNTIME_WITHOUT_CONTEXT(cudaGetDeviceProperties, (cudaDeviceProp * properties, int device), {
    if (!primary_context(device)) return invalid_device;
    std::memset(properties, 0, sizeof *properties);
    std::strcpy(properties->name, "emulated H100");
    properties->totalGlobalMem = settings().memory;
    properties->major = settings().compute / 10;
    properties->minor = settings().compute % 10;
    properties->multiProcessorCount = multiprocessors;
    properties->l2CacheSize = 50 << 20;
    properties->warpSize = warp_size;
    properties->maxThreadsPerBlock = max_threads;
    properties->sharedMemPerBlockOptin = shared_optin;
    return success;
})
RUNTIME_WITHOUT_CONTEXT(cudaGetLastError, (), { return success; })
RUNTIME(cudaDeviceSynchronize, (), { return synchronize_device(); })
RUNTIME(cudaDeviceGetPCIBusId, (char* text, int room, int device), {
    std::snprintf(text, room, "FFFE:00:%02X.0", device + 1);  // no device of the host
    return success;
})
RUNTIME(cudaDeviceGetLimit, (size_t * value, cudaLimit), {
    *value = 0;
    return success;
})

EXPORTED const char* emulated_cudaGetErrorName(cudaError_t error) { return name_of(error); }
EXPORTED const char* emulated_cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "out of memory" : name_of(error);
}

// ---- memory ----

RUNTIME(cudaMalloc, (void** pointer, size_t size), { return allocate(pointer, size, Kind::device); })
RUNTIME(cudaFree, (void* pointer), { return release(pointer, Kind::device); })
RUNTIME(cudaHostAlloc, (void** pointer, size_t size, unsigned), { return allocate(pointer, size, Kind::pinned); })
RUNTIME(cudaFreeHost, (void* pointer), { return release(pointer, Kind::pinned); })
RUNTIME(cudaMemGetInfo, (size_t * free, size_t* total), { return memory_info(free, total); })
RUNTIME(cudaMemcpyAsync, (void* target, const void* source, size_t size, cudaMemcpyKind kind, cudaStream_t stream), {
    return copy(target, source, size, static_cast<Direction>(kind), of(stream));
})
RUNTIME(cudaMemcpy, (void* target, const void* source, size_t size, cudaMemcpyKind kind), {
    return copy_and_wait(target, source, size, static_cast<Direction>(kind));
})
RUNTIME(cudaMemsetAsync, (void* target, int value, size_t size, cudaStream_t stream), {
    return fill(target, value, size, of(stream));
})
RUNTIME(cudaMemset, (void* target, int value, size_t size), { return fill(target, value, size, nullptr); })
RUNTIME(cudaPointerGetAttributes, (cudaPointerAttributes * attributes, const void* pointer), {
    std::memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    if (find_memory(pointer, 1, Kind::device, &attributes->device)) attributes->type = cudaMemoryTypeDevice;
    if (find_memory(pointer, 1, Kind::pinned, &attributes->device))
        attributes->type = settings().confidential ? cudaMemoryTypeManaged : cudaMemoryTypeHost;
    if (attributes->type != cudaMemoryTypeUnregistered) attributes->devicePointer = const_cast<void*>(pointer);
    return success;
})

// ---- streams and events ----

RUNTIME(cudaStreamCreate, (cudaStream_t * stream), { return create_stream(reinterpret_cast<Stream**>(stream), 0, 0); })
RUNTIME(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), {
    return create_stream(reinterpret_cast<Stream**>(stream), flags, 0);
})
RUNTIME(cudaStreamCreateWithPriority, (cudaStream_t * stream, unsigned flags, int priority), {
    return create_stream(reinterpret_cast<Stream**>(stream), flags, priority);
})
RUNTIME(cudaStreamDestroy, (cudaStream_t stream), { return destroy_stream(of(stream)); })
RUNTIME(cudaStreamSynchronize, (cudaStream_t stream), { return synchronize_stream(of(stream)); })
RUNTIME(cudaStreamQuery, (cudaStream_t stream), { return query_stream(of(stream)); })
RUNTIME(cudaStreamGetFlags, (cudaStream_t stream, unsigned* flags), {
    int priority, device;
    return stream_properties(of(stream), flags, &priority, &device);
})
RUNTIME(cudaStreamGetPriority, (cudaStream_t stream, int* priority), {
    unsigned flags;
    int device;
    return stream_properties(of(stream), &flags, priority, &device);
})
RUNTIME(cudaStreamWaitEvent, (cudaStream_t stream, cudaEvent_t event, unsigned), {
    return wait_event(of(stream), of(event));
})
RUNTIME(cudaLaunchHostFunc, (cudaStream_t stream, cudaHostFn_t function, void* data), {
    return enqueue(of(stream), [=] { function(data); });
})
RUNTIME(cudaEventCreate, (cudaEvent_t * event), { return create_event(reinterpret_cast<Event**>(event), 0); })
RUNTIME(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags), {
    return create_event(reinterpret_cast<Event**>(event), flags);
})
RUNTIME(cudaEventDestroy, (cudaEvent_t event), { return destroy_event(of(event)); })
RUNTIME(cudaEventRecord, (cudaEvent_t event, cudaStream_t stream), { return record_event(of(event), of(stream)); })
RUNTIME(cudaEventQuery, (cudaEvent_t event), { return query_event(of(event)); })
RUNTIME(cudaEventSynchronize, (cudaEvent_t event), { return synchronize_event(of(event)); })
RUNTIME(cudaEventElapsedTime, (float* milliseconds, cudaEvent_t start, cudaEvent_t stop), {
    return elapsed_time(milliseconds, of(start), of(stop));
})

// ---- captures and graphs ----

RUNTIME(cudaStreamBeginCapture, (cudaStream_t stream, cudaStreamCaptureMode mode), {
    return begin_capture(of(stream), mode);
})
RUNTIME(cudaStreamEndCapture, (cudaStream_t stream, cudaGraph_t* graph), {
    return end_capture(of(stream), reinterpret_cast<Graph**>(graph));
})
RUNTIME(cudaStreamIsCapturing, (cudaStream_t stream, cudaStreamCaptureStatus* status), {
    return is_capturing(of(stream), reinterpret_cast<int*>(status));
})
RUNTIME(cudaGraphInstantiate, (cudaGraphExec_t * made, cudaGraph_t graph, unsigned long long), {
    *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*of(graph)));
    return success;
})
RUNTIME(cudaGraphLaunch, (cudaGraphExec_t graph, cudaStream_t stream), { return launch_graph(of(graph), of(stream)); })
RUNTIME(cudaGraphDestroy, (cudaGraph_t graph), {
    delete of(graph);
    return success;
})
RUNTIME(cudaGraphExecDestroy, (cudaGraphExec_t graph), {
    delete of(graph);
    return success;
})
