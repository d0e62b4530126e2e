/* Shares work out between the calling thread and a pool of waiting ones. */
#ifndef CAMSHAFT_POOL_H
#define CAMSHAFT_POOL_H

/* Does items [first, last). Two calls at once never have the same seat, which is below the number of threads. */
typedef void pool_work(void *context, long first, long last, int seat);

/* Calls `work` until it has done items [0, count), each once, a multiple of `grain` (1 or more) at a time, on at
 * most `threads` threads; returns when all are done. Which thread does what varies from run to run. A call while
 * another thread's is under way, or from inside `work`, does everything itself. */
__attribute__((visibility("hidden"))) void pool_run(long count, long grain, int threads, pool_work *work,
                                                    void *context);

/* Items a chunk, so that it does `enough` of something an item does `each` of. */
static inline long pool_grain(long enough, long each) { return each >= enough || each <= 0 ? 1 : enough / each; }

#endif
