// Packed matrices, and the one multiplication of the package: y = x W^T for any number of rows x.
//
// W [N, K] is stored in strips of 16 rows, K running slowest: each 64-byte vector holds, for 16 outputs, the next elements of
// K that one dot-product instruction takes (2 of bfloat16, 4 of int8, 8 of int4). One output is one lane that walks K in order,
// so its bits do not depend on how many rows, strips or threads share the work, and memory is read as one long stream.
//
//   BF16  per pair of k: [16][2] bfloat16
//   INT8  per group of k: [group / 4][16][4] unsigned q, then [16] float32 scale:           w = scale (q - 128)
//   INT4  per group of k: [group / 8][16][4] two q a byte, low half first by 4 k, then [16] bfloat16 pairs (scale, least):
//                                                                                           w = scale q + least
//
// Rows x of a quantised product are int8 with one scale per row and group (the matrix's groups), so that
//   y = sum over groups of x_scale * (w_scale * (exact integer sum) + least * (sum of x)).
// A symmetric int4 matrix is one whose least is -8 scale. The layout is the same for all instruction sets.
#pragma once
#include "kernel.h"
#include "simd.h"

enum class Format : int64_t { BF16 = 0, INT8 = 1, INT4 = 2 };

constexpr int64_t STRIP = 16;  // rows of a strip: the lanes of a v16

struct Matrix {
    const uint8_t* data;  // [n_strips, strip_bytes]
    Format format;
    int64_t n, k, group;  // group: elements of K that share a scale, the last group may be shorter; all multiples of 32

    int64_t n_strips() const { return (n + STRIP - 1) / STRIP; }
    int64_t n_groups() const { return (k + group - 1) / group; }
    int64_t strip_bytes() const {
        if (format == Format::BF16) return k * STRIP * 2;
        return k * STRIP / (format == Format::INT8 ? 1 : 2) + n_groups() * STRIP * 4;
    }
    void read(Arguments& a) { a.read(data, format, n, k, group); }
    Matrix expert(int64_t e) const { return {data + e * n_strips() * strip_bytes(), format, n, k, group}; }
};

// Strips of one task: few enough that every thread finds some, at most 4.
static inline int64_t strips_per_task(int64_t n_strips, int n_threads) {
    int64_t share = n_strips / (4 * n_threads);
    return share < 1 ? 1 : share > 4 ? 4 : share;
}

// 64 bytes of a strip: 16 lanes of 32 bits.
struct w16 {
    u32_part part[PARTS];
};
static inline w16 load_words(const uint8_t* p) {
    w16 w;  // a register at a time, as `load`
    for (int i = 0; i < PARTS; i++) memcpy(&w.part[i], p + i * sizeof w.part[i], sizeof w.part[i]);
    return w;
}
struct v16i {
    i32_part part[PARTS];
};

// acc + x.w over one pair of bfloat16: x holds the pair, lane i of w the pair of output i.
static inline v16 dot2(v16 acc, w16 w, const uint32_t& x) {
    const u32_part pair = everywhere(x);
    return each_part([&](int i) { return fold(acc.part[i], pair, w.part[i]); });
}

// AVX2 without a dot product of bytes.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define DELTIC_PAIRS_OF_BYTES
#endif

// What dot4 takes the bytes of w for. The q + 128 of INT8 are made the signed q again where sdot, or a product of pairs, is all
// there is; the q of INT4 are the same number either way.
#if (defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)) || defined(DELTIC_PAIRS_OF_BYTES)
constexpr bool SIGNED_WEIGHTS = true;
#else
constexpr bool SIGNED_WEIGHTS = false;
#endif

// acc + x.w over four elements, exactly: unsigned bytes of w (signed ones where SIGNED_WEIGHTS), signed bytes of x.
static inline v16i dot4(v16i acc, w16 w, uint32_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    for (int i = 0; i < PARTS; i++)
        acc.part[i] = (i32_part)vusdotq_s32((int32x4_t)acc.part[i], (uint8x16_t)w.part[i], (int8x16_t)vdupq_n_u32(x));
#elif defined(__ARM_FEATURE_DOTPROD)
    for (int i = 0; i < PARTS; i++)
        acc.part[i] = (i32_part)vdotq_s32((int32x4_t)acc.part[i], (int8x16_t)w.part[i], (int8x16_t)vdupq_n_u32(x));
#elif defined(__AVX512VNNI__)
    acc.part[0] = (i32_part)_mm512_dpbusd_epi32((__m512i)acc.part[0], (__m512i)w.part[0], _mm512_set1_epi32((int)x));
#elif defined(__AVXVNNI__)
    for (int i = 0; i < PARTS; i++)
        acc.part[i] = (i32_part)_mm256_dpbusd_avx_epi32((__m256i)acc.part[i], (__m256i)w.part[i], _mm256_set1_epi32((int)x));
#elif defined(__AVX2__)
    // The sign goes over to x, so that no pair saturates: 2 * 128 * 127 fits into 16 bits.
    __m256i bytes = _mm256_set1_epi32((int)x);
    for (int i = 0; i < PARTS; i++) {
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w.part[i]), _mm256_sign_epi8(bytes, (__m256i)w.part[i]));
        acc.part[i] = (i32_part)_mm256_add_epi32((__m256i)acc.part[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#else
    for (int i = 0; i < PARTS; i++)
        for (int j = 0; j < 4; j++)
            acc.part[i] += (i32_part)(w.part[i] >> (8 * j) & 255u) * (int32_t)(int8_t)(x >> (8 * j));
#endif
    return acc;
}

// dot4 of the low and of the high halves of the bytes of q.
static inline v16i dot8(v16i acc, w16 q, w16 high, uint32_t x_low, uint32_t x_high) {
#if defined(DELTIC_PAIRS_OF_BYTES)
    __m256i low_bytes = _mm256_set1_epi32((int)x_low), high_bytes = _mm256_set1_epi32((int)x_high);
    for (int i = 0; i < PARTS; i++) {  // four products of 15 * 127 fit into 16 bits
        __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)q.part[i], low_bytes), _mm256_maddubs_epi16((__m256i)high.part[i], high_bytes));
        acc.part[i] = (i32_part)_mm256_add_epi32((__m256i)acc.part[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return acc;
#else
    return dot4(dot4(acc, q, x_low), high, x_high);
#endif
}

static inline v16 to_float(v16i x) {
    return each_part([&](int i) { return __builtin_convertvector(x.part[i], f32_part); });
}
static inline v16i splat_int(int32_t x) {
    v16i v;
    for (int i = 0; i < PARTS; i++) v.part[i] = i32_part{} + x;
    return v;
}

// What row n stands for.
static inline void unpack_row(const Matrix& w, int64_t n, float* out) {
    const uint8_t* at = w.data + n / STRIP * w.strip_bytes();
    const int64_t lane = n % STRIP;
    if (w.format == Format::BF16) {
        for (int64_t i = 0; i < w.k; i++) {
            bf16 x;
            memcpy(&x, at + i / 2 * 64 + lane * 4 + i % 2 * 2, 2);
            out[i] = widen(x);
        }
        return;
    }
    for (int64_t k0 = 0; k0 < w.k; k0 += w.group) {
        const int64_t n_k = w.k - k0 < w.group ? w.k - k0 : w.group;
        const uint8_t* scales = at + n_k * STRIP / (w.format == Format::INT8 ? 1 : 2) + lane * 4;
        if (w.format == Format::INT8) {
            float scale;
            memcpy(&scale, scales, 4);
            for (int64_t i = 0; i < n_k; i++) out[k0 + i] = scale * (float)(at[i / 4 * 64 + lane * 4 + i % 4] - 128);
        } else {
            bf16 pair[2];
            memcpy(pair, scales, 4);
            for (int64_t i = 0; i < n_k; i++)
                out[k0 + i] = widen(pair[0]) * (float)(at[i / 8 * 64 + lane * 4 + i % 4] >> i % 8 / 4 * 4 & 15) + widen(pair[1]);
        }
        at = scales - lane * 4 + STRIP * 4;
    }
}

// Rows x as the tiles read them. A tile of `rows` rows holds word j of all its rows side by side: [k / 2 or k / 4][rows];
// its scales and sums are [n_groups][rows]. Tiles follow one another, so the tile that begins at row m begins at m times the
// size of a row.
struct Rows {
    const uint32_t* words;
    const float* scale;   // null for BF16
    const int32_t* sum;   // of the signed bytes of a group
};

#if defined(__AMX_BF16__)
constexpr bool ROWS_AS_THEY_STAND = true;  // amx.h reads bfloat16 rows one after another
#else
constexpr bool ROWS_AS_THEY_STAND = false;
#endif

// Where the rows of a product with `matrix` go in a workspace of n_rows * row_bytes(matrix) bytes.
static inline int64_t row_bytes(const Matrix& matrix) {
    return matrix.format == Format::BF16 ? matrix.k * 2 : matrix.k + matrix.n_groups() * 8;
}
static inline Rows place_rows(uint8_t* workspace, int64_t n_rows, const Matrix& matrix) {
    float* scale = (float*)(workspace + n_rows * matrix.k);
    return {(const uint32_t*)workspace, scale, (const int32_t*)(scale + n_rows * matrix.n_groups())};
}

// Row m of a tile of `rows` rows, as words.
static inline void pack_row_bf16(const bf16* x, int64_t k, int64_t m, int64_t rows, uint32_t* words) {
    if (ROWS_AS_THEY_STAND) {
        memcpy(words + m * k / 2, x, k * 2);
        return;
    }
    for (int64_t j = 0; j < k / 2; j++) memcpy(words + j * rows + m, x + 2 * j, 4);
}

// The same as int8, rounded to the nearest (even) multiple of scale = max |x| / 127 of each group. A group with a value that is
// not finite gets a scale that is not, so that its row's outputs are not either.
static inline void pack_row_int8(const bf16* x, int64_t k, int64_t group, int64_t m, int64_t rows, uint32_t* words, float* scale, int32_t* sum) {
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    for (int64_t k0 = 0, g = 0; k0 < k; k0 += group, g++) {
        int64_t end = k - k0 < group ? k : k0 + group;
        v16 most = {}, nothing = {};
        for (int64_t i = k0; i < end; i += 16) {
            v16 v = load_bf16(x + i);
            most = vmax(most, vmax(v, -v));
            nothing = nothing + v * splat(0.0f);
        }
        float top = max(most);
        v16 inverse = splat(top > 0.0f ? 127.0f / top : 0.0f);
        v16i total = splat_int(0);
        for (int64_t i = k0; i < end; i += 16) {
            v16 rounded = load_bf16(x + i) * inverse + magic;
            alignas(64) int8_t q[16];
            for (int p = 0; p < PARTS; p++) {
                i32_part integer = (i32_part)rounded.part[p] - 0x4b400000;
                total.part[p] += integer;
                auto bytes = __builtin_convertvector(integer, i8_part);
                memcpy(q + p * LANES, &bytes, sizeof bytes);
            }
            for (int j = 0; j < 4; j++) memcpy(words + (i / 4 + j) * rows + m, q + 4 * j, 4);
        }
        scale[g * rows + m] = top / 127.0f + ::sum(nothing);
        int32_t lanes[16], all = 0;
        memcpy(lanes, &total, sizeof lanes);
        for (int32_t lane : lanes) all += lane;
        sum[g * rows + m] = all;
    }
}

// The rows from m0 on, where a tile begins.
static inline Rows rows_from(const Rows& x, int64_t m0, const Matrix& matrix) {
    if (matrix.format == Format::BF16) return {x.words + m0 * matrix.k / 2, nullptr, nullptr};
    const int64_t groups = m0 * matrix.n_groups();
    return {x.words + m0 * matrix.k / 4, x.scale + groups, x.sum + groups};
}

// Packs the tile of `rows` rows that begins at row m0; row(m) gives the bfloat16 row m.
template <class Row>
static inline void pack_tile(const Rows& x, int64_t m0, int64_t rows, const Matrix& matrix, const Row& row) {
    const Rows at = rows_from(x, m0, matrix);
    auto words = (uint32_t*)at.words;
    for (int64_t m = 0; m < rows; m++) {
        if (matrix.format == Format::BF16) pack_row_bf16(row(m0 + m), matrix.k, m, rows, words);
        else pack_row_int8(row(m0 + m), matrix.k, matrix.group, m, rows, words, (float*)at.scale, (int32_t*)at.sum);
    }
}

// Rows of a tile when there are many, and most rows that are done in one pass over a strip when there are few.
constexpr int64_t TILE_ROWS = LANES == 16 ? 12 : 4;
constexpr int64_t MOST_ROWS = LANES == 16 ? 16 : 4;
constexpr int TILE_STRIPS = LANES == 16 ? 2 : 1;
constexpr int64_t FAR = 32768, NEAR = 4096;  // bytes between what is multiplied and what is fetched: of bfloat16, of less
// Of how many vectors of a strip one is fetched ahead, for few rows. Of quantised weights the processor guesses the rest, and more
// would only take the few places that a core has for what is under way: one to eight rows are up to twice as fast for it (Zen 4). With
// AVX2 it is the other way round: one row of int8 or int4 is 1.6 times as fast with all of them (Zen 3).
template <Format F, int MR>
constexpr int EVERY = F == Format::BF16 || MR > 8 || LANES == 8 ? 1 : 4;

static inline int64_t tile_rows(int64_t n_rows) { return n_rows <= 2 * MOST_ROWS ? MOST_ROWS : TILE_ROWS; }

// One tile of MR rows and NS strips: out[m][s] = the 16 outputs of strip s. FETCH: of so many vectors one is fetched; 0: none.
template <int MR, int NS, int FETCH>
static inline void tile_bf16(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][NS]) {
    const int64_t strip = matrix.strip_bytes(), n_words = matrix.k / 2;
    v16 acc[MR][NS] = {};
    for (int64_t j = 0; j < n_words; j++) {
        w16 words[NS];
        for (int s = 0; s < NS; s++) {
            words[s] = load_words(w + s * strip + j * 64);
            if constexpr (FETCH > 0) __builtin_prefetch(w + s * strip + j * 64 + ahead, 0, 2);
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int s = 0; s < NS; s++) acc[m][s] = dot2(acc[m][s], words[s], x.words[j * MR + m]);
    }
    for (int m = 0; m < MR; m++)
        for (int s = 0; s < NS; s++) out[m][s] = acc[m][s];
}

// The sums of a group are exact integers in registers; `out` lives in the first-level cache and is touched once a group.
template <Format F, int MR, int NS, int FETCH>
static inline void tile_int(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][NS]) {
    constexpr bool INT8 = F == Format::INT8;
    const int64_t strip = matrix.strip_bytes();
    for (int m = 0; m < MR; m++)
        for (int s = 0; s < NS; s++) out[m][s] = v16{};
    const uint32_t* words = x.words;
    for (int64_t k = 0, g = 0; k < matrix.k; k += matrix.group, g++) {
        int64_t n_vectors = (matrix.k - k < matrix.group ? matrix.k - k : matrix.group) / (INT8 ? 4 : 8);
        v16i acc[MR][NS];
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int s = 0; s < NS; s++) acc[m][s] = splat_int(INT8 && !SIGNED_WEIGHTS ? -128 * x.sum[g * MR + m] : 0);
        for (int64_t j = 0; j < n_vectors; j += 4) {  // a group is a multiple of 32 elements
#pragma GCC unroll 4
            for (int u = 0; u < 4; u++, w += 64) {
                w16 q[NS];
                for (int s = 0; s < NS; s++) {
                    q[s] = load_words(w + s * strip);
                    if constexpr (FETCH > 0)
                        if (u % FETCH == 0) __builtin_prefetch(w + s * strip + ahead, 0, 2);
                }
                if constexpr (INT8) {
                    if constexpr (SIGNED_WEIGHTS)
                        for (int s = 0; s < NS; s++)
                            for (int i = 0; i < PARTS; i++) q[s].part[i] ^= 0x80808080u;
#pragma GCC unroll 16
                    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                        for (int s = 0; s < NS; s++) acc[m][s] = dot4(acc[m][s], q[s], words[m]);
                    words += MR;
                } else {
                    w16 high[NS];
                    for (int s = 0; s < NS; s++)
                        for (int i = 0; i < PARTS; i++) {
                            high[s].part[i] = q[s].part[i] >> 4 & 0x0f0f0f0fu;
                            q[s].part[i] &= 0x0f0f0f0fu;
                        }
#pragma GCC unroll 16
                    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                        for (int s = 0; s < NS; s++) acc[m][s] = dot8(acc[m][s], q[s], high[s], words[m], words[MR + m]);
                    words += 2 * MR;
                }
            }
        }
        // Clang, left to itself, carries it over the groups in registers that it does not have.
        if constexpr (MR > 1) asm("" : "+m"(out));
        v16 scale[NS], least[NS];
        for (int s = 0; s < NS; s++) {
            w16 scales = load_words(w + s * strip);
            scale[s] = each_part([&](int i) { return (f32_part)(INT8 ? scales.part[i] : scales.part[i] << 16); });
            least[s] = each_part([&](int i) { return (f32_part)(scales.part[i] & 0xffff0000u); });
        }
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {  // unrolled, as above: Clang keeps sums that are indexed by a variable in memory
            const v16 x_sum = splat((float)x.sum[g * MR + m]), x_scale = splat(x.scale[g * MR + m]);
            for (int s = 0; s < NS; s++) {
                v16 value = to_float(acc[m][s]) * scale[s];
                if constexpr (!INT8) value = fma(x_sum, least[s], value);
                out[m][s] = fma(x_scale, value, out[m][s]);
            }
        }
        w += 64;
    }
}

template <Format F, int MR, int NS, int FETCH>
static inline void tile(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][NS]) {
    if constexpr (F == Format::BF16) tile_bf16<MR, NS, FETCH>(x, w, matrix, ahead, out);
    else tile_int<F, MR, NS, FETCH>(x, w, matrix, ahead, out);
}

// Outputs [n0, n0 + 16) of one row, as far as the matrix has so many.
static inline void write_sums(v16 sums, int64_t n, int64_t n0, bool add, float* row) {
    float* to = row + n0;
    if (n0 + STRIP <= n) {
        store(to, add ? load(to) + sums : sums);
        return;
    }
    float rest[STRIP];
    store(rest, sums);
    for (int64_t i = 0; n0 + i < n; i++) to[i] = add ? to[i] + rest[i] : rest[i];
}

// Strips [s0, s0 + NS) for MR rows: `out(m)` is where row m's output 0 goes; it is added to when `add`.
template <Format F, int MR, int NS, int FETCH, class Out>
static inline void multiply_tile(const Rows& x, const Matrix& matrix, int64_t s0, int64_t ahead, bool add, const Out& out) {
    v16 sums[MR][NS];
    tile<F, MR, NS, FETCH>(x, matrix.data + s0 * matrix.strip_bytes(), matrix, ahead, sums);
    for (int m = 0; m < MR; m++)
        for (int s = 0; s < NS; s++) write_sums(sums[m][s], matrix.n, (s0 + s) * STRIP, add, out(m));
}

// Strips [s0, s1) for all n_rows rows of x.
template <Format F, class Out>
static inline void multiply_strips(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, bool add, const Out& out) {
    const int64_t step = tile_rows(n_rows), ahead = F == Format::BF16 ? FAR : NEAR;
    while (s0 < s1) {
        // One row of bfloat16 would wait for its own sums: four strips take turns.
        const int panel = F == Format::BF16 && n_rows == 1 && s1 - s0 >= 4 ? 4 : n_rows > step && s1 - s0 >= TILE_STRIPS ? TILE_STRIPS : 1;
        for (int64_t m0 = 0; m0 < n_rows; m0 += step) {
            const int64_t rows = n_rows - m0 < step ? n_rows - m0 : step;
            const Rows at = rows_from(x, m0, matrix);
            auto to = [&](int m) { return out(m0 + m); };
            if (panel == 4) multiply_tile<F, 1, 4, 0>(at, matrix, s0, 0, add, to);
            else if (panel == TILE_STRIPS && rows == TILE_ROWS && m0 == 0) multiply_tile<F, TILE_ROWS, TILE_STRIPS, 1>(at, matrix, s0, panel * matrix.strip_bytes(), add, to);
            else if (panel == TILE_STRIPS && rows == TILE_ROWS) multiply_tile<F, TILE_ROWS, TILE_STRIPS, 0>(at, matrix, s0, 0, add, to);
            else
                for (int s = 0; s < panel; s++)
                    with_rows<MOST_ROWS>(rows, [&](auto mr) { multiply_tile<F, mr(), 1, EVERY<F, mr()>>(at, matrix, s0 + s, ahead, add, to); });
        }
        s0 += panel;
    }
}
