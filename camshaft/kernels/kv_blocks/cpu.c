/* Writes a step's keys and values into their pages, cast to the pool's dtype. */
#include "native.h"

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

/* k, v: [tokens, heads, dim] of `kind`; pool: [pages, 2, heads, page, dim] of `pool_kind`; a slot is
 * page index * page size + offset. */
void camshaft_kv_write(const void *k, long k_token, long k_head, const void *v, long v_token, long v_head, int kind,
                       void *pool, int pool_kind, const int64_t *slots, long tokens, long heads, long page, long dim,
                       int threads) {
    const rows sides[2] = {{k, k_token, k_head}, {v, v_token, v_head}};
    const long parallel_floats = 1 << 16; /* below this, starting threads costs more than the copy */
#pragma omp parallel for num_threads(threads) if (tokens * heads * dim > parallel_floats)
    for (long t = 0; t < tokens; t++)
        for (int side = 0; side < 2; side++)
            for (long h = 0; h < heads; h++) {
                long line = ((slots[t] / page * 2 + side) * heads + h) * page + slots[t] % page;
                const void *from = at(sides[side].data, t * sides[side].token + h * sides[side].head, kind);
                copy_head(from, kind, at_mut(pool, line * dim, pool_kind), pool_kind, dim);
            }
}
