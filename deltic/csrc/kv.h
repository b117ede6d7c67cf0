// Keys and values in fewer bits (deltic/ops/kv_formats.py): how they are written, and exact products with them.
//
// A row that is multiplied with codes (a query with keys; softmax's weights, times the scales of values, with values) is rounded to
// integers first, multiples of 1 / 32512 of its largest element. Then a product is a sum of integers: the same in any order and on
// any processor, and twice as many products an instruction as of bfloat16. Such a row is 255 high + low, two signed bytes an element;
// where there is no product of bytes, 16 bits.
//
// Codes lie as words of four bytes of what is summed over, and neighbouring words are neighbouring lanes:
//
//   keys    [nk, d / 4, 64 keys, 4 elements], int8 + 128
//   values  [nk, 16, d, 4 keys], int8 + 128; of 4 bits [nk, 16, d / 2, 4 keys]: low halves column c, high halves column d / 2 + c
#pragma once
#include "matrix.h"

enum class Kv : int64_t { BF16, INT8, K8V4 };

constexpr float MOST_FIXED = 32512.0f;    // 255 * 127 + 127
constexpr float LEAST_SCALE = 0x1p-100f;  // of rows of zeros

#if defined(DELTIC_PAIRS_OF_BYTES) || (defined(__x86_64__) && !defined(__AVX2__))
#define DELTIC_PAIRS  // of 16 bits
#elif !defined(__AVX2__) && !defined(__ARM_FEATURE_DOTPROD)
#define DELTIC_SINGLES
#endif
#if defined(DELTIC_PAIRS) || defined(DELTIC_SINGLES)
constexpr bool HALVES = true;  // of a word, not bytes of an integer
constexpr int CODE_BIAS = 128;
#else
constexpr bool HALVES = false;
constexpr int CODE_BIAS = SIGNED_WEIGHTS ? 0 : 128;
#endif

// Four elements of a rounded row. As bytes: the high ones, the low ones. As 16 bits: elements 0 and 2, then 1 and 3.
struct Quad {
    uint32_t first, second;
};

// Rounds n elements; gives the multiplier, which is no number where an element is none, and the sum of the integers.
static inline float fix_row(const float* x, int64_t n, Quad* out, int32_t& sum_of_all) {
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    v16 most = splat(LEAST_SCALE), nothing = {};
    for (int64_t i = 0; i < n; i += 16) {
        v16 v = load(x + i);
        most = vmax(most, vmax(v, -v));
        nothing = nothing + v * splat(0.0f);
    }
    const float step = max(most) / MOST_FIXED;
    const v16 inverse = splat(1.0f / step), by_255 = splat(1.0f / 255.0f);
    v16i total = splat_int(0);
    for (int64_t i = 0; i < n; i += 16) {
        const v16 fixed = load(x + i) * inverse + magic, high = (fixed - magic) * by_255 + magic;  // never half way between two
        uint8_t first[16], second[16];
        uint16_t whole[16];
        for (int p = 0; p < PARTS; p++) {
            const i32_part t = (i32_part)fixed.part[p] - 0x4b400000, h = (i32_part)high.part[p] - 0x4b400000;
            total.part[p] += t;
            if constexpr (HALVES) {
                auto both = __builtin_convertvector((u32_part)t, u16_part);
                memcpy(whole + p * LANES, &both, sizeof both);
            } else {
                auto bytes = __builtin_convertvector(h, i8_part), rest = __builtin_convertvector(t - h * 255, i8_part);
                memcpy(first + p * LANES, &bytes, sizeof bytes);
                memcpy(second + p * LANES, &rest, sizeof rest);
            }
        }
        for (int j = 0; j < 4; j++) {
            Quad& quad = out[i / 4 + j];
            if constexpr (HALVES) {
                const uint16_t* w = whole + 4 * j;
                quad = {w[0] | (uint32_t)w[2] << 16, w[1] | (uint32_t)w[3] << 16};
            } else {
                memcpy(&quad.first, first + 4 * j, 4);
                memcpy(&quad.second, second + 4 * j, 4);
            }
        }
    }
    int32_t lanes[16];
    memcpy(lanes, &total, sizeof lanes);
    sum_of_all = 0;
    for (int32_t lane : lanes) sum_of_all += lane;
    return step + ::sum(nothing);
}

// A word of codes in each lane, as products take it.
#if defined(DELTIC_PAIRS)
struct Operand {
    w16 even, odd;
};
static inline Operand operand(w16 w, bool) {
    Operand o;
    for (int i = 0; i < PARTS; i++) o.even.part[i] = w.part[i] & 0x00ff00ffu, o.odd.part[i] = w.part[i] >> 8 & 0x00ff00ffu;
    return o;
}
#else
struct Operand {
    w16 w;
};
static inline Operand operand(w16 w, bool is_byte) {
    if (is_byte && !HALVES && SIGNED_WEIGHTS)
        for (int i = 0; i < PARTS; i++) w.part[i] ^= 0x80808080u;
    return {w};
}
#endif

// Sums of products of a rounded row, one a lane.
struct Sums {
    v16i first, second;

    void add(const Operand& o, const Quad& x) {
#if defined(DELTIC_PAIRS)
        for (int i = 0; i < PARTS; i++) {
#if defined(__AVX2__)
            __m256i even = _mm256_madd_epi16((__m256i)o.even.part[i], _mm256_set1_epi32((int)x.first));
            __m256i odd = _mm256_madd_epi16((__m256i)o.odd.part[i], _mm256_set1_epi32((int)x.second));
#else
            __m128i even = _mm_madd_epi16((__m128i)o.even.part[i], _mm_set1_epi32((int)x.first));
            __m128i odd = _mm_madd_epi16((__m128i)o.odd.part[i], _mm_set1_epi32((int)x.second));
#endif
            first.part[i] += (i32_part)even + (i32_part)odd;
        }
#elif defined(DELTIC_SINGLES)
        const int32_t q[4] = {(int16_t)x.first, (int16_t)x.second, (int16_t)(x.first >> 16), (int16_t)(x.second >> 16)};
        for (int i = 0; i < PARTS; i++)
            for (int j = 0; j < 4; j++) first.part[i] += (i32_part)(o.w.part[i] >> (8 * j) & 255u) * q[j];
#else
        first = dot4(first, o.w, x.first);
        second = dot4(second, o.w, x.second);
#endif
    }

    // Less what the bytes are too large by, times the sum of the row.
    v16 total(int32_t sum_of_row, int bias) const {
        return each_part([&](int i) {
            u32_part all = (u32_part)first.part[i];  // wraps where only parts of the sum are too large
            if constexpr (!HALVES) all = all * 255u + (u32_part)second.part[i];
            return __builtin_convertvector((i32_part)(all - (uint32_t)bias * (uint32_t)sum_of_row), f32_part);
        });
    }
};

// Accumulators of a tile: MR rows, NV registers of lanes.
template <int MR, int NV>
using Tile = Sums[MR][NV];

// tile[r][j] = rows[r] . words over n steps of a word each; `stride` bytes from step to step. Of 4 bits NV / 2 registers of words are
// NV of lanes: first those of low halves. fetch(i) is called in step i.
template <int MR, int NV, int BITS, class Fetch>
static inline __attribute__((always_inline)) void multiply_tile(
    const Quad* rows, int64_t row_stride, const uint8_t* words, int64_t stride, int64_t n, const Fetch& fetch, Tile<MR, NV>& tile) {
    constexpr int NW = BITS == 4 ? NV / 2 : NV;
    for (int r = 0; r < MR; r++)
        for (int j = 0; j < NV; j++) tile[r][j] = {};
    for (int64_t i = 0; i < n; i++) {
        fetch(i);
        Operand o[NV];
        for (int j = 0; j < NW; j++) {
            w16 w = load_words(words + i * stride + 64 * j);
            if constexpr (BITS == 8) {
                o[j] = operand(w, true);
            } else {
                w16 low, high;
                for (int p = 0; p < PARTS; p++) low.part[p] = w.part[p] & 0x0f0f0f0fu, high.part[p] = w.part[p] >> 4 & 0x0f0f0f0fu;
                o[j] = operand(low, false);
                o[NW + j] = operand(high, false);
            }
        }
        for (int r = 0; r < MR; r++) {
            const Quad& x = rows[r * row_stride + i];
            for (int j = 0; j < NV; j++) tile[r][j].add(o[j], x);
        }
    }
}

// A scale of a row, bfloat16 [n], whose size is `most` codes; no number where an element is none.
static inline float scale_of(const bf16* x, int64_t n, float size, float most) {
    uint16_t bits = 0;
    for (int64_t i = 0; i < n; i++) bits = (x[i] & 0x7fff) > bits ? (uint16_t)(x[i] & 0x7fff) : bits;
    if (bits >= 0x7f80 || !(size < INFINITY)) return NAN;
    const float scale = size / most;
    return scale > LEAST_SCALE ? scale : LEAST_SCALE;
}

// code = round((x - least) / scale), n of them, from `low` to `high`, + `bias`.
static inline void codes_of(const bf16* x, int64_t n, float least, float scale, float low, float high, int bias, uint8_t* codes) {
    for (int64_t i = 0; i < n; i += 16) {
        const v16 y = (load_bf16(x + i) - splat(least)) / splat(scale);
        const v16 rounded = -vmax(-vmax(y, splat(low)), splat(-high)) + splat(12582912.0f);
        for (int p = 0; p < PARTS; p++) {
            auto bytes = __builtin_convertvector((i32_part)rounded.part[p] - 0x4b400000 + bias, i8_part);
            memcpy(codes + i + p * LANES, &bytes, sizeof bytes);
        }
    }
}

// A row as int8 + 128; gives its scale.
static inline float int8_codes(const bf16* x, int64_t n, uint8_t* codes) {
    v16 most = {};
    for (int64_t i = 0; i < n; i += 16) most = vmax(most, vmax(load_bf16(x + i), -load_bf16(x + i)));
    const float scale = scale_of(x, n, max(most), 127.0f);
    codes_of(x, n, 0.0f, scale, -127.0f, 127.0f, 128, codes);
    return scale;
}
// A row as 4 bits, one a byte; gives its scale.
static inline float uint4_codes(const bf16* x, int64_t n, uint8_t* codes, float& least) {
    v16 high = load_bf16(x), low = -high;
    for (int64_t i = 16; i < n; i += 16) high = vmax(high, load_bf16(x + i)), low = vmax(low, -load_bf16(x + i));
    least = -max(low);
    const float scale = scale_of(x, n, max(high) - least, 15.0f);
    codes_of(x, n, least, scale, 0.0f, 15.0f, 0, codes);
    return scale;
}

// View of one key head of a layer's part of a page.
template <Kv KIND>
struct RoundedPage {
    static constexpr int VALUE_BITS = KIND == Kv::INT8 ? 8 : 4;
    static constexpr bool HAS_LEAST = KIND == Kv::K8V4;
    uint8_t *keys, *values;
    float *key_scales, *value_scales, *least_values;  // [64] each

    RoundedPage(uint8_t* page, int64_t n_heads, int64_t head, int64_t dim) {
        const int64_t value_bytes = 64 * dim * VALUE_BITS / 8;
        keys = page + head * 64 * dim;
        values = page + n_heads * 64 * dim + head * value_bytes;
        float* scales = (float*)(page + n_heads * (64 * dim + value_bytes));
        key_scales = scales + head * 64;
        value_scales = scales + (n_heads + head) * 64;
        least_values = scales + (2 * n_heads + head) * 64;
    }

    // Key and value of the token in place `at`, bfloat16 [dim].
    void write(int64_t at, const bf16* k, const bf16* v, int64_t dim) const {
        uint8_t codes[256];
        key_scales[at] = int8_codes(k, dim, codes);
        for (int64_t i = 0; i < dim; i += 4) memcpy(keys + (i * 16 + at) * 4, codes + i, 4);
        uint8_t* to = values + at % 4;
        if constexpr (VALUE_BITS == 8) {
            value_scales[at] = int8_codes(v, dim, codes);
            to += at / 4 * dim * 4;
            for (int64_t c = 0; c < dim; c++) to[4 * c] = codes[c];
        } else {
            value_scales[at] = uint4_codes(v, dim, codes, least_values[at]);
            to += at / 4 * dim * 2;
            for (int64_t c = 0; c < dim / 2; c++) to[4 * c] = (uint8_t)(codes[c] | codes[dim / 2 + c] << 4);
        }
    }

    // Copies four tokens, which stand together in both pages, to the places from `to` on.
    void copy(int64_t to, const RoundedPage& page, int64_t from, int64_t dim) const {
        const int64_t n_values = dim * VALUE_BITS / 8;  // bytes of a token's
        for (int64_t i = 0; i < dim / 4; i++) memcpy(keys + (i * 64 + to) * 4, page.keys + (i * 64 + from) * 4, 16);
        memcpy(values + to * n_values, page.values + from * n_values, 4 * n_values);
        memcpy(key_scales + to, page.key_scales + from, 16);
        memcpy(value_scales + to, page.value_scales + from, 16);
        if constexpr (HAS_LEAST) memcpy(least_values + to, page.least_values + from, 16);
    }
};
