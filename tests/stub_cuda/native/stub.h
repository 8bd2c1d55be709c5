// What the stub libraries share: streams, captures, graphs, the device queue, memory and counters.
//
// Everything here is internal. The files *_api.cpp export the CUDA names, query.cpp the functions that tests call. driver_api.cpp,
// query.cpp and what is declared here are in libcuda.so.1, which the libraries of the other *_api.cpp link against.
#pragma once

#include <functional>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace stub {

// Values that cudaError_t and CUresult have in common.
enum Code : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};
const char* code_name(int code);
const char* code_text(int code);

// ---- counters and messages (report.cpp) ----

class Counter {
  public:
    void add(int64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
    int64_t value() const { return value_.load(std::memory_order_relaxed); }

  private:
    std::atomic<int64_t> value_{0};
};
Counter& counter(const std::string& name);  // lives to the end of the process
std::vector<std::pair<std::string, int64_t>> all_counters();
void message(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string take_messages();  // one per line; forgets them
void issued(const char* kind, uint64_t stream, const void* subject);  // outside captures: work, an event recorded or waited for
std::string take_issued(bool more);  // one per line; forgets them, and keeps later ones if `more`

// ---- kernels (kernels.cpp) ----

struct Parameter {
    size_t offset, size;
};

struct Module;

struct Function {
    std::string symbol;
    Module* module = nullptr;
    bool resolved = false;          // whether the next two fields are final
    bool parameters_known = false;  // if false, launches keep no arguments
    std::vector<Parameter> parameters;
};

// The caller of these holds no lock.
Module* load_module(const void* image);             // a cubin or fat binary, as cuModuleLoadData takes it
Module* register_fat_binary(const void* wrapper);   // what nvcc's host code registers; read at the first launch
Function* module_function(Module* module, const char* symbol);
void register_function(Module* module, const void* host_function, const char* symbol);
Function* host_function(const void* host_function);
Function* library_function(const char* name, size_t arguments);  // one kernel per call of a library, each argument 8 bytes
const std::vector<Parameter>* parameters_of(Function* function);  // null: not known

// ---- graphs (graph.cpp) ----

// Values of CUgraphNodeType.
enum class NodeType : int { kernel = 0, copy = 1, fill = 2, host = 3, child = 4, empty = 5, event_wait = 6, event_record = 7,
    conditional = 13 };

struct Graph;
struct Event;
struct Stream;

struct Node {
    NodeType type = NodeType::empty;
    Graph* graph = nullptr;
    size_t index = 0;
    std::vector<Node*> dependencies;
    uint64_t stream = 0;  // the number of the stream that it was captured from
    // kernel
    Function* function = nullptr;
    unsigned shape[7] = {};  // grid, block, dynamic shared memory
    bool has_arguments = false;
    std::vector<std::vector<uint8_t>> arguments;
    std::vector<void*> argument_pointers;  // for the driver's kernelParams
    const void* workspace = nullptr;       // of a call of cuBLAS
    std::function<void()> values;          // of a collective of NCCL
    // copy: `height` lines of `width` bytes; fill: of `width` elements
    char* destination = nullptr;
    const char* source = nullptr;
    size_t width = 0, height = 1, destination_pitch = 0, source_pitch = 0;
    bool pageable = false;
    unsigned value = 0, element = 1;
    // host
    void (*callback)(void*) = nullptr;
    void* data = nullptr;
    // event
    Event* event = nullptr;
    // child: a copy of the graph; conditional: the graph that the caller fills, and its handle as the caller gets it
    std::shared_ptr<Graph> body;
    void* body_handle = nullptr;
    uint64_t condition = 0;
    int condition_type = 0;
};

// Shared by a graph, its execs and queued launches: nodes live as long as any of these.
using Nodes = std::vector<std::shared_ptr<Node>>;

struct Graph {
    Nodes nodes;
};

struct Exec {
    Nodes nodes;
    bool uploaded = false;
};

std::string describe(const Nodes& nodes);  // JSON
void register_graph(Graph* graph);   // of a capture that begins
void unregister_graph(Graph* graph);
int destroy_graph(void* graph);
int instantiate(void** exec, void* graph);
int destroy_exec(void* exec);
int upload(void* exec, void* stream);
int launch_graph(void* exec, void* stream);
int add_node(void** handle, void* graph, Node* const* dependencies, size_t count, std::shared_ptr<Node> node);
int create_graph(void** graph);
int create_condition(uint64_t* handle, void* graph);
bool is_condition(uint64_t handle, void* graph);
Graph* find_graph(void* graph);  // null: no such graph; also finds a graph that is being captured
Exec* find_exec(void* exec);
std::vector<void*> live_graphs();

// ---- streams, events and captures (capture.cpp) ----

enum class Mode : int { global = 0, thread_local_ = 1, relaxed = 2 };

struct Capture {
    uint64_t id = 0;
    Graph* graph = nullptr;
    Stream* origin = nullptr;
    Mode mode = Mode::global;
    bool invalid = false, open = true;
    std::thread::id thread;
    std::set<Stream*> streams;
};

struct Stream {
    uint64_t number = 0;
    bool blocking = true;  // synchronises with the legacy stream
    std::shared_ptr<Capture> capture;
    std::vector<Node*> frontier;  // what the next captured node depends on
    uint64_t ticket = 0;          // of the last work issued on it
};

struct Event {
    bool recorded = false;
    std::shared_ptr<Capture> capture;  // it was recorded in
    std::vector<Node*> frontier;
    uint64_t ticket = 0;
};

// One lock over all of this; never held while work runs or a caller waits.
extern std::recursive_mutex state;
using Lock = std::lock_guard<std::recursive_mutex>;

Stream* find_stream(void* handle);  // null: no such stream
int create_stream(void** handle, bool blocking);
int destroy_stream(void* handle);
int create_event(void** handle);
int destroy_event(void* handle);
int record_event(void* event, void* stream, bool external);
int wait_event(void* stream, void* event, bool external);
int query_event(void* event);
int synchronize_event(void* event);
int query_stream(void* stream);
int synchronize_stream(void* stream);
int synchronize_device(const char* what);

int begin_capture(void* stream, int mode);
int end_capture(void* stream, void** graph);
struct CaptureInfo {
    int status = 0;  // 0 none, 1 active, 2 invalidated
    uint64_t id = 0;
    Graph* graph = nullptr;
    Node* const* dependencies = nullptr;
    size_t num_dependencies = 0;
};
int capture_info(void* stream, CaptureInfo* info);
int exchange_mode(int* mode);
int unsafe_call(const char* what);  // a call that a capture may forbid on this thread
int legacy_call(const char* what);  // implicit use of the legacy stream
int invalidate(Capture& capture, int code, const char* why);

// ---- work: becomes a node if the stream captures, else runs in order (work.cpp) ----

int issue(void* stream, std::shared_ptr<Node> node);
std::shared_ptr<Node> kernel_node(Function* function, const unsigned shape[7], void** arguments);
int launch_kernel(void* stream, Function* function, const unsigned shape[7], void** arguments, const void* workspace = nullptr,
                  std::function<void()> values = {});
int copy(void* stream, void* destination, const void* source, size_t width, size_t height, size_t destination_pitch, size_t source_pitch);
int fill(void* stream, void* destination, unsigned value, unsigned element, size_t width, size_t height, size_t pitch);
int host_call(void* stream, void (*callback)(void*), void* data);
uint64_t enqueue(Nodes nodes);  // the ticket of this work
bool reached(uint64_t ticket);
void wait_for(uint64_t ticket);
void drain();  // wait for all that was issued
bool in_host_node();

// ---- memory (memory.cpp) ----

constexpr size_t TOTAL_MEMORY = size_t{140} << 30;
enum class Memory { unregistered = 0, host = 1, device = 2 };

int allocate_device(void** pointer, size_t size);
int free_device(void* pointer);
int allocate_host(void** pointer, size_t size);
int free_host(void* pointer);
int register_host(void* pointer, size_t size);
int unregister_host(void* pointer);
Memory memory_type(const void* pointer);
bool device_range(const void* pointer, void** base, size_t* size);
size_t used_memory();

// Whether this thread has a context. Calls of the runtime API give it one, calls of the driver API need one.
extern thread_local bool has_context;

}  // namespace stub
