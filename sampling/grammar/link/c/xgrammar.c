/* xgrammar's matcher over tvm-ffi's C ABI, in which values take 16 bytes and functions and errors are objects.

   The declarations follow tvm-ffi 0.1 and DLPack 1. Python has checked the versions and the function names before
   anything here is called. Every function may be called from any thread without the GIL: objects unknown to Python
   are freed without it, and objects that Python holds are never released here. */

#include "host_link.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { TVM_NONE = 0, TVM_INT = 1, TVM_BOOL = 2, TVM_TENSOR_POINTER = 7, TVM_SMALL_STRING = 11, TVM_FIRST_OBJECT = 64, TVM_STRING = 65 };
enum { DL_CPU = 1, DL_INT = 0 };

struct tvm_any {
    int32_t type;
    uint32_t size; /* of a small string, else 0 */
    union {
        int64_t integer;
        void *pointer;
        char small[8];
    };
};

typedef struct {
    uint64_t references;
    int32_t type;
    uint32_t padding;
    void (*deleter)(void *self, int flags);
} tvm_object;

typedef struct {
    const char *data;
    size_t size;
} tvm_bytes;

typedef struct {
    tvm_object header;
    tvm_bytes kind, message;
} tvm_error;

typedef struct {
    tvm_object header;
    tvm_bytes text;
} tvm_string;

typedef struct {
    void *data;
    struct { int32_t type, id; } device;
    int32_t dimensions;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

static tvm_any integer(int64_t value) { return (tvm_any){.type = TVM_INT, .integer = value}; }
static tvm_any boolean(int value) { return (tvm_any){.type = TVM_BOOL, .integer = value}; }

static tvm_any object(const xgrammar_library *library, void *matcher) {
    return (tvm_any){.type = library->matcher_type, .pointer = matcher};
}

/* Takes this thread's pending error and writes "what: message" to `error`. */
static void take_error(const xgrammar_library *library, const char *what, char *error) {
    void *taken = NULL;
    library->take_error(&taken);
    if (!taken) {
        snprintf(error, FAULT_BYTES, "%s: the library failed without an error", what);
        return;
    }
    const tvm_bytes message = ((const tvm_error *)taken)->message;
    snprintf(error, FAULT_BYTES, "%s: %.*s", what, (int)message.size, message.data);
    library->release(taken);
}

/* Calls a method. Returns 0 or 1 for a bool, 0 for None, -1 on failure. */
static int call(const xgrammar_library *library, void *function, tvm_any *arguments, int32_t count, const char *what, char *error) {
    tvm_any result = {.type = TVM_NONE};
    if (library->call(function, arguments, count, &result)) {
        take_error(library, what, error);
        return -1;
    }
    if (result.type == TVM_BOOL || result.type == TVM_NONE) return result.type == TVM_BOOL && result.integer;
    if (result.type >= TVM_FIRST_OBJECT) library->release(result.pointer);
    snprintf(error, FAULT_BYTES, "%s: got a result of type %d, expected a bool or None", what, result.type);
    return -1;
}

static int accept(const matcher_library *self, void *matcher, int64_t token, char *error) {
    const xgrammar_library *library = (const xgrammar_library *)self;
    tvm_any arguments[] = {object(library, matcher), integer(token), boolean(0)};
    return call(library, library->accept_token, arguments, 3, "accept_token", error);
}

static int fill(const matcher_library *self, void *matcher, int32_t *words, int64_t count, int32_t *written, char *error) {
    (void)written;
    const xgrammar_library *library = (const xgrammar_library *)self;
    int64_t shape[] = {1, count}, strides[] = {count, 1};
    dl_tensor masks = {
        .data = words, .device = {DL_CPU, 0}, .dimensions = 2, .dtype = {DL_INT, 32, 1}, .shape = shape, .strides = strides,
    };
    tvm_any tensor = {.type = TVM_TENSOR_POINTER, .pointer = &masks};
    tvm_any arguments[] = {object(library, matcher), tensor, integer(0), boolean(0)};
    return call(library, library->fill_next_token_bitmask, arguments, 4, "fill_next_token_bitmask", error) < 0 ? -1 : 0;
}

static int rollback(const matcher_library *self, void *matcher, int64_t tokens, char *error) {
    const xgrammar_library *library = (const xgrammar_library *)self;
    tvm_any arguments[] = {object(library, matcher), integer(tokens)};
    return call(library, library->rollback, arguments, 2, "RuntimeError", error);
}

static int is_terminated(const matcher_library *self, void *matcher, char *error) {
    const xgrammar_library *library = (const xgrammar_library *)self;
    tvm_any arguments[] = {object(library, matcher)};
    return call(library, library->is_terminated, arguments, 1, "RuntimeError", error);
}

/* Leaves the matcher unchanged. Short strings are values, longer ones objects. */
static int forced(const matcher_library *self, void *matcher, char *text, int64_t room, char *error) {
    const xgrammar_library *library = (const xgrammar_library *)self;
    tvm_any argument = object(library, matcher), result = {.type = TVM_NONE};
    if (library->call(library->find_jump_forward_string, &argument, 1, &result)) {
        take_error(library, "find_jump_forward_string", error);
        return -1;
    }
    tvm_bytes found = {result.small, result.size};
    if (result.type == TVM_STRING) found = ((const tvm_string *)result.pointer)->text;
    int size = (int64_t)found.size < room ? (int)found.size : (int)room;
    int is_string = result.type == TVM_STRING || result.type == TVM_SMALL_STRING;
    if (is_string) memcpy(text, found.data, (size_t)size);
    if (result.type >= TVM_FIRST_OBJECT) library->release(result.pointer);
    if (is_string) return size;
    snprintf(error, FAULT_BYTES, "find_jump_forward_string: got a result of type %d, expected a string", result.type);
    return -1;
}

void stepgraph_bind_xgrammar(xgrammar_library *library) {
    library->functions = (matcher_library){accept, fill, rollback, is_terminated, forced};
}
