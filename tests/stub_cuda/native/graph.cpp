// Graphs after their capture: instantiation, launch, and a description for tests.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>

#include "stub.h"

namespace stub {

namespace {
struct Alive {
    std::set<Graph*> graphs;
    std::set<Exec*> execs;
    std::vector<void*> conditions;  // by handle - 1: the graph that a condition was created in
};
Alive& alive() {
    static Alive* one = new Alive;
    return *one;
}

std::string demangled(const std::string& symbol) {
    int status = 0;
    char* text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
    std::string name = status == 0 && text ? text : symbol;
    std::free(text);
    return name;
}

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (char letter : text) {
        if (letter == '"' || letter == '\\') out += '\\';
        out += static_cast<unsigned char>(letter) < 32 ? ' ' : letter;
    }
    return out + "\"";
}

std::string hex(const std::vector<uint8_t>& bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string out;
    for (uint8_t byte : bytes) {
        out += digits[byte >> 4];
        out += digits[byte & 15];
    }
    return quoted(out);
}

template <typename Items, typename Text>
std::string listed(const Items& items, Text text) {
    std::string out = "[";
    for (auto& item : items) out += (out.size() > 1 ? "," : "") + text(item);
    return out + "]";
}

std::string number(uint64_t value) { return std::to_string(value); }
std::string address(const void* pointer) { return number(reinterpret_cast<uintptr_t>(pointer)); }

std::string kernel_fields(const Node& node) {
    std::string out = ",\"name\":" + quoted(demangled(node.function->symbol)) + ",\"symbol\":" + quoted(node.function->symbol);
    out += ",\"shape\":" + listed(node.shape, [](unsigned size) { return number(size); });
    if (node.workspace) out += ",\"workspace\":" + address(node.workspace);
    return out + ",\"arguments\":" + (node.has_arguments ? listed(node.arguments, hex) : "null");
}

std::string fields(const Node& node) {
    switch (node.type) {
        case NodeType::kernel:
            return kernel_fields(node);
        case NodeType::copy:
            return ",\"destination\":" + address(node.destination) + ",\"source\":" + address(node.source) + ",\"nbytes\":" +
                   number(node.width * node.height) + ",\"pageable\":" + (node.pageable ? "true" : "false");
        case NodeType::fill:
            return ",\"destination\":" + address(node.destination) + ",\"nbytes\":" + number(node.width * node.height * node.element) +
                   ",\"value\":" + number(node.value);
        case NodeType::child:
            return ",\"body\":" + describe(node.body->nodes);
        case NodeType::conditional:
            return ",\"condition\":" + number(node.condition) + ",\"condition_type\":" + number(uint64_t(node.condition_type)) +
                ",\"body\":" +
                   describe(node.body->nodes);
        case NodeType::host:
            return ",\"callback\":" + address(reinterpret_cast<void*>(node.callback)) + ",\"data\":" + address(node.data);
        default:
            return "";
    }
}
}  // namespace

std::string describe(const Nodes& nodes) {
    return listed(nodes, [](const std::shared_ptr<Node>& node) {
        return "{\"type\":" + number(static_cast<uint64_t>(node->type)) + ",\"stream\":" + number(node->stream) + ",\"dependencies\":" +
               listed(node->dependencies, [](Node* other) { return number(other->index); }) + fields(*node) + "}";
    });
}

void register_graph(Graph* graph) { alive().graphs.insert(graph); }
void unregister_graph(Graph* graph) { alive().graphs.erase(graph); }

Graph* find_graph(void* handle) {
    Lock lock(state);
    auto graph = static_cast<Graph*>(handle);
    return alive().graphs.count(graph) ? graph : nullptr;
}

Exec* find_exec(void* handle) {
    Lock lock(state);
    auto exec = static_cast<Exec*>(handle);
    return alive().execs.count(exec) ? exec : nullptr;
}

std::vector<void*> live_graphs() {
    Lock lock(state);
    return {alive().graphs.begin(), alive().graphs.end()};
}

int destroy_graph(void* handle) {
    Lock lock(state);
    Graph* graph = find_graph(handle);
    if (!graph) return INVALID_VALUE;
    unregister_graph(graph);
    for (auto& node : graph->nodes)
        if (node->type == NodeType::conditional) unregister_graph(node->body.get());
    counter("live_graphs").add(-1);
    delete graph;
    return SUCCESS;
}

int create_graph(void** handle) {
    Lock lock(state);
    auto graph = new Graph;
    register_graph(graph);
    counter("live_graphs").add();
    *handle = graph;
    return SUCCESS;
}

int create_condition(uint64_t* handle, void* graph) {
    Lock lock(state);
    if (!find_graph(graph)) return INVALID_VALUE;
    alive().conditions.push_back(graph);
    *handle = alive().conditions.size();
    return SUCCESS;
}

bool is_condition(uint64_t handle, void* graph) {
    Lock lock(state);
    return handle >= 1 && handle <= alive().conditions.size() && alive().conditions[handle - 1] == graph;
}

int add_node(void** handle, void* graph_handle, Node* const* dependencies, size_t count, std::shared_ptr<Node> node) {
    Lock lock(state);
    Graph* graph = find_graph(graph_handle);
    if (!graph) return INVALID_VALUE;
    for (size_t index = 0; index < count; ++index) {
        if (dependencies[index]->graph != graph) return INVALID_VALUE;
        node->dependencies.push_back(dependencies[index]);
    }
    if (node->type == NodeType::conditional) {
        node->body = std::make_shared<Graph>();
        node->body_handle = node->body.get();
        register_graph(node->body.get());
    }
    node->graph = graph;
    node->index = graph->nodes.size();
    *handle = node.get();
    graph->nodes.push_back(std::move(node));
    return SUCCESS;
}

namespace {
// Whether CUDA allows these nodes, and recursively those of their bodies, in the body of a conditional node.
bool allowed_in_body(const Nodes& nodes) {
    for (auto& node : nodes) {
        bool known = node->type == NodeType::kernel || node->type == NodeType::copy || node->type == NodeType::fill ||
            node->type == NodeType::empty;
        if (!known && !(node->body && allowed_in_body(node->body->nodes))) {
            message("a node of type %d in the body of a conditional node", int(node->type));
            return false;
        }
    }
    return true;
}
}  // namespace

int instantiate(void** handle, void* graph_handle) {
    if (int refused = unsafe_call("instantiation of a graph")) return refused;
    Lock lock(state);
    Graph* graph = find_graph(graph_handle);
    if (!graph) return INVALID_VALUE;
    for (auto& node : graph->nodes)
        if (node->type == NodeType::conditional && !allowed_in_body(node->body->nodes)) return INVALID_VALUE;
    auto exec = new Exec;
    exec->nodes = graph->nodes;
    alive().execs.insert(exec);
    counter("live_graph_execs").add();
    *handle = exec;
    return SUCCESS;
}

int destroy_exec(void* handle) {
    Lock lock(state);
    auto exec = static_cast<Exec*>(handle);
    if (!alive().execs.erase(exec)) return INVALID_VALUE;
    counter("live_graph_execs").add(-1);
    delete exec;  // a launch under way shares the nodes
    return SUCCESS;
}

int upload(void* exec_handle, void* stream_handle) {
    Lock lock(state);
    Exec* exec = find_exec(exec_handle);
    Stream* stream = find_stream(stream_handle);
    if (!exec || !stream) return INVALID_VALUE;
    if (stream->capture) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "upload of a graph in a capturing stream");
    exec->uploaded = true;
    counter("graph_uploads").add();
    return SUCCESS;
}

int launch_graph(void* exec_handle, void* stream_handle) {
    Lock lock(state);
    Exec* exec = find_exec(exec_handle);
    Stream* stream = find_stream(stream_handle);
    if (!exec || !stream) return INVALID_VALUE;
    if (stream->capture)
        return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, "launch of a graph in a capturing stream (child graphs are not modelled)");
    if (!exec->uploaded) counter("graph_launches_that_upload").add();
    exec->uploaded = true;
    counter("graph_launches").add();
    issued("graph", stream->number, exec_handle);
    stream->ticket = enqueue(exec->nodes);
    return SUCCESS;
}

}  // namespace stub
