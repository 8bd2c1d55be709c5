/* Operations of torch on few elements, for replays of the tape: as small_operations.py names them. Torch takes longer to start one than
   these take to run. */

#include "native.h"

enum { COPY, ADD, SUBTRACT, MULTIPLY, EQUAL, UNEQUAL, LESS, LESS_EQUAL, GREATER, GREATER_EQUAL, AND, OR, CLAMP_MIN, CLAMP_MAX, WHERE,
    GATHER };

/* An integer of 1 (as bool), 2, 4 or 8 bytes; a scalar has no data. */
INLINED int64_t element(const argument *from, int64_t at) {
    if (!from->data) return from->integer;
    switch (from->integer) {
    case 1: return ((const uint8_t *)from->data)[at];
    case 2: return ((const int16_t *)from->data)[at];
    case 4: return ((const int32_t *)from->data)[at];
    default: return ((const int64_t *)from->data)[at];
    }
}

INLINED void set_element(const argument *to, int64_t at, int64_t value) {
    switch (to->integer) {
    case 1: ((uint8_t *)to->data)[at] = (uint8_t)value; break;
    case 2: ((int16_t *)to->data)[at] = (int16_t)value; break;
    case 4: ((int32_t *)to->data)[at] = (int32_t)value; break;
    default: ((int64_t *)to->data)[at] = value;
    }
}

INLINED int64_t compute(int64_t kind, int64_t a, int64_t b, int64_t c) {
    switch (kind) {
    case ADD: return (int64_t)((uint64_t)a + (uint64_t)b);
    case SUBTRACT: return (int64_t)((uint64_t)a - (uint64_t)b);
    case MULTIPLY: return (int64_t)((uint64_t)a * (uint64_t)b);
    case EQUAL: return a == b;
    case UNEQUAL: return a != b;
    case LESS: return a < b;
    case LESS_EQUAL: return a <= b;
    case GREATER: return a > b;
    case GREATER_EQUAL: return a >= b;
    case AND: return a & b;
    case OR: return a | b;
    case CLAMP_MIN: return a > b ? a : b;
    case CLAMP_MAX: return a < b ? a : b;
    case WHERE: return a ? b : c;
    default: return a;
    }
}

/* The offset of an index from a dimension's first element; -1 if out of range. wraparound: negative indices count from the end. */
INLINED int64_t indexed_offset(const argument *index, int64_t at, const argument *stride, const argument *size, int64_t wraparound) {
    int64_t found = element(index, at);
    found = wraparound || found >= 0 ? index_in(found, size->integer) : -1;
    return found < 0 ? -1 : found * stride->integer;
}

/* kind; out, a, b, c: tensors of four dimensions and of one shape, some with strides of 0, or numbers; stride and size of the dimension
   that b is an index of, and whether it counts from the end where it is negative. GATHER: out is a at the index b. */
EXPORTED int stepgraph_small_operation(const argument *args) {
    const argument *out = args + 1, *a = args + 2, *b = args + 3, *c = args + 4;
    const int64_t kind = args->integer, indexed = kind == GATHER, *size = out->size;
    /* whether the last dimension can be copied at once */
    bool copyable = (kind == COPY || indexed) && a->integer == out->integer && a->stride[3] == 1 && out->stride[3] == 1 &&
        (!indexed || b->stride[3] == 0);
    int64_t inner = copyable ? 1 : size[3];
    for (int64_t i = 0; i < size[0]; i++)
        for (int64_t j = 0; j < size[1]; j++)
            for (int64_t k = 0; k < size[2]; k++)
                for (int64_t l = 0; l < inner; l++) {
                    int64_t at[4];
                    for (int each = 0; each < 4; each++) {
                        const int64_t *stride = args[1 + each].stride;
                        at[each] = i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3];
                    }
                    if (indexed) {
                        int64_t offset = indexed_offset(b, at[2], args + 5, args + 6, args[7].integer);
                        if (offset < 0) return 1;
                        at[1] += offset;
                    }
                    if (copyable) {
                        int64_t bytes = out->integer;
                        memcpy((char *)out->data + at[0] * bytes, (const char *)a->data + at[1] * bytes, (size_t)(size[3] * bytes));
                        continue;
                    }
                    int64_t second = indexed ? 0 : element(b, at[2]), third = indexed ? 0 : element(c, at[3]);
                    set_element(out, at[0], compute(kind, element(a, at[1]), second, third));
                }
    return 0;
}
