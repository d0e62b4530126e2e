/* A product of any weights but those of cpu_int8.c, and what its two ways through memory share: cpu.c streams the
 * weights once past few tokens, cpu_tiles.c goes back to them for many. Both add an output up in the same order,
 * so that it has the same bits either way. */
#ifndef CAMSHAFT_GEMM_PRODUCT_H
#define CAMSHAFT_GEMM_PRODUCT_H

#include "native.h"

#define ROWS 4 /* of weights in one tile */

/* Strides are in elements, of rows; the last dimensions are contiguous, and so is y. bias and scale may be null. */
typedef struct {
    const void *x, *weight, *bias;
    const float *scale;
    void *y;
    long tokens, rows, depth, x_stride, weight_stride;
    int kind, weight_kind, threads;
} Product;

/* The whole product, for more than one token. Returns 1 without memory. */
__attribute__((visibility("hidden"))) int product_tiled(const Product *p);

/* Stores `count` outputs: of `token` and the rows from `row` on, or of `row` and the tokens from `token` on. */
INLINE void finish(const Product *p, long token, long row, vquad values, int count, int along_rows, int kind) {
    for (int i = 0; i < count; i++) {
        long t = along_rows ? token : token + i, r = along_rows ? row + i : row;
        float value = values[i];
        if (p->scale) value *= p->scale[r];
        if (p->bias) value += load_one(at(p->bias, r, kind), kind);
        store_one(at_mut(p->y, t * p->rows + r, kind), value, kind);
    }
}

INLINE void widen_line(float *to, const void *line, long depth, int kind) {
    long k = 0;
    for (; k + LANES <= depth; k += LANES) store(to + k, load(at(line, k, kind), kind), KIND_F32);
    if (k < depth) store_part(to + k, load_part(at(line, k, kind), depth - k, kind), depth - k, KIND_F32);
}

/* `rows` lines of `depth` values of a narrow kind, `stride` apart, as contiguous fp32. */
static inline void widen(float *to, const void *from, long rows, long depth, long stride, int kind) {
    for (long r = 0; r < rows; r++, to += depth) {
        const void *line = at(from, r * stride, kind);
        if (kind == KIND_I8) widen_line(to, line, depth, KIND_I8);
        else if (kind == KIND_BF16) widen_line(to, line, depth, KIND_BF16);
        else widen_line(to, line, depth, KIND_F16);
    }
}

#endif
