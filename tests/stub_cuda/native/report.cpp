// Counters by name and a bounded list of messages: what went wrong, for a test to read.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <utility>

#include "stub.h"

namespace stub {

namespace {
struct Report {
    std::mutex lock;
    std::map<std::string, std::unique_ptr<Counter>> counters;
    std::deque<std::string> messages;
    std::string issued;
    std::atomic<bool> keeps_issued{false};
    bool verbose = std::getenv("STUB_CUDA_VERBOSE") != nullptr;
};

// Never destroyed: threads may count until the process ends.
Report& report() {
    static Report* one = new Report;
    return *one;
}

constexpr size_t MOST_MESSAGES = 1000;
}  // namespace

Counter& counter(const std::string& name) {
    std::lock_guard<std::mutex> lock(report().lock);
    auto& found = report().counters[name];
    if (!found) found = std::make_unique<Counter>();
    return *found;
}

std::vector<std::pair<std::string, int64_t>> all_counters() {
    std::lock_guard<std::mutex> lock(report().lock);
    std::vector<std::pair<std::string, int64_t>> all;
    for (auto& [name, value] : report().counters) all.emplace_back(name, value->value());
    return all;
}

void message(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::lock_guard<std::mutex> lock(report().lock);
    if (report().verbose) std::fprintf(stderr, "[stub cuda] %s\n", text);
    if (report().messages.size() == MOST_MESSAGES) report().messages.pop_front();
    report().messages.emplace_back(text);
}

void issued(const char* kind, uint64_t stream, const void* subject) {
    if (!report().keeps_issued) return;
    char text[128];
    std::snprintf(text, sizeof text, "%s %llu %llu\n", kind, static_cast<unsigned long long>(stream),
        reinterpret_cast<unsigned long long>(subject));
    std::lock_guard<std::mutex> lock(report().lock);
    report().issued += text;
}

std::string take_issued(bool more) {
    std::lock_guard<std::mutex> lock(report().lock);
    report().keeps_issued = more;
    return std::exchange(report().issued, {});
}

std::string take_messages() {
    std::lock_guard<std::mutex> lock(report().lock);
    std::string all;
    for (auto& text : report().messages) all += text + "\n";
    report().messages.clear();
    return all;
}

namespace {
struct CodeText {
    int code;
    const char *name, *text;
};
constexpr CodeText CODES[] = {
    {SUCCESS, "SUCCESS", "no error"},
    {INVALID_VALUE, "INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "OUT_OF_MEMORY", "out of memory"},
    {9, "INVALID_CONFIGURATION", "invalid configuration argument"},
    {INVALID_CONTEXT, "INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "NOT_FOUND", "named symbol not found"},
    {NOT_READY, "NOT_READY", "device not ready"},
    {NOT_PERMITTED, "NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"},
    {CAPTURE_UNMATCHED, "STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {CAPTURE_UNJOINED, "STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
    {CAPTURE_WRONG_THREAD, "STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"},
};
const CodeText* find(int code) {
    for (auto& entry : CODES)
        if (entry.code == code) return &entry;
    return nullptr;
}
}  // namespace

const char* code_name(int code) {
    const CodeText* entry = find(code);
    return entry ? entry->name : "UNKNOWN";
}

const char* code_text(int code) {
    const CodeText* entry = find(code);
    return entry ? entry->text : "unknown error";
}

}  // namespace stub
