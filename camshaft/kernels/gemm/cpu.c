/* y[T,N] = x[T,K] * weight[N,K]^T (* scale[N]) + bias[N], bound by how fast weights stream from memory. Weights are
 * of x's type or narrower: 16 bit, or int8 with a scale a row; all arithmetic is fp32.
 *
 * Every output is one accumulator of LANES partial sums walking k upwards, whatever T is: the result of a row
 * never depends on its neighbours in the batch. A chunk of work is a range of weight rows. For few
 * tokens, fp32 rows go by one at a time: a single linear stream. Narrow ones go by four at a time, since one accumulator
 * could not keep up with them. What is a few kB ahead is fetched meanwhile: the hardware's own prefetch ends at every
 * 4 kB. Products of more tokens are cpu_tiles.c's. */
#include "pool.h"
#include "product.h"

#include <stdatomic.h>
#include <stdlib.h>

/* The most tokens for which fp32 weights stream, and narrow ones, which are not widened first then. */
#if LANES == 16
#define STREAM_TOKENS 4
#define NARROW_STREAM_TOKENS 4
#else
#define STREAM_TOKENS 1 /* a row at a time would wait for its sums with shorter vectors */
#define NARROW_STREAM_TOKENS 3
#endif
#define AHEAD_BYTES 4096
#define MIN_PARALLEL_PRODUCTS 32768
#define CHUNK_PRODUCTS 65536
#define WIDENING_BANDS 16   /* fewer would not pay for turning x into fp32 */

/* One step over k of the tile below: names, not arrays, because gcc keeps only names in registers. */
#define ROW_STEP(r, LOAD_X, LOAD_W) \
    if (r < rows) { \
        vfloat w = LOAD_W(r); \
        PIN(w); \
        s##r##0 += w * x0; \
        if (tokens > 1) s##r##1 += w * x1; \
        if (tokens > 2) s##r##2 += w * x2; \
        if (tokens > 3) s##r##3 += w * x3; \
    }
#define STEP(LOAD_X, LOAD_W) \
    do { \
        vfloat x0 = LOAD_X(0), x1 = {0}, x2 = {0}, x3 = {0}; \
        PIN(x0); \
        if (tokens > 1) { x1 = LOAD_X(1); PIN(x1); } \
        if (tokens > 2) { x2 = LOAD_X(2); PIN(x2); } \
        if (tokens > 3) { x3 = LOAD_X(3); PIN(x3); } \
        ROW_STEP(0, LOAD_X, LOAD_W) ROW_STEP(1, LOAD_X, LOAD_W) \
        ROW_STEP(2, LOAD_X, LOAD_W) ROW_STEP(3, LOAD_X, LOAD_W) \
    } while (0)
#define WHOLE_X(t) load(x + t * x_stride + k, KIND_F32)
#define WHOLE_W(r) load(at(weight, r * weight_stride + k, weight_kind), weight_kind)
#define PART_X(t) load_part(x + t * x_stride + k, rest, KIND_F32)
#define PART_W(r) load_part(at(weight, r * weight_stride + k, weight_kind), rest, weight_kind)
#define NO_SUMS(r) vfloat s##r##0 = {0}, s##r##1 = {0}, s##r##2 = {0}, s##r##3 = {0}

/* A tile of `rows` (1 or 4) x `tokens` (1 to 4) outputs over the whole depth. x is fp32. With `ahead`, as many bytes
 * from there on are fetched meanwhile: the next rows, as the one linear stream that four rows at once are not. */
INLINE void tile(const Product *p, const float *x, long x_stride, const void *weight, long weight_stride,
                 long token, long row, int tokens, int rows, int weight_kind, int kind, const char *ahead) {
    NO_SUMS(0); NO_SUMS(1); NO_SUMS(2); NO_SUMS(3);
    long whole = p->depth / LANES * LANES, rest = p->depth - whole, k = 0;
    long step = LANES * rows * kind_bytes(weight_kind);
    if (ahead) {
        for (; k < whole; k += LANES, ahead += step) {
            STEP(WHOLE_X, WHOLE_W);
            for (long i = 0; i < step; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        }
    } else for (; k < whole; k += LANES) STEP(WHOLE_X, WHOLE_W);
    if (rest) STEP(PART_X, PART_W);
    if (rows == 1) {
        finish(p, token, row, lane_sums(s00, s01, s02, s03), tokens, 0, kind);
        return;
    }
    finish(p, token, row, lane_sums(s00, s10, s20, s30), 4, 1, kind);
    if (tokens > 1) finish(p, token + 1, row, lane_sums(s01, s11, s21, s31), 4, 1, kind);
    if (tokens > 2) finish(p, token + 2, row, lane_sums(s02, s12, s22, s32), 4, 1, kind);
    if (tokens > 3) finish(p, token + 3, row, lane_sums(s03, s13, s23, s33), 4, 1, kind);
}

/* `rows` weight rows, in cache after their first use, times tokens [from, to), whose fp32 values start at x. */
INLINE void band(const Product *p, const float *x, long x_stride, const void *weight, long weight_stride,
                 long row, long from, long to, int rows, int weight_kind, int kind,
                 const char *ahead) {
    int tokens = rows == 1 ? 4 : NARROW_STREAM_TOKENS;
    long t = from;
    for (; t + tokens <= to; t += tokens, x += tokens * x_stride, ahead = 0)
        tile(p, x, x_stride, weight, weight_stride, t, row, tokens, rows, weight_kind, kind, ahead);
    switch (to - t) {
    case 1: tile(p, x, x_stride, weight, weight_stride, t, row, 1, rows, weight_kind, kind, ahead); break;
    case 2: tile(p, x, x_stride, weight, weight_stride, t, row, 2, rows, weight_kind, kind, ahead); break;
    case 3: tile(p, x, x_stride, weight, weight_stride, t, row, 3, rows, weight_kind, kind, ahead); break;
    }
}

/* Each of these is compiled once; all else calls them. */
#define BANDS(NAME, ROWS_AT_ONCE, WEIGHT_KIND) \
    static __attribute__((noinline)) void NAME(const Product *p, const float *x, long x_stride, const void *weight, \
                                               long weight_stride, long row, long from, long to, const char *ahead) { \
        band(p, x, x_stride, weight, weight_stride, row, from, to, ROWS_AT_ONCE, WEIGHT_KIND, p->kind, ahead); \
    }
BANDS(one_f32, 1, KIND_F32)
BANDS(one_bf16, 1, KIND_BF16)
BANDS(one_f16, 1, KIND_F16)
BANDS(one_i8, 1, KIND_I8)
BANDS(four_f32, ROWS, KIND_F32)
BANDS(four_bf16, ROWS, KIND_BF16)
BANDS(four_f16, ROWS, KIND_F16)
BANDS(four_i8, ROWS, KIND_I8)

typedef void bands(const Product *p, const float *x, long x_stride, const void *weight, long weight_stride, long row,
                   long from, long to, const char *ahead);
static bands *const ONE[] = {one_f32, one_bf16, one_f16, one_i8};
static bands *const FOUR[] = {four_f32, four_bf16, four_f16, four_i8};

/* Rows [first, last), each read once, times all tokens, whose fp32 values start at x. */
static void stream(const Product *p, const float *x, long x_stride, long first, long last) {
    int kind = p->weight_kind;
    long n = first, stride = p->weight_stride * kind_bytes(kind);
    const char *weight = (const char *)p->weight + first * stride;
    if (kind != KIND_F32)
        for (; n + ROWS <= last; n += ROWS, weight += ROWS * stride)
            FOUR[kind](p, x, x_stride, weight, p->weight_stride, n, 0, p->tokens, weight + AHEAD_BYTES);
    for (; n < last; n++, weight += stride) ONE[kind](p, x, x_stride, weight, p->weight_stride, n, 0, p->tokens, weight + AHEAD_BYTES);
}

static int share(const Product *p, long first, long last) {
    if (first >= last) return 0;
    if (p->kind == KIND_F32) {
        stream(p, p->x, p->x_stride, first, last);
        return 0;
    }
    float *x = aligned_alloc(64, (size_t)(p->tokens * p->depth / 16 + 1) * 64); /* no load crosses a line */
    if (!x) return 1;
    widen(x, p->x, p->tokens, p->depth, p->x_stride, p->kind);
    stream(p, x, p->depth, first, last);
    free(x);
    return 0;
}

typedef struct {
    const Product *product;
    atomic_int failed;
} Job;

static void some_bands(void *context, long first, long last, int seat) {
    Job *job = context;
    const Product *p = job->product;
    (void)seat;
    if (share(p, first * ROWS, last * ROWS < p->rows ? last * ROWS : p->rows)) atomic_store(&job->failed, 1);
}

/* Returns 1 without memory. */
int camshaft_linear(const Product *p) {
    if (p->tokens == 0 || p->rows == 0) return 0;
    if (p->tokens > (p->weight_kind == KIND_F32 ? STREAM_TOKENS : NARROW_STREAM_TOKENS)) return product_tiled(p);
    Job job = {p, 0};
    long products = p->tokens * p->depth * ROWS, bands = (p->rows + ROWS - 1) / ROWS;
    long grain = pool_grain(CHUNK_PRODUCTS, products);
    if (p->kind != KIND_F32 && grain < WIDENING_BANDS) grain = WIDENING_BANDS;
    pool_run(bands, grain, bands * products > MIN_PARALLEL_PRODUCTS ? p->threads : 1, some_bands, &job);
    return atomic_load(&job.failed);
}
