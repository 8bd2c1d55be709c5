// Kernels are names with a layout of their parameters. The layout comes from the device code itself: a cubin is an ELF file,
// whose section .nv.info.<kernel> has one entry for each parameter. Triton loads bare cubins; nvcc packs those of each
// source file into a fat binary, compressed with zstd or, by older ones, with LZ4, which is read at the first launch of one of its kernels.
#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "stub.h"

namespace stub {

struct Module {
    const uint8_t* fat_binary = nullptr;  // not read yet; else null
    std::map<std::string, std::vector<Parameter>> layouts;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

namespace {
std::mutex kernels;  // protects all state of this file
std::map<const void*, Function*> host_functions;
std::map<std::string, std::unique_ptr<Function>> library_functions;

template <typename Value>
Value read(const uint8_t* source) {
    Value value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

// Entries of .nv.info: format, attribute, then a size and that many bytes if the format is 4, else a value of two bytes.
std::vector<Parameter> read_info(const uint8_t* info, size_t size) {
    constexpr uint8_t SIZED = 4, PARAMETER = 0x17;
    std::map<uint16_t, Parameter> by_ordinal;
    for (size_t at = 0; at + 4 <= size;) {
        uint8_t format = info[at], attribute = info[at + 1];
        uint16_t length = format == SIZED ? read<uint16_t>(info + at + 2) : 0;
        if (at + 4 + length > size) break;
        if (format == SIZED && attribute == PARAMETER && length >= 12) {
            const uint8_t* entry = info + at + 4;  // index, ordinal, offset, then flags with the size in the top bits
            by_ordinal[read<uint16_t>(entry + 4)] = {read<uint16_t>(entry + 6), read<uint32_t>(entry + 8) >> 18};
        }
        at += 4 + length;
    }
    std::vector<Parameter> parameters;
    for (auto& [ordinal, parameter] : by_ordinal) parameters.push_back(parameter);
    return parameters;
}

void read_cubin(Module& module, const uint8_t* image) {
    if (std::memcmp(image, ELFMAG, SELFMAG) != 0) {
        message("a module is not a cubin: arguments of its kernels are not kept");
        return;
    }
    auto header = read<Elf64_Ehdr>(image);
    auto section = [&](size_t index) { return read<Elf64_Shdr>(image + header.e_shoff + index * header.e_shentsize); };
    const uint8_t* names = image + section(header.e_shstrndx).sh_offset;
    static const std::string prefix = ".nv.info.", code = ".text.";
    for (size_t index = 0; index < header.e_shnum; ++index) {
        auto found = section(index);
        std::string name = reinterpret_cast<const char*>(names + found.sh_name);
        // a kernel without parameters has no entries
        if (name.compare(0, code.size(), code) == 0) module.layouts[name.substr(code.size())];
        if (name.compare(0, prefix.size(), prefix) == 0)
            module.layouts[name.substr(prefix.size())] = read_info(image + found.sh_offset, found.sh_size);
    }
}

// PTX: the parameters of each entry are .param .u32 or .param .u64.
void read_ptx(Module& module, const std::string& text) {
    for (size_t entry = text.find(".entry "); entry != std::string::npos; entry = text.find(".entry ", entry + 1)) {
        size_t open = text.find('(', entry), close = text.find(')', open), end = text.find_last_not_of(" \n", open - 1) + 1;
        std::vector<Parameter> layout;
        size_t offset = 0;
        for (size_t at = text.find(".param .u", open); at < close; at = text.find(".param .u", at + 1)) {
            size_t size = text.compare(at + 9, 2, "64") == 0 ? 8 : 4;
            offset = (offset + size - 1) / size * size;
            layout.push_back({offset, size});
            offset += size;
        }
        module.layouts[text.substr(entry + 7, end - entry - 7)] = layout;
    }
}

using Decompress = size_t (*)(void*, size_t, const void*, size_t);

Decompress open_zstd() {
    void* library = dlopen("libzstd.so.1", RTLD_NOW);
    auto call = library ? reinterpret_cast<Decompress>(dlsym(library, "ZSTD_decompress")) : nullptr;
    if (!call) message("no libzstd.so.1: arguments of compiled kernels are not kept");
    return call;
}

// Decompresses an LZ4 block: pairs of literals and a copy of earlier output. Returns the bytes written, 0 if the block is damaged.
size_t decompress_lz4(void* to, size_t size, const void* from, size_t packed) {
    auto *out = static_cast<uint8_t*>(to), *out_end = out + size;
    auto *in = static_cast<const uint8_t*>(from), *in_end = in + packed;
    auto more = [&](size_t length) {
        for (uint8_t byte = 255; length >= 15 && byte == 255 && in < in_end;) length += byte = *in++;
        return length;
    };
    while (in < in_end) {
        uint8_t token = *in++;
        size_t literals = more(token >> 4);
        if (literals > size_t(in_end - in) || literals > size_t(out_end - out)) return 0;
        out = std::copy_n(in, literals, out);
        in += literals;
        if (in_end - in < 2) break;  // the last pair has no copy
        size_t distance = read<uint16_t>(in);
        in += 2;
        size_t length = more(token & 15) + 4;
        if (!distance || distance > size_t(out - static_cast<uint8_t*>(to)) || length > size_t(out_end - out)) return 0;
        for (; length; --length, ++out) *out = *(out - distance);  // may overlap
    }
    return out - static_cast<uint8_t*>(to);
}

// One entry of a fat binary: device code for one architecture.
struct Entry {
    uint16_t kind;
    uint32_t header_size, packed_size, architecture;
    uint64_t size, flags, unpacked_size;

    explicit Entry(const uint8_t* header)
        : kind(read<uint16_t>(header)),
          header_size(read<uint32_t>(header + 4)),
          packed_size(read<uint32_t>(header + 16)),
          architecture(read<uint32_t>(header + 28)),
          size(read<uint64_t>(header + 8)),
          flags(read<uint64_t>(header + 40)),
          unpacked_size(read<uint64_t>(header + 56)) {}
};

void read_fat_binary(Module& module, const uint8_t* data) {
    constexpr uint32_t MAGIC = 0xBA55ED50;
    constexpr uint16_t CUBIN = 2;
    constexpr uint64_t LZ4 = 0x2000, ZSTD = 0x8000;
    static const Decompress decompress_zstd = open_zstd();
    if (read<uint32_t>(data) != MAGIC) {
        message("a fat binary of an unknown format");
        return;
    }
    uint16_t header_size = read<uint16_t>(data + 6);
    const uint8_t *current = data + header_size, *end = current + read<uint64_t>(data + 8);
    const uint8_t* best = nullptr;  // the newest architecture that the device runs
    uint32_t architecture = 0;
    while (current < end) {
        Entry entry(current);
        if (entry.kind == CUBIN && entry.architecture <= 90 && entry.architecture >= architecture)
            best = current, architecture = entry.architecture;
        current += entry.header_size + entry.size;
    }
    if (!best) return;
    Entry entry(best);
    const uint8_t* payload = best + entry.header_size;
    if (!(entry.flags & (ZSTD | LZ4))) {
        read_cubin(module, payload);
    } else if (Decompress decompress = entry.flags & ZSTD ? decompress_zstd : decompress_lz4) {
        std::vector<uint8_t> cubin(entry.unpacked_size);
        if (decompress(cubin.data(), cubin.size(), payload, entry.packed_size) == cubin.size()) read_cubin(module, cubin.data());
        else message("a fat binary could not be decompressed");
    }
}

Function* function_of(Module& module, const std::string& symbol) {
    auto& function = module.functions[symbol];
    if (!function) {
        function = std::make_unique<Function>();
        function->symbol = symbol;
        function->module = &module;
    }
    return function.get();
}
}  // namespace

Module* load_module(const void* image) {
    std::lock_guard<std::mutex> lock(kernels);
    auto module = new Module;  // kept after cuModuleUnload: nodes refer to its functions
    auto bytes = static_cast<const uint8_t*>(image);
    if (std::memcmp(bytes, ELFMAG, SELFMAG) == 0) read_cubin(*module, bytes);
    else if (read<uint32_t>(bytes) == 0xBA55ED50) read_fat_binary(*module, bytes);
    else if (std::strstr(static_cast<const char*>(image), ".version")) read_ptx(*module, static_cast<const char*>(image));
    else message("cuModuleLoadData: neither PTX, a cubin nor a fat binary; arguments of its kernels are not kept");
    return module;
}

Module* register_fat_binary(const void* wrapper) {
    auto module = new Module;
    module->fat_binary = read<const uint8_t*>(static_cast<const uint8_t*>(wrapper) + 8);  // magic, version, data
    return module;
}

Function* module_function(Module* module, const char* symbol) {
    std::lock_guard<std::mutex> lock(kernels);
    return function_of(*module, symbol);
}

void register_function(Module* module, const void* host_function, const char* symbol) {
    std::lock_guard<std::mutex> lock(kernels);
    host_functions[host_function] = function_of(*module, symbol);
}

Function* host_function(const void* host_function) {
    std::lock_guard<std::mutex> lock(kernels);
    auto found = host_functions.find(host_function);
    return found == host_functions.end() ? nullptr : found->second;
}

Function* library_function(const char* name, size_t arguments) {
    std::lock_guard<std::mutex> lock(kernels);
    auto& function = library_functions[name];
    if (!function) {
        function = std::make_unique<Function>();
        function->symbol = name;
        function->resolved = function->parameters_known = true;
        for (size_t index = 0; index < arguments; ++index) function->parameters.push_back({8 * index, 8});
    }
    return function.get();
}

const std::vector<Parameter>* parameters_of(Function* function) {
    std::lock_guard<std::mutex> lock(kernels);
    if (!function->resolved) {
        Module& module = *function->module;
        if (module.fat_binary) read_fat_binary(module, module.fat_binary);
        module.fat_binary = nullptr;
        auto layout = module.layouts.find(function->symbol);
        if (layout != module.layouts.end()) {
            function->parameters = layout->second;
            function->parameters_known = true;
        } else {
            message("no parameter layout of %s", function->symbol.c_str());
        }
        function->resolved = true;
    }
    return function->parameters_known ? &function->parameters : nullptr;
}

}  // namespace stub
