// cuBLAS: handles with a stream, and one kernel node for each product, with the sizes and pointers of its call. Other
// computing functions are generated and issue one kernel without arguments.
#include <map>

#include "api.h"

using namespace stub;

namespace {
struct Handle {
    void* stream = nullptr;
    void* workspace = nullptr;
    int pointer_mode = 0, math_mode = 0;
};

constexpr int FAILED = 13;  // CUBLAS_STATUS_EXECUTION_FAILED

int product(const char* name, void* handle, std::vector<uint64_t> values) {
    static const unsigned shape[7] = {1, 1, 1, 128, 1, 1, 0};
    std::vector<void*> arguments;
    for (uint64_t& value : values) arguments.push_back(&value);
    auto& used = *static_cast<Handle*>(handle);
    return launch_kernel(used.stream, library_function(name, values.size()), shape, arguments.data(), used.workspace) ? FAILED : SUCCESS;
}

uint64_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
}  // namespace

extern "C" {

// For generated functions.
int stub_library_kernel(void* handle, const char* name) { return product(name, handle, {}); }

int cublasCreate_v2(void** handle) {
    STUB_ENTER();
    if (unsafe_call(__func__)) return FAILED;  // it allocates device memory
    counter("live_cublas_handles").add();
    *handle = new Handle;
    return SUCCESS;
}

int cublasDestroy_v2(void* handle) {
    STUB_ENTER();
    counter("live_cublas_handles").add(-1);
    delete static_cast<Handle*>(handle);
    return SUCCESS;
}

int cublasSetStream_v2(void* handle, void* stream) {
    static_cast<Handle*>(handle)->stream = stream;
    static_cast<Handle*>(handle)->workspace = nullptr;  // as in CUDA: the handle's own workspace until one is set
    return SUCCESS;
}

int cublasSetWorkspace_v2(void* handle, void* workspace, size_t) {
    static_cast<Handle*>(handle)->workspace = workspace;
    return SUCCESS;
}

int cublasSetPointerMode_v2(void* handle, int mode) {
    static_cast<Handle*>(handle)->pointer_mode = mode;
    return SUCCESS;
}

int cublasGetPointerMode_v2(void* handle, int* mode) { return stub_give(mode, static_cast<Handle*>(handle)->pointer_mode); }

int cublasSetMathMode(void* handle, int mode) {
    static_cast<Handle*>(handle)->math_mode = mode;
    return SUCCESS;
}

int cublasGetMathMode(void* handle, int* mode) { return stub_give(mode, static_cast<Handle*>(handle)->math_mode); }

// Arguments of the node, here and below: m, n, k, A, B, C, and the number of products of a batch.
int cublasGemmEx(
    void* handle, int, int, int m, int n, int k, const void*, const void* a, int, int, const void* b, int, int, const void*, void* c, int,
    int, int, int) {
    STUB_ENTER();
    return product(__func__, handle, {unsigned(m), unsigned(n), unsigned(k), number(a), number(b), number(c), 1});
}

int cublasGemmStridedBatchedEx(
    void* handle, int, int, int m, int n, int k, const void*, const void* a, int, int, long long, const void* b, int, int, long long,
    const void*, void* c,
    int, int, long long, int batch, int, int) {
    STUB_ENTER();
    return product(__func__, handle, {unsigned(m), unsigned(n), unsigned(k), number(a), number(b), number(c), unsigned(batch)});
}

int cublasSgemm_v2(void* handle, int, int, int m, int n, int k, const float*, const float* a, int, const float* b, int, const float*,
    float* c, int) {
    STUB_ENTER();
    return product(__func__, handle, {unsigned(m), unsigned(n), unsigned(k), number(a), number(b), number(c), 1});
}

int cublasSgemmStridedBatched(
    void* handle, int, int, int m, int n, int k, const float*, const float* a, int, long long, const float* b, int, long long, const float*,
    float* c, int,
    long long, int batch) {
    STUB_ENTER();
    return product(__func__, handle, {unsigned(m), unsigned(n), unsigned(k), number(a), number(b), number(c), unsigned(batch)});
}

}  // extern "C"
