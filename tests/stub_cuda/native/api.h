// How every exported CUDA function begins and ends.
#pragma once

#include "stub.h"

// Counts the call under its name. A host node must not call CUDA: the call is refused there, as the driver does.
#define STUB_ENTER()                                                              \
    static stub::Counter& calls = stub::counter(__func__);                        \
    calls.add();                                                                  \
    if (stub::in_host_node()) {                                                   \
        stub::message("%s called from a host node", __func__);                    \
        return stub::NOT_PERMITTED;                                               \
    }

// For functions that only copy a value out.
template <typename Value>
int stub_give(Value* target, Value value) {
    if (!target) return stub::INVALID_VALUE;
    *target = value;
    return stub::SUCCESS;
}

int stub_attribute(int* value, int attribute);  // of the device; both APIs use the same numbers
