// The driver API, as far as torch, Triton, FlashInfer and the CUDA back end call it. Handles are pointers to the structures of
// stub.h. Parameter types are spelled with void* and int where the C ABI is the same, so that no CUDA header is needed.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "api.h"

using namespace stub;

thread_local bool stub::has_context = false;

namespace {
char context_object;  // the one context

struct LaunchConfig {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned num_attributes;
};

struct KernelNodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
    void* function;
    unsigned shape[7];
    void** arguments;
    void **extra, *kernel, *context;
};

struct MemsetNodeParams {  // CUDA_MEMSET_NODE_PARAMS
    uintptr_t destination;
    size_t pitch;
    unsigned value, element;
    size_t width, height;
};

struct ConditionalParams {  // CUDA_CONDITIONAL_NODE_PARAMS
    uint64_t handle;
    int type;
    unsigned size;
    void** bodies;
    void* context;
};

struct NodeParams {  // CUgraphNodeParams
    int type, reserved0[3];
    union {
        long long reserved1[29];
        ConditionalParams conditional;
    };
    long long reserved2;
};

struct HostNodeParams {  // CUDA_HOST_NODE_PARAMS
    void (*callback)(void*);
    void* data;
};

enum MemoryType { HOST = 1, DEVICE = 2 };

struct CopyParams {  // CUDA_MEMCPY3D
    size_t source_x, source_y, source_z, source_lod;
    int source_type;
    const void* source_host;
    uintptr_t source_device;
    void *source_array, *reserved0;
    size_t source_pitch, source_height;
    size_t destination_x, destination_y, destination_z, destination_lod;
    int destination_type;
    void* destination_host;
    uintptr_t destination_device;
    void *destination_array, *reserved1;
    size_t destination_pitch, destination_height;
    size_t width, height, depth;
};

struct DeviceAttribute {
    int number, value;
};
// As an H100 reports them; what is not listed is 1.
constexpr DeviceAttribute ATTRIBUTES[] = {
    {1, 1024},     // threads per block
    {2, 1024},     {3, 1024}, {4, 64},  // block
    {5, 2147483647}, {6, 65535}, {7, 65535},  // grid
    {8, 49152},    // shared memory per block
    {10, 32},      // warp
    {12, 65536},   // registers per block
    {13, 1980000}, // clock, kHz
    {16, 132},     // multiprocessors
    {17, 0},       // kernel time limit
    {18, 0},       // integrated
    {36, 2619000}, // memory clock, kHz
    {37, 5120},    // memory bus, bits
    {38, 52428800},  // L2
    {39, 2048},    // threads per multiprocessor
    {75, 9},       {76, 0},  // compute capability
    {81, 233472},  // shared memory per multiprocessor
    {82, 65536},   // registers per multiprocessor
    {83, 0},       // managed memory
    {95, 1},       // cooperative launch
    {97, 232448},  // shared memory per block, opt-in
    {106, 32},     // blocks per multiprocessor
    {115, 0},      // memory pools
};

// Copies a list out as CUDA does: as many items as fit, and the number of all items.
template <typename Items>
int give_list(const Items& items, void** out, size_t* count) {
    if (out) std::copy_n(items.begin(), std::min(*count, items.size()), out);
    *count = items.size();
    return SUCCESS;
}

std::vector<void*> handles(const Nodes& nodes) {
    std::vector<void*> all;
    for (auto& node : nodes) all.push_back(node.get());
    return all;
}

int give_edges(void* handle, void** from, void** to, size_t* count) {
    Lock lock(state);
    Graph* graph = find_graph(handle);
    if (!graph || !count) return INVALID_VALUE;
    std::vector<void*> begins, ends;
    for (auto& node : graph->nodes)
        for (Node* before : node->dependencies) {
            begins.push_back(before);
            ends.push_back(node.get());
        }
    size_t room = *count;
    give_list(begins, from, count);
    return give_list(ends, to, from ? &room : count);
}
}  // namespace

int stub_attribute(int* value, int attribute) {
    *value = 1;
    for (auto& entry : ATTRIBUTES)
        if (entry.number == attribute) *value = entry.value;
    return SUCCESS;
}

// A call of the driver API that needs a context on this thread.
#define STUB_ENTER_CONTEXT()                                                \
    STUB_ENTER()                                                            \
    if (!stub::has_context) {                                               \
        stub::message("%s on a thread without a context", __func__);        \
        return stub::INVALID_CONTEXT;                                       \
    }

// Functions of one statement, with a context and without.
#define STUB_CALL(name, parameters, result) \
    int name parameters {                   \
        STUB_ENTER_CONTEXT();               \
        return result;                      \
    }
#define STUB_CALL_ANYWHERE(name, parameters, result) \
    int name parameters {                            \
        STUB_ENTER();                                \
        return result;                               \
    }

extern "C" {

// ---- initialisation, errors, contexts, devices ----

STUB_CALL_ANYWHERE(cuInit, (unsigned), SUCCESS)

int cuDriverGetVersion(int* version) { return stub_give(version, 13000); }

int cuGetErrorName(int code, const char** text) {
    thread_local char name[64];
    std::snprintf(name, sizeof name, code == SUCCESS ? "CUDA_%s" : "CUDA_ERROR_%s", code_name(code));
    return stub_give(text, static_cast<const char*>(name));
}

int cuGetErrorString(int code, const char** text) { return stub_give(text, code_text(code)); }

int cuCtxGetCurrent(void** context) { return stub_give(context, has_context ? static_cast<void*>(&context_object) : nullptr); }

int cuCtxSetCurrent(void* context) {
    STUB_ENTER();
    if (context && context != &context_object) return INVALID_CONTEXT;
    has_context = context != nullptr;
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void* context) { return cuCtxSetCurrent(context); }

int cuCtxPopCurrent_v2(void** context) {
    if (context) *context = &context_object;
    return SUCCESS;
}

int cuCtxGetDevice(int* device) { return stub_give(device, 0); }
int cuCtxGetLimit(size_t* value, int) { return stub_give(value, size_t{0}); }
int cuCtxSetLimit(int, size_t) { return SUCCESS; }

STUB_CALL(cuCtxSynchronize, (), synchronize_device(__func__))

int cuDevicePrimaryCtxRetain(void** context, int) { return stub_give(context, static_cast<void*>(&context_object)); }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) { return ordinal == 0 ? stub_give(device, 0) : 101; }
int cuDeviceGetCount(int* count) { return stub_give(count, 1); }
int cuDeviceGetAttribute(int* value, int attribute, int) { return stub_attribute(value, attribute); }

int cuDeviceGetName(char* name, int size, int) {
    std::snprintf(name, size_t(size), "Stub CUDA device");
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* size, int) { return stub_give(size, TOTAL_MEMORY); }

// ---- memory ----

int cuMemGetInfo_v2(size_t* available, size_t* total) {
    STUB_ENTER_CONTEXT();
    *available = TOTAL_MEMORY - used_memory();
    *total = TOTAL_MEMORY;
    return SUCCESS;
}

STUB_CALL(cuMemAlloc_v2, (void** pointer, size_t size), allocate_device(pointer, size))
STUB_CALL(cuMemFree_v2, (void* pointer), free_device(pointer))
STUB_CALL(cuMemHostAlloc, (void** pointer, size_t size, unsigned), allocate_host(pointer, size))
STUB_CALL(cuMemAllocHost_v2, (void** pointer, size_t size), allocate_host(pointer, size))
STUB_CALL(cuMemFreeHost, (void* pointer), free_host(pointer))

int cuMemHostGetDevicePointer_v2(void** device, void* host, unsigned) { return stub_give(device, host); }

int cuMemGetAddressRange_v2(void** base, size_t* size, void* pointer) {
    void* begin;
    size_t length;
    if (!device_range(pointer, &begin, &length)) return INVALID_VALUE;
    if (base) *base = begin;
    if (size) *size = length;
    return SUCCESS;
}

int cuPointerGetAttribute(void* out, int attribute, void* pointer) {
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_POINTER = 3, HOST_POINTER = 4, DEVICE_ORDINAL = 9 };
    Memory type = memory_type(pointer);
    if (type == Memory::unregistered) return INVALID_VALUE;
    switch (attribute) {
        case CONTEXT:
            *static_cast<void**>(out) = &context_object;
            return SUCCESS;
        case MEMORY_TYPE:
            *static_cast<int*>(out) = type == Memory::host ? HOST : DEVICE;
            return SUCCESS;
        case DEVICE_POINTER:
        case HOST_POINTER:
            *static_cast<void**>(out) = pointer;
            return SUCCESS;
        case DEVICE_ORDINAL:
            *static_cast<int*>(out) = 0;
            return SUCCESS;
        default:
            message("cuPointerGetAttribute: attribute %d is not modelled", attribute);
            return NOT_SUPPORTED;
    }
}

STUB_CALL(cuMemcpyAsync, (void* destination, const void* source, size_t size, void* stream),
    copy(stream, destination, source, size, 1, 0, 0))
STUB_CALL(cuMemcpyHtoDAsync_v2, (void* destination, const void* source, size_t size, void* stream),
    copy(stream, destination, source, size, 1, 0, 0))
STUB_CALL(cuMemcpyDtoHAsync_v2, (void* destination, const void* source, size_t size, void* stream),
    copy(stream, destination, source, size, 1, 0, 0))
STUB_CALL(cuMemcpyDtoDAsync_v2, (void* destination, const void* source, size_t size, void* stream),
    copy(stream, destination, source, size, 1, 0, 0))
STUB_CALL(cuMemsetD8Async, (void* destination, unsigned char value, size_t count, void* stream),
    fill(stream, destination, value, 1, count, 1, 0))
STUB_CALL(cuMemsetD32Async, (void* destination, unsigned value, size_t count, void* stream),
    fill(stream, destination, value, 4, count, 1, 0))

// ---- streams and events ----

STUB_CALL(cuStreamCreate, (void** stream, unsigned flags), create_stream(stream, !(flags & 1)))
STUB_CALL(cuStreamCreateWithPriority, (void** stream, unsigned flags, int), create_stream(stream, !(flags & 1)))
STUB_CALL(cuStreamDestroy_v2, (void* stream), destroy_stream(stream))
STUB_CALL(cuStreamQuery, (void* stream), query_stream(stream))
STUB_CALL(cuStreamSynchronize, (void* stream), synchronize_stream(stream))
STUB_CALL(cuStreamWaitEvent, (void* stream, void* event, unsigned flags), wait_event(stream, event, flags & 1))
STUB_CALL(cuEventCreate, (void** event, unsigned), create_event(event))

STUB_CALL_ANYWHERE(cuEventDestroy_v2, (void* event), destroy_event(event))

STUB_CALL(cuEventRecord, (void* event, void* stream), record_event(event, stream, false))
STUB_CALL(cuEventRecordWithFlags, (void* event, void* stream, unsigned flags), record_event(event, stream, flags & 1))
STUB_CALL(cuEventQuery, (void* event), query_event(event))
STUB_CALL(cuEventSynchronize, (void* event), synchronize_event(event))

int cuEventElapsedTime(float* milliseconds, void*, void*) { return stub_give(milliseconds, 0.01f); }

// ---- capture ----

STUB_CALL(cuStreamBeginCapture_v2, (void* stream, int mode), begin_capture(stream, mode))
STUB_CALL(cuStreamEndCapture, (void* stream, void** graph), end_capture(stream, graph))

int cuStreamIsCapturing(void* stream, int* status) {
    STUB_ENTER_CONTEXT();
    CaptureInfo info;
    int code = capture_info(stream, &info);
    *status = info.status;
    return code;
}

int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* id, void** graph, Node* const** dependencies, size_t* count) {
    STUB_ENTER_CONTEXT();
    CaptureInfo info;
    int code = capture_info(stream, &info);
    *status = info.status;
    if (id) *id = info.id;
    if (graph) *graph = info.graph;
    if (dependencies) *dependencies = info.dependencies;
    if (count) *count = info.num_dependencies;
    return code;
}

int cuStreamGetCaptureInfo_v3(void* stream, int* status, uint64_t* id, void** graph, Node* const** dependencies, const void** edges,
    size_t* count) {
    if (edges) *edges = nullptr;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

STUB_CALL_ANYWHERE(cuThreadExchangeStreamCaptureMode, (int* mode), exchange_mode(mode))

// ---- modules and kernels ----

int cuModuleLoadData(void** module, const void* image) {
    STUB_ENTER_CONTEXT();
    if (int refused = unsafe_call("load of a module")) return refused;
    *module = load_module(image);
    return SUCCESS;
}

int cuModuleLoad(void** module, const char* path) {
    enum { FILE_NOT_FOUND = 301 };
    std::ifstream file(path, std::ios::binary);
    if (!file) return FILE_NOT_FOUND;
    std::string image(std::istreambuf_iterator<char>(file), {});
    return cuModuleLoadData(module, image.c_str());
}

int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) { return cuModuleLoadData(module, image); }
int cuModuleUnload(void*) { return SUCCESS; }

int cuModuleGetFunction(void** function, void* module, const char* name) {
    STUB_ENTER();
    *function = module_function(static_cast<Module*>(module), name);
    return SUCCESS;
}

int cuFuncGetAttribute(int* value, int attribute, void*) {
    enum { MOST_THREADS = 0, REGISTERS = 4 };
    *value = attribute == MOST_THREADS ? 1024 : attribute == REGISTERS ? 64 : 0;
    return SUCCESS;
}

int cuFuncSetAttribute(void*, int, int) { return SUCCESS; }
int cuFuncSetCacheConfig(void*, int) { return SUCCESS; }
int cuFuncGetName(const char** name, void* function) { return stub_give(name, static_cast<Function*>(function)->symbol.c_str()); }

int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
    auto parameters = parameters_of(static_cast<Function*>(function));
    if (!parameters) return NOT_SUPPORTED;
    if (index >= parameters->size()) return INVALID_VALUE;
    *offset = (*parameters)[index].offset;
    if (size) *size = (*parameters)[index].size;
    return SUCCESS;
}

int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void*, int, size_t) { return stub_give(count, 2); }
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* count, void*, int, size_t, unsigned) { return stub_give(count, 2); }
int cuOccupancyMaxActiveClusters(int* count, void*, const void*) { return stub_give(count, 1); }

int cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments, void** extra) {
    STUB_ENTER_CONTEXT();
    if (extra) return NOT_SUPPORTED;
    return launch_kernel(config->stream, static_cast<Function*>(function), config->grid, arguments);  // block and shared follow grid
}

int cuLaunchKernel(
    void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream,
    void** arguments,
    void** extra) {
    STUB_ENTER_CONTEXT();
    if (extra) return NOT_SUPPORTED;
    const unsigned shape[7] = {gx, gy, gz, bx, by, bz, shared};
    return launch_kernel(stream, static_cast<Function*>(function), shape, arguments);
}

int cuLaunchCooperativeKernel(
    void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void* stream,
    void** arguments) {
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, nullptr);
}

STUB_CALL(cuLaunchHostFunc, (void* stream, void (*callback)(void*), void* data), host_call(stream, callback, data))

// ---- graphs ----

int cuGraphGetNodes(void* handle, void** nodes, size_t* count) {
    STUB_ENTER();
    Lock lock(state);
    Graph* graph = find_graph(handle);
    return graph && count ? give_list(handles(graph->nodes), nodes, count) : int(INVALID_VALUE);
}

STUB_CALL_ANYWHERE(cuGraphGetEdges, (void* graph, void** from, void** to, size_t* count), give_edges(graph, from, to, count))
STUB_CALL_ANYWHERE(cuGraphGetEdges_v2, (void* graph, void** from, void** to, void*, size_t* count),
    give_edges(graph, from, to, count))
STUB_CALL_ANYWHERE(cuGraphNodeGetDependencies, (Node* node, void** dependencies, size_t* count),
    give_list(node->dependencies, dependencies, count))
STUB_CALL_ANYWHERE(cuGraphNodeGetDependencies_v2, (Node* node, void** dependencies, void*, size_t* count),
    give_list(node->dependencies, dependencies, count))

int cuGraphNodeGetType(Node* node, int* type) {
    STUB_ENTER();
    *type = static_cast<int>(node->type);
    return SUCCESS;
}

int cuGraphKernelNodeGetParams_v2(Node* node, KernelNodeParams* out) {
    STUB_ENTER();
    if (node->type != NodeType::kernel) return INVALID_VALUE;
    *out = {};
    out->function = node->function;
    std::memcpy(out->shape, node->shape, sizeof out->shape);
    out->arguments = node->has_arguments ? node->argument_pointers.data() : nullptr;
    return SUCCESS;
}

int cuGraphMemcpyNodeGetParams(Node* node, CopyParams* out) {
    STUB_ENTER();
    if (node->type != NodeType::copy) return INVALID_VALUE;
    *out = {};
    out->source_type = memory_type(node->source) == Memory::device ? DEVICE : HOST;
    out->destination_type = memory_type(node->destination) == Memory::device ? DEVICE : HOST;
    out->source_host = node->source;
    out->source_device = reinterpret_cast<uintptr_t>(node->source);
    out->destination_host = node->destination;
    out->destination_device = reinterpret_cast<uintptr_t>(node->destination);
    out->source_pitch = node->source_pitch;
    out->destination_pitch = node->destination_pitch;
    out->width = node->width;
    out->height = node->height;
    out->depth = 1;
    return SUCCESS;
}

int cuGraphMemsetNodeGetParams(Node* node, MemsetNodeParams* out) {
    STUB_ENTER();
    if (node->type != NodeType::fill) return INVALID_VALUE;
    *out = {reinterpret_cast<uintptr_t>(node->destination), node->destination_pitch, node->value, node->element, node->width, node->height};
    return SUCCESS;
}

int cuGraphHostNodeGetParams(Node* node, HostNodeParams* out) {
    STUB_ENTER();
    if (node->type != NodeType::host) return INVALID_VALUE;
    *out = {node->callback, node->data};
    return SUCCESS;
}

STUB_CALL(cuGraphCreate, (void** graph, unsigned), create_graph(graph))
STUB_CALL(cuGraphConditionalHandleCreate, (uint64_t* handle, void* graph, void* context, unsigned, unsigned),
    context == &context_object ? create_condition(handle, graph) : int(INVALID_CONTEXT))

int cuGraphAddNode_v2(void** out, void* graph, Node* const* dependencies, const void*, size_t count, NodeParams* params) {
    STUB_ENTER_CONTEXT();
    enum { IF = 0, WHILE = 1 };
    auto& conditional = params->conditional;
    if (params->type != int(NodeType::conditional)) return NOT_SUPPORTED;
    bool valid = (conditional.type == IF || conditional.type == WHILE) && conditional.size == 1 && conditional.context == &context_object;
    if (!valid || !is_condition(conditional.handle, graph)) return INVALID_VALUE;
    auto node = std::make_shared<Node>();
    node->type = NodeType::conditional;
    node->condition = conditional.handle;
    node->condition_type = conditional.type;
    if (int code = add_node(out, graph, dependencies, count, node)) return code;
    conditional.bodies = &node->body_handle;
    return SUCCESS;
}

int cuGraphAddChildGraphNode(void** out, void* graph, Node* const* dependencies, size_t count, void* child) {
    STUB_ENTER_CONTEXT();
    Lock lock(state);
    Graph* found = find_graph(child);
    if (!found) return INVALID_VALUE;
    auto node = std::make_shared<Node>();
    node->type = NodeType::child;
    node->body = std::make_shared<Graph>(*found);
    return add_node(out, graph, dependencies, count, node);
}

int cuGraphAddKernelNode_v2(void** out, void* graph, Node* const* dependencies, size_t count, const KernelNodeParams* params) {
    STUB_ENTER_CONTEXT();
    return add_node(out, graph, dependencies, count,
        kernel_node(static_cast<Function*>(params->function), params->shape, params->arguments));
}

int cuGraphAddMemsetNode(void** out, void* graph, Node* const* dependencies, size_t count, const MemsetNodeParams* params, void* context) {
    STUB_ENTER_CONTEXT();
    if (context != &context_object) return INVALID_CONTEXT;
    auto node = std::make_shared<Node>();
    node->type = NodeType::fill;
    node->destination = reinterpret_cast<char*>(params->destination);
    node->value = params->value;
    node->element = params->element;
    node->width = params->width;
    node->height = params->height;
    node->destination_pitch = params->pitch;
    return add_node(out, graph, dependencies, count, node);
}

STUB_CALL(cuGraphInstantiateWithFlags, (void** exec, void* graph, unsigned long long), instantiate(exec, graph))
STUB_CALL(cuGraphUpload, (void* exec, void* stream), upload(exec, stream))
STUB_CALL(cuGraphLaunch, (void* exec, void* stream), launch_graph(exec, stream))

STUB_CALL_ANYWHERE(cuGraphExecDestroy, (void* exec), destroy_exec(exec))
STUB_CALL_ANYWHERE(cuGraphDestroy, (void* graph), destroy_graph(graph))

}  // extern "C"
