// Work that is no part of a capture runs on one thread, in the order of issue. That is one of the orders that the
// streams allow, since an event is recorded before another stream can wait for it. Kernels do nothing.
#include <condition_variable>
#include <cstring>
#include <deque>

#include "stub.h"

namespace stub {

namespace {
class Queue {
  public:
    uint64_t push(Nodes nodes) {
        std::lock_guard<std::mutex> lock(lock_);
        if (!started_) {
            std::thread([this] { serve(); }).detach();
            started_ = true;
        }
        waiting_.push_back(std::move(nodes));
        more_.notify_one();
        return ++issued_;
    }

    bool reached(uint64_t ticket) {
        std::lock_guard<std::mutex> lock(lock_);
        return done_ >= ticket;
    }

    void wait(uint64_t ticket) {
        std::unique_lock<std::mutex> lock(lock_);
        progress_.wait(lock, [&] { return done_ >= ticket; });
    }

    uint64_t issued() {
        std::lock_guard<std::mutex> lock(lock_);
        return issued_;
    }

  private:
    [[noreturn]] void serve();

    std::mutex lock_;
    std::condition_variable more_, progress_;
    std::deque<Nodes> waiting_;
    uint64_t issued_ = 0, done_ = 0;
    bool started_ = false;
};

// Never destroyed: its thread runs to the end of the process.
Queue& queue() {
    static Queue* one = new Queue;
    return *one;
}

thread_local bool inside_host_node = false;

// Memory that was device or pinned memory at the issue and has been freed since: a graph may outlive its buffers.
bool illegal(const void* pointer) {
    if (memory_type(pointer) != Memory::unregistered) return false;
    counter("illegal_addresses").add();
    message("a copy, fill or workspace of memory that was freed: %p", pointer);
    return true;
}

void run_copy(const Node& node) {
    if (!node.pageable && (illegal(node.destination) || illegal(node.source))) return;
    for (size_t line = 0; line < node.height; ++line)
        std::memmove(node.destination + line * node.destination_pitch, node.source + line * node.source_pitch, node.width);
}

void run_fill(const Node& node) {
    if (illegal(node.destination)) return;
    for (size_t line = 0; line < node.height; ++line) {
        char* begin = node.destination + line * node.destination_pitch;
        if (node.element == 1) std::memset(begin, int(node.value), node.width);
        else
            for (size_t index = 0; index < node.width; ++index) std::memcpy(begin + index * node.element, &node.value, node.element);
    }
}

void run(const Node& node) {
    switch (node.type) {
        case NodeType::conditional:  // kernels set no condition, so a body runs once
        case NodeType::child:
            for (auto& inner : node.body->nodes) run(*inner);
            break;
        case NodeType::copy:
            run_copy(node);
            break;
        case NodeType::fill:
            run_fill(node);
            break;
        case NodeType::host:
            counter("executed_host_nodes").add();
            inside_host_node = true;
            node.callback(node.data);
            inside_host_node = false;
            break;
        case NodeType::kernel:
            if (node.workspace) illegal(node.workspace);
            if (node.values) node.values();
            break;
        default:
            break;
    }
}

void Queue::serve() {
    for (;;) {
        Nodes nodes;
        {
            std::unique_lock<std::mutex> lock(lock_);
            more_.wait(lock, [&] { return !waiting_.empty(); });
            nodes = std::move(waiting_.front());
            waiting_.pop_front();
        }
        for (auto& node : nodes) run(*node);
        nodes.clear();
        std::lock_guard<std::mutex> lock(lock_);
        ++done_;
        progress_.notify_all();
    }
}

const char* issued_name(NodeType type) {
    switch (type) {
        case NodeType::kernel:
            return "eager_kernels";
        case NodeType::copy:
            return "eager_copies";
        case NodeType::fill:
            return "eager_fills";
        case NodeType::host:
            return "eager_host_calls";
        default:
            return "eager_other";
    }
}
}  // namespace

bool in_host_node() { return inside_host_node; }
uint64_t enqueue(Nodes nodes) { return queue().push(std::move(nodes)); }
bool reached(uint64_t ticket) { return queue().reached(ticket); }
void wait_for(uint64_t ticket) { queue().wait(ticket); }
void drain() { queue().wait(queue().issued()); }

int issue(void* handle, std::shared_ptr<Node> node) {
    uint64_t ticket = 0;
    bool staged = false;
    {
        Lock lock(state);
        Stream* stream = find_stream(handle);
        if (!stream) return INVALID_HANDLE;
        if (stream->capture) {
            Capture& capture = *stream->capture;
            if (capture.invalid) return CAPTURE_INVALIDATED;
            node->graph = capture.graph;
            node->index = capture.graph->nodes.size();
            node->stream = stream->number;
            node->dependencies = stream->frontier;
            stream->frontier = {node.get()};
            capture.graph->nodes.push_back(std::move(node));
            return SUCCESS;
        }
        if (!handle || handle == reinterpret_cast<void*>(1))
            if (int refused = legacy_call("work on the legacy stream")) return refused;
        counter(issued_name(node->type)).add();
        issued(issued_name(node->type), stream->number, node->destination);
        staged = node->type == NodeType::copy && node->pageable;
        ticket = stream->ticket = enqueue({std::move(node)});
    }
    // The host may use pageable memory again as soon as the call returns.
    if (staged) wait_for(ticket);
    return SUCCESS;
}

std::shared_ptr<Node> kernel_node(Function* function, const unsigned shape[7], void** arguments) {
    auto node = std::make_shared<Node>();
    node->type = NodeType::kernel;
    node->function = function;
    std::memcpy(node->shape, shape, sizeof node->shape);
    const std::vector<Parameter>* parameters = parameters_of(function);
    if (parameters && (arguments || parameters->empty())) {
        node->has_arguments = true;
        for (size_t index = 0; index < parameters->size(); ++index) {
            auto bytes = static_cast<const uint8_t*>(arguments[index]);
            node->arguments.emplace_back(bytes, bytes + (*parameters)[index].size);
        }
        for (auto& argument : node->arguments) node->argument_pointers.push_back(argument.data());
    }
    return node;
}

int launch_kernel(
    void* stream, Function* function, const unsigned shape[7], void** arguments, const void* workspace, std::function<void()> values) {
    for (int axis = 0; axis < 6; ++axis)
        if (!shape[axis]) {
            message("launch of %s with an empty grid or block", function->symbol.c_str());
            return INVALID_VALUE;
        }
    if (shape[1] > 65535 || shape[2] > 65535 || uint64_t(shape[3]) * shape[4] * shape[5] > 1024) {
        message("launch of %s with grid %u %u %u, block %u %u %u", function->symbol.c_str(), shape[0], shape[1], shape[2], shape[3],
            shape[4], shape[5]);
        return 9;  // invalid configuration
    }
    auto node = kernel_node(function, shape, arguments);
    node->workspace = workspace;
    node->values = std::move(values);
    return issue(stream, std::move(node));
}

int copy(void* stream, void* destination, const void* source, size_t width, size_t height, size_t destination_pitch, size_t source_pitch) {
    auto node = std::make_shared<Node>();
    node->type = NodeType::copy;
    node->destination = static_cast<char*>(destination);
    node->source = static_cast<const char*>(source);
    node->width = width;
    node->height = height;
    node->destination_pitch = destination_pitch;
    node->source_pitch = source_pitch;
    node->pageable = memory_type(destination) == Memory::unregistered || memory_type(source) == Memory::unregistered;
    return issue(stream, std::move(node));
}

int fill(void* stream, void* destination, unsigned value, unsigned element, size_t width, size_t height, size_t pitch) {
    auto node = std::make_shared<Node>();
    node->type = NodeType::fill;
    node->destination = static_cast<char*>(destination);
    node->value = value;
    node->element = element;
    node->width = width;
    node->height = height;
    node->destination_pitch = pitch;
    return issue(stream, std::move(node));
}

int host_call(void* stream, void (*callback)(void*), void* data) {
    auto node = std::make_shared<Node>();
    node->type = NodeType::host;
    node->callback = callback;
    node->data = data;
    return issue(stream, std::move(node));
}

}  // namespace stub
