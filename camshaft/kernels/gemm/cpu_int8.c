/* y[T,N] = x[T,K] * weight[N,K]^T * scale[N] + bias[N] with int8 weights and every row of x rounded to int8.
 *
 * A row of x becomes whole numbers of magnitude up to 127 and a scale of its own, so a row's result never depends on
 * its neighbours in the batch. Integer sums are exact: neither the tile nor the width of the machine's vectors
 * changes a bit. One chunk of work is a range of weight rows, which are read as they lie in memory; x, rounded once
 * before, is padded with zeros to whole vectors. */
#include "native.h"
#include "pool.h"

#include <math.h>
#include <stdlib.h>

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
 * (dpbusd), weights are taken 128 higher, and 128 times the sum of x is taken off the result again. */
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
#define TOKENS 3
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

typedef int32_t vquad_int __attribute__((vector_size(16)));

INLINE vbytes load_weights_part(const void *from, long count) {
    int8_t whole[WIDTH] = {0};
    memcpy(whole, from, (size_t)count);
    return load_weights(whole);
}

INLINE vquad_int fold_sums(vsums sums) {
#if WIDTH == 64
    __m256i octet = _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
    return (vquad_int)_mm_add_epi32(_mm256_castsi256_si128(octet), _mm256_extracti128_si256(octet, 1));
#elif WIDTH == 32
    return (vquad_int)_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
#else
    return sums;
#endif
}

#if defined(__clang__)
#define SHUFFLE_INT(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE_INT(a, b, ...) __builtin_shuffle(a, b, (vquad_int){__VA_ARGS__})
#endif

/* The totals of four vectors of partial sums. */
INLINE vquad_int totals(vsums a, vsums b, vsums c, vsums d) {
    vquad_int qa = fold_sums(a), qb = fold_sums(b), qc = fold_sums(c), qd = fold_sums(d);
    vquad_int ab = SHUFFLE_INT(qa, qb, 0, 4, 1, 5) + SHUFFLE_INT(qa, qb, 2, 6, 3, 7);
    vquad_int cd = SHUFFLE_INT(qc, qd, 0, 4, 1, 5) + SHUFFLE_INT(qc, qd, 2, 6, 3, 7);
    return SHUFFLE_INT(ab, cd, 0, 1, 4, 5) + SHUFFLE_INT(ab, cd, 2, 3, 6, 7);
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

/* x as int8 [tokens, padded], its scales [tokens], and WEIGHT_OFFSET times the sums of its rows. */
typedef struct {
    const Product *product;
    int8_t *x;
    float *scale;
    int32_t *offset;
    long padded;
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

INLINE void quantise_row(const void *x, long depth, long padded, int kind, int8_t *out, float *scale, int32_t *offset) {
    vint peaks = {0}, sums = {0};
    long whole = depth / LANES * LANES, k;
    for (k = 0; k < depth; k += LANES) {
        vfloat lanes = k < whole ? load(at(x, k, kind), kind) : load_part(at(x, k, kind), depth - k, kind);
        /* Magnitudes compare as whole numbers do, and NaN is above infinity. */
        vint magnitude = (vint)lanes & INT32_MAX, more = magnitude > peaks;
        peaks = (magnitude & more) | (peaks & ~more);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) if (peaks[i] > bits) bits = peaks[i];
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    if (peak < SMALLEST_PEAK) peak = SMALLEST_PEAK;
    float inverse = LARGEST / peak;
    *scale = peak / LARGEST;
    memset(out + whole, 0, (size_t)(padded - whole));
    for (k = 0; k < depth; k += LANES) {
        vfloat lanes = k < whole ? load(at(x, k, kind), kind) : load_part(at(x, k, kind), depth - k, kind);
        vint rounded = round_lanes(lanes * inverse);
        sums += rounded;
        vbyte bytes = __builtin_convertvector(rounded, vbyte);
        memcpy(out + k, &bytes, (size_t)(k < whole ? LANES : depth - k));
    }
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    *offset = (int32_t)(WEIGHT_OFFSET * (uint32_t)sum); /* garbage where x is not finite, and so is the scale then */
}

static void quantise(void *context, long first, long last, int seat) {
    const Job *job = context;
    const Product *p = job->product;
    (void)seat;
    for (long t = first; t < last; t++) {
        const void *x = at(p->x, t * p->x_stride, p->kind);
        int8_t *out = job->x + t * job->padded;
        if (p->kind == KIND_F32) quantise_row(x, p->depth, job->padded, KIND_F32, out, job->scale + t, job->offset + t);
        else quantise_row(x, p->depth, job->padded, p->kind, out, job->scale + t, job->offset + t);
    }
}

/* Stores outputs [row, row + count) of a token from the totals of its products. */
INLINE void finish(const Job *job, long token, long row, vquad_int sums, int count) {
    const Product *p = job->product;
    vquad values = __builtin_convertvector(sums - job->offset[token], vquad), scales = {0};
    memcpy(&scales, p->scale + row, (size_t)count * sizeof(float));
    values *= scales * job->scale[token];
    void *y = at_mut(p->y, token * p->rows + row, p->kind);
    if (p->bias) {
        vquad bias = {0};
        for (int i = 0; i < count; i++) bias[i] = load_one(at(p->bias, row + i, p->kind), p->kind);
        values += bias;
    }
    if (p->kind == KIND_F32) memcpy(y, &values, (size_t)count * sizeof(float));
    else for (int i = 0; i < count; i++) store_one(at_mut(y, i, p->kind), values[i], p->kind);
}

/* One step over k of the tile below: names, not arrays, because gcc keeps only names in registers. */
#define ROW_STEP(r, LOAD_W) \
    if (r < rows) { \
        vbytes w = LOAD_W(r); \
        s##r##0 = dot(s##r##0, w, x0); \
        if (tokens > 1) s##r##1 = dot(s##r##1, w, x1); \
        if (tokens > 2) s##r##2 = dot(s##r##2, w, x2); \
        if (tokens > 3) s##r##3 = dot(s##r##3, w, x3); \
    }
#define STEP(LOAD_W) \
    do { \
        vbytes x0 = load_bytes(x + k), x1 = x0, x2 = x0, x3 = x0; \
        if (tokens > 1) x1 = load_bytes(x + job->padded + k); \
        if (tokens > 2) x2 = load_bytes(x + 2 * job->padded + k); \
        if (tokens > 3) x3 = load_bytes(x + 3 * job->padded + k); \
        ROW_STEP(0, LOAD_W) ROW_STEP(1, LOAD_W) ROW_STEP(2, LOAD_W) ROW_STEP(3, LOAD_W) \
    } while (0)
#define WHOLE_W(r) load_weights(weight + r * stride + k)
#define PART_W(r) load_weights_part(weight + r * stride + k, p->depth - k)
#define NO_SUMS(r) vsums s##r##0 = {0}, s##r##1 = {0}, s##r##2 = {0}, s##r##3 = {0}

/* A tile of `rows` (1 or ROWS) x `tokens` (1 to TOKENS) outputs over the whole depth. With `ahead`, as many bytes
 * further on are fetched meanwhile: the rows after next, as one linear stream. */
INLINE void tile(const Job *job, long token, long row, int tokens, int rows, int ahead) {
    const Product *p = job->product;
    const int8_t *x = job->x + token * job->padded, *weight = p->weight + row * p->weight_stride;
    long stride = p->weight_stride, whole = p->depth / WIDTH * WIDTH, k = 0;
    NO_SUMS(0); NO_SUMS(1); NO_SUMS(2); NO_SUMS(3);
    if (ahead) {
        const int8_t *next = weight + AHEAD_BYTES;
        for (; k < whole; k += WIDTH, next += WIDTH * ROWS) {
            for (int i = 0; i < WIDTH * ROWS; i += 64) __builtin_prefetch(next + i, 0, 2);
            STEP(WHOLE_W);
        }
    } else for (; k < whole; k += WIDTH) STEP(WHOLE_W);
    if (k < p->depth) STEP(PART_W);
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
    long end = last * ROWS < p->rows ? last * ROWS : p->rows, block = TILE_BYTES / (job->padded + 1) / TOKENS * TOKENS;
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
    long padded = (p->depth + WIDTH - 1) / WIDTH * WIDTH, values = p->tokens * p->depth;
    int8_t *x = aligned_alloc(64, (size_t)(p->tokens * (padded + 8) + 64) / 64 * 64);
    if (!x) return 1;
    float *scale = (float *)(x + p->tokens * padded);
    Job job = {p, x, scale, (int32_t *)(scale + p->tokens), padded};
    pool_run(p->tokens, pool_grain(CHUNK_VALUES, p->depth), values > MIN_PARALLEL_VALUES ? p->threads : 1, quantise,
             &job);
    long products = values * ROWS, bands = (p->rows + ROWS - 1) / ROWS, grain = pool_grain(CHUNK_PRODUCTS, products);
    if (p->tokens > TOKENS && grain < bands / (CHUNKS_A_THREAD * p->threads))
        grain = bands / (CHUNKS_A_THREAD * p->threads);
    pool_run(bands, grain, bands * products > MIN_PARALLEL_PRODUCTS ? p->threads : 1, some_bands, &job);
    free(x);
    return 0;
}
