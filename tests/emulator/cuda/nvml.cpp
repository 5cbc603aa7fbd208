// NVML, as far as fastrack asks it: this library's soname is that of NVIDIA's, libnvidia-ml.so.1. The structures are
// those that pynvml declares.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum Return { success = 0, invalid_argument = 2, insufficient_size = 7 };
enum Environment { unavailable = 0, production = 2 };

unsigned long long from_environment(const char* name, unsigned long long otherwise) {
    const char* text = std::getenv(name);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// 1 is confidential mode, 2 protected PCIe: the driver then reports the former as off.
unsigned mode() { return static_cast<unsigned>(from_environment("EMU_CONFIDENTIAL", 0)); }
bool is_confidential() { return mode() == 1; }

Return answer(char* text, unsigned room, const char* with) {
    if (std::strlen(with) >= room) return insufficient_size;
    std::strcpy(text, with);
    return success;
}

struct Memory {
    unsigned long long total, free, used;
};
struct ConfidentialState {
    unsigned environment, feature, developer_tools;
};
struct ConfidentialSettings {
    unsigned version, environment, feature, developer_tools, multi_gpu;
};
struct Place {
    char legacy[16];
    unsigned domain, bus, device, kind, subsystem;
    char address[32];
};

}  // namespace

EXPORTED Return nvmlInitWithFlags(unsigned) { return success; }
EXPORTED Return nvmlInit_v2() { return success; }
EXPORTED Return nvmlShutdown() { return success; }
EXPORTED const char* nvmlErrorString(Return) { return "an error of the emulator"; }
EXPORTED Return nvmlSystemGetDriverVersion(char* text, unsigned room) { return answer(text, room, "580.0.emulated"); }

EXPORTED Return nvmlDeviceGetCount_v2(unsigned* count) {
    *count = static_cast<unsigned>(from_environment("EMU_DEVICES", 1));
    return success;
}
EXPORTED Return nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    if (index >= from_environment("EMU_DEVICES", 1)) return invalid_argument;
    *device = reinterpret_cast<void*>(index + 1ul);
    return success;
}
EXPORTED Return nvmlDeviceGetName(void*, char* text, unsigned room) { return answer(text, room, "emulated H100"); }
EXPORTED Return nvmlDeviceGetPciInfo_v3(void* device, Place* place) {
    *place = {};
    place->domain = 0xfffe;  // no device of the host
    place->device = static_cast<unsigned>(reinterpret_cast<unsigned long>(device));
    return success;
}
EXPORTED Return nvmlDeviceGetPersistenceMode(void*, unsigned* enabled) {
    *enabled = static_cast<unsigned>(from_environment("EMU_PERSISTENCE", 0));
    return success;
}
EXPORTED Return nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
    const unsigned long long total = from_environment("EMU_MEMORY", 16ull << 30);
    *memory = {total, total, 0};
    return success;
}

EXPORTED Return nvmlSystemGetConfComputeState(ConfidentialState* state) {
    *state = {is_confidential() ? production : unavailable, is_confidential(), 0};
    return success;
}
EXPORTED Return nvmlSystemGetConfComputeSettings(ConfidentialSettings* settings) {
    if (settings->version != (sizeof *settings | 1u << 24)) return invalid_argument;
    const unsigned protected_pcie = mode() == 2;
    *settings = {settings->version, mode() ? production : unavailable, is_confidential(), 0, protected_pcie};
    return success;
}
EXPORTED Return nvmlSystemGetConfComputeGpusReadyState(unsigned* ready) {
    *ready = is_confidential() && from_environment("EMU_READY", 1);
    return success;
}
