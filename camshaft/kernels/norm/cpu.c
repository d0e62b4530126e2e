/* RMS and layer norms over the last dimension, alone or after adding a residual. One thread owns a row, and a
 * row's sums run in one fixed order, so a result depends on its row only. */
#include <math.h>

#include "native.h"

#define MIN_PARALLEL_VALUES 32768

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

INLINE void rms(const line *l, int kind) {
    vfloat squares[2] = {{0}, {0}};
    for (long k = 0; k < l->size; k += LANES) {
        vfloat x = take(l->x, k, l->size, kind);
        squares[k / LANES & 1] += x * x;
    }
    vfloat scale = splat(1.f / sqrtf(lane_sum(squares[0] + squares[1]) / (float)l->size + l->eps));
    for (long k = 0; k < l->size; k += LANES) {
        vfloat x = rounded(take(l->x, k, l->size, kind) * scale, kind);
        give(l->out, x * take(l->weight, k, l->size, kind), k, l->size, kind);
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

INLINE void norm(line l, int centre, int kind) {
    if (l.residual) {
        add(&l, kind);
        l.x = l.total;
    }
    if (centre) layer(&l, kind);
    else rms(&l, kind);
}

/* x, residual (or null): [outer, inner, size], lanes contiguous, strides in elements; out and total: contiguous.
 * `centre`: layer norm, else RMS norm. */
void camshaft_norm(const void *x, long x_outer, long x_inner, const void *residual, long r_outer, long r_inner,
                   const void *weight, const void *bias, void *out, void *total, long rows, long inner, long size,
                   float eps, int centre, int kind, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * size > MIN_PARALLEL_VALUES)
    for (long i = 0; i < rows; i++) {
        line l = {at(x, offset(i, inner, x_outer, x_inner), kind),
                  residual ? at(residual, offset(i, inner, r_outer, r_inner), kind) : 0,
                  weight, bias, at_mut(out, i * size, kind), total ? at_mut(total, i * size, kind) : 0, size, eps};
        if (kind == KIND_F32) norm(l, centre, KIND_F32);
        else if (kind == KIND_BF16) norm(l, centre, KIND_BF16);
        else norm(l, centre, KIND_F16);
    }
}
