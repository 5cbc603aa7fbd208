// The driver API, as far as CuPy and fastrack use it: this library's soname is that of NVIDIA's, libcuda.so.1.

#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "emulator.h"

using namespace emulator;

namespace {

Stream* of(CUstream stream) { return reinterpret_cast<Stream*>(stream); }
Event* of(CUevent event) { return reinterpret_cast<Event*>(event); }
Context* of(CUcontext context) { return reinterpret_cast<Context*>(context); }
Kernel* of(CUfunction function) { return reinterpret_cast<Kernel*>(function); }
void* at(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

bool is_context(CUcontext context) {
    for (int device = 0; device < settings().devices; ++device)
        if (of(context) == primary_context(device)) return true;
    return false;
}

const char* name_of(Status status) {
    switch (status) {
        case success: return "CUDA_SUCCESS";
        case invalid_value: return "CUDA_ERROR_INVALID_VALUE";
        case out_of_memory: return "CUDA_ERROR_OUT_OF_MEMORY";
        case not_initialized: return "CUDA_ERROR_NOT_INITIALIZED";
        case invalid_device: return "CUDA_ERROR_INVALID_DEVICE";
        case invalid_image: return "CUDA_ERROR_INVALID_IMAGE";
        case invalid_context: return "CUDA_ERROR_INVALID_CONTEXT";
        case no_binary_for_gpu: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
        case invalid_ptx: return "CUDA_ERROR_INVALID_PTX";
        case unsupported_ptx_version: return "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
        case file_not_found: return "CUDA_ERROR_FILE_NOT_FOUND";
        case invalid_handle: return "CUDA_ERROR_INVALID_HANDLE";
        case not_found: return "CUDA_ERROR_NOT_FOUND";
        case not_ready: return "CUDA_ERROR_NOT_READY";
        case launch_out_of_resources: return "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES";
        case launch_failed: return "CUDA_ERROR_LAUNCH_FAILED";
        case not_supported: return "CUDA_ERROR_NOT_SUPPORTED";
        case system_not_ready: return "CUDA_ERROR_SYSTEM_NOT_READY";
        case capture_unsupported: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        case capture_invalidated: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        case capture_isolation: return "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
        case capture_implicit: return "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
        case captured_event: return "CUDA_ERROR_CAPTURED_EVENT";
        default: return nullptr;
    }
}

// Functions of which the name without a suffix means another one from some version on (cudaTypedefs.h).
struct Versioned {
    const char *name, *exported;
    int since;
};
constexpr Versioned versioned[] = {
    {"cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4000},
    {"cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4000},
    {"cuCtxSynchronize", "cuCtxSynchronize_v2", 13000},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", 3020},
    {"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", 3020},
    {"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", 3020},
};

}  // namespace

// Calls on a handle need no context; what `DRIVER_IN_CONTEXT` defines does.
#define DRIVER(name, parameters, ...)                                                            \
    EXPORTED CUresult name parameters {                                                          \
        return static_cast<CUresult>(counted(#name, [&]() -> Status __VA_ARGS__));               \
    }
#define DRIVER_IN_CONTEXT(name, parameters, ...)                                                 \
    EXPORTED CUresult name parameters {                                                          \
        return static_cast<CUresult>(counted(#name, [&]() -> Status {                            \
            if (!current_context()) return invalid_context;                                      \
            return [&]() -> Status __VA_ARGS__();                                                \
        }));                                                                                     \
    }

#undef cuGetProcAddress
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent

// ---- the library ----

// NVRTC goes on to ask an undocumented table of the driver if it finds one, and does without if there is no device.
EXPORTED CUresult cuInit(unsigned) {
    Dl_info caller;
    const bool known = dladdr(__builtin_return_address(0), &caller) && caller.dli_fname;
    return known && std::strstr(caller.dli_fname, "libnvrtc") ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
DRIVER(cuDriverGetVersion, (int* version), {
    *version = CUDA_VERSION;
    return success;
})
EXPORTED CUresult cuGetErrorName(CUresult error, const char** text) {
    *text = name_of(error);
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : name_of(error);
    return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// As documented: the name is the one without a suffix, and one that is not known gives null and success.
DRIVER(cuGetProcAddress_v2,
       (const char* symbol, void** function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult* status), {
           *function = nullptr;
           if (version > CUDA_VERSION) return invalid_value;
           if (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) {
               violate("cuGetProcAddress is asked for variants of the per-thread default stream");
               return not_supported;
           }
           const bool is_base = !std::strstr(symbol, "_v2");
           const char* exported = symbol;
           for (const Versioned& each : versioned)
               if (!std::strcmp(each.name, symbol) && version >= each.since) exported = each.exported;
           Dl_info here;
           dladdr(reinterpret_cast<void*>(&cuInit), &here);
           void* library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
           if (is_base) *function = dlsym(library, exported);
           if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
           return success;
       })

// ---- devices and contexts ----

DRIVER(cuDeviceGetCount, (int* count), {
    *count = settings().devices;
    return success;
})
DRIVER(cuDeviceGet, (CUdevice * device, int ordinal), {
    *device = ordinal;
    return primary_context(ordinal) ? success : invalid_device;
})
DRIVER(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), {
    Context* found = primary_context(device);
    if (!found) return invalid_device;
    std::lock_guard guard(mutex);
    ++found->retained;
    *context = reinterpret_cast<CUcontext>(found);
    return success;
})
DRIVER(cuDevicePrimaryCtxRelease_v2, (CUdevice device), {
    Context* found = primary_context(device);
    if (!found) return invalid_device;
    std::lock_guard guard(mutex);
    if (!found->retained) return invalid_context;
    --found->retained;
    return success;
})
DRIVER(cuCtxPushCurrent_v2, (CUcontext context), {
    if (!is_context(context)) return invalid_context;
    push_context(of(context));
    return success;
})
DRIVER(cuCtxPopCurrent_v2, (CUcontext * context), { return pop_context(reinterpret_cast<Context**>(context)); })
DRIVER(cuCtxGetCurrent, (CUcontext * context), {
    *context = reinterpret_cast<CUcontext>(current_context());
    return success;
})
DRIVER(cuCtxSetCurrent, (CUcontext context), {
    if (context && !is_context(context)) return invalid_context;
    pop_context(nullptr);
    if (context) push_context(of(context));
    return success;
})
DRIVER_IN_CONTEXT(cuCtxGetDevice, (CUdevice * device), {
    *device = current_device();
    return success;
})
DRIVER_IN_CONTEXT(cuCtxSynchronize, (), { return synchronize_device(); })
DRIVER(cuCtxSynchronize_v2, (CUcontext context), {
    if (!context) return current_context() ? synchronize_device() : invalid_context;
    if (!is_context(context)) return invalid_context;
    push_context(of(context));
    const Status status = synchronize_device();
    pop_context(nullptr);
    return status;
})
DRIVER(cuStreamGetCtx, (CUstream stream, CUcontext* context), {
    unsigned flags;
    int priority, device;
    if (Status status = stream_properties(of(stream), &flags, &priority, &device)) return status;
    *context = reinterpret_cast<CUcontext>(primary_context(device));
    return success;
})

// ---- streams and events ----

DRIVER_IN_CONTEXT(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned), {
    return wait_event(of(stream), of(event));
})
DRIVER_IN_CONTEXT(cuStreamSynchronize, (CUstream stream), { return synchronize_stream(of(stream)); })
DRIVER_IN_CONTEXT(cuStreamQuery, (CUstream stream), { return query_stream(of(stream)); })
DRIVER(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), {
    return exchange_mode(reinterpret_cast<int*>(mode));
})
DRIVER_IN_CONTEXT(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus* status), {
    return is_capturing(of(stream), reinterpret_cast<int*>(status));
})
DRIVER_IN_CONTEXT(cuEventRecord, (CUevent event, CUstream stream), { return record_event(of(event), of(stream)); })
DRIVER(cuEventQuery, (CUevent event), { return query_event(of(event)); })
DRIVER(cuEventSynchronize, (CUevent event), { return synchronize_event(of(event)); })

// ---- memory ----

DRIVER_IN_CONTEXT(cuMemcpyHtoDAsync_v2, (CUdeviceptr target, const void* source, size_t size, CUstream stream), {
    return copy(at(target), source, size, host_to_device, of(stream));
})
DRIVER_IN_CONTEXT(cuMemcpyDtoHAsync_v2, (void* target, CUdeviceptr source, size_t size, CUstream stream), {
    return copy(target, at(source), size, device_to_host, of(stream));
})
DRIVER_IN_CONTEXT(cuMemcpyDtoDAsync_v2, (CUdeviceptr target, CUdeviceptr source, size_t size, CUstream stream), {
    return copy(at(target), at(source), size, device_to_device, of(stream));
})
DRIVER_IN_CONTEXT(cuMemsetD8Async, (CUdeviceptr target, unsigned char value, size_t size, CUstream stream), {
    return fill(at(target), value, size, of(stream));
})

// ---- kernels ----

DRIVER_IN_CONTEXT(cuModuleLoadData, (CUmodule * module, const void* image), {
    return load_module(reinterpret_cast<Module**>(module), image);
})
DRIVER_IN_CONTEXT(cuModuleLoad, (CUmodule * module, const char* path), {
    std::ifstream file(path, std::ios::binary);
    if (!file) return file_not_found;
    const std::string image{std::istreambuf_iterator<char>(file), {}};
    return load_module(reinterpret_cast<Module**>(module), image.c_str());
})
DRIVER(cuModuleUnload, (CUmodule module), {
    delete reinterpret_cast<Module*>(module);
    return success;
})
DRIVER(cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name), {
    return find_kernel(reinterpret_cast<Kernel**>(function), reinterpret_cast<Module*>(module), name);
})
DRIVER(cuFuncSetAttribute, (CUfunction function, CUfunction_attribute attribute, int value), {
    return set_attribute(of(function), attribute, value);
})
DRIVER(cuFuncGetAttribute, (int* value, CUfunction_attribute attribute, CUfunction function), {
    return get_attribute(value, attribute, of(function));
})
DRIVER_IN_CONTEXT(cuLaunchKernel,
                  (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** parameters,
                   void** extra),
                  {
                      return launch(of(function), {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared,
                                    of(stream), parameters, extra);
                  })
// As on an H100: 228 KiB and 65536 registers of a multiprocessor, and a kibibyte that each block takes besides.
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* blocks, CUfunction function, int threads, size_t shared), {
    const Kernel* kernel = of(function);
    const std::size_t by_shared = (shared_optin + shared_reserved) / (shared + shared_reserved);
    const std::size_t by_registers = registers_per_block / std::max(1, kernel->registers * threads);
    *blocks = static_cast<int>(std::min({by_shared, by_registers, std::size_t(2048 / threads)}));
    return success;
})
