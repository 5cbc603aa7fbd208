// What a cubin says of its kernels: their parameters, registers and shared memory. NVIDIA does not document the sections
// `.nv.info`; cuobjdump and nvdisasm name their attributes as here.

#include <elf.h>

#include <cstring>
#include <map>

#include "emulator.h"

namespace emulator {

namespace {

enum Attribute : unsigned char {
    max_threads_attribute = 0x05,
    frame_attribute = 0x11,
    parameter_attribute = 0x17,
    registers_attribute = 0x2f,
};
constexpr unsigned char sized_value = 4;  // the format of an attribute whose value follows

template <typename T>
T read(const char* place) {
    T value;
    std::memcpy(&value, place, sizeof value);
    return value;
}

// Call `use(attribute, value)` for each attribute of a section that has a value behind it.
template <typename Use>
void for_each_attribute(const char* start, const char* end, Use use) {
    while (start + 4 <= end) {
        const auto format = read<unsigned char>(start), attribute = read<unsigned char>(start + 1);
        const auto size = read<std::uint16_t>(start + 2);
        start += 4;
        if (format != sized_value) continue;
        use(attribute, start);
        start += size;
    }
}

void read_own_section(Kernel& kernel, const char* start, const char* end) {
    std::map<unsigned, Parameter> parameters;
    for_each_attribute(start, end, [&](unsigned char attribute, const char* value) {
        if (attribute == max_threads_attribute) kernel.max_threads = read<int>(value);
        if (attribute != parameter_attribute) return;
        // An index into a table, the ordinal, the offset, and flags below the size.
        const std::size_t offset = read<std::uint16_t>(value + 6), size = read<std::uint32_t>(value + 8) >> 18;
        parameters[read<std::uint16_t>(value + 4)] = {offset, size};
    });
    for (const auto& [ordinal, parameter] : parameters) kernel.parameters.push_back(parameter);
}

}  // namespace

std::vector<std::unique_ptr<Kernel>> read_cubin(const void* image) {
    const char* file = static_cast<const char*>(image);
    if (std::memcmp(file, ELFMAG, SELFMAG) != 0) return {};
    const auto header = read<Elf64_Ehdr>(file);
    std::vector<Elf64_Shdr> sections(header.e_shnum);
    std::memcpy(sections.data(), file + header.e_shoff, sizeof(Elf64_Shdr) * sections.size());
    const char* names = file + sections[header.e_shstrndx].sh_offset;
    std::map<std::string, const Elf64_Shdr*> by_name;
    for (const Elf64_Shdr& section : sections) by_name[names + section.sh_name] = &section;

    std::vector<std::unique_ptr<Kernel>> kernels;
    std::map<std::uint32_t, Kernel*> by_symbol;
    const Elf64_Shdr& symbols = *by_name.at(".symtab");
    const char* strings = file + sections[symbols.sh_link].sh_offset;
    for (std::uint32_t index = 0; index < symbols.sh_size / sizeof(Elf64_Sym); ++index) {
        const auto symbol = read<Elf64_Sym>(file + symbols.sh_offset + index * sizeof(Elf64_Sym));
        const std::string name = strings + symbol.st_name;
        auto own = by_name.find(".nv.info." + name);
        if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || own == by_name.end()) continue;
        auto kernel = std::make_unique<Kernel>();
        kernel->name = name;
        const char* start = file + own->second->sh_offset;
        read_own_section(*kernel, start, start + own->second->sh_size);
        if (auto shared = by_name.find(".nv.shared." + name); shared != by_name.end())
            kernel->static_shared = static_cast<int>(shared->second->sh_size);
        by_symbol[index] = kernel.get();
        kernels.push_back(std::move(kernel));
    }
    const Elf64_Shdr& all = *by_name.at(".nv.info");
    const char* start = file + all.sh_offset;
    for_each_attribute(start, start + all.sh_size, [&](unsigned char attribute, const char* value) {
        auto kernel = by_symbol.find(read<std::uint32_t>(value));
        if (kernel == by_symbol.end()) return;
        if (attribute == registers_attribute) kernel->second->registers = read<int>(value + 4);
        if (attribute == frame_attribute) kernel->second->frame = read<int>(value + 4);
    });
    return kernels;
}

}  // namespace emulator
