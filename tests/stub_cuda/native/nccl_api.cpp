// NCCL: communicators, and one kernel for each all-gather and each all-reduce of a sum, with the number of its communicator, pointers and
// count. Other ranks are not waited for; they are taken to have the values of this one. Other collectives are generated and issue nothing.
#include "api.h"

#include <cstring>

using namespace stub;

namespace {
struct Communicator {
    int ranks, rank, number;
};
struct UniqueId {
    char bytes[128];
};

constexpr int UNHANDLED_CUDA_ERROR = 1, INVALID_ARGUMENT = 4;
constexpr int FLOAT32 = 7, BFLOAT16 = 9;  // ncclDataType_t

size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

template <typename Values>
int collective(const char* name, const void* own, void* found, size_t count, int type, void* communicator, void* stream, Values values) {
    static const unsigned shape[7] = {1, 1, 1, 512, 1, 1, 0};
    uint64_t number = static_cast<Communicator*>(communicator)->number, kind = unsigned(type), elements = count;
    void* arguments[] = {&number, &own, &found, &elements, &kind};
    return launch_kernel(stream, library_function(name, 5), shape, arguments, nullptr, values) ? UNHANDLED_CUDA_ERROR : SUCCESS;
}

int connect(void** communicator, int ranks, int rank, const char* name) {
    if (unsafe_call(name)) return UNHANDLED_CUDA_ERROR;  // it allocates device memory
    static int made = 0;
    counter("live_nccl_communicators").add();
    *communicator = new Communicator{ranks, rank, made++};
    return SUCCESS;
}

int disconnect(void* communicator) {
    counter("live_nccl_communicators").add(-1);
    delete static_cast<Communicator*>(communicator);
    return SUCCESS;
}
}  // namespace

extern "C" {

int ncclGetVersion(int* version) { return stub_give(version, 22803); }

int ncclGetUniqueId(UniqueId* id) {
    *id = {};
    return SUCCESS;
}

int ncclCommInitRank(void** communicator, int ranks, UniqueId, int rank) {
    STUB_ENTER();
    return connect(communicator, ranks, rank, __func__);
}

int ncclCommInitRankConfig(void** communicator, int ranks, UniqueId, int rank, void*) {
    STUB_ENTER();
    return connect(communicator, ranks, rank, __func__);
}

int ncclCommDestroy(void* communicator) {
    STUB_ENTER();
    return disconnect(communicator);
}

int ncclCommAbort(void* communicator) {
    STUB_ENTER();
    return disconnect(communicator);
}

int ncclCommCount(void* communicator, int* ranks) { return stub_give(ranks, static_cast<Communicator*>(communicator)->ranks); }

int ncclCommUserRank(void* communicator, int* rank) { return stub_give(rank, static_cast<Communicator*>(communicator)->rank); }

int ncclCommGetAsyncError(void*, int* error) { return stub_give(error, int(SUCCESS)); }

int ncclAllGather(const void* own, void* found, size_t count, int type, void* communicator, void* stream) {
    STUB_ENTER();
    size_t bytes = count * size_of(type);
    int ranks = static_cast<Communicator*>(communicator)->ranks;
    return collective(__func__, own, found, count, type, communicator, stream, [=] {
        for (int rank = 0; rank < ranks; ++rank) std::memmove(static_cast<char*>(found) + rank * bytes, own, bytes);
    });
}

int ncclAllReduce(const void* own, void* found, size_t count, int type, int operation, void* communicator, void* stream) {
    STUB_ENTER();
    if (operation) return INVALID_ARGUMENT;  // other than a sum
    int ranks = static_cast<Communicator*>(communicator)->ranks;
    return collective(__func__, own, found, count, type, communicator, stream, [=] {
        if (type == FLOAT32)
            for (size_t index = 0; index < count; ++index)
                static_cast<float*>(found)[index] = ranks * static_cast<const float*>(own)[index];
        if (type == BFLOAT16)
            for (size_t index = 0; index < count; ++index) {
                uint32_t wide = uint32_t(static_cast<const uint16_t*>(own)[index]) << 16;
                float value;
                std::memcpy(&value, &wide, 4);
                value *= ranks;
                std::memcpy(&wide, &value, 4);
                wide += 0x7fff + (wide >> 16 & 1);  // rounds to nearest, ties to even
                static_cast<uint16_t*>(found)[index] = uint16_t(wide >> 16);
            }
    });
}

}  // extern "C"
