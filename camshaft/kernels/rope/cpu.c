/* Rotary position embedding: the table of cosines and sines, and the rotation of queries and keys. */
#include <math.h>

#include "native.h"

#define MIN_PARALLEL_VALUES 16384
#define MIN_PARALLEL_ANGLES 2048

/* table: [tokens, 2 * half], cosines first; one rounding of position * frequency, as torch's fp32 product has. */
void camshaft_rope_table(const int64_t *positions, long stride, const float *inv_freq, float scaling, float *table,
                         long tokens, long half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (tokens * half > MIN_PARALLEL_ANGLES)
    for (long t = 0; t < tokens; t++) {
        float position = (float)positions[t * stride], *cosines = table + t * 2 * half, *sines = cosines + half;
        for (long i = 0; i < half; i++) {
            float angle = position * inv_freq[i];
            cosines[i] = cosf(angle) * scaling;
            sines[i] = sinf(angle) * scaling;
        }
    }
}

typedef struct {
    const void *from;
    void *to;
    long token, head, heads; /* strides of `from` in elements; `to` is contiguous */
} side;

INLINE void turn(const void *from, void *to, const float *cosines, long half, long size, int kind) {
    const float *sines = cosines + half;
    const void *from_second = at(from, half, kind);
    void *to_second = at_mut(to, half, kind);
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        vfloat c = load(cosines + i, KIND_F32), s = load(sines + i, KIND_F32);
        vfloat a = load(at(from, i, kind), kind), b = load(at(from_second, i, kind), kind);
        store(at_mut(to, i, kind), a * c - b * s, kind);
        store(at_mut(to_second, i, kind), b * c + a * s, kind);
    }
    if (i < half) {
        long rest = half - i;
        vfloat c = load_part(cosines + i, rest, KIND_F32), s = load_part(sines + i, rest, KIND_F32);
        vfloat a = load_part(at(from, i, kind), rest, kind), b = load_part(at(from_second, i, kind), rest, kind);
        store_part(at_mut(to, i, kind), a * c - b * s, rest, kind);
        store_part(at_mut(to_second, i, kind), b * c + a * s, rest, kind);
    }
    memcpy(at_mut(to, 2 * half, kind), at(from, 2 * half, kind), (size_t)((size - 2 * half) * kind_bytes(kind)));
}

INLINE void turn_heads(side s, const float *cosines, long token, long half, long size, int kind) {
    for (long h = 0; h < s.heads; h++)
        turn(at(s.from, token * s.token + h * s.head, kind), at_mut(s.to, (token * s.heads + h) * size, kind), cosines,
             half, size, kind);
}

INLINE void turn_token(const side *sides, const float *cosines, long token, long half, long size, int kind) {
    turn_heads(sides[0], cosines, token, half, size, kind);
    turn_heads(sides[1], cosines, token, half, size, kind);
}

/* q, k: [tokens, heads, size], lanes contiguous; table: [tokens, 2 * half] with its row stride; lanes from 2 * half on stay. */
void camshaft_rope(const void *q, long q_token, long q_head, long q_heads, const void *k, long k_token, long k_head,
                   long k_heads, const float *table, long table_row, void *q_out, void *k_out, long tokens, long half,
                   long size, int kind, int threads) {
    const side sides[2] = {{q, q_out, q_token, q_head, q_heads}, {k, k_out, k_token, k_head, k_heads}};
#pragma omp parallel for schedule(static) num_threads(threads) \
    if (tokens * (q_heads + k_heads) * size > MIN_PARALLEL_VALUES)
    for (long t = 0; t < tokens; t++) {
        const float *cosines = table + t * table_row;
        if (kind == KIND_F32) turn_token(sides, cosines, t, half, size, KIND_F32);
        else if (kind == KIND_BF16) turn_token(sides, cosines, t, half, size, KIND_BF16);
        else turn_token(sides, cosines, t, half, size, KIND_F16);
    }
}
