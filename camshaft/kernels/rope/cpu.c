/* Rotary position embedding: the table of cosines and sines, and the rotation of queries and keys. */
#include <math.h>

#include "native.h"
#include "pool.h"

#define MIN_PARALLEL_VALUES 16384
#define CHUNK_VALUES 4096
#define MIN_PARALLEL_ANGLES 2048
#define CHUNK_ANGLES 512

/* table: [tokens, 2 * half], cosines first; one rounding of position * frequency, as torch's fp32 product has. */
typedef struct {
    const int64_t *positions;
    const float *inv_freq;
    float *table;
    long stride, tokens, half;
    float scaling;
    int threads;
} table_call;

static void some_angles(void *context, long first, long last, int seat) {
    const table_call *c = context;
    (void)seat;
    for (long t = first; t < last; t++) {
        float position = (float)c->positions[t * c->stride];
        float *cosines = c->table + t * 2 * c->half, *sines = cosines + c->half;
        for (long i = 0; i < c->half; i++) {
            float angle = position * c->inv_freq[i];
            cosines[i] = cosf(angle) * c->scaling;
            sines[i] = sinf(angle) * c->scaling;
        }
    }
}

int camshaft_rope_table(table_call *c) {
    int threads = c->tokens * c->half > MIN_PARALLEL_ANGLES ? c->threads : 1;
    pool_run(c->tokens, pool_grain(CHUNK_ANGLES, c->half), threads, some_angles, c);
    return 0;
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

/* Sides q and k: [tokens, heads, size], lanes contiguous; table: [tokens, 2 * half] with its row stride; lanes from
 * 2 * half on stay. */
typedef struct {
    side sides[2];
    const float *table;
    long table_row, tokens, half, size;
    int kind, threads;
} call;

static void some_tokens(void *context, long first, long last, int seat) {
    const call *c = context;
    (void)seat;
    for (long t = first; t < last; t++) {
        const float *cosines = c->table + t * c->table_row;
        if (c->kind == KIND_F32) turn_token(c->sides, cosines, t, c->half, c->size, KIND_F32);
        else if (c->kind == KIND_BF16) turn_token(c->sides, cosines, t, c->half, c->size, KIND_BF16);
        else turn_token(c->sides, cosines, t, c->half, c->size, KIND_F16);
    }
}

int camshaft_rope(call *c) {
    long values = (c->sides[0].heads + c->sides[1].heads) * c->size;
    int threads = c->tokens * values > MIN_PARALLEL_VALUES ? c->threads : 1;
    pool_run(c->tokens, pool_grain(CHUNK_VALUES, values), threads, some_tokens, c);
    return 0;
}
