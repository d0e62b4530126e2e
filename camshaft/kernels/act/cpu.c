/* Gated activations: out[r, i] = f(gate_up[r, i]) * gate_up[r, size + i]. */
#include "native.h"
#include "pool.h"

#define MIN_PARALLEL_VALUES 16384
#define CHUNK_VALUES 4096

enum { SILU, GELU_TANH, GELU };

/* x / (1 + e^-t): x times the logistic function of t. */
INLINE vfloat gated(vfloat x, vfloat t) { return x / (1.f + exp_lanes(-t)); }

/* x * (1 + erf(x / sqrt 2)) / 2, erf by Abramowitz and Stegun 7.1.26: absolute error 1.5e-7. */
INLINE vfloat gelu(vfloat x) {
    vint sign = (vint)x & INT32_MIN;
    vfloat a = (vfloat)((vint)x & INT32_MAX) * 0.70710678f, t = 1.f / (1.f + 0.3275911f * a);
    vfloat y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    vfloat erf = 1.f - y * t * exp_lanes(-a * a);
    return 0.5f * x * (1.f + (vfloat)((vint)erf | sign));
}

INLINE vfloat activate(vfloat x, int form) {
    if (form == SILU) return gated(x, x);
    if (form == GELU_TANH) return gated(x, 1.5957691f * (x + 0.044715f * x * x * x));
    return gelu(x);
}

INLINE void row(const void *gate, const void *up, void *out, long size, int form, int kind) {
    long i = 0;
    for (; i + LANES <= size; i += LANES)
        store(at_mut(out, i, kind), activate(load(at(gate, i, kind), kind), form) * load(at(up, i, kind), kind), kind);
    if (i < size) {
        vfloat g = load_part(at(gate, i, kind), size - i, kind), u = load_part(at(up, i, kind), size - i, kind);
        store_part(at_mut(out, i, kind), activate(g, form) * u, size - i, kind);
    }
}

INLINE void row_of(const void *gate, const void *up, void *out, long size, int form, int kind) {
    if (kind == KIND_F32) row(gate, up, out, size, form, KIND_F32);
    else if (kind == KIND_BF16) row(gate, up, out, size, form, KIND_BF16);
    else row(gate, up, out, size, form, KIND_F16);
}

/* gate_up: [rows, 2 * size], row stride in elements; out: [rows, size], contiguous. */
typedef struct {
    const void *gate_up;
    void *out;
    long stride, rows, size;
    int form, kind, threads;
} call;

static void some_rows(void *context, long first, long last, int seat) {
    const call *c = context;
    (void)seat;
    for (long r = first; r < last; r++) {
        const void *gate = at(c->gate_up, r * c->stride, c->kind), *up = at(gate, c->size, c->kind);
        void *to = at_mut(c->out, r * c->size, c->kind);
        if (c->form == SILU) row_of(gate, up, to, c->size, SILU, c->kind);
        else if (c->form == GELU_TANH) row_of(gate, up, to, c->size, GELU_TANH, c->kind);
        else row_of(gate, up, to, c->size, GELU, c->kind);
    }
}

int camshaft_gated(call *c) {
    int threads = c->rows * c->size > MIN_PARALLEL_VALUES ? c->threads : 1;
    pool_run(c->rows, pool_grain(CHUNK_VALUES, c->size), threads, some_rows, c);
    return 0;
}
