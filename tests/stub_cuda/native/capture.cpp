// Streams, events and the rules of stream capture, after the CUDA programming guide and the descriptions of
// cudaStreamBeginCapture and cudaThreadExchangeStreamCaptureMode.
#include <algorithm>

#include "stub.h"

namespace stub {

std::recursive_mutex state;

namespace {
struct World {
    Stream legacy, per_thread;
    std::set<Stream*> streams;
    std::set<Event*> events;
    std::set<std::shared_ptr<Capture>> open;
    uint64_t last_capture = 0, last_stream = 2;
    World() { legacy.number = 1, per_thread.number = 2; }
};
World& world() {
    static World* one = new World;
    return *one;
}

thread_local Mode thread_mode = Mode::global;

Event* find_event(void* handle) {
    auto event = static_cast<Event*>(handle);
    return world().events.count(event) ? event : nullptr;
}

bool reaches(const std::vector<Node*>& from, const std::vector<Node*>& targets) {
    std::set<Node*> seen;
    std::vector<Node*> next(from);
    while (!next.empty()) {
        Node* node = next.back();
        next.pop_back();
        if (!seen.insert(node).second) continue;
        next.insert(next.end(), node->dependencies.begin(), node->dependencies.end());
    }
    return std::all_of(targets.begin(), targets.end(), [&](Node* node) { return seen.count(node) > 0; });
}

bool has_blocking_stream(const Capture& capture) {
    return std::any_of(capture.streams.begin(), capture.streams.end(), [](Stream* stream) { return stream->blocking; });
}

bool blocking_capture() {
    return std::any_of(world().open.begin(), world().open.end(), [](auto& capture) { return has_blocking_stream(*capture); });
}

// A wait or record inside a capture that refers to work outside of it, as the flag "external" requires.
int add_event_node(Stream& stream, NodeType type, Event* event) {
    auto node = std::make_shared<Node>();
    node->type = type;
    node->event = event;
    return issue(&stream, std::move(node));
}
}  // namespace

Stream* find_stream(void* handle) {
    if (!handle || handle == reinterpret_cast<void*>(1)) return &world().legacy;
    if (handle == reinterpret_cast<void*>(2)) return &world().per_thread;
    auto stream = static_cast<Stream*>(handle);
    return world().streams.count(stream) || stream == &world().legacy || stream == &world().per_thread ? stream : nullptr;
}

int invalidate(Capture& capture, int code, const char* why) {
    capture.invalid = true;
    counter("invalidated_captures").add();
    message("capture %llu invalidated: %s: %s", static_cast<unsigned long long>(capture.id), why, code_name(code));
    return code;
}

int unsafe_call(const char* what) {
    Lock lock(state);
    if (thread_mode == Mode::relaxed) return SUCCESS;
    int code = SUCCESS;
    for (auto& capture : world().open) {
        bool own = capture->thread == std::this_thread::get_id();
        bool forbidden = own ? capture->mode != Mode::relaxed : capture->mode == Mode::global && thread_mode == Mode::global;
        if (forbidden) code = invalidate(*capture, CAPTURE_UNSUPPORTED, what);
    }
    return code;
}

int legacy_call(const char* what) {
    Lock lock(state);
    int code = SUCCESS;
    for (auto& capture : world().open)
        if (has_blocking_stream(*capture)) code = invalidate(*capture, CAPTURE_IMPLICIT, what);
    return code;
}

int exchange_mode(int* mode) {
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    Mode before = thread_mode;
    thread_mode = static_cast<Mode>(*mode);
    *mode = static_cast<int>(before);
    return SUCCESS;
}

int create_stream(void** handle, bool blocking) {
    Lock lock(state);
    auto stream = new Stream;
    stream->number = ++world().last_stream;
    stream->blocking = blocking;
    world().streams.insert(stream);
    counter("live_streams").add();
    *handle = stream;
    return SUCCESS;
}

int destroy_stream(void* handle) {
    Lock lock(state);
    auto stream = static_cast<Stream*>(handle);
    if (!world().streams.erase(stream)) return INVALID_HANDLE;
    if (stream->capture) {
        invalidate(*stream->capture, CAPTURE_INVALIDATED, "a capturing stream is destroyed");
        stream->capture->streams.erase(stream);
        if (stream->capture->origin == stream) {
            unregister_graph(stream->capture->graph);
            delete stream->capture->graph;
            for (Stream* other : stream->capture->streams) other->capture.reset();
            stream->capture->open = false;
            world().open.erase(stream->capture);
        }
    }
    counter("live_streams").add(-1);
    delete stream;  // work that was issued on it still runs
    return SUCCESS;
}

int create_event(void** handle) {
    Lock lock(state);
    auto event = new Event;
    world().events.insert(event);
    counter("live_events").add();
    *handle = event;
    return SUCCESS;
}

int destroy_event(void* handle) {
    Lock lock(state);
    auto event = static_cast<Event*>(handle);
    if (!world().events.erase(event)) return INVALID_HANDLE;
    counter("live_events").add(-1);
    delete event;
    return SUCCESS;
}

int record_event(void* event_handle, void* stream_handle, bool external) {
    Lock lock(state);
    Event* event = find_event(event_handle);
    Stream* stream = find_stream(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    if (stream->capture) {
        if (stream->capture->invalid) return CAPTURE_INVALIDATED;
        if (external) return add_event_node(*stream, NodeType::event_record, event);
        event->capture = stream->capture;
        event->frontier = stream->frontier;
    } else {
        event->capture.reset();
        event->frontier.clear();
        event->ticket = stream->ticket;
        issued("record", stream->number, event_handle);
    }
    event->recorded = true;
    return SUCCESS;
}

int wait_event(void* stream_handle, void* event_handle, bool external) {
    Lock lock(state);
    Event* event = find_event(event_handle);
    Stream* stream = find_stream(stream_handle);
    if (!event || !stream) return INVALID_HANDLE;
    if (stream->capture && stream->capture->invalid) return CAPTURE_INVALIDATED;
    if (event->capture && event->capture->open) {
        if (!stream->capture) {
            if (stream == &world().legacy)
                return invalidate(*event->capture, CAPTURE_IMPLICIT, "the legacy stream waits for a captured event");
            stream->capture = event->capture;
            stream->frontier = event->frontier;
            event->capture->streams.insert(stream);
            return SUCCESS;
        }
        if (stream->capture != event->capture) {
            invalidate(*event->capture, CAPTURE_MERGE, "a stream of another capture waits for its event");
            return invalidate(*stream->capture, CAPTURE_MERGE, "a stream waits for an event of another capture");
        }
        for (Node* node : event->frontier)
            if (std::find(stream->frontier.begin(), stream->frontier.end(), node) == stream->frontier.end())
                stream->frontier.push_back(node);
        return SUCCESS;
    }
    if (event->capture) return CAPTURED_EVENT;
    if (stream->capture) {
        if (external) return add_event_node(*stream, NodeType::event_wait, event);
        return event->recorded ? invalidate(*stream->capture, CAPTURE_ISOLATION, "wait for an event from outside the capture") : SUCCESS;
    }
    stream->ticket = std::max(stream->ticket, event->ticket);
    issued("wait", stream->number, event_handle);
    return SUCCESS;
}

// The ticket to wait for, if the event may be queried.
static int askable_event(void* handle, const char* what, uint64_t* ticket) {
    if (int refused = unsafe_call(what)) return refused;
    Lock lock(state);
    Event* event = find_event(handle);
    if (!event) return INVALID_HANDLE;
    if (event->capture) return event->capture->open ? invalidate(*event->capture, CAPTURED_EVENT, what) : CAPTURED_EVENT;
    *ticket = event->ticket;
    return SUCCESS;
}

int query_event(void* handle) {
    uint64_t ticket = 0;
    if (int code = askable_event(handle, "query of an event", &ticket)) return code;
    return reached(ticket) ? SUCCESS : NOT_READY;
}

int synchronize_event(void* handle) {
    uint64_t ticket = 0;
    if (int code = askable_event(handle, "synchronization with an event", &ticket)) return code;
    wait_for(ticket);
    return SUCCESS;
}

static int askable_stream(void* handle, const char* what, uint64_t* ticket) {
    Lock lock(state);
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (stream->capture) return invalidate(*stream->capture, CAPTURE_UNSUPPORTED, what);
    if (stream == &world().legacy)
        if (int refused = legacy_call(what)) return refused;
    if (int refused = unsafe_call(what)) return refused;
    *ticket = stream->ticket;
    return SUCCESS;
}

int query_stream(void* handle) {
    uint64_t ticket = 0;
    if (int code = askable_stream(handle, "query of a stream", &ticket)) return code;
    return reached(ticket) ? SUCCESS : NOT_READY;
}

int synchronize_stream(void* handle) {
    uint64_t ticket = 0;
    if (int code = askable_stream(handle, "synchronization with a stream", &ticket)) return code;
    wait_for(ticket);
    return SUCCESS;
}

int synchronize_device(const char* what) {
    {
        Lock lock(state);
        int code = SUCCESS;
        for (auto& capture : world().open) code = invalidate(*capture, CAPTURE_UNSUPPORTED, what);
        if (code) return code;
    }
    drain();
    return SUCCESS;
}

int begin_capture(void* handle, int mode) {
    Lock lock(state);
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    if (mode < 0 || mode > 2) return INVALID_VALUE;
    if (stream == &world().legacy) return CAPTURE_UNSUPPORTED;
    if (stream->capture) return ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->id = ++world().last_capture;
    capture->graph = new Graph;
    register_graph(capture->graph);
    capture->origin = stream;
    capture->mode = static_cast<Mode>(mode);
    capture->thread = std::this_thread::get_id();
    capture->streams.insert(stream);
    stream->capture = capture;
    stream->frontier.clear();
    world().open.insert(capture);
    return SUCCESS;
}

int end_capture(void* handle, void** graph) {
    Lock lock(state);
    *graph = nullptr;
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return ILLEGAL_STATE;
    if (capture->origin != stream) return CAPTURE_UNMATCHED;
    if (capture->mode != Mode::relaxed && capture->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    int code = capture->invalid ? CAPTURE_INVALIDATED : SUCCESS;
    if (code == SUCCESS)
        for (Stream* other : capture->streams)
            if (other != stream && !reaches(stream->frontier, other->frontier))
                code = invalidate(*capture, CAPTURE_UNJOINED, "end of the capture");
    for (Stream* other : capture->streams) {
        other->capture.reset();
        other->frontier.clear();
    }
    capture->open = false;
    world().open.erase(capture);
    if (code) {
        unregister_graph(capture->graph);
        delete capture->graph;
        capture->graph = nullptr;
        return code;
    }
    counter("captured_graphs").add();
    counter("live_graphs").add();
    *graph = capture->graph;
    return SUCCESS;
}

int capture_info(void* handle, CaptureInfo* info) {
    Lock lock(state);
    Stream* stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    *info = {};
    if (stream == &world().legacy && blocking_capture()) return CAPTURE_IMPLICIT;  // does not invalidate the capture
    if (!stream->capture) return SUCCESS;
    info->status = stream->capture->invalid ? 2 : 1;
    info->id = stream->capture->id;
    if (info->status == 1) {
        info->graph = stream->capture->graph;
        info->dependencies = stream->frontier.data();
        info->num_dependencies = stream->frontier.size();
    }
    return SUCCESS;
}

}  // namespace stub
