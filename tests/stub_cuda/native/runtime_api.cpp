// The runtime API of CUDA 12 (torch 2.8) and 13, as far as torch calls it. Other symbols that torch needs are generated and do nothing.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "api.h"

using namespace stub;

namespace {
thread_local int last_error = SUCCESS;

int done(int code) {
    if (code != SUCCESS && code != NOT_READY) last_error = code;
    return code;
}

struct Dim3 {
    unsigned x, y, z;
};

struct LaunchConfig {  // cudaLaunchConfig_t
    Dim3 grid, block;
    size_t shared;
    void* stream;
    void* attributes;
    unsigned num_attributes;
};

struct PendingLaunch {  // between <<<>>> and the launch
    Dim3 grid, block;
    size_t shared;
    void* stream;
};
thread_local std::vector<PendingLaunch> pending;

struct PointerAttributes {  // cudaPointerAttributes
    int type, device;
    void *device_pointer, *host_pointer;
#if STUB_CUDA_MAJOR >= 13
    long reserved[8];
#endif
};

struct FunctionAttributes {  // cudaFuncAttributes
    size_t shared, constant, local;
    int most_threads, registers, ptx_version, binary_version, cache, most_dynamic_shared;
    int rest[24];
};

// cudaDeviceProp by offset: the fields that a program may depend on. In CUDA 12, fields that CUDA 13 does not have lie between them.
struct Property {
    size_t offset, size;
    uint64_t value;
};
constexpr bool CUDA_12 = STUB_CUDA_MAJOR == 12;
constexpr size_t PROPERTIES_SIZE = CUDA_12 ? 1032 : 1008;
constexpr size_t at(size_t offset_12, size_t offset_13) { return CUDA_12 ? offset_12 : offset_13; }
constexpr Property PROPERTIES[] = {
    {288, 8, TOTAL_MEMORY},               // totalGlobalMem
    {296, 8, 49152},                      // sharedMemPerBlock
    {304, 4, 65536},                      // regsPerBlock
    {308, 4, 32},                         // warpSize
    {312, 8, 2147483647},                 // memPitch
    {320, 4, 1024},                       // maxThreadsPerBlock
    {324, 4, 1024}, {328, 4, 1024}, {332, 4, 64},           // maxThreadsDim
    {336, 4, 2147483647}, {340, 4, 65535}, {344, 4, 65535},  // maxGridSize
    {352, 8, 65536},                      // totalConstMem
    {360, 4, 9}, {364, 4, 0},             // major, minor
    {368, 8, 512},                        // textureAlignment
    {at(388, 384), 4, 132},               // multiProcessorCount
    {at(400, 392), 4, 1},                 // canMapHostMemory
    {at(576, 560), 4, 1},                 // concurrentKernels
    {at(600, 584), 4, 3},                 // asyncEngineCount
    {at(604, 588), 4, 1},                 // unifiedAddressing
    {at(612, 592), 4, 5120},              // memoryBusWidth
    {at(616, 596), 4, 52428800},          // l2CacheSize
    {at(624, 604), 4, 2048},              // maxThreadsPerMultiProcessor
    {at(640, 624), 8, 233472},            // sharedMemPerMultiprocessor
    {at(648, 632), 4, 65536},             // regsPerMultiprocessor
    {at(688, 668), 4, 1},                 // cooperativeLaunch
    {at(696, 672), 8, 232448},            // sharedMemPerBlockOptin
    {at(712, 688), 4, 32},                // maxBlocksPerMultiProcessor
    {at(772, 748), 4, 1},                 // clusterLaunch
};

// A driver function that is not modelled.
int not_modelled() {
    message("call of a driver function that is not modelled");
    return NOT_SUPPORTED;
}

int launch(const void* host, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
    Function* function = host_function(host);
    if (!function) {
        message("launch of a kernel that was not registered");
        return 98;  // invalid device function
    }
    const unsigned shape[7] = {grid.x, grid.y, grid.z, block.x, block.y, block.z, unsigned(shared)};
    return launch_kernel(stream, function, shape, arguments);
}

// A synchronous copy or fill runs on the legacy stream and waits for it.
int legacy_synchronous(const char* what) {
    if (int refused = unsafe_call(what)) return refused;
    return legacy_call(what);
}
}  // namespace

// The runtime API makes the primary context current where the thread has none.
#define STUB_ENTER_RUNTIME() \
    STUB_ENTER()             \
    stub::has_context = true;

// A function of one statement.
#define STUB_CALL(name, parameters, result) \
    int name parameters {                   \
        STUB_ENTER_RUNTIME();               \
        return done(result);                \
    }

extern "C" {

// ---- registration of device code, and launches ----

Module** __cudaRegisterFatBinary(void* wrapper) { return new Module*(register_fat_binary(wrapper)); }
void __cudaRegisterFatBinaryEnd(Module**) {}
void __cudaUnregisterFatBinary(Module**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(Module** module, const char* host, char*, const char* symbol, int, void*, void*, void*, void*, int*) {
    register_function(*module, host, symbol);
}

unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void* stream) {
    pending.push_back({grid, block, shared, stream});
    return 0;
}

int __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
    if (pending.empty()) return done(ILLEGAL_STATE);
    PendingLaunch last = pending.back();
    pending.pop_back();
    *grid = last.grid, *block = last.block, *shared = last.shared, *stream = last.stream;
    return SUCCESS;
}

int __cudaGetKernel(const void** kernel, const void* host) { return stub_give(kernel, host); }

STUB_CALL(cudaLaunchKernel, (const void* host, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream),
    launch(host, grid, block, arguments, shared, stream))

int __cudaLaunchKernel(const void* kernel, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

int cudaLaunchCooperativeKernel(const void* host, Dim3 grid, Dim3 block, void** arguments, size_t shared, void* stream) {
    return cudaLaunchKernel(host, grid, block, arguments, shared, stream);
}

int cudaLaunchKernelExC(const LaunchConfig* config, const void* host, void** arguments) {
    return cudaLaunchKernel(host, config->grid, config->block, arguments, config->shared, config->stream);
}

STUB_CALL(cudaLaunchHostFunc, (void* stream, void (*callback)(void*), void* data), host_call(stream, callback, data))

int cudaStreamAddCallback(void*, void (*)(void*, int, void*), void*, unsigned) { return done(NOT_SUPPORTED); }

int cudaFuncGetAttributes(FunctionAttributes* out, const void*) {
    *out = {};
    out->most_threads = 1024;
    out->registers = 64;
    out->ptx_version = out->binary_version = 90;
    out->most_dynamic_shared = 49152;
    return SUCCESS;
}

int cudaFuncSetAttribute(const void*, int, int) { return SUCCESS; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) { return stub_give(count, 2); }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, const void*, int, size_t, unsigned) { return stub_give(count, 2); }

// ---- errors, devices ----

const char* cudaGetErrorName(int code) {
    thread_local char name[64];
    std::snprintf(name, sizeof name, "cudaError %s", code_name(code));
    return name;
}

const char* cudaGetErrorString(int code) { return code_text(code); }

int cudaGetLastError() {
    int code = last_error;
    last_error = SUCCESS;
    return code;
}

int cudaPeekAtLastError() { return last_error; }
int cudaDriverGetVersion(int* version) { return stub_give(version, 13000); }
int cudaRuntimeGetVersion(int* version) { return stub_give(version, 13000); }
int cudaGetDeviceCount(int* count) { return stub_give(count, 1); }
int cudaGetDevice(int* device) { return stub_give(device, 0); }

int cudaSetDevice(int device) {
    STUB_ENTER_RUNTIME();
    return device == 0 ? SUCCESS : done(101);
}

int cudaGetDeviceProperties(char* out, int) {
    std::memset(out, 0, PROPERTIES_SIZE);
    std::strcpy(out, "Stub CUDA device");
    for (auto& property : PROPERTIES) std::memcpy(out + property.offset, &property.value, property.size);
    return SUCCESS;
}

int cudaGetDeviceProperties_v2(char* out, int device) { return cudaGetDeviceProperties(out, device); }  // CUDA 12

int cudaDeviceGetAttribute(int* value, int attribute, int) { return stub_attribute(value, attribute); }

int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

int cudaDeviceCanAccessPeer(int* can, int, int) { return stub_give(can, 0); }

int cudaDeviceGetPCIBusId(char* out, int size, int) {
    std::snprintf(out, size_t(size), "0000:00:00.0");
    return SUCCESS;
}

int cudaDeviceReset() { return done(801); }  // not supported; FlashInfer looks the name up

STUB_CALL(cudaDeviceSynchronize, (), synchronize_device(__func__))

int cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long, int* status) {
    // A requested name without a version means the newest one.
    static const char* const versions[] = {"_v3", "_v2", ""};
    static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    *entry = nullptr;
    for (const char* version : versions)
        if (!*entry) *entry = dlsym(driver, (std::string(name) + version).c_str());
    if (!*entry) *entry = reinterpret_cast<void*>(not_modelled);
    if (status) *status = 0;
    return SUCCESS;
}

int cudaGetDriverEntryPoint(const char* name, void** entry, unsigned long long flags, int* status) {  // CUDA 12
    return cudaGetDriverEntryPointByVersion(name, entry, 0, flags, status);
}

// ---- memory ----

STUB_CALL(cudaMalloc, (void** pointer, size_t size), allocate_device(pointer, size))
STUB_CALL(cudaFree, (void* pointer), free_device(pointer))
STUB_CALL(cudaHostAlloc, (void** pointer, size_t size, unsigned), allocate_host(pointer, size))
STUB_CALL(cudaFreeHost, (void* pointer), free_host(pointer))
STUB_CALL(cudaHostRegister, (void* pointer, size_t size, unsigned), register_host(pointer, size))
STUB_CALL(cudaHostUnregister, (void* pointer), unregister_host(pointer))

int cudaMallocAsync(void**, size_t, void*) { return done(NOT_SUPPORTED); }
int cudaFreeAsync(void*, void*) { return done(NOT_SUPPORTED); }
int cudaDeviceGetDefaultMemPool(void**, int) { return done(NOT_SUPPORTED); }

int cudaMemGetInfo(size_t* available, size_t* total) {
    STUB_ENTER_RUNTIME();
    *available = TOTAL_MEMORY - used_memory();
    *total = TOTAL_MEMORY;
    return SUCCESS;
}

int cudaPointerGetAttributes(PointerAttributes* out, void* pointer) {
    Memory type = memory_type(pointer);
    *out = {};
    out->type = static_cast<int>(type);
    out->device = type == Memory::unregistered ? -2 : 0;
    out->device_pointer = type == Memory::unregistered ? nullptr : pointer;
    out->host_pointer = type == Memory::device ? nullptr : pointer;
    return SUCCESS;
}

int cudaMemcpy(void* destination, const void* source, size_t size, int) {
    STUB_ENTER_RUNTIME();
    if (int refused = legacy_synchronous(__func__)) return done(refused);
    drain();
    std::memmove(destination, source, size);
    return SUCCESS;
}

STUB_CALL(cudaMemcpyAsync, (void* destination, const void* source, size_t size, int, void* stream),
    copy(stream, destination, source, size, 1, 0, 0))
STUB_CALL(cudaMemcpyPeerAsync, (void* destination, int, const void* source, int, size_t size, void* stream),
    copy(stream, destination, source, size, 1, 0, 0))

int cudaMemcpy2DAsync(
    void* destination, size_t destination_pitch, const void* source, size_t source_pitch, size_t width, size_t height, int, void* stream) {
    STUB_ENTER_RUNTIME();
    return done(copy(stream, destination, source, width, height, destination_pitch, source_pitch));
}

int cudaMemset(void* destination, int value, size_t count) {
    STUB_ENTER_RUNTIME();
    if (int refused = legacy_synchronous(__func__)) return done(refused);
    drain();
    std::memset(destination, value, count);
    return SUCCESS;
}

STUB_CALL(cudaMemsetAsync, (void* destination, int value, size_t count, void* stream),
    fill(stream, destination, unsigned(value), 1, count, 1, 0))

// ---- streams and events ----

STUB_CALL(cudaStreamCreate, (void** stream), create_stream(stream, true))
STUB_CALL(cudaStreamCreateWithPriority, (void** stream, unsigned flags, int), create_stream(stream, !(flags & 1)))
STUB_CALL(cudaStreamDestroy, (void* stream), destroy_stream(stream))

int cudaStreamGetPriority(void*, int* priority) { return stub_give(priority, 0); }

STUB_CALL(cudaStreamQuery, (void* stream), query_stream(stream))
STUB_CALL(cudaStreamSynchronize, (void* stream), synchronize_stream(stream))
STUB_CALL(cudaStreamWaitEvent, (void* stream, void* event, unsigned flags), wait_event(stream, event, flags & 1))
STUB_CALL(cudaEventCreate, (void** event), create_event(event))
STUB_CALL(cudaEventCreateWithFlags, (void** event, unsigned), create_event(event))
STUB_CALL(cudaEventDestroy, (void* event), destroy_event(event))
STUB_CALL(cudaEventRecord, (void* event, void* stream), record_event(event, stream, false))
STUB_CALL(cudaEventRecordWithFlags, (void* event, void* stream, unsigned flags), record_event(event, stream, flags & 1))
STUB_CALL(cudaEventQuery, (void* event), query_event(event))
STUB_CALL(cudaEventSynchronize, (void* event), synchronize_event(event))

int cudaEventElapsedTime(float* milliseconds, void*, void*) { return stub_give(milliseconds, 0.01f); }

// ---- capture and graphs ----

STUB_CALL(cudaStreamBeginCapture, (void* stream, int mode), begin_capture(stream, mode))
STUB_CALL(cudaStreamEndCapture, (void* stream, void** graph), end_capture(stream, graph))

int cudaStreamIsCapturing(void* stream, int* status) {
    STUB_ENTER_RUNTIME();
    CaptureInfo info;
    int code = capture_info(stream, &info);
    *status = info.status;
    return done(code);
}

int cudaStreamGetCaptureInfo(void* stream, int* status, uint64_t* id, void** graph, Node* const** dependencies, const void** edges,
    size_t* count) {
    STUB_ENTER_RUNTIME();
    CaptureInfo info;
    int code = capture_info(stream, &info);
    *status = info.status;
    if (id) *id = info.id;
    if (graph) *graph = info.graph;
    if (dependencies) *dependencies = info.dependencies;
    if (edges) *edges = nullptr;
    if (count) *count = info.num_dependencies;
    return done(code);
}

// CUDA 12
int cudaStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, Node* const** dependencies, size_t* count) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, dependencies, nullptr, count);
}

STUB_CALL(cudaThreadExchangeStreamCaptureMode, (int* mode), exchange_mode(mode))

int cudaGraphGetNodes(void* handle, void** nodes, size_t* count) {
    STUB_ENTER_RUNTIME();
    Lock lock(state);
    Graph* graph = find_graph(handle);
    if (!graph || !count) return done(INVALID_VALUE);
    for (size_t index = 0; nodes && index < *count && index < graph->nodes.size(); ++index) nodes[index] = graph->nodes[index].get();
    *count = graph->nodes.size();
    return SUCCESS;
}

int cudaGraphNodeGetDependencies(Node* node, Node** dependencies, void*, size_t* count) {
    STUB_ENTER_RUNTIME();
    for (size_t index = 0; dependencies && index < *count && index < node->dependencies.size(); ++index)
        dependencies[index] = node->dependencies[index];
    *count = node->dependencies.size();
    return SUCCESS;
}

STUB_CALL(cudaGraphInstantiateWithFlags, (void** exec, void* graph, unsigned long long), instantiate(exec, graph))

int cudaGraphInstantiate(void** exec, void* graph, unsigned long long flags) { return cudaGraphInstantiateWithFlags(exec, graph, flags); }

STUB_CALL(cudaGraphLaunch, (void* exec, void* stream), launch_graph(exec, stream))
STUB_CALL(cudaGraphUpload, (void* exec, void* stream), upload(exec, stream))
STUB_CALL(cudaGraphExecDestroy, (void* exec), destroy_exec(exec))
STUB_CALL(cudaGraphDestroy, (void* graph), destroy_graph(graph))

int cudaGraphDebugDotPrint(void* handle, const char* path, unsigned) {
    STUB_ENTER_RUNTIME();
    Lock lock(state);
    Graph* graph = find_graph(handle);
    std::FILE* file = graph ? std::fopen(path, "w") : nullptr;
    if (!file) return done(INVALID_VALUE);
    std::fprintf(file, "digraph stub {\n");
    for (auto& node : graph->nodes)
        for (Node* before : node->dependencies) std::fprintf(file, "  %zu -> %zu\n", before->index, node->index);
    std::fprintf(file, "}\n");
    std::fclose(file);
    return SUCCESS;
}

}  // extern "C"
