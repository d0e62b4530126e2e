/* What every family's cpu.c shares: the vector type of this machine and loads and stores that turn fp32,
 * bf16, fp16 and (loads only) int8 memory into fp32 lanes. All arithmetic is fp32; nothing here allocates or keeps
 * state. */
#ifndef CAMSHAFT_NATIVE_H
#define CAMSHAFT_NATIVE_H

#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef uint32_t vword __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));
typedef int8_t vbyte __attribute__((vector_size(LANES)));

/* Pins a value to a register: without it gcc loads an operand again for each use, and loads then bound a tile. */
#if defined(__AVX512F__) || defined(__AVX2__)
#define PIN(vector) __asm__("" : "+v"(vector))
#else
#define PIN(vector) (void)(vector)
#endif

typedef float vquad __attribute__((vector_size(16)));
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t vquad_index __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vquad_index){__VA_ARGS__})
#endif

/* The codes that kernels/native.py passes for a tensor's dtype. */
enum { KIND_F32 = 0, KIND_BF16 = 1, KIND_F16 = 2, KIND_I8 = 3 };

INLINE long kind_bytes(int kind) { return kind == KIND_F32 ? 4 : kind == KIND_I8 ? 1 : 2; }

INLINE const void *at(const void *base, long index, int kind) {
    return (const char *)base + index * kind_bytes(kind);
}

INLINE void *at_mut(void *base, long index, int kind) { return (char *)base + index * kind_bytes(kind); }

INLINE vfloat splat(float value) { return value - (vfloat){0}; }

INLINE vfloat half_to_float(vhalf half) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    return (vfloat)_mm256_cvtph_ps((__m128i)half);
#else
    vfloat out;
    for (int i = 0; i < LANES; i++) {
        uint32_t sign = (uint32_t)(half[i] & 0x8000) << 16, magnitude = half[i] & 0x7fff, bits;
        if (magnitude >= 0x7c00) bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
        else if (magnitude >= 0x400) bits = (magnitude << 13) + 0x38000000;
        else {
            float small = (float)magnitude * 0x1p-24f;
            memcpy(&bits, &small, 4);
        }
        bits |= sign;
        memcpy((char *)&out + 4 * i, &bits, 4);
    }
    return out;
#endif
}

INLINE vhalf float_to_half(vfloat value) {
#if defined(__AVX512F__)
    return (vhalf)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (vhalf)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    vhalf out;
    for (int i = 0; i < LANES; i++) {
        uint32_t bits, sign, rounded;
        float lane = value[i];
        memcpy(&bits, &lane, 4);
        sign = bits >> 16 & 0x8000;
        bits &= 0x7fffffff;
        if (bits > 0x7f800000) rounded = 0x7e00;
        else if (bits >= 0x477ff000) rounded = 0x7c00;
        else if (bits < 0x38800000) {
            /* Adding 0.5 aligns a subnormal's units with the last bits of the sum, rounded to nearest even. */
            float aligned;
            memcpy(&aligned, &bits, 4);
            aligned += 0.5f;
            memcpy(&rounded, &aligned, 4);
            rounded -= 0x3f000000;
        } else rounded = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
        out[i] = (uint16_t)(sign | rounded);
    }
    return out;
#endif
}

INLINE vfloat brain_to_float(vhalf half) {
    return (vfloat)(__builtin_convertvector(half, vword) << 16);
}

INLINE vhalf float_to_brain(vfloat value) {
    vword bits = (vword)value;
    vword rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    vword is_nan = (vword)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), vhalf);
}

INLINE vfloat byte_to_float(vbyte byte) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)byte));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (long long)byte)));
#else
    return __builtin_convertvector(__builtin_convertvector(byte, vint), vfloat);
#endif
}

/* LANES values from unaligned memory of `kind`, as fp32. */
INLINE vfloat load(const void *from, int kind) {
    if (kind == KIND_F32) {
        vfloat lanes;
        memcpy(&lanes, from, sizeof lanes);
        return lanes;
    }
    if (kind == KIND_I8) {
        vbyte byte;
        memcpy(&byte, from, sizeof byte);
        return byte_to_float(byte);
    }
    vhalf half;
    memcpy(&half, from, sizeof half);
    return kind == KIND_BF16 ? brain_to_float(half) : half_to_float(half);
}

/* The first `count` < LANES values; the other lanes are 0. */
INLINE vfloat load_part(const void *from, long count, int kind) {
    vfloat whole = {0};
    memcpy(&whole, from, (size_t)(count * kind_bytes(kind)));
    return load(&whole, kind);
}

INLINE void store(void *to, vfloat lanes, int kind) {
    if (kind == KIND_F32) {
        memcpy(to, &lanes, sizeof lanes);
        return;
    }
    vhalf half = kind == KIND_BF16 ? float_to_brain(lanes) : float_to_half(lanes);
    memcpy(to, &half, sizeof half);
}

INLINE void store_part(void *to, vfloat lanes, long count, int kind) {
    vfloat whole;
    store(&whole, lanes, kind);
    memcpy(to, &whole, (size_t)(count * kind_bytes(kind)));
}

INLINE float load_one(const void *from, int kind) {
    if (kind == KIND_F32) {
        float value;
        memcpy(&value, from, sizeof value);
        return value;
    }
    return load_part(from, 1, kind)[0];
}

INLINE void store_one(void *to, float value, int kind) {
    if (kind == KIND_F32) memcpy(to, &value, sizeof value);
    else store_part(to, splat(value), 1, kind);
}

/* Lane i plus lanes i + 4, i + 8, ... in one fixed order. */
INLINE vquad fold(vfloat lanes) {
#if defined(__AVX512F__)
    __m256 octet = _mm256_add_ps(_mm512_castps512_ps256((__m512)lanes),
                                 _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)lanes, 1)));
    return (vquad)_mm_add_ps(_mm256_castps256_ps128(octet), _mm256_extractf128_ps(octet, 1));
#elif defined(__F16C__)
    return (vquad)_mm_add_ps(_mm256_castps256_ps128((__m256)lanes), _mm256_extractf128_ps((__m256)lanes, 1));
#else
    vquad low, high;
    memcpy(&low, &lanes, sizeof low);
    memcpy(&high, (const char *)&lanes + sizeof low, sizeof high);
    return low + high;
#endif
}

/* Sum of the lanes, in one fixed order. */
INLINE float lane_sum(vfloat lanes) {
    vquad quad = fold(lanes);
    return (quad[0] + quad[2]) + (quad[1] + quad[3]);
}

/* The sums of four vectors; each has the very bits that lane_sum gives. */
INLINE vquad lane_sums(vfloat a, vfloat b, vfloat c, vfloat d) {
    vquad qa = fold(a), qb = fold(b), qc = fold(c), qd = fold(d);
    vquad ab = SHUFFLE(qa, qb, 0, 4, 1, 5) + SHUFFLE(qa, qb, 2, 6, 3, 7);
    vquad cd = SHUFFLE(qc, qd, 0, 4, 1, 5) + SHUFFLE(qc, qd, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

/* e^x to 2e-7, relative; from 88 on that of 88, below -87 zero, NaN stays. x = n ln 2 + r, Taylor to r^7. */
INLINE vfloat exp_lanes(vfloat x) {
    vint high = (vint)(x > 88.f), low = (vint)(x < -87.f);
    x = (vfloat)(((vint)x & ~high) | ((vint)splat(88.f) & high));
    vfloat shifted = x * 0x1.715476p+0f + 0x1.8p23f; /* leaves n in the low bits of the mantissa */
    vfloat n = shifted - 0x1.8p23f;
    vfloat r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
    vfloat y = r * (1 / 5040.f) + 1 / 720.f;
    y = y * r + 1 / 120.f;
    y = y * r + 1 / 24.f;
    y = y * r + 1 / 6.f;
    y = y * r + 0.5f;
    y = y * r + 1.f;
    y = y * r + 1.f;
    return (vfloat)(((vint)y + ((vint)shifted << 23)) & ~low);
}

#endif
