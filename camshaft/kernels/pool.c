/* The thread pool of all kernels in this library.
 *
 * A job is a number of chunks. Whoever takes some lowers a shared counter, and only then looks at what the job is:
 * while a taken chunk is unfinished the job cannot change, so a late worker finds either chunks of the present job
 * or none. Many are taken at once at first, for long streams through memory, and one at a time at last, so that all
 * end together. The caller takes chunks too and in the end waits for those in work, never for a worker that sleeps or
 * was put off its core: a busy neighbour then costs its share of the cores and no more. Threads that wait
 * spin for a moment and sleep after it. */
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define MOST_WORKERS 255
#define LINE 64              /* bytes of a cache line: what different threads write lies apart */
#define WORKER_SPIN_NS 50000 /* longer than most gaps between two products of a step; more costs a busy neighbour */
#define CALLER_SPIN_NS 10000 /* about a chunk; a worker that takes longer lost its core, and may need this one */
#define SPINS_A_LOOK 32      /* at the clock */

typedef struct {
    pthread_t thread;
    pthread_cond_t wake;
    atomic_int asleep;
    int index;
} worker;

static struct {
    _Alignas(LINE) atomic_int taken;
    _Alignas(LINE) _Atomic uint64_t open; /* chunks nobody has taken yet; above them, how many workers may */
    _Alignas(LINE) _Atomic long finished; /* chunks that workers have done */
    atomic_int caller_asleep;
    _Alignas(LINE) pool_work *work; /* from here to `chunks`: the job, constant while it has unfinished chunks */
    void *context;
    long count, grain, chunks;
    pthread_mutex_t mutex; /* guards what is below, and every sleep */
    pthread_cond_t done;
    int workers, stopping, watched;
    worker staff[MOST_WORKERS];
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t opened(int helpers, long chunks) { return (uint64_t)helpers << 32 | (uint32_t)chunks; }
static long chunks_in(uint64_t open) { return (long)(uint32_t)open; }
static int helpers_in(uint64_t open) { return (int)(open >> 32); }
static int may_take(uint64_t open, int index) { return chunks_in(open) && index < helpers_in(open); }

/* Chunks to take at once: half of a thread's even share of what is left. */
static long portion(uint64_t open) {
    long chunks = chunks_in(open) / (2 * (helpers_in(open) + 1));
    return chunks > 0 ? chunks : 1;
}

/* Takes and does chunks until none is open to worker `index` (-1: the caller); returns how many. */
static long take_chunks(int index) {
    long taken = 0;
    uint64_t open = atomic_load(&pool.open);
    while (may_take(open, index)) {
        long chunks = portion(open);
        if (!atomic_compare_exchange_weak(&pool.open, &open, open - (uint64_t)chunks)) continue;
        long first = (pool.chunks - chunks_in(open)) * pool.grain, last = first + chunks * pool.grain;
        pool.work(pool.context, first, last < pool.count ? last : pool.count, index + 1);
        taken += chunks;
        open = atomic_load(&pool.open);
    }
    return taken;
}

/* Waits for a chunk; 0 when the pool closes. */
static int wait_for_work(worker *self) {
    for (uint64_t until = now_ns() + WORKER_SPIN_NS; now_ns() < until;)
        for (int i = 0; i < SPINS_A_LOOK; i++) {
            if (may_take(atomic_load_explicit(&pool.open, memory_order_relaxed), self->index)) return 1;
            relax();
        }
    pthread_mutex_lock(&pool.mutex);
    /* First the flag, then the look at `open`; pool_run does the reverse, so one of the two sees the other. */
    atomic_store(&self->asleep, 1);
    while (!pool.stopping && !may_take(atomic_load(&pool.open), self->index))
        pthread_cond_wait(&self->wake, &pool.mutex);
    atomic_store(&self->asleep, 0);
    int go_on = !pool.stopping;
    pthread_mutex_unlock(&pool.mutex);
    return go_on;
}

static void *work_on(void *self) {
    while (wait_for_work(self)) {
        long taken = take_chunks(((worker *)self)->index);
        if (!taken) continue;
        atomic_fetch_add(&pool.finished, taken);
        if (!atomic_load(&pool.caller_asleep)) continue;
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.mutex);
    }
    return 0;
}

static void wait_for_workers(long chunks) {
    for (uint64_t until = now_ns() + CALLER_SPIN_NS; now_ns() < until;)
        for (int i = 0; i < SPINS_A_LOOK; i++) {
            if (atomic_load(&pool.finished) == chunks) return;
            relax();
        }
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.caller_asleep, 1);
    while (atomic_load(&pool.finished) != chunks) pthread_cond_wait(&pool.done, &pool.mutex);
    atomic_store(&pool.caller_asleep, 0);
    pthread_mutex_unlock(&pool.mutex);
}

/* A child process has none of its parent's threads, and perhaps a job that one of them was at. */
static void forget(void) {
    pthread_mutex_init(&pool.mutex, 0);
    pthread_cond_init(&pool.done, 0);
    atomic_store(&pool.open, 0);
    atomic_store(&pool.caller_asleep, 0);
    atomic_store(&pool.taken, 0);
    pool.workers = 0;
}

static int hire(int index) {
    worker *self = &pool.staff[index];
    self->index = index;
    atomic_store(&self->asleep, 0);
    pthread_cond_init(&self->wake, 0);
    return !pthread_create(&self->thread, 0, work_on, self);
}

/* Sees to it that there are `wanted` workers, and returns how many of them there are. */
static int hired(int wanted) {
    sigset_t all, before;
    if (wanted > MOST_WORKERS) wanted = MOST_WORKERS;
    if (pool.workers >= wanted) return wanted; /* only the owner of `taken` changes it, until the end */
    if (!pool.watched) pool.watched = !pthread_atfork(0, 0, forget);
    if (!pool.watched) return 0;
    sigfillset(&all); /* signals are for the threads of the program */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_mutex_lock(&pool.mutex);
    while (!pool.stopping && pool.workers < wanted && hire(pool.workers)) pool.workers++;
    int workers = pool.workers;
    pthread_mutex_unlock(&pool.mutex);
    pthread_sigmask(SIG_SETMASK, &before, 0);
    return workers < wanted ? workers : wanted;
}

static void wake(int helpers) {
    for (int i = 0; i < helpers; i++) {
        if (!atomic_load(&pool.staff[i].asleep)) continue;
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_signal(&pool.staff[i].wake);
        pthread_mutex_unlock(&pool.mutex);
    }
}

void pool_run(long count, long grain, int threads, pool_work *work, void *context) {
    while ((count - 1) / grain >= INT32_MAX) grain *= 2;
    long chunks = (count + grain - 1) / grain;
    int helpers = (int)(chunks < threads ? chunks : threads) - 1;
    if (helpers > 0 && !atomic_exchange(&pool.taken, 1)) {
        helpers = hired(helpers);
        if (helpers > 0) {
            pool.work = work, pool.context = context, pool.count = count, pool.grain = grain, pool.chunks = chunks;
            atomic_store(&pool.finished, 0);
            atomic_store(&pool.open, opened(helpers, chunks));
            wake(helpers);
            wait_for_workers(chunks - take_chunks(-1));
            atomic_store(&pool.taken, 0);
            return;
        }
        atomic_store(&pool.taken, 0);
    }
    if (count > 0) work(context, 0, count, 0);
}

/* Before the library's code goes away its threads must have left it. */
__attribute__((destructor)) static void close_pool(void) {
    pthread_mutex_lock(&pool.mutex);
    pool.stopping = 1;
    int workers = pool.workers;
    for (int i = 0; i < workers; i++) pthread_cond_signal(&pool.staff[i].wake);
    pthread_mutex_unlock(&pool.mutex);
    for (int i = 0; i < workers; i++) pthread_join(pool.staff[i].thread, 0);
    pthread_mutex_lock(&pool.mutex);
    pool.workers = 0;
    pthread_mutex_unlock(&pool.mutex);
}
