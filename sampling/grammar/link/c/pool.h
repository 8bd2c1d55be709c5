/* A few threads that share the items of one piece of work with the thread that brings it. */

#ifndef STEPGRAPH_POOL_H
#define STEPGRAPH_POOL_H

enum { MAX_ITEMS = 4096 };

typedef struct pool pool;
typedef void (*pool_work)(void *context, unsigned item);

/* A pool with up to `helpers` threads; NULL where there is no memory. */
pool *pool_open(unsigned helpers);

/* Calls `work` once for every item below `items`, on any of the threads, and returns when all are done.
   One caller at a time. A single item is the caller's own: nothing is handed over. */
void pool_run(pool *pool, pool_work work, void *context, unsigned items);

void pool_close(pool *pool);

#endif
