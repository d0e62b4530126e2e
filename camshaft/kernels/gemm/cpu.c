/* y[T,N] = x[T,K] * weight[N,K]^T (* scale[N]) + bias[N], bound by how fast weights stream from memory. Weights are
 * of x's type or narrower: 16 bit, or int8 with a scale a row; all arithmetic is fp32.
 *
 * Every output is one accumulator of LANES partial sums walking k upwards, whatever T is: the result of a row
 * never depends on its neighbours in the batch. A chunk of work is a range of weight rows. For one
 * token, fp32 rows go by one at a time: a single linear stream. Narrow ones go by four at a time, since one accumulator
 * could not keep up with them. What is a few kB ahead is fetched meanwhile: the hardware's own prefetch ends at every
 * 4 kB. For more tokens, ROWS x TOKENS tiles are held in
 * registers, and while a block of rows is used from the first-level cache the next one is fetched. */
#include "native.h"
#include "pool.h"

#include <stdatomic.h>
#include <stdlib.h>

#define STREAM_TOKENS 1
#define ROWS 4
#if LANES == 16
#define TOKENS 4
#else
#define TOKENS 3
#endif
#define AHEAD_BYTES 4096
#define TILE_BYTES (192 * 1024)
#define WIDENED_TILE_BYTES (384 * 1024) /* more tokens for each time a weight is widened */
#define MIN_PARALLEL_PRODUCTS 32768
#define CHUNK_PRODUCTS 65536
#define CHUNKS_A_THREAD 16  /* where x is read again for every chunk: few of them, yet enough to end together */
#define WIDENING_BANDS 16   /* fewer would not pay for turning x into fp32 */

/* Strides are in elements, of rows; the last dimensions are contiguous, and so is y. bias and scale may be null. */
typedef struct {
    const void *x, *weight, *bias;
    const float *scale;
    void *y;
    long tokens, rows, depth, x_stride, weight_stride;
    int kind, weight_kind, threads;
} Product;

/* Stores four outputs `step` elements apart in y, of which `count` exist. */
INLINE void finish(const Product *p, long token, long row, vquad values, int count, int along_rows, int kind) {
    for (int i = 0; i < count; i++) {
        long t = along_rows ? token : token + i, r = along_rows ? row + i : row;
        float value = values[i];
        if (p->scale) value *= p->scale[r];
        if (p->bias) value += load_one(at(p->bias, r, kind), kind);
        store_one(at_mut(p->y, t * p->rows + r, kind), value, kind);
    }
}

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
    int tokens = rows == 1 ? 4 : TOKENS;
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

INLINE void widen_line(float *to, const void *line, long depth, int kind) {
    long k = 0;
    for (; k + LANES <= depth; k += LANES) store(to + k, load(at(line, k, kind), kind), KIND_F32);
    if (k < depth) store_part(to + k, load_part(at(line, k, kind), depth - k, kind), depth - k, KIND_F32);
}

static void widen(float *to, const void *from, long rows, long depth, long stride, int kind) {
    for (long r = 0; r < rows; r++, to += depth) {
        const void *line = at(from, r * stride, kind);
        if (kind == KIND_I8) widen_line(to, line, depth, KIND_I8);
        else if (kind == KIND_BF16) widen_line(to, line, depth, KIND_BF16);
        else widen_line(to, line, depth, KIND_F16);
    }
}

/* `scratch` holds room for a block of tokens where x is not fp32, then for ROWS weight rows where those are not. */
static void tiled(const Product *p, float *scratch, long block, long first, long last) {
    int widen_x = p->kind != KIND_F32, widen_weight = p->weight_kind != KIND_F32;
    float *weight_scratch = widen_x ? scratch + block * p->depth : scratch;
    for (long from = 0; from < p->tokens; from += block) {
        long to = from + block < p->tokens ? from + block : p->tokens;
        const float *x = at(p->x, from * p->x_stride, p->kind);
        long x_stride = p->x_stride;
        if (widen_x) {
            widen(scratch, x, to - from, p->depth, x_stride, p->kind);
            x = scratch, x_stride = p->depth;
        }
        for (long n = first; n < last; n += ROWS) {
            long rows = last - n < ROWS ? last - n : ROWS, stride = p->weight_stride;
            const float *weight = at(p->weight, n * stride, p->weight_kind);
            if (widen_weight) {
                widen(weight_scratch, weight, rows, p->depth, stride, p->weight_kind);
                weight = weight_scratch, stride = p->depth;
            }
            if (rows == ROWS)
                four_f32(p, x, x_stride, weight, stride, n, from, to,
                         at(p->weight, (n + ROWS) * p->weight_stride, p->weight_kind));
            else for (long r = 0; r < rows; r++, weight += stride)
                one_f32(p, x, x_stride, weight, stride, n + r, from, to, 0);
        }
    }
}

static int share(const Product *p, long first, long last) {
    if (first >= last) return 0;
    int widen_x = p->kind != KIND_F32, widen_weight = p->weight_kind != KIND_F32;
    int streams = p->tokens <= (widen_weight ? TOKENS : STREAM_TOKENS);
    long block = (widen_weight ? WIDENED_TILE_BYTES : TILE_BYTES) / 4 / (p->depth + 1) / TOKENS * TOKENS;
    if (block < 4 * TOKENS) block = 4 * TOKENS;
    if (block > p->tokens) block = p->tokens;
    float *scratch = 0;
    if (widen_x || (widen_weight && !streams)) {
        scratch = aligned_alloc(64, (size_t)((block + ROWS) * p->depth + 16) / 16 * 64); /* no load crosses a line */
        if (!scratch) return 1;
    }
    if (!streams) tiled(p, scratch, block, first, last);
    else if (widen_x) {
        widen(scratch, p->x, p->tokens, p->depth, p->x_stride, p->kind);
        stream(p, scratch, p->depth, first, last);
    } else stream(p, p->x, p->x_stride, first, last);
    free(scratch);
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
    Job job = {p, 0};
    long products = p->tokens * p->depth * ROWS, bands = (p->rows + ROWS - 1) / ROWS;
    long grain = pool_grain(CHUNK_PRODUCTS, products);
    if (p->tokens > STREAM_TOKENS && grain < bands / (CHUNKS_A_THREAD * p->threads))
        grain = bands / (CHUNKS_A_THREAD * p->threads);
    if (p->kind != KIND_F32 && grain < WIDENING_BANDS) grain = WIDENING_BANDS;
    pool_run(bands, grain, bands * products > MIN_PARALLEL_PRODUCTS ? p->threads : 1, some_bands, &job);
    return atomic_load(&job.failed);
}
