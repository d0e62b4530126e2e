/* Drives the pool the way kernels do, and counts what they rely on. Built beside pool.c by test_kernel_pool.py. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "pool.h"

#define MOST_ITEMS 1000
#define MOST_SEATS 8

typedef struct {
    atomic_int done[MOST_ITEMS], in_seat[MOST_SEATS], wrong;
    long value[MOST_ITEMS]; /* plain: what a worker writes the caller must see */
    int threads, nested;
} tally;

static void add(void *context, long first, long last, int seat) {
    tally *t = context;
    if (seat < 0 || seat >= t->threads || atomic_fetch_add(&t->in_seat[seat], 1)) atomic_fetch_add(&t->wrong, 1);
    for (long i = first; i < last; i++) atomic_fetch_add(&t->done[i], 1), t->value[i] = i * i;
    if (t->nested) {
        tally *inner = calloc(1, sizeof *inner);
        inner->threads = t->threads;
        pool_run(10, 1, t->threads, add, inner);
        for (int i = 0; i < 10; i++)
            if (inner->done[i] != 1) atomic_fetch_add(&t->wrong, 1);
        free(inner);
    }
    atomic_fetch_sub(&t->in_seat[seat], 1);
}

static unsigned next(unsigned *state) { return *state = *state * 1664525u + 1013904223u, *state >> 8; }

/* Jobs of random shape; returns how many promises were broken. */
int drive(int jobs, int nested, unsigned seed) {
    int wrong = 0;
    for (int n = 0; n < jobs; n++) {
        tally *t = calloc(1, sizeof *t);
        long count = next(&seed) % 4 ? next(&seed) % 20 : next(&seed) % MOST_ITEMS, grain = 1 + next(&seed) % 7;
        t->threads = 1 + (int)(next(&seed) % 4), t->nested = nested;
        pool_run(count, grain, t->threads, add, t);
        wrong += t->wrong;
        for (long i = 0; i < MOST_ITEMS; i++) wrong += t->done[i] != (i < count) || t->value[i] != (i < count ? i * i : 0);
        free(t);
    }
    return wrong;
}

typedef struct {
    int jobs, wrong;
    unsigned seed;
} lap;

static void *run_lap(void *context) {
    lap *l = context;
    l->wrong = drive(l->jobs, 0, l->seed);
    return 0;
}

/* The same from several threads at once. */
int drive_together(int jobs) {
    pthread_t threads[3];
    lap laps[3];
    int wrong = 0;
    for (unsigned i = 0; i < 3; i++) {
        laps[i] = (lap){jobs, 0, i};
        if (pthread_create(&threads[i], 0, run_lap, &laps[i])) return -1;
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], 0), wrong += laps[i].wrong;
    return wrong;
}
