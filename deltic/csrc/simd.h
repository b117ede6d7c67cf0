// Sixteen float lanes, bfloat16 conversion and the exponential, for any instruction set.
//
// A v16 is one AVX-512 register, two of AVX2, or four of SSE or NEON; the lanes and the order of their sums are the same
// everywhere. Products are fused into sums only where fma() says so (the build sets -ffp-contract=off), and reductions are
// written out as trees: no order depends on the compiler, or on how many rows, sequences or threads there are.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PARTS = 16 / LANES;
#if defined(__x86_64__)
constexpr bool SSE = LANES == 4;  // half as many registers as NEON
#else
constexpr bool SSE = false;
#endif

typedef float f32_part __attribute__((vector_size(LANES * 4)));
typedef int32_t i32_part __attribute__((vector_size(LANES * 4)));
typedef uint32_t u32_part __attribute__((vector_size(LANES * 4)));
typedef uint16_t u16_part __attribute__((vector_size(LANES * 2)));
typedef int8_t i8_part __attribute__((vector_size(LANES)));
typedef uint16_t bf16;

struct v16 {
    f32_part part[PARTS];
};

// f(i) for each register of a v16; unrolled, so that the parts stay in registers.
template <class F>
static inline __attribute__((always_inline)) v16 each_part(const F& f) {
    v16 out;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) out.part[i] = f(i);
    return out;
}

static inline v16 operator+(v16 a, v16 b) { return each_part([&](int i) { return a.part[i] + b.part[i]; }); }
static inline v16 operator-(v16 a, v16 b) { return each_part([&](int i) { return a.part[i] - b.part[i]; }); }
static inline v16 operator*(v16 a, v16 b) { return each_part([&](int i) { return a.part[i] * b.part[i]; }); }
static inline v16 operator/(v16 a, v16 b) { return each_part([&](int i) { return a.part[i] / b.part[i]; }); }
static inline v16 operator-(v16 a) { return each_part([&](int i) { return -a.part[i]; }); }

// A register at a time: GCC copies a whole v16 of two registers through the stack, 16 bytes a store and 32 a load, which waits.
static inline v16 load(const float* p) {
    return each_part([&](int i) {
        f32_part part;
        memcpy(&part, p + i * LANES, sizeof part);
        return part;
    });
}
static inline void store(float* p, v16 v) {
    for (int i = 0; i < PARTS; i++) memcpy(p + i * LANES, &v.part[i], sizeof v.part[i]);
}
static inline v16 splat(float x) {
    return each_part([&](int) { return f32_part{} + x; });
}

static inline f32_part fma(f32_part a, f32_part b, f32_part c) {
#if defined(__AVX512F__)
    return (f32_part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (f32_part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (f32_part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
static inline v16 fma(v16 a, v16 b, v16 c) {
    return each_part([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}

static inline f32_part everywhere(float x) { return x - f32_part{}; }  // minus 0: a broadcast and nothing else
// A word in every lane. Clang, left to itself, broadcasts it as a float, or the halves of it out of integer registers: of bfloat16, 16
// rows take a third longer and a convolution with one channel a quarter (Zen 4).
static inline u32_part everywhere(const uint32_t& x) {
    u32_part all = x + u32_part{};
#if defined(__clang__) && defined(__AVX2__)  // GCC, given it, takes twice as long for many rows
    asm("vpbroadcastd %1, %0" : "=v"(all) : "m"(x));
#endif
    return all;
}
// acc + x w; of words with a pair of bfloat16 each, its second product first. All overloads stand here: one in a namespace would hide
// these, and words become floats in silence.
static inline f32_part fold(f32_part acc, f32_part x, f32_part w) { return fma(x, w, acc); }
static inline f32_part fold(f32_part acc, u32_part x, u32_part w) {
#if defined(__AVX512BF16__)
    return (f32_part)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w);
#else
    f32_part odd = fma((f32_part)(x & 0xffff0000u), (f32_part)(w & 0xffff0000u), acc);
    return fma((f32_part)(x << 16), (f32_part)(w << 16), odd);
#endif
}

static inline float widen(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline v16 load_bf16(const bf16* p) {
    return each_part([&](int i) {
        u16_part h;
        memcpy(&h, p + i * LANES, sizeof h);
        return (f32_part)(__builtin_convertvector(h, u32_part) << 16);
    });
}

// Round to nearest even, NaN kept quiet: the rounding torch uses. The result is in the low half of each lane.
static inline u32_part narrow(f32_part v) {
    u32_part u = (u32_part)v;
    u32_part rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16, quiet = (u >> 16) | 0x40u;
    u32_part is_nan = (u32_part)((u & 0x7fffffffu) > (u32_part{} + 0x7f800000u));
    return (rounded & ~is_nan) | (quiet & is_nan);
}
static inline void store_bf16(bf16* p, v16 v) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
        u16_part h = __builtin_convertvector(narrow(v.part[i]), u16_part);
        memcpy(p + i * LANES, &h, sizeof h);
    }
}
static inline v16 round_bf16(v16 v) {
    return each_part([&](int i) { return (f32_part)(narrow(v.part[i]) << 16); });
}

static inline f32_part select(i32_part mask, f32_part a, f32_part b) {
    return (f32_part)(((i32_part)a & mask) | ((i32_part)b & ~mask));
}
static inline v16 vmax(v16 a, v16 b) {
    return each_part([&](int i) { return select(a.part[i] > b.part[i], a.part[i], b.part[i]); });
}

// Lanes are added as a tree: i with i + 8, then + 4, + 2, + 1.
static inline float sum(v16 v) {
#if defined(__AVX512F__)
    __m512 x = (__m512)v.part[0];
    __m256 by8 = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#elif defined(__AVX2__)
    __m256 by8 = (__m256)(v.part[0] + v.part[1]);
#endif
#if defined(__AVX2__)
    __m128 by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps(by8, 1));
    __m128 by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    return _mm_cvtss_f32(_mm_add_ss(by2, _mm_shuffle_ps(by2, by2, 1)));
#else
    f32_part by4 = (v.part[0] + v.part[2]) + (v.part[1] + v.part[3]);
    return (by4[0] + by4[2]) + (by4[1] + by4[3]);
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
static inline f32_part vexp(f32_part x) {
    auto all = [](float value) { return f32_part{} + value; };
    i32_part vanishes = x < all(-87.33f);
    x = select(vanishes, all(-87.33f), x);
    x = select(x > all(88.37f), all(88.37f), x);
    const f32_part magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    f32_part n = fma(x, all(1.44269504088896341f), magic) - magic;
    f32_part r = fma(n, all(-0.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    f32_part p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r + all(1.0f));
    i32_part exponent = (__builtin_convertvector(n, i32_part) + 127) << 23;
    return select(vanishes, all(0.0f), p * (f32_part)exponent);
}
static inline v16 vexp(v16 x) {
    return each_part([&](int i) { return vexp(x.part[i]); });
}
static inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + vexp(-x)); }
static inline v16 silu(v16 x) { return x / (splat(1.0f) + vexp(-x)); }

// x (1 + erf(x / sqrt 2)) / 2; erf to 1.5e-7 (Abramowitz and Stegun 7.1.26).
static inline v16 gelu(v16 x) {
    v16 z = x * splat(0.70710678118654752f), size = vmax(z, -z), one = splat(1.0f);
    v16 t = one / fma(size, splat(0.3275911f), one);
    v16 p = fma(t, splat(1.061405429f), splat(-1.453152027f));
    p = fma(t, p, splat(1.421413741f));
    p = fma(t, p, splat(-0.284496736f));
    p = fma(t, p, splat(0.254829592f));
    v16 tail = p * t * vexp(-(size * size));  // 1 - erf(|z|)
    v16 above = x - x * tail * splat(0.5f), below = x * tail * splat(0.5f);
    return each_part([&](int i) { return select(z.part[i] > f32_part{}, above.part[i], below.part[i]); });
}
// Approximates GELU by a hyperbolic tangent, x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline v16 gelu_tanh(v16 x) {
    v16 u = x * fma(x * x, splat(0.7978845608028654f * 0.044715f), splat(0.7978845608028654f));
    return x * sigmoid(u + u);
}

// Sum that the norms divide by: x.x over n elements, n a multiple of 16.
static inline float sum_of_squares(const float* x, int64_t n) {
    v16 squares = {};
    for (int64_t i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
    return sum(squares);
}

// Computes one row of a SwiGLU: gate [n], then up [n].
static inline void silu_mul_row(const float* gate_up, int64_t n, bf16* out) {
    for (int64_t i = 0; i < n; i += 16) store_bf16(out + i, silu(load(gate_up + i)) * load(gate_up + n + i));
}

// The scalar functions go through the vector ones, so that a value has the same bits wherever it is computed.
static inline float exp1(float x) { return vexp(f32_part{} + x)[0]; }
static inline float sigmoid1(float x) { return sigmoid(splat(x)).part[0][0]; }

// f(integral_constant<N>) for the N in [1, MOST] that equals n.
template <int MOST, class Call>
static inline void with_rows(int64_t n, const Call& f) {
    if constexpr (MOST > 0) {
        if (n == MOST) f(std::integral_constant<int, MOST>{});
        else with_rows<MOST - 1>(n, f);
    }
}
