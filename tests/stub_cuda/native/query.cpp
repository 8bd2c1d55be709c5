// What tests read, see counters.py. None of these counts as a CUDA call.
#include <algorithm>
#include <cstring>

#include "stub.h"

namespace {
// The size that the text needs; it is copied if it fits.
size_t give_text(const std::string& text, char* out, size_t room) {
    if (out && room > text.size()) std::memcpy(out, text.c_str(), text.size() + 1);
    return text.size() + 1;
}
}  // namespace

extern "C" {

// Lines of "name value".
size_t stub_counters(char* out, size_t room) {
    std::string text;
    for (auto& [name, value] : stub::all_counters()) text += name + " " + std::to_string(value) + "\n";
    return give_text(text, out, room);
}

// Moves the messages to the caller, at most `room` bytes of them, cut at the end.
size_t stub_take_messages(char* out, size_t room) {
    std::string text = stub::take_messages();
    size_t size = std::min(text.size(), room - 1);
    std::memcpy(out, text.c_str(), size);
    out[size] = 0;
    return size;
}

// Moves the lines "kind stream subject" since the last call to the caller, at most `room` bytes; keeps later ones if `more`.
size_t stub_take_issued(char* out, size_t room, int more) { return give_text(stub::take_issued(more), out, room); }

// Nodes and edges of a graph as JSON; 0 where there is no such graph.
size_t stub_describe_graph(void* handle, char* out, size_t room) {
    stub::Lock lock(stub::state);
    stub::Graph* graph = stub::find_graph(handle);
    return graph ? give_text(stub::describe(graph->nodes), out, room) : 0;
}

// The handles of all graphs that are alive; returns how many there are.
size_t stub_live_graphs(void** out, size_t room) {
    auto all = stub::live_graphs();
    std::copy_n(all.begin(), std::min(all.size(), room), out);
    return all.size();
}

}  // extern "C"
