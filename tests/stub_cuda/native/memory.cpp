// Device and pinned memory. Both are host memory, zeroed and only backed by pages once touched, so that a process may
// "allocate" more device memory than the machine has.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "stub.h"

namespace stub {

namespace {
struct Block {
    size_t size, mapped;
};
struct Blocks {
    std::mutex lock;
    std::map<const char*, Block> device, host, registered;
    size_t used = 0;
};
Blocks& blocks() {
    static Blocks* one = new Blocks;
    return *one;
}

const std::pair<const char* const, Block>* holding(const std::map<const char*, Block>& all, const void* pointer) {
    auto address = static_cast<const char*>(pointer);
    auto after = all.upper_bound(address);
    if (after == all.begin()) return nullptr;
    auto& found = *std::prev(after);
    return address < found.first + (found.second.size ? found.second.size : 1) ? &found : nullptr;
}

void* map_pages(size_t size, size_t* mapped) {
    *mapped = (size + 4095) / 4096 * 4096;
    if (!*mapped) *mapped = 4096;
    void* pages = mmap(nullptr, *mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return pages == MAP_FAILED ? nullptr : pages;
}

int allocate(std::map<const char*, Block>& all, void** pointer, size_t size) {
    size_t mapped;
    *pointer = map_pages(size, &mapped);
    if (!*pointer) return OUT_OF_MEMORY;
    all[static_cast<char*>(*pointer)] = {size, mapped};
    return SUCCESS;
}

int release(std::map<const char*, Block>& all, void* pointer, size_t* size) {
    auto found = all.find(static_cast<char*>(pointer));
    if (found == all.end()) return INVALID_VALUE;
    *size = found->second.size;
    munmap(pointer, found->second.mapped);
    all.erase(found);
    return SUCCESS;
}
}  // namespace

int allocate_device(void** pointer, size_t size) {
    if (int refused = unsafe_call("allocation of device memory")) return refused;
    std::lock_guard<std::mutex> lock(blocks().lock);
    if (blocks().used + size > TOTAL_MEMORY) {
        message("out of memory: %zu bytes requested, %zu in use", size, blocks().used);
        return OUT_OF_MEMORY;
    }
    int code = allocate(blocks().device, pointer, size);
    if (code == SUCCESS) {
        blocks().used += size;
        counter("device_allocations").add();
        counter("device_bytes_allocated").add(int64_t(size));
        counter("live_device_allocations").add();
        counter("live_device_bytes").add(int64_t(size));
    }
    return code;
}

int free_device(void* pointer) {
    if (!pointer) return SUCCESS;
    if (int refused = unsafe_call("free of device memory")) return refused;
    drain();  // cudaFree waits for the device
    std::lock_guard<std::mutex> lock(blocks().lock);
    size_t size = 0;
    int code = release(blocks().device, pointer, &size);
    if (code == SUCCESS) {
        blocks().used -= size;
        counter("device_frees").add();
        counter("live_device_allocations").add(-1);
        counter("live_device_bytes").add(-int64_t(size));
    }
    return code;
}

int allocate_host(void** pointer, size_t size) {
    if (int refused = unsafe_call("allocation of pinned memory")) return refused;
    std::lock_guard<std::mutex> lock(blocks().lock);
    int code = allocate(blocks().host, pointer, size);
    if (code == SUCCESS) {
        counter("pinned_allocations").add();
        counter("pinned_bytes_allocated").add(int64_t(size));
        counter("live_pinned_allocations").add();
        counter("live_pinned_bytes").add(int64_t(size));
    }
    return code;
}

int free_host(void* pointer) {
    if (!pointer) return SUCCESS;
    if (int refused = unsafe_call("free of pinned memory")) return refused;
    drain();
    std::lock_guard<std::mutex> lock(blocks().lock);
    size_t size = 0;
    int code = release(blocks().host, pointer, &size);
    if (code == SUCCESS) {
        counter("live_pinned_allocations").add(-1);
        counter("live_pinned_bytes").add(-int64_t(size));
    }
    return code;
}

int register_host(void* pointer, size_t size) {
    if (int refused = unsafe_call("registration of host memory")) return refused;
    std::lock_guard<std::mutex> lock(blocks().lock);
    blocks().registered[static_cast<char*>(pointer)] = {size, 0};
    counter("pinned_allocations").add();
    counter("live_pinned_allocations").add();
    counter("live_pinned_bytes").add(int64_t(size));
    return SUCCESS;
}

int unregister_host(void* pointer) {
    if (int refused = unsafe_call("unregistration of host memory")) return refused;
    drain();
    std::lock_guard<std::mutex> lock(blocks().lock);
    auto found = blocks().registered.find(static_cast<char*>(pointer));
    if (found == blocks().registered.end()) return INVALID_VALUE;
    counter("live_pinned_allocations").add(-1);
    counter("live_pinned_bytes").add(-int64_t(found->second.size));
    blocks().registered.erase(found);
    return SUCCESS;
}

Memory memory_type(const void* pointer) {
    std::lock_guard<std::mutex> lock(blocks().lock);
    if (holding(blocks().device, pointer)) return Memory::device;
    if (holding(blocks().host, pointer) || holding(blocks().registered, pointer)) return Memory::host;
    return Memory::unregistered;
}

bool device_range(const void* pointer, void** base, size_t* size) {
    std::lock_guard<std::mutex> lock(blocks().lock);
    auto found = holding(blocks().device, pointer);
    if (!found) return false;
    *base = const_cast<char*>(found->first);
    *size = found->second.size;
    return true;
}

size_t used_memory() {
    std::lock_guard<std::mutex> lock(blocks().lock);
    return blocks().used;
}

}  // namespace stub
