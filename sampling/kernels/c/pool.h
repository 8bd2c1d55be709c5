/* Worker threads that share the items of one job with the calling thread. */

#pragma once

typedef struct pool pool;
typedef void (*pool_work)(void *context, unsigned item);

/* A pool with up to `helpers` threads; NULL if memory is exhausted. */
pool *pool_open(unsigned helpers);

/* Call `work` once for every item below `items`, on any of the threads, and return when all are done. One caller at a time.
   A single item runs on the calling thread. wake: how many sleeping threads to wake; others join if they have not fallen asleep yet. */
void pool_run(pool *pool, pool_work work, void *context, unsigned items, unsigned wake);

void pool_close(pool *pool);

void pause_briefly(void); /* in a loop that waits for another thread */
