/* Products and attention on several threads. Columns and queries are independent, so the number of threads changes no result.

   One call at a time uses the helpers; a call that runs meanwhile, for a second engine, stays on its own thread. */

#include "kernels.h"
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>

/* A thread is woken for at least MIN_THREAD_BYTES: reading them takes about as long as waking it. Parts are small, as it starts late. */
enum { MIN_THREAD_BYTES = 1 << 17, PARTS_PER_THREAD = 4 };

typedef struct {
    range_work work;
    const void *call;
    int64_t count, parts;
} divided_work;

static atomic_flag pool_in_use = ATOMIC_FLAG_INIT;
static pool *helpers;
static _Atomic int64_t threads = 1;

static void run_part(void *context, unsigned item) {
    const divided_work *all = context;
    all->work(all->call, all->count * item / all->parts, all->count * (item + 1) / all->parts);
}

int64_t threads_for(int64_t bytes) { return bytes / MIN_THREAD_BYTES < threads ? bytes / MIN_THREAD_BYTES : threads; }

void divide_work(range_work work, const void *call, int64_t count, int64_t bytes) {
    int64_t used = threads_for(bytes);
    if (used < 2 || atomic_flag_test_and_set(&pool_in_use)) {
        work(call, 0, count);
        return;
    }
    int64_t parts = used * PARTS_PER_THREAD;
    divided_work all = {work, call, count, parts < count ? parts : count};
    if (!helpers) helpers = pool_open((unsigned)threads - 1); /* the first product after a fork */
    if (helpers) pool_run(helpers, run_part, &all, (unsigned)all.parts, (unsigned)used - 1);
    else work(call, 0, count);
    atomic_flag_clear(&pool_in_use);
}

/* Runs in the child of a fork, which has no helpers. If the parent ran a product, its flag and the locks of its pool stay held. */
static void after_fork(void) {
    helpers = NULL;
    atomic_flag_clear(&pool_in_use);
}

static void call_after_fork(void) { pthread_atfork(NULL, NULL, after_fork); }

/* Sets the number of threads for later calls, the calling thread included. */
EXPORTED void stepgraph_use_threads(int64_t count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, call_after_fork);
    while (atomic_flag_test_and_set(&pool_in_use)) pause_briefly();
    if (helpers) pool_close(helpers);
    threads = count;
    helpers = threads > 1 ? pool_open((unsigned)threads - 1) : NULL;
    atomic_flag_clear(&pool_in_use);
}
