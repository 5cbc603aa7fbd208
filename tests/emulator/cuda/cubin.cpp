// What a cubin says of its kernels: their parameters, registers and shared memory. NVIDIA does not document the sections
// `.nv.info`; cuobjdump and nvdisasm name their attributes as here. And what PTX says, which is documented.

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

std::vector<std::unique_ptr<Kernel>> read_cubin(const char* file) {
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

std::size_t number_after(const std::string& text, const char* word, std::size_t otherwise = 0) {
    const auto place = text.find(word);
    return place == std::string::npos ? otherwise : std::stoul(text.substr(place + std::strlen(word)));
}

// A version such as 9.5, times ten.
int version_after(const std::string& text, const char* word) {
    const auto place = text.find(word);
    return place == std::string::npos ? 0 : static_cast<int>(10 * std::stod(text.substr(place + std::strlen(word))) + .5);
}

// What stands between `start` and a character, which `start` is then behind.
std::string take_until(const std::string& text, char end, std::size_t* start) {
    const auto begin = *start, stop = text.find(end, begin);
    *start = stop + 1;
    return text.substr(begin, stop - begin);
}

// Parameters and launch bounds stand in the text. Registers are as many as the bounds leave a thread.
std::vector<std::unique_ptr<Kernel>> read_ptx(const std::string& text) {
    std::vector<std::unique_ptr<Kernel>> kernels;
    for (std::size_t place = 0; (place = text.find(".entry ", place)) != std::string::npos;) {
        place += std::strlen(".entry ");
        auto kernel = std::make_unique<Kernel>();
        kernel->name = take_until(text, '(', &place);
        const std::string parameters = take_until(text, ')', &place), bounds = take_until(text, '{', &place);
        std::size_t end = 0;
        for (std::size_t next = 0; (next = parameters.find(".param .", next)) != std::string::npos;) {
            next += std::strlen(".param .");
            const std::string parameter = take_until(parameters + ',', ',', &next);
            const bool is_array = parameter.find('[') != std::string::npos;  // .align 8 .b8 name[4000], or .u64 name
            const std::size_t size = is_array ? number_after(parameter, "[") : std::stoul(parameter.substr(1)) / 8;
            const std::size_t alignment = is_array ? number_after(parameter, "align ") : size;
            const std::size_t offset = (end + alignment - 1) / alignment * alignment;
            kernel->parameters.push_back({offset, size});
            end = offset + size;
        }
        kernel->max_threads = static_cast<int>(number_after(bounds, ".maxntid ", max_threads));
        const int blocks = static_cast<int>(number_after(bounds, ".minnctapersm ", 1));
        kernel->registers = registers_per_block / (kernel->max_threads * blocks);
        kernels.push_back(std::move(kernel));
    }
    return kernels;
}

}  // namespace

Status read_image(const void* image, std::vector<std::unique_ptr<Kernel>>* kernels) {
    const char* file = static_cast<const char*>(image);
    const int compute = settings().compute;
    if (std::memcmp(file, ELFMAG, SELFMAG) == 0) {
        const int built = read<Elf64_Ehdr>(file).e_flags >> 8 & 0xff;  // 90 for sm_90, as CUDA 13 writes it
        if (built / 10 != compute / 10 || built > compute) return no_binary_for_gpu;
        *kernels = read_cubin(file);
    } else {
        const std::string text = file;
        if (version_after(text, ".version ") > settings().ptx) return unsupported_ptx_version;
        if (static_cast<int>(number_after(text, ".target sm_")) > compute) return invalid_ptx;
        *kernels = read_ptx(text);
    }
    return kernels->empty() ? invalid_image : success;
}

}  // namespace emulator
