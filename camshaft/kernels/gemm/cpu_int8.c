/* y[T,N] = x[T,K] * weight[N,K]^T * scale[N] + bias[N] with int8 weights and every BLOCK values of a row of x rounded
 * to int8.
 *
 * A block of x becomes whole numbers of magnitude up to 127 and a scale of its own, so a row's result never depends on
 * its neighbours in the batch. Integer sums of a block are exact; each output adds its blocks up in one order, whatever
 * the tile: a row's result has the same bits in any batch. One chunk of work is a range of weight rows, which are read
 * as they lie in memory; x, rounded once before, is padded with zeros to whole blocks. */
#include "native.h"
#include "pool.h"

#include <math.h>
#include <stdlib.h>

#define BLOCK 64
#define ROWS 4
#define TILE_BYTES (192 * 1024)
#define MIN_PARALLEL_PRODUCTS 65536
#define MIN_PARALLEL_VALUES 32768
#define CHUNK_PRODUCTS 131072
#define CHUNK_VALUES 8192
#define CHUNKS_A_THREAD 16
#define AHEAD_BYTES 4096
#define LARGEST 127.f
#define SMALLEST_PEAK 1e-30f

/* The dot product of this machine. `vsums` holds WIDTH / 4 partial sums. Where one operand must be unsigned
 * (dpbusd), weights are taken 128 higher, and sums begin at -128 times the sum of x, an equal part of it in each. */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define WIDTH 64
#define TOKENS 4
#define WEIGHT_OFFSET 128
typedef __m512i vbytes, vsums;
INLINE vbytes load_bytes(const void *from) { return _mm512_loadu_si512(from); }
INLINE vbytes load_weights(const void *from) { return _mm512_xor_si512(load_bytes(from), _mm512_set1_epi8(-128)); }
INLINE vsums dot(vsums sums, vbytes weight, vbytes x) { return _mm512_dpbusd_epi32(sums, weight, x); }
#elif defined(__AVXVNNI__)
#define WIDTH 32
#define TOKENS 2
#define WEIGHT_OFFSET 128
typedef __m256i vbytes, vsums;
INLINE vbytes load_bytes(const void *from) { return _mm256_loadu_si256(from); }
INLINE vbytes load_weights(const void *from) { return _mm256_xor_si256(load_bytes(from), _mm256_set1_epi8(-128)); }
INLINE vsums dot(vsums sums, vbytes weight, vbytes x) { return _mm256_dpbusd_avx_epi32(sums, weight, x); }
#elif defined(__AVX2__)
#define WIDTH 32
#define TOKENS 2
#define WEIGHT_OFFSET 0
typedef __m256i vbytes, vsums;
INLINE vbytes load_bytes(const void *from) { return _mm256_loadu_si256(from); }
INLINE vbytes load_weights(const void *from) { return load_bytes(from); }
/* |x| * (weight with x's sign): pairs sum to at most 2 * 127 * 127, which 16 bits hold. */
INLINE vsums dot(vsums sums, vbytes weight, vbytes x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(weight, x));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
#define WIDTH 16
#define TOKENS 2
#define WEIGHT_OFFSET 0
typedef int8_t vbytes __attribute__((vector_size(16)));
typedef int32_t vsums __attribute__((vector_size(16)));
INLINE vbytes load_bytes(const void *from) {
    vbytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}
INLINE vbytes load_weights(const void *from) { return load_bytes(from); }
INLINE vsums dot(vsums sums, vbytes weight, vbytes x) {
    for (int i = 0; i < 16; i++) sums[i / 4] += weight[i] * x[i];
    return sums;
}
#endif

typedef int32_t vints __attribute__((vector_size(WIDTH)));
typedef float vreals __attribute__((vector_size(WIDTH)));
#define STEPS (BLOCK / WIDTH)

INLINE vbytes load_weights_part(const int8_t *from, long count) {
    int8_t whole[WIDTH] = {0};
    if (count > 0) memcpy(whole, from, (size_t)(count < WIDTH ? count : WIDTH));
    return load_weights(whole);
}

/* Four partial sums in place of WIDTH / 4. */
INLINE vquad fold_reals(vreals sums) {
#if WIDTH == 64
    __m256 octet = _mm256_add_ps(_mm512_castps512_ps256((__m512)sums),
                                 _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)sums, 1)));
    return (vquad)_mm_add_ps(_mm256_castps256_ps128(octet), _mm256_extractf128_ps(octet, 1));
#elif WIDTH == 32
    return (vquad)_mm_add_ps(_mm256_castps256_ps128((__m256)sums), _mm256_extractf128_ps((__m256)sums, 1));
#else
    return sums;
#endif
}

/* The totals of four vectors of partial sums. */
INLINE vquad totals(vreals a, vreals b, vreals c, vreals d) {
    vquad qa = fold_reals(a), qb = fold_reals(b), qc = fold_reals(c), qd = fold_reals(d);
    vquad ab = SHUFFLE(qa, qb, 0, 4, 1, 5) + SHUFFLE(qa, qb, 2, 6, 3, 7);
    vquad cd = SHUFFLE(qc, qd, 0, 4, 1, 5) + SHUFFLE(qc, qd, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

/* Strides are in elements, of rows; the last dimensions are contiguous, and so is y. bias may be null. */
typedef struct {
    const void *x;
    const int8_t *weight;
    const void *bias;
    const float *scale;
    void *y;
    long tokens, rows, depth, x_stride, weight_stride;
    int kind, threads;
} Product;

/* A rounded block of x: its scale, and what each partial sum of its products begins at. */
typedef struct {
    float scale;
    int32_t start;
} Block;

/* x as int8 [tokens, blocks * BLOCK], and its blocks [tokens, blocks]. */
typedef struct {
    const Product *product;
    int8_t *x;
    Block *block;
    long blocks;
} Job;

INLINE vint round_lanes(vfloat lanes) {
#if defined(__AVX512F__)
    return (vint)_mm512_cvtps_epi32((__m512)lanes);
#elif defined(__AVX2__)
    return (vint)_mm256_cvtps_epi32((__m256)lanes);
#else
    vint whole;
    for (int i = 0; i < LANES; i++) whole[i] = (int32_t)lrintf(lanes[i]);
    return whole;
#endif
}

INLINE Block quantise_block(const float *x, int8_t *out) {
    vint peaks = {0}, sums = {0};
    for (long k = 0; k < BLOCK; k += LANES) {
        /* Magnitudes compare as whole numbers do, and NaN is above infinity. */
        vint magnitude = (vint)load(x + k, KIND_F32) & INT32_MAX, more = magnitude > peaks;
        peaks = (magnitude & more) | (peaks & ~more);
    }
    int32_t bits = 0, sum = 0;
    for (int i = 0; i < LANES; i++) bits = peaks[i] > bits ? peaks[i] : bits;
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    if (peak < SMALLEST_PEAK) peak = SMALLEST_PEAK;
    float inverse = LARGEST / peak;
    for (long k = 0; k < BLOCK; k += LANES) {
        vbyte bytes = __builtin_convertvector(round_lanes(load(x + k, KIND_F32) * inverse), vbyte);
        memcpy(out + k, &bytes, sizeof bytes);
        sums += __builtin_convertvector(bytes, vint);
    }
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return (Block){peak / LARGEST, -WEIGHT_OFFSET / (WIDTH / 4) * sum};
}

static void quantise(void *context, long first, long last, int seat) {
    const Job *job = context;
    const Product *p = job->product;
    (void)seat;
    for (long t = first; t < last; t++)
        for (long b = 0; b < job->blocks; b++) {
            float values[BLOCK] = {0};
            const void *x = at(p->x, t * p->x_stride + b * BLOCK, p->kind);
            long count = p->depth - b * BLOCK < BLOCK ? p->depth - b * BLOCK : BLOCK, k = 0;
            for (; k + LANES <= count; k += LANES) store(values + k, load(at(x, k, p->kind), p->kind), KIND_F32);
            if (k < count) store(values + k, load_part(at(x, k, p->kind), count - k, p->kind), KIND_F32);
            job->block[t * job->blocks + b] = quantise_block(values, job->x + (t * job->blocks + b) * BLOCK);
        }
}

/* Stores outputs [row, row + count) of a token from the totals of its products. */
INLINE void finish(const Job *job, long token, long row, vquad values, int count) {
    const Product *p = job->product;
    vquad scales = {0};
    memcpy(&scales, p->scale + row, (size_t)count * sizeof(float));
    values *= scales;
    void *y = at_mut(p->y, token * p->rows + row, p->kind);
    if (p->bias) {
        vquad bias = {0};
        for (int i = 0; i < count; i++) bias[i] = load_one(at(p->bias, row + i, p->kind), p->kind);
        values += bias;
    }
    if (p->kind == KIND_F32) memcpy(y, &values, (size_t)count * sizeof(float));
    else for (int i = 0; i < count; i++) store_one(at_mut(y, i, p->kind), values[i], p->kind);
}

/* An output's sums with one block more, whose weights are w. */
INLINE vreals more(vreals sums, const vbytes *w, const int8_t *x, Block block) {
    vsums dots = (vsums)((vints){0} + block.start);
    for (int i = 0; i < STEPS; i++) dots = dot(dots, w[i], load_bytes(x + i * WIDTH));
    return sums + __builtin_convertvector((vints)dots, vreals) * block.scale;
}

/* One block of the tile below: names, not arrays, because gcc keeps only names in registers. */
#define ROW_STEP(r, LOAD_W) \
    if (r < rows) { \
        vbytes w[STEPS]; \
        for (int i = 0; i < STEPS; i++) w[i] = LOAD_W(r, i); \
        s##r##0 = more(s##r##0, w, x, b[0]); \
        if (tokens > 1) s##r##1 = more(s##r##1, w, x + width, b[blocks]); \
        if (tokens > 2) s##r##2 = more(s##r##2, w, x + 2 * width, b[2 * blocks]); \
        if (tokens > 3) s##r##3 = more(s##r##3, w, x + 3 * width, b[3 * blocks]); \
    }
#define STEP(LOAD_W) ROW_STEP(0, LOAD_W) ROW_STEP(1, LOAD_W) ROW_STEP(2, LOAD_W) ROW_STEP(3, LOAD_W)
#define WHOLE_W(r, i) load_weights(weight + r * stride + i * WIDTH)
#define PART_W(r, i) load_weights_part(weight + r * stride + i * WIDTH, rest - i * WIDTH)
#define NO_SUMS(r) vreals s##r##0 = {0}, s##r##1 = {0}, s##r##2 = {0}, s##r##3 = {0}

/* A tile of `rows` (1 or ROWS) x `tokens` (1 to TOKENS) outputs over the whole depth. With `ahead`, as many bytes
 * further on are fetched meanwhile: the rows after next, as one linear stream. */
INLINE void tile(const Job *job, long token, long row, int tokens, int rows, int ahead) {
    const Product *p = job->product;
    long stride = p->weight_stride, blocks = job->blocks, width = blocks * BLOCK, rest = p->depth;
    const int8_t *x = job->x + token * width, *weight = p->weight + row * stride, *next = weight + AHEAD_BYTES;
    const Block *b = job->block + token * blocks;
    NO_SUMS(0); NO_SUMS(1); NO_SUMS(2); NO_SUMS(3);
    for (; rest >= BLOCK; rest -= BLOCK, x += BLOCK, weight += BLOCK, b++) {
        if (ahead) for (int i = 0; i < ROWS; i++, next += BLOCK) __builtin_prefetch(next, 0, 2);
        STEP(WHOLE_W)
    }
    if (rest) { STEP(PART_W) }
    finish(job, token, row, totals(s00, s10, s20, s30), rows);
    if (tokens > 1) finish(job, token + 1, row, totals(s01, s11, s21, s31), rows);
    if (tokens > 2) finish(job, token + 2, row, totals(s02, s12, s22, s32), rows);
    if (tokens > 3) finish(job, token + 3, row, totals(s03, s13, s23, s33), rows);
}

/* ROWS weight rows, in cache after their first use, times tokens [from, to). */
static __attribute__((noinline)) void four_rows(const Job *job, long row, long from, long to) {
    int ahead = 1;
    for (; from + TOKENS <= to; from += TOKENS, ahead = 0) tile(job, from, row, TOKENS, ROWS, ahead);
    for (; from < to; from++, ahead = 0) tile(job, from, row, 1, ROWS, ahead);
}

static __attribute__((noinline)) void one_row(const Job *job, long row, long from, long to) {
    for (; from < to; from++) tile(job, from, row, 1, 1, 0);
}

static void some_bands(void *context, long first, long last, int seat) {
    const Job *job = context;
    const Product *p = job->product;
    (void)seat;
    long end = last * ROWS < p->rows ? last * ROWS : p->rows;
    long block = TILE_BYTES / (job->blocks * BLOCK + 1) / TOKENS * TOKENS;
    if (block < 4 * TOKENS) block = 4 * TOKENS;
    for (long from = 0; from < p->tokens; from += block) {
        long to = from + block < p->tokens ? from + block : p->tokens, n = first * ROWS;
        for (; n + ROWS <= end; n += ROWS) four_rows(job, n, from, to);
        for (; n < end; n++) one_row(job, n, from, to);
    }
}

/* Returns 1 without memory. */
int camshaft_linear_int8(const Product *p) {
    if (p->tokens == 0 || p->rows == 0) return 0;
    long blocks = (p->depth + BLOCK - 1) / BLOCK, values = p->tokens * p->depth;
    int8_t *x = aligned_alloc(64, (size_t)(p->tokens * blocks * (BLOCK + (long)sizeof(Block)) + 64) / 64 * 64);
    if (!x) return 1;
    Job job = {p, x, (Block *)(x + p->tokens * blocks * BLOCK), blocks};
    pool_run(p->tokens, pool_grain(CHUNK_VALUES, p->depth), values > MIN_PARALLEL_VALUES ? p->threads : 1, quantise,
             &job);
    long products = values * ROWS, bands = (p->rows + ROWS - 1) / ROWS, grain = pool_grain(CHUNK_PRODUCTS, products);
    if (p->tokens > TOKENS && grain < bands / (CHUNKS_A_THREAD * p->threads))
        grain = bands / (CHUNKS_A_THREAD * p->threads);
    pool_run(bands, grain, bands * products > MIN_PARALLEL_PRODUCTS ? p->threads : 1, some_bands, &job);
    free(x);
    return 0;
}
