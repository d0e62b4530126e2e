/* pool_run as an OpenMP region: what benchmarks/pool_cpu.py compares the kernels' own thread pool with. */
#include "pool.h"

#include <omp.h>

void pool_run(long count, long grain, int threads, pool_work *work, void *context) {
    long chunks = (count + grain - 1) / grain;
    if (threads < 2 || chunks < 2) {
        if (count > 0) work(context, 0, count, 0);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        long shares = omp_get_num_threads(), index = omp_get_thread_num();
        long first = chunks * index / shares * grain, last = chunks * (index + 1) / shares * grain;
        if (first < last) work(context, first, last < count ? last : count, (int)index);
    }
}
