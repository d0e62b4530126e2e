/* Writes a step's keys and values into their pages, cast to the pool's dtype. */
#include "native.h"
#include "pool.h"

#define MIN_PARALLEL_VALUES 65536 /* below this, calling on threads costs more than the copy */
#define CHUNK_VALUES 16384

typedef struct {
    const void *data;
    long token, head; /* strides in elements */
} rows;

INLINE void copy_head(const void *from, int from_kind, void *to, int to_kind, long dim) {
    if (from_kind == to_kind) {
        memcpy(to, from, (size_t)(dim * kind_bytes(to_kind)));
        return;
    }
    for (long d = 0; d < dim; d += LANES) {
        const void *source = at(from, d, from_kind);
        void *target = at_mut(to, d, to_kind);
        if (d + LANES <= dim) store(target, load(source, from_kind), to_kind);
        else store_part(target, load_part(source, dim - d, from_kind), dim - d, to_kind);
    }
}

/* Sides k and v: [tokens, heads, dim] of `kind`; pool: [pages, 2, heads, page, dim] of `pool_kind`; a slot is
 * page index * page size + offset. */
typedef struct {
    rows sides[2];
    void *pool;
    const int64_t *slots;
    long tokens, heads, page, dim;
    int kind, pool_kind, threads;
} call;

static void some_tokens(void *context, long first, long last, int seat) {
    const call *c = context;
    (void)seat;
    for (long t = first; t < last; t++)
        for (int side = 0; side < 2; side++)
            for (long h = 0; h < c->heads; h++) {
                long line = ((c->slots[t] / c->page * 2 + side) * c->heads + h) * c->page + c->slots[t] % c->page;
                const void *from = at(c->sides[side].data, t * c->sides[side].token + h * c->sides[side].head, c->kind);
                copy_head(from, c->kind, at_mut(c->pool, line * c->dim, c->pool_kind), c->pool_kind, c->dim);
            }
}

int camshaft_kv_write(call *c) {
    long values = c->heads * c->dim;
    int threads = c->tokens * values > MIN_PARALLEL_VALUES ? c->threads : 1;
    pool_run(c->tokens, pool_grain(CHUNK_VALUES, values), threads, some_tokens, c);
    return 0;
}
