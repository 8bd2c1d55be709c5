/* See pool.h. Threads take items from a shared counter, so a slow item delays only its own thread.

   The counter, the job number and the number of items share one atomic word: a helper that wakes up late learns in the same
   atomic operation to which job its item belongs. Helpers spin briefly for the next job, then sleep. A forked process has no
   helpers: the caller processes all items itself. */

#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { SPINS = 400 }; /* 5 to 20 microseconds: longer spinning takes more from other threads of the core than a wake-up costs */

struct pool {
    _Atomic uint64_t ticket; /* job number: 32 bits, number of items: 16 bits, next item: 16 bits */
    atomic_uint done;        /* finished items of this job */
    atomic_uint sleepers;
    atomic_bool waiting; /* whether the caller sleeps */
    atomic_bool stopped;
    pool_work work;
    void *context;
    pthread_mutex_t mutex;
    pthread_cond_t posted, finished;
    unsigned helpers;
    pid_t owner;
    pthread_t threads[];
};

void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __asm__ volatile("pause");
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint32_t job_of(uint64_t ticket) { return (uint32_t)(ticket >> 32); }

static void take_items(pool *pool) {
    for (;;) {
        uint64_t ticket = atomic_fetch_add(&pool->ticket, 1);
        unsigned item = ticket & 0xffff, items = ticket >> 16 & 0xffff;
        if (item >= items) return;
        pool->work(pool->context, item);
        if (atomic_fetch_add(&pool->done, 1) + 1 == items && atomic_load(&pool->waiting)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->finished);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void *help(void *data) {
    pool *pool = data;
    uint32_t seen = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS && job_of(atomic_load(&pool->ticket)) == seen; spin++) pause_briefly();
        if (job_of(atomic_load(&pool->ticket)) == seen) {
            pthread_mutex_lock(&pool->mutex);
            atomic_fetch_add(&pool->sleepers, 1); /* before the last check: a later post sees a sleeper */
            while (job_of(atomic_load(&pool->ticket)) == seen && !atomic_load(&pool->stopped))
                pthread_cond_wait(&pool->posted, &pool->mutex);
            atomic_fetch_sub(&pool->sleepers, 1);
            pthread_mutex_unlock(&pool->mutex);
        }
        if (atomic_load(&pool->stopped)) return NULL;
        seen = job_of(atomic_load(&pool->ticket));
        take_items(pool);
    }
}

pool *pool_open(unsigned helpers) {
    pool *pool = calloc(1, sizeof *pool + helpers * sizeof(pthread_t));
    if (!pool) return NULL;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->posted, NULL);
    pthread_cond_init(&pool->finished, NULL);
    pool->owner = getpid();
    sigset_t all, before; /* helpers block all signals: Python handles them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->helpers < helpers && pthread_create(&pool->threads[pool->helpers], NULL, help, pool) == 0) pool->helpers++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return pool;
}

static void wait_for(pool *pool, unsigned items) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (atomic_load(&pool->done) == items) return;
        pause_briefly();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->waiting, 1); /* before the last check: a later finish sees the waiting caller */
    while (atomic_load(&pool->done) != items) pthread_cond_wait(&pool->finished, &pool->mutex);
    atomic_store(&pool->waiting, 0);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(pool *pool, pool_work work, void *context, unsigned items, unsigned wake) {
    if (items <= 1 || !pool->helpers) {
        for (unsigned item = 0; item < items; item++) work(context, item);
        return;
    }
    pool->work = work;
    pool->context = context;
    atomic_store(&pool->done, 0);
    uint64_t job = job_of(atomic_load(&pool->ticket)) + 1u;
    atomic_store(&pool->ticket, job << 32 | (uint64_t)items << 16);
    if (atomic_load(&pool->sleepers) && pool->owner == getpid()) { /* a fork copies a lock that helpers hold, and no helpers */
        pthread_mutex_lock(&pool->mutex);
        if (wake >= pool->helpers) pthread_cond_broadcast(&pool->posted);
        else for (; wake; wake--) pthread_cond_signal(&pool->posted);
        pthread_mutex_unlock(&pool->mutex);
    }
    take_items(pool);
    wait_for(pool, items);
}

void pool_close(pool *pool) {
    if (pool->owner == getpid()) {
        pthread_mutex_lock(&pool->mutex);
        atomic_store(&pool->stopped, 1);
        pthread_cond_broadcast(&pool->posted);
        pthread_mutex_unlock(&pool->mutex);
        for (unsigned helper = 0; helper < pool->helpers; helper++) pthread_join(pool->threads[helper], NULL);
    }
    free(pool);
}
