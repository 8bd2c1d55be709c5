// Sizes of workspaces for float32, which callers allocate: none is needed. Decompositions are generated functions.
#include "api.h"

using namespace stub;

extern "C" {

int cusolverDnXpotrf_bufferSize(void*, void*, int, int64_t, int, const void*, int64_t, int, size_t* on_device, size_t* on_host) {
    STUB_ENTER();
    *on_device = *on_host = 0;
    return SUCCESS;
}

int cusolverDnSpotrf_bufferSize(void*, int, int, float*, int, int* size) {
    STUB_ENTER();
    return stub_give(size, 0);
}

int cusolverDnSgetrf_bufferSize(void*, int, int, float*, int, int* size) {
    STUB_ENTER();
    return stub_give(size, 0);
}

}  // extern "C"
