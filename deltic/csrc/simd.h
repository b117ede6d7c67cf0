// Sixteen float lanes, bfloat16 conversion and the exponential, for any instruction set.
//
// GCC's vector extension splits the 64-byte vectors into whatever registers the target has, so one source serves
// AVX-512, AVX2, NEON and plain SSE. Reductions are written out lane by lane: their order never depends on how many
// rows, sequences or threads there are (ARCHITECTURE.md, "Purity").
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef uint16_t bf16;

static inline v16 load(const float* p) {
    v16 v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, v16 v) { memcpy(p, &v, sizeof v); }
static inline v16 splat(float x) { return v16{} + x; }

static inline v16 fma(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline v16 load_bf16(const bf16* p) {
    h16 h;
    memcpy(&h, p, sizeof h);
    return (v16)(__builtin_convertvector(h, u16) << 16);
}

// Round to nearest even, NaN kept quiet: the rounding torch uses.
static inline bf16 narrow(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
static inline h16 narrow(v16 v) {
    u16 u = (u16)v;
    u16 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    i16 is_nan = (i16)((u & 0x7fffffffu) > (u16{} + 0x7f800000u));
    u16 quiet = (u >> 16) | 0x40u;
    return __builtin_convertvector((rounded & ~(u16)is_nan) | (quiet & (u16)is_nan), h16);
}
static inline void store_bf16(bf16* p, v16 v) {
    h16 h = narrow(v);
    memcpy(p, &h, sizeof h);
}
static inline v16 round_bf16(v16 v) { return (v16)(__builtin_convertvector(narrow(v), u16) << 16); }

static inline v16 select(i16 mask, v16 a, v16 b) { return (v16)(((i16)a & mask) | ((i16)b & ~mask)); }
static inline v16 vmax(v16 a, v16 b) { return select(a > b, a, b); }

// Lanes are added as a tree: i with i + 8, then + 4, + 2, + 1.
static inline float sum(v16 v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[16];
    store(x, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
#endif
}
static inline float max(v16 v) {
    float x[16];
    store(x, v);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

// exp to about one unit in the last place: 2^n * e^r, |r| <= ln2 / 2, a degree-6 polynomial (Cephes expf).
// Exactly 0 below -87.33 (so that a masked score of -inf weighs nothing), finite at the top.
static inline v16 vexp(v16 x) {
    i16 vanishes = x < splat(-87.33f);
    x = select(vanishes, splat(-87.33f), x);
    x = select(x > splat(88.37f), splat(88.37f), x);
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    v16 n = fma(x, splat(1.44269504088896341f), magic) - magic;
    v16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    v16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    i16 exponent = (__builtin_convertvector(n, i16) + 127) << 23;
    return select(vanishes, splat(0.0f), p * (v16)exponent);
}
static inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }
static inline v16 silu(v16 x) { return x / (splat(1.0f) + vexp(-x)); }

// The scalar functions go through the vector ones, so that a value has the same bits wherever it is computed.
static inline float exp1(float x) { return vexp(splat(x))[0]; }
static inline float sigmoid1(float x) { return sigmoid(splat(x))[0]; }
