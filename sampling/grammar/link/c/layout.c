/* What the loader and the tests need: sizes of the structs, and calls from a thread without the interpreter. */

#include "llguidance.h"
#include "matcher.h"

#include <string.h>

/* Makes the calls in order on this thread, as the CUDA driver would. For tests and benchmarks. */
void stepgraph_run_calls(void *data) {
    call_list *list = data;
    for (int64_t index = 0; index < list->count; index++) {
        list->calls[index].function(list->calls[index].data);
        list->calls[index].finished = (double)ns_of(CLOCK_MONOTONIC) * 1e-9;
    }
}

/* Writes the values of layout.OWN_LAYOUT, if there is room for them, and returns their number. */
int64_t stepgraph_layout(int64_t *values, int64_t room) {
    const int64_t own[] = {
        LAYOUT_VERSION, sizeof(token_table), sizeof(forced_text), sizeof(marker_table), sizeof(marker_progress),
        sizeof(matcher_library), sizeof(mask_content), sizeof(matcher_row), sizeof(link_shape), sizeof(host_step), sizeof(host_node),
        sizeof(xgrammar_library), sizeof(timed_call), sizeof(call_list), sizeof(llguidance_library),
    };
    int64_t count = sizeof own / sizeof *own;
    if (count <= room) memcpy(values, own, sizeof own);
    return count;
}
