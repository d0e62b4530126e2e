/* RMS and layer norms over the last dimension, alone or after adding a residual. One thread owns a row, and a
 * row's sums run in one fixed order, so a result depends on its row only. */
#include <math.h>

#include "native.h"
#include "pool.h"

#define MIN_PARALLEL_VALUES 32768
#define CHUNK_VALUES 8192

typedef struct {
    const void *x, *residual, *weight, *bias;
    void *out, *total;
    long size;
    float eps;
} line;

/* Row `i` of [outer, inner, size] with strides in elements. */
INLINE long offset(long i, long inner, long outer_stride, long inner_stride) {
    return i / inner * outer_stride + i % inner * inner_stride;
}

INLINE vfloat rounded(vfloat lanes, int kind) {
    if (kind == KIND_F32) return lanes;
    char memory[sizeof lanes];
    store(memory, lanes, kind);
    return load(memory, kind);
}

INLINE vfloat take(const void *from, long k, long size, int kind) {
    return k + LANES <= size ? load(at(from, k, kind), kind) : load_part(at(from, k, kind), size - k, kind);
}

INLINE void give(void *to, vfloat lanes, long k, long size, int kind) {
    if (k + LANES <= size) store(at_mut(to, k, kind), lanes, kind);
    else store_part(at_mut(to, k, kind), lanes, size - k, kind);
}

INLINE void add(const line *l, int kind) {
    for (long k = 0; k < l->size; k += LANES)
        give(l->total, take(l->x, k, l->size, kind) + take(l->residual, k, l->size, kind), k, l->size, kind);
}

/* The weight multiplies in `weight_kind`: what it is given is rounded to that, and the product to `kind`. */
INLINE void rms(const line *l, int kind, int weight_kind) {
    vfloat squares[2] = {{0}, {0}};
    for (long k = 0; k < l->size; k += LANES) {
        vfloat x = take(l->x, k, l->size, kind);
        squares[k / LANES & 1] += x * x;
    }
    vfloat scale = splat(1.f / sqrtf(lane_sum(squares[0] + squares[1]) / (float)l->size + l->eps));
    for (long k = 0; k < l->size; k += LANES) {
        vfloat x = rounded(take(l->x, k, l->size, kind) * scale, weight_kind);
        give(l->out, x * take(l->weight, k, l->size, weight_kind), k, l->size, kind);
    }
}

INLINE void layer(const line *l, int kind) {
    vfloat sum = {0}, squares = {0};
    for (long k = 0; k < l->size; k += LANES) sum += take(l->x, k, l->size, kind);
    float mean = lane_sum(sum) / (float)l->size;
    long k = 0;
    for (; k + LANES <= l->size; k += LANES) {
        vfloat centred = take(l->x, k, l->size, kind) - mean;
        squares += centred * centred;
    }
    float square = lane_sum(squares);
    for (; k < l->size; k++) {
        float centred = load_one(at(l->x, k, kind), kind) - mean;
        square += centred * centred;
    }
    vfloat scale = splat(1.f / sqrtf(square / (float)l->size + l->eps));
    for (k = 0; k < l->size; k += LANES) {
        vfloat y = (take(l->x, k, l->size, kind) - mean) * scale * take(l->weight, k, l->size, kind);
        if (l->bias) y += take(l->bias, k, l->size, kind);
        give(l->out, y, k, l->size, kind);
    }
}

INLINE void norm(line l, int centre, int kind, int weight_kind) {
    if (l.residual) {
        add(&l, kind);
        l.x = l.total;
    }
    if (centre) layer(&l, kind);
    else rms(&l, kind, weight_kind);
}

/* x, residual (or null): [outer, inner, size], lanes contiguous, strides in elements; out and total: contiguous.
 * `centre`: layer norm, else RMS norm, whose weight may be fp32 beside 16-bit values: `weight_kind`. */
typedef struct {
    const void *x, *residual, *weight, *bias;
    void *out, *total;
    long x_outer, x_inner, r_outer, r_inner, rows, inner, size;
    float eps;
    int centre, kind, weight_kind, threads;
} call;

static void some_rows(void *context, long first, long last, int seat) {
    const call *c = context;
    (void)seat;
    for (long i = first; i < last; i++) {
        line l = {at(c->x, offset(i, c->inner, c->x_outer, c->x_inner), c->kind),
                  c->residual ? at(c->residual, offset(i, c->inner, c->r_outer, c->r_inner), c->kind) : 0,
                  c->weight, c->bias, at_mut(c->out, i * c->size, c->kind),
                  c->total ? at_mut(c->total, i * c->size, c->kind) : 0, c->size, c->eps};
        int same = c->kind == c->weight_kind;
        if (c->kind == KIND_F32) norm(l, c->centre, KIND_F32, KIND_F32);
        else if (c->kind == KIND_BF16 && same) norm(l, c->centre, KIND_BF16, KIND_BF16);
        else if (c->kind == KIND_BF16) norm(l, 0, KIND_BF16, KIND_F32);
        else if (same) norm(l, c->centre, KIND_F16, KIND_F16);
        else norm(l, 0, KIND_F16, KIND_F32);
    }
}

int camshaft_norm(call *c) {
    int threads = c->rows * c->size > MIN_PARALLEL_VALUES ? c->threads : 1;
    pool_run(c->rows, pool_grain(CHUNK_VALUES, c->size), threads, some_rows, c);
    return 0;
}
