/* Products of many tokens, bound by arithmetic: fp32 tiles of ROWS weight rows x TOKENS tokens in registers.
 *
 * Of what a tile multiplies, its tokens' values stay in the first-level cache while the rows of a group pass by,
 * and the group stays in the second-level cache while the tokens of a block pass by. Rows stream because a tile has
 * fewer of them than tokens: less to fetch for as many products. Depth goes by in parts that let a tile's tokens
 * stay where they are; partial sums wait in memory in between, as vectors, so nothing changes in an output's order of
 * addition. A group's memory is read while the one before it is in use, a few lines at a time. Work is shared out as
 * items of one block x one group, blocks outermost: a thread keeps its block of x as long as it can. */
#include "pool.h"
#include "product.h"

#include <stdatomic.h>
#include <stdlib.h>

#if LANES == 16
#define TOKENS 6 /* 24 sums, 6 values of x and one of the weights: 31 of 32 registers */
#else
#define TOKENS 3 /* 16 of 16 registers */
#endif
#define GROUP_ROWS 32
#define BLOCK_BYTES (384 * 1024) /* of x */
#define PART_DEPTH 768           /* at which a tile's tokens and rows take 30 kB */
#define LINE 64
#define MIN_PARALLEL_PRODUCTS 32768
#define CHUNK_PRODUCTS 65536
#define WIDENING_ITEMS 2 /* fewer would not pay for turning a block of x into fp32 */

/* Lines of fp32 values, `stride` apart. */
typedef struct {
    const float *values;
    long stride;
} Lines;

/* The part of the depth that tiles go through, and what they fetch for later meanwhile. */
typedef struct {
    long from, to;
    const char *ahead;
    long ahead_bytes; /* with each step over k */
} Part;

#if LANES == 16
/* In each of these an output's lanes meet as in lane_sum: i and i + 8, i and i + 4, i and i + 2, i and i + 1. */
INLINE __m512 eighths(vfloat a, vfloat b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, (__m512)a, (__m512)b),
                         _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x4e));
}

INLINE __m512 quarters(__m512 a, __m512 b) {
    __m512i crossed = _mm512_permutex2var_epi64((__m512i)a, _mm512_set_epi64(13, 12, 7, 6, 9, 8, 3, 2), (__m512i)b);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, a, b), (__m512)crossed);
}

INLINE __m512 halves(__m512 a, __m512 b) {
    return _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b),
                         (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b));
}

/* What lane_sums gives for each four, in half the instructions: the tile's end is a tenth of its time. */
INLINE void eight_lane_sums(vquad sums[2], vfloat a0, vfloat a1, vfloat a2, vfloat a3, vfloat b0, vfloat b1, vfloat b2,
                            vfloat b3) {
    __m512 pairs = halves(quarters(eighths(a0, b0), eighths(a2, b2)), quarters(eighths(a1, b1), eighths(a3, b3)));
    __m512i even = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 14, 12, 10, 8, 6, 4, 2, 0);
    __m512i odd = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 all = _mm512_add_ps(_mm512_permutexvar_ps(even, pairs), _mm512_permutexvar_ps(odd, pairs));
    memcpy(sums, &all, 2 * sizeof *sums);
}
#else
INLINE void eight_lane_sums(vquad sums[2], vfloat a0, vfloat a1, vfloat a2, vfloat a3, vfloat b0, vfloat b1, vfloat b2,
                            vfloat b3) {
    sums[0] = lane_sums(a0, a1, a2, a3);
    sums[1] = lane_sums(b0, b1, b2, b3);
}
#endif

static __attribute__((noinline)) void finish_narrow(const Product *p, long token, long row, vquad sums, int count) {
    finish(p, token, row, sums, count, 1, p->kind);
}

/* Stores the outputs of `rows` (1 or ROWS) rows for one token. */
INLINE void finish_rows(const Product *p, long token, long row, vquad sums, int rows) {
    if (rows < ROWS || p->kind != KIND_F32) {
        finish_narrow(p, token, row, sums, rows);
        return;
    }
    vquad other;
    if (p->scale) {
        memcpy(&other, p->scale + row, sizeof other);
        sums *= other;
    }
    if (p->bias) {
        memcpy(&other, (const float *)p->bias + row, sizeof other);
        sums += other;
    }
    memcpy((float *)p->y + token * p->rows + row, &sums, sizeof sums);
}

INLINE void finish_pair(const Product *p, long token, long row, int tokens, int rows, vfloat a0, vfloat a1, vfloat a2,
                        vfloat a3, vfloat b0, vfloat b1, vfloat b2, vfloat b3) {
    vquad sums[2];
    if (tokens < 1) return;
    eight_lane_sums(sums, a0, a1, a2, a3, b0, b1, b2, b3);
    finish_rows(p, token, row, sums[0], rows);
    if (tokens > 1) finish_rows(p, token + 1, row, sums[1], rows);
}

/* s12 is the sum of row 1 and token 2: names, not arrays, because gcc keeps only names in registers. */
#define EACH_TOKEN(DO, r) DO(r, 0) DO(r, 1) DO(r, 2) DO(r, 3) DO(r, 4) DO(r, 5)
#define EACH_SUM(DO) EACH_TOKEN(DO, 0) EACH_TOKEN(DO, 1) EACH_TOKEN(DO, 2) EACH_TOKEN(DO, 3)
#define START(r, t) vfloat s##r##t = {0};
#define RESUME(r, t) if (r < rows && t < tokens) s##r##t = load(sums + (r * TOKENS + t) * LANES, KIND_F32);
#define SUSPEND(r, t) if (r < rows && t < tokens) store(sums + (r * TOKENS + t) * LANES, s##r##t, KIND_F32);
#define MULTIPLY(r, t) if (t < tokens) s##r##t += w * x##t;
#define TOKEN(t, LOAD) vfloat x##t = {0}; if (t < tokens) { x##t = LOAD(x.values + t * x.stride + k); PIN(x##t); }
#define ROW(r, LOAD) if (r < rows) { \
        vfloat w = LOAD(weight.values + r * weight.stride + k); \
        PIN(w); \
        EACH_TOKEN(MULTIPLY, r) \
    }
#define STEP(LOAD) do { \
        TOKEN(0, LOAD) TOKEN(1, LOAD) TOKEN(2, LOAD) TOKEN(3, LOAD) TOKEN(4, LOAD) TOKEN(5, LOAD) \
        ROW(0, LOAD) ROW(1, LOAD) ROW(2, LOAD) ROW(3, LOAD) \
    } while (0)
#define WHOLE(from) load(from, KIND_F32)
#define REST(from) load_part(from, part.to - k, KIND_F32)

/* A tile of `rows` (1 or ROWS) x `tokens` outputs over one part of the depth. `sums` holds those of the parts before. */
INLINE void tile(const Product *p, Lines x, Lines weight, Part part, long token, long row, float *sums, int tokens,
                 int rows) {
    long k = part.from, whole = part.to / LANES * LANES;
    EACH_SUM(START)
    if (part.from > 0) { EACH_SUM(RESUME) }
    if (part.ahead_bytes <= LINE) {
        _Pragma("GCC unroll 4") /* fewer turns let the end of the loop be predicted; by hand, gcc spills */
        for (; k < whole; k += LANES, part.ahead += part.ahead_bytes) {
            STEP(WHOLE);
            __builtin_prefetch(part.ahead, 0, 2);
        }
    } else {
        for (; k < whole; k += LANES, part.ahead += part.ahead_bytes) {
            STEP(WHOLE);
            for (long i = 0; i < ROWS * LANES * 4; i += LINE) __builtin_prefetch(part.ahead + i, 0, 2);
        }
    }
    if (k < part.to) STEP(REST);
    if (part.to < p->depth) {
        EACH_SUM(SUSPEND)
        return;
    }
    finish_pair(p, token, row, tokens, rows, s00, s10, s20, s30, s01, s11, s21, s31);
    finish_pair(p, token + 2, row, tokens - 2, rows, s02, s12, s22, s32, s03, s13, s23, s33);
    finish_pair(p, token + 4, row, tokens - 4, rows, s04, s14, s24, s34, s05, s15, s25, s35);
}

/* Rows [row, last), whose values `weight` holds, times as many tokens as the name says, from `token` on. */
#define COLUMN(NAME, COUNT) \
    static __attribute__((noinline)) void NAME(const Product *p, Lines x, Lines weight, Part part, long token, \
                                               long row, long last, float *sums) { \
        long tile_bytes = (part.to - part.from) / LANES * part.ahead_bytes; \
        for (; row + ROWS <= last; row += ROWS, sums += ROWS * TOKENS * LANES) { \
            tile(p, x, weight, part, token, row, sums, COUNT, ROWS); \
            weight.values += ROWS * weight.stride, part.ahead += tile_bytes; \
        } \
        for (; row < last; row++, sums += TOKENS * LANES, weight.values += weight.stride) \
            tile(p, x, weight, part, token, row, sums, COUNT, 1); \
    }
COLUMN(column_1, 1)
COLUMN(column_2, 2)
COLUMN(column_3, 3)
#if TOKENS > 3
COLUMN(column_4, 4)
COLUMN(column_5, 5)
COLUMN(column_6, 6)
#endif

typedef void column(const Product *p, Lines x, Lines weight, Part part, long token, long row, long last, float *sums);
static column *const COLUMNS[] = {
    column_1, column_2, column_3,
#if TOKENS > 3
    column_4, column_5, column_6,
#endif
};

/* Rounded up. */
INLINE long ratio(long a, long b) { return (a + b - 1) / b; }

/* The length of equal parts of `whole`, about `most` or less, each but the last a multiple of `unit`. */
static long even_part(long whole, long most, long unit) {
    long parts = whole > most ? ratio(whole, most) : 1;
    return ratio(ratio(whole, parts), unit) * unit;
}

/* `part` is of the depth, `ahead_bytes` as in Part. */
typedef struct {
    const Product *product;
    long block, group, groups, part, ahead_bytes;
    atomic_int failed;
} Grid;

/* Tokens [from, to) times rows [first, last), whose fp32 values start at x and weight. `part` says what to fetch. */
static void multiply(const Grid *grid, Lines x, Lines weight, long from, long to, long first, long last, Part part) {
    _Alignas(LINE) float sums[GROUP_ROWS * TOKENS * LANES];
    const Product *p = grid->product;
    for (long t = from; t < to; t += TOKENS, x.values += TOKENS * x.stride) {
        column *some_rows = COLUMNS[to - t < TOKENS ? to - t - 1 : TOKENS - 1];
        part.to = 0;
        do {
            part.from = part.to;
            part.to = part.from + grid->part < p->depth ? part.from + grid->part : p->depth;
            some_rows(p, x, weight, part, t, first, last, sums);
            part.ahead += (last - first) / ROWS * ((part.to - part.from) / LANES) * part.ahead_bytes;
        } while (part.to < p->depth);
    }
}

/* Items [first, last) of the grid: block of tokens by block, in each group of rows by group. */
static void some_items(void *context, long first, long last, int seat) {
    Grid *grid = context;
    const Product *p = grid->product;
    int widen_x = p->kind != KIND_F32, widen_weight = p->weight_kind != KIND_F32;
    float *x_scratch = 0, *weight_scratch = 0;
    (void)seat;
    if (widen_x || widen_weight) {
        long lines = (widen_x ? grid->block : 0) + (widen_weight ? grid->group : 0);
        x_scratch = aligned_alloc(LINE, (size_t)(lines * p->depth / 16 + 1) * LINE); /* no load crosses a line */
        weight_scratch = widen_x ? x_scratch + grid->block * p->depth : x_scratch;
        if (!x_scratch) {
            atomic_store(&grid->failed, 1);
            return;
        }
    }
    for (long item = first; item < last; item++) {
        long from = item / grid->groups * grid->block, row = item % grid->groups * grid->group;
        long to = from + grid->block < p->tokens ? from + grid->block : p->tokens;
        long last_row = row + grid->group < p->rows ? row + grid->group : p->rows;
        Lines x = {at(p->x, from * p->x_stride, p->kind), p->x_stride};
        Lines weight = {at(p->weight, row * p->weight_stride, p->weight_kind), p->weight_stride};
        if (widen_x) {
            if (item == first || row == 0) widen(x_scratch, x.values, to - from, p->depth, x.stride, p->kind);
            x = (Lines){x_scratch, p->depth};
        }
        if (widen_weight) {
            widen(weight_scratch, weight.values, last_row - row, p->depth, weight.stride, p->weight_kind);
            weight = (Lines){weight_scratch, p->depth};
        }
        long next = last_row < p->rows ? last_row : 0;
        Part part = {.ahead = at(p->weight, next * p->weight_stride, p->weight_kind),
                     .ahead_bytes = item + 1 < last ? grid->ahead_bytes : 0};
        multiply(grid, x, weight, from, to, row, last_row, part);
    }
    free(x_scratch);
}

int product_tiled(const Product *p) {
    long most_tokens = BLOCK_BYTES / 4 / (p->depth + 1), rows = ROWS * ratio(p->tokens, TOKENS);
    Grid grid = {.product = p};
    grid.block = even_part(p->tokens, most_tokens > 4 * TOKENS ? most_tokens : 4 * TOKENS, TOKENS);
    grid.group = rows < GROUP_ROWS ? rows : GROUP_ROWS; /* about as many as tokens */
    grid.groups = ratio(p->rows, grid.group);
    grid.part = even_part(p->depth, PART_DEPTH, LANES);
    grid.ahead_bytes = ratio(grid.group * p->weight_stride * kind_bytes(p->weight_kind),
                             ratio(grid.block, TOKENS) * (grid.group / ROWS) * (p->depth / LANES + 1));
    long items = ratio(p->tokens, grid.block) * grid.groups, products = p->tokens * p->rows * p->depth;
    long grain = pool_grain(CHUNK_PRODUCTS, grid.block * grid.group * p->depth);
    if (p->kind != KIND_F32 && grain < WIDENING_ITEMS) grain = WIDENING_ITEMS;
    pool_run(items, grain, products > MIN_PARALLEL_PRODUCTS ? p->threads : 1, some_items, &grid);
    return atomic_load(&grid.failed);
}
