// The one multiplication of the package: y = x W^T for any number of rows x, W in any format of format.h.
//
// Rows x of a product with integers are int8 with one scale per row and group (the matrix's groups), so that
//   y = sum over groups of x_scale * (w_scale * (exact integer sum) + least * (sum of x)).
// With floats they are bfloat16: exact products, summed in float32, of e4m3 by group.
#pragma once
#include "codebook.h"
#include "format.h"

// Strips of one task: few enough that every thread finds some, at most 4.
static inline int64_t strips_per_task(int64_t n_strips, int n_threads) {
    int64_t share = n_strips / (4 * n_threads);
    return share < 1 ? 1 : share > 4 ? 4 : share;
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

// True if dot4 takes the bytes of w as signed. The codes + 128 of INT8, and of the tables, are made signed again where sdot, or a product of
// pairs, is all there is; codes of fewer bits are the same number either way.
#if (defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)) || defined(DELTIC_PAIRS_OF_BYTES)
constexpr bool SIGNED_WEIGHTS = true;
#else
constexpr bool SIGNED_WEIGHTS = false;
#endif

// Excess of each code, as dot4 takes it.
static inline constexpr int too_large(Codes codes, bool least) {
    const bool bytes = codes == Codes::INT8 || codes == Codes::IQ4 || codes == Codes::E2M1 || is_book(codes);
    return bytes ? (SIGNED_WEIGHTS ? 0 : 128) : bias_of(codes, least);
}
// Factor of the sum of x over a group when it is packed. Where codes are too large, the sum of a group begins with it.
static inline constexpr int start_factor(Codes codes, bool least) {
    const int bias = too_large(codes, least);
    return bias ? -bias : 1;
}

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

// dot4 of two words of codes of at most 6 bits.
static inline v16i dot8(v16i acc, w16 q, w16 high, uint32_t x_low, uint32_t x_high) {
#if defined(DELTIC_PAIRS_OF_BYTES)
    __m256i low_bytes = _mm256_set1_epi32((int)x_low), high_bytes = _mm256_set1_epi32((int)x_high);
    for (int i = 0; i < PARTS; i++) {  // four products of 63 * 127 fit into 16 bits
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

// Rows x as the tiles read them. A tile of `rows` rows holds word j of all its rows side by side: [k / 2 or k / 4][rows];
// its scales and starts are [n_groups][rows]. Tiles follow one another, so the tile that begins at row m begins at m times the
// size of a row.
struct Rows {
    bool stand;  // rows_stand: [n_rows][k / 2 or k / 4] words, [n_rows][n_groups] scales and starts
    const uint32_t* words;
    const float* scale;   // null for floats
    const int32_t* start; // of a group: the sum of its signed bytes, times start_factor
};

// Floats for so few rows are read where they stand: packing them takes longer than it saves.
constexpr int64_t FEW_ROWS = LANES == 16 ? 6 : 1;

// Returns whether a product of n_rows rows reads them one after another, as amx.h and multiply_few do.
static inline bool rows_stand(const Matrix& matrix, int64_t n_rows) {
#if defined(__AMX_BF16__)
    return is_float(matrix.codes()) || (n_rows >= 16 && matrix.group % UNIT == 0);
#else
    return is_float(matrix.codes()) && n_rows <= FEW_ROWS;
#endif
}

// Rows that are done, at most, in one pass over a strip.
constexpr int64_t MOST_ROWS = LANES == 16 ? 16 : 4;

// Rows that a tile of integers is compiled for, when it has `rows`: any number up to six, then even numbers; of plain x86-64,
// which few machines run, one, two or four. Half of the time of a compile is these tiles. A row too many is computed with a scale of zero
// and not written. Floats have every number.
static inline constexpr int64_t compiled_rows(Codes codes, int64_t rows) {
    if (is_float(codes) || (LANES < 16 && !SSE)) return rows;
    if (SSE) return rows + (rows % 4 == 3);
    return rows <= 6 ? rows : rows + rows % 2;
}

// Bytes of a workspace for each row of x. Floats take them all. Integers take k, and 8 for each group of at least 16: three rows or more
// leave room for one more, which compiled_rows may ask for.
static inline constexpr int64_t row_bytes(int64_t k) { return 2 * k; }

// Places the rows of a product with `matrix` in a workspace of n_rows * row_bytes(k) bytes.
static inline Rows place_rows(uint8_t* workspace, int64_t n_rows, const Matrix& matrix) {
    const int64_t placed = compiled_rows(matrix.codes(), n_rows);
    float* scale = (float*)(workspace + placed * matrix.k);
    return {rows_stand(matrix, n_rows), (const uint32_t*)workspace, scale, (const int32_t*)(scale + placed * matrix.n_groups())};
}

// Row m of a tile of `rows` rows, as words.
static inline void pack_row_bf16(const bf16* x, int64_t k, int64_t m, int64_t rows, uint32_t* words) {
    for (int64_t j = 0; j < k / 2; j++) memcpy(words + j * rows + m, x + 2 * j, 4);
}

// The same as int8, rounded to the nearest (even) multiple of scale = max |x| / 127 of each group. A group with a value that is
// not finite gets a scale that is not, so that its row's outputs are not either.
static inline void pack_row_int8(const bf16* x, const Matrix& matrix, int64_t m, int64_t rows, uint32_t* words, float* scale, int32_t* start) {
    const int64_t k = matrix.k, group = matrix.group;
    const int factor = start_factor(matrix.codes(), has_least(matrix.scales()));
    const bool by_levels = is_by_levels(matrix.codes());
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
            alignas(64) int8_t q[16], of_level[16];
            for (int p = 0; p < PARTS; p++) {
                i32_part integer = (i32_part)rounded.part[p] - 0x4b400000;
                total.part[p] += integer;
                auto bytes = __builtin_convertvector(integer, i8_part);
                memcpy(q + p * LANES, &bytes, sizeof bytes);
            }
            if (by_levels)
                for (int j = 0; j < 16; j++) of_level[position(Codes::IQ1, j)] = q[j];
            for (int j = 0; j < 4; j++) memcpy(words + (i / 4 + j) * rows + m, (by_levels ? of_level : q) + 4 * j, 4);
        }
        scale[g * rows + m] = top / 127.0f + ::sum(nothing);
        int32_t lanes[16], all = 0;
        memcpy(lanes, &total, sizeof lanes);
        for (int32_t lane : lanes) all += lane;
        start[g * rows + m] = all * factor;
    }
}

// The rows from m0 on, where a tile begins.
static inline Rows rows_from(const Rows& x, int64_t m0, const Matrix& matrix) {
    if (is_float(matrix.codes())) return {x.stand, x.words + m0 * matrix.k / 2, nullptr, nullptr};
    const int64_t groups = m0 * matrix.n_groups();
    return {x.stand, x.words + m0 * matrix.k / 4, x.scale + groups, x.start + groups};
}

// Packs the tile of `rows` rows that begins at row m0; row(m) gives the bfloat16 row m.
template <class Row>
static inline void pack_tile(const Rows& x, int64_t m0, int64_t rows, const Matrix& matrix, const Row& row) {
    if (x.stand && rows > 1) {  // a tile each
        for (int64_t m = 0; m < rows; m++) pack_tile(x, m0 + m, 1, matrix, row);
        return;
    }
    const Rows at = rows_from(x, m0, matrix);
    auto words = (uint32_t*)at.words;
    auto scale = (float*)at.scale;
    auto start = (int32_t*)at.start;
    const int64_t width = compiled_rows(matrix.codes(), rows);
    for (int64_t m = 0; m < rows; m++) {
        if (is_float(matrix.codes())) pack_row_bf16(row(m0 + m), matrix.k, m, width, words);
        else pack_row_int8(row(m0 + m), matrix, m, width, words, scale, start);
    }
    for (int64_t m = rows; m < width; m++)
        for (int64_t g = 0; g < matrix.n_groups(); g++) scale[g * width + m] = 0.0f, start[g * width + m] = 0;
}

// Rows of a tile of floats when there are many.
constexpr int64_t TILE_ROWS = LANES == 16 ? 12 : 4;
constexpr int TILE_STRIPS = LANES == 16 ? 2 : 1;
// Integers for more than a few rows wait for the second-level cache, not for memory, so all of a strip is fetched to the first: 8 rows
// are 1.5 to 2 times as fast, 16 of eight bits 1.5 times (Zen 4).
template <Codes C, int MR>
constexpr bool TO_FIRST = LANES == 16 && !is_float(C) && MR > (bits_of(C) == 8 ? 4 : 1);
// Of how many vectors of a strip one is fetched ahead. Of quantised weights for a few rows the processor guesses the rest, and more
// would only take the few places that a core has for what is under way: one row is up to twice as fast for it (Zen 4). With AVX2 it is
// the other way round: one row of int8 or int4 is 1.6 times as fast with all of them (Zen 3). So it is on Zen 5
// (FETCHES_ALL, Stream): one row of Q4_K is 1.8 times as fast, of IQ4_XS 2.3 times. With AVX2 the scales of K-quants with least values are so
// many bytes that they are fetched, too.
template <Codes C, int MR>
constexpr int EVERY = C == Codes::BF16 || TO_FIRST<C, MR> || MR > 8 || LANES == 8 || SSE ? 1 : 4;
#if defined(__AVX512F__)
const bool FETCHES_ALL = [] {
    uint32_t id, other;
    __cpuid(1, id, other, other, other);
    return (id >> 8 & 15) + (id >> 20 & 255) >= 26;  // families of AMD, of which no Intel processor has one
}();
#else
constexpr bool FETCHES_ALL = false;
#endif
constexpr int64_t FAR = 32768, NEAR = 4096;  // bytes between what is multiplied and what is fetched: of bfloat16, of less
template <Codes C, int MR>
constexpr int64_t AHEAD = C == Codes::BF16 ? FAR : TO_FIRST<C, MR> ? 2 * NEAR : NEAR;

// One row, where FETCHES_ALL: a strip line by line into the first cache, as much with each unit, so that a block's scales are there in
// time, too; and what stands at the end of the next strip, which its first block reads. Q6_K is 1.3 times as fast for it, NVFP4 1.6 times.
struct Stream {
    const uint8_t *line = nullptr, *end = nullptr;
    int64_t a_unit = 0;

    Stream() = default;
    Stream(const uint8_t* strip, const Matrix& matrix) : line(strip + 2 * NEAR), end(line) {
        for (int64_t i = matrix.tail_bytes(); i > 0; i -= 64) __builtin_prefetch(strip + 2 * matrix.strip_bytes() - i, 0, 2);
    }
    void fetch() {
        for (end += a_unit; line < end; line += 64) __builtin_prefetch(line, 0, 3);
    }
};

// A tile of integers has the rows of one pass, however many there are.
static inline int64_t tile_rows(const Matrix& matrix, int64_t n_rows) {
    return n_rows <= 2 * MOST_ROWS || !is_float(matrix.codes()) ? MOST_ROWS : TILE_ROWS;
}

// Computes a tile of MR rows and NS strips: out[m][s] = the 16 outputs of strip s. FETCH: of so many vectors one is fetched; 0: none.
// STAND: rows_stand.
template <int MR, int NS, int FETCH, bool STAND>
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
            for (int s = 0; s < NS; s++) acc[m][s] = dot2(acc[m][s], words[s], x.words[STAND ? m * n_words + j : j * MR + m]);
    }
    for (int m = 0; m < MR; m++)
        for (int s = 0; s < NS; s++) out[m][s] = acc[m][s];
}

template <int MR, int NS, int FETCH, bool STAND>
static inline void tile_e4m3(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][NS]) {
    const int64_t strip = matrix.strip_bytes();
    for (int m = 0; m < MR; m++)
        for (int s = 0; s < NS; s++) out[m][s] = v16{};
    const uint32_t* words = x.words;
    for (int64_t k = 0; k < matrix.k; k += matrix.group, w += 64) {
        const int64_t n_vectors = (matrix.k - k < matrix.group ? matrix.k - k : matrix.group) / 4;
        v16 acc[MR][NS] = {};
        for (int64_t j = 0; j < n_vectors; j++, w += 64, words += STAND ? 2 : 2 * MR) {
            w16 first[NS], second[NS];
            for (int s = 0; s < NS; s++) {
                load_e4m3_pairs(w + s * strip, first[s], second[s]);
                if constexpr (FETCH > 0)
                    if (j % FETCH == 0) __builtin_prefetch(w + s * strip + ahead, 0, 2);
            }
#pragma GCC unroll 16
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                for (int s = 0; s < NS; s++) {
                    const uint32_t *low = words + (STAND ? m * matrix.k / 2 : m), *high = low + (STAND ? 1 : MR);
                    acc[m][s] = dot2(dot2(acc[m][s], first[s], *low), second[s], *high);
                }
        }
        for (int s = 0; s < NS; s++) {
            const v16 scale = load((const float*)(w + s * strip));
            for (int m = 0; m < MR; m++) out[m][s] = fma(scale, acc[m][s], out[m][s]);
        }
    }
}

// Table entries of the low four bits of each byte, + 128 unless SIGNED_WEIGHTS.
template <Codes C>
static inline u32_part look_up(u32_part index) {
    alignas(16) static constexpr auto table = [] {
        struct { uint8_t at[16]; } t{};
        for (int i = 0; i < 16; i++) t.at[i] = (uint8_t)(TABLES[C == Codes::E2M1][i] + (SIGNED_WEIGHTS ? 0 : 128));
        return t;
    }();
#if defined(__AVX512F__)
    return (u32_part)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table.at)), (__m512i)index);
#elif defined(__AVX2__)
    return (u32_part)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table.at)), (__m256i)index);
#elif defined(__aarch64__)
    return (u32_part)vqtbl1q_u8(vld1q_u8(table.at), (uint8x16_t)index);
#else
    uint8_t bytes[16];
    memcpy(bytes, &index, 16);
    for (uint8_t& byte : bytes) byte = table.at[byte];
    memcpy(&index, bytes, 16);
    return index;
#endif
}

// Words 2 i and 2 i + 1 of a unit, as dot4 takes them.
template <Codes C>
static inline __attribute__((always_inline)) void load_codes(const uint8_t* unit, int i, w16& first, w16& second) {
    constexpr bool TABLE = C == Codes::IQ4 || C == Codes::E2M1;
    if constexpr (C == Codes::INT8 || C == Codes::BOOK) {
        first = load_words(unit + i * 128), second = load_words(unit + i * 128 + 64);
        if constexpr (SIGNED_WEIGHTS)
            for (int p = 0; p < PARTS; p++) first.part[p] ^= 0x80808080u, second.part[p] ^= 0x80808080u;
    } else if constexpr (C == Codes::UINT2 || C == Codes::UINT3) {
        const w16 two = load_words(unit + i / 2 * 64);
        for (int p = 0; p < PARTS; p++) {
            first.part[p] = two.part[p] >> i % 2 * 4 & 0x03030303u;
            second.part[p] = two.part[p] >> (i % 2 * 4 + 2) & 0x03030303u;
        }
    } else {
        const w16 four = load_words(unit + i * 64);
        for (int p = 0; p < PARTS; p++) {
            first.part[p] = four.part[p] & 0x0f0f0f0fu;
            second.part[p] = four.part[p] >> 4 & 0x0f0f0f0fu;
            if constexpr (TABLE) first.part[p] = look_up<C>(first.part[p]), second.part[p] = look_up<C>(second.part[p]);
        }
    }
    if constexpr (C == Codes::UINT6) {
        const w16 two = load_words(unit + 256 + i / 2 * 64);
        for (int p = 0; p < PARTS; p++) {
            first.part[p] |= (i % 2 ? two.part[p] : two.part[p] << 4) & 0x30303030u;
            second.part[p] |= (i % 2 ? two.part[p] >> 2 : two.part[p] << 2) & 0x30303030u;
        }
    }
    if constexpr (C == Codes::UINT5 || C == Codes::UINT3) {
        constexpr int AT = C == Codes::UINT5 ? 4 : 2;
        const w16 one = load_words(unit + AT * 64);
        for (int p = 0; p < PARTS; p++) {
            first.part[p] |= (2 * i < AT ? one.part[p] << (AT - 2 * i) : one.part[p] >> (2 * i - AT)) & 0x01010101u << AT;
            second.part[p] |= (2 * i + 1 < AT ? one.part[p] << (AT - 2 * i - 1) : one.part[p] >> (2 * i + 1 - AT)) & 0x01010101u << AT;
        }
    }
}

// The sums of a group are exact integers. GROUP: its elements, 16 or 32; 0 where they are more.
//
// With AVX-512 a group's codes are decoded once, and then the rows take turns: a row's sum is scaled and added while the next row's
// is taken, and its sum over the groups never leaves its register (a store takes as long there as two multiplications). Where registers
// are fewer, or groups are larger, the rows take turns at 8 codes.
template <Codes C, Scales KIND, bool LEAST, int GROUP, int MR, int FETCH>
static inline void tile_int(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][1]) {
    constexpr bool BYTES = C == Codes::INT8 || C == Codes::IQ4 || C == Codes::E2M1 || is_book(C), BIASED = too_large(C, LEAST) != 0;
    constexpr bool BY_BLOCK = KIND == Scales::K || KIND == Scales::K_LEAST || KIND == Scales::K_EIGHTH || KIND == Scales::F16;
    constexpr int TURN = LANES == 16 && GROUP ? GROUP / 8 : 1;  // pairs of words
    // One row would wait for each product before it: its words have a sum each, and integers the same in any order.
    constexpr int SUMS = LANES == 16 && MR == 1 && !GROUP ? 8 : 1;
    constexpr int64_t UNIT_BYTES = unit_bytes(C);
    const int64_t block = matrix.block(), group = GROUP ? GROUP : matrix.group;
    const uint8_t* end = w + matrix.strip_bytes();
    const Scales kind = matrix.scales();
    v16 total[MR] = {};
    const uint32_t* words = x.words;
    const float* x_scale = x.scale;
    const int32_t* start = x.start;
    v16i acc[MR * SUMS];
    auto begin = [&](int m) __attribute__((always_inline)) {
        v16i v = splat_int(C == Codes::SIGN ? start[m] / -128 : start[m]);
#if defined(__AVX512F__)
        asm("" : "+v"(v.part[0]));  // else Clang makes a float of it first, and broadcasts that by an instruction of its own
#endif
        return v;
    };
    constexpr bool STREAM = LANES == 16 && FETCH == 1 && MR == 1 && C != Codes::BOOK;
    [[maybe_unused]] std::conditional_t<STREAM, Stream, int> stream{};
    if constexpr (STREAM) stream = Stream(w, matrix);
    int64_t n_k = 0, n_groups = 0, code_bytes = 0, scale_bytes = 0;
    for (int64_t k0 = 0; k0 < matrix.k; k0 += block) {
        if (const int64_t left = matrix.k - k0 < block ? matrix.k - k0 : block; left != n_k) {  // few blocks divide
            n_k = left, n_groups = (n_k + group - 1) / group, code_bytes = matrix.code_bytes(n_k), scale_bytes = matrix.scale_bytes(n_k);
            if constexpr (STREAM) stream.a_unit = (code_bytes + scale_bytes) * UNIT / n_k;
        }
        const uint8_t *scales_at = w + code_bytes, *next = scales_at + scale_bytes, *at = w;
        if constexpr (FETCH == 1 && MR == 1 && !STREAM && KIND == Scales::K_LEAST)
            for (const uint8_t* s = scales_at; s < next; s += 64) __builtin_prefetch(s + ahead, 0, 2);
        alignas(64) uint8_t made[C == Codes::BOOK ? BLOCK * STRIP : 64];
        w16 words_of_unit[8];  // of SIGN
        if constexpr (C == Codes::BOOK) {
            if constexpr (FETCH > 0)
                for (int64_t v = 0; v < code_bytes + scale_bytes; v += 64) __builtin_prefetch(w + v + ahead, 0, 3);
            unpack_units(matrix.codes(), w, n_k / UNIT, made);
            at = made;
        }
        // Of K where they are needed: a call for all of a block would send the sums to memory and back.
        const BlockScales<KIND> of_block(scales_at);
        v16 scales[MOST_GROUPS], leasts[MOST_GROUPS];
        if constexpr (!BY_BLOCK) read_scales(kind, scales_at, end, n_groups, scales, leasts);
        if constexpr (LEAST && BIASED)
            for (int64_t i = 0; i < n_groups; i++) leasts[i] = leasts[i] * splat(1.0f / start_factor(C, LEAST));
        auto scale_of = [&](int64_t i) __attribute__((always_inline)) {
            if constexpr (BY_BLOCK) return of_block.scale(i);
            else return scales[i];
        };
        auto least_of = [&](int64_t i) __attribute__((always_inline)) {
            if constexpr (!LEAST) return v16{};
            else if constexpr (BY_BLOCK) return of_block.least(i);
            else return leasts[i];
        };
        auto finish = [&](int m, v16 scale, v16 least, v16i whole) __attribute__((always_inline)) {
            v16 value = to_float(whole) * scale;
            if constexpr (LEAST) value = fma(to_float(begin(m)), least, value);
            total[m] = fma(each_part([&](int) { return everywhere(x_scale[m]); }), value, total[m]);
        };
        // A turn of all rows, from pair i of the unit on; the first and the last of a group begin and finish it.
        auto turn = [&](int i, bool first, bool last, int64_t in_block) __attribute__((always_inline)) {
            w16 codes[2 * TURN];
            const v16 scale = last ? scale_of(in_block) : v16{}, least = last ? least_of(in_block) : v16{};
#pragma GCC unroll 4
            for (int j = 0; j < TURN; j++)
                if constexpr (C == Codes::SIGN) codes[2 * j] = words_of_unit[2 * (i + j)], codes[2 * j + 1] = words_of_unit[2 * (i + j) + 1];
                else load_codes<C>(at, i + j, codes[2 * j], codes[2 * j + 1]);
            // Clang, left to itself, carries it over the groups in registers that it does not have.
            if constexpr (MR > 1 && TURN == 1)
                if (last) asm("" : "+m"(total));
            if constexpr (SUMS > 1) acc[2 * i] = dot4(acc[2 * i], codes[0], words[0]), acc[2 * i + 1] = dot4(acc[2 * i + 1], codes[1], words[1]);
#pragma GCC unroll 16
            for (int m = SUMS > 1 ? MR : 0; m < MR; m++) {  // unrolled: Clang keeps sums that are indexed by a variable in memory
                v16i whole = !first ? acc[m] : BIASED ? begin(m) : splat_int(0);
#pragma GCC unroll 4
                for (int j = 0; j < TURN; j++) {
                    const uint32_t *low = words + 2 * j * MR + m, *high = low + MR;
                    if constexpr (BYTES) whole = dot4(dot4(whole, codes[2 * j], *low), codes[2 * j + 1], *high);
                    else whole = dot8(whole, codes[2 * j], codes[2 * j + 1], *low, *high);
                }
                if (last) finish(m, scale, least, whole);
                else acc[m] = whole;
                if constexpr (TURN > 1) asm volatile("" ::: "memory");  // Clang would take the sums of all rows first
            }
            words += 2 * TURN * MR;
            if (last) x_scale += MR, start += MR;
        };
        auto next_unit = [&] {
            if constexpr (STREAM) stream.fetch();
            else if constexpr (FETCH > 0 && C != Codes::BOOK)
#pragma GCC unroll 8
                for (int64_t v = 0; v < UNIT_BYTES; v += 64 * FETCH) __builtin_prefetch(at + v + ahead, 0, TO_FIRST<C, MR> ? 3 : 2);
            at += UNIT_BYTES;
        };
        auto unpack = [&]() __attribute__((always_inline)) {
#if defined(__AVX512VBMI__)
            if constexpr (C == Codes::SIGN) expand<C, true>(look<C>(at), words_of_unit);
#endif
        };
        if constexpr (GROUP != 0) {
            constexpr int PAIRS = GROUP / 8;  // of a group
            for (int64_t i = 0; i < n_groups; i += UNIT / GROUP) {
                unpack();
#pragma GCC unroll 4
                for (int j = 0; j < UNIT / 8; j += TURN) turn(j, j % PAIRS == 0, j % PAIRS == PAIRS - TURN, i + j / PAIRS);
                next_unit();
            }
        } else {
            for (int64_t i = 0; i < n_groups; i++) {
                const int64_t stop = (i + 1) * group < n_k ? (i + 1) * group : n_k;
#pragma GCC unroll 16
                for (int m = 0; m < MR * SUMS; m++) acc[m] = BIASED && C != Codes::SIGN && m % SUMS == 0 ? begin(m / SUMS) : splat_int(0);
                for (int64_t k = i * group; k < stop; k += UNIT) {
                    unpack();
                    turn(0, false, false, i), turn(1, false, false, i), turn(2, false, false, i), turn(3, false, false, i);
                    next_unit();
                }
                if constexpr (MR > 1) asm("" : "+m"(total));
#pragma GCC unroll 8
                for (int j = 1; j < SUMS; j++) acc[0].part[0] += C == Codes::SIGN ? acc[j].part[0] >> j : acc[j].part[0];
                if constexpr (C == Codes::SIGN) acc[0].part[0] = begin(0).part[0] - 2 * acc[0].part[0];
#pragma GCC unroll 16
                for (int m = 0; m < MR; m++) finish(m, scale_of(i), least_of(i), acc[m]);
                x_scale += MR, start += MR;
            }
        }
        w = next;
    }
    for (int m = 0; m < MR; m++) out[m][0] = total[m];
}

// A format as the tiles are compiled for it.
template <Codes C, Scales KIND = Scales::NONE, bool LEAST = false, int GROUP = 0>
struct Tiles {
    static constexpr Codes CODES = C;
    static constexpr bool HAS_LEAST = LEAST, HALF_UNITS = GROUP == 16;
    template <int MR, int NS, int FETCH, bool STAND>
    static inline void run(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][NS]) {
        if constexpr (C == Codes::BF16) tile_bf16<MR, NS, FETCH, STAND>(x, w, matrix, ahead, out);
        else if constexpr (C == Codes::E4M3) tile_e4m3<MR, NS, FETCH, STAND>(x, w, matrix, ahead, out);
        else if (FETCH > 1 && FETCHES_ALL) tile_int<C, KIND, LEAST, GROUP, MR, FETCH ? 1 : 0>(x, w, matrix, ahead, out);
        else tile_int<C, KIND, LEAST, GROUP, MR, FETCH>(x, w, matrix, ahead, out);
    }
};

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

// Target of a product: row m to `rows` + stride * (order[m], or m), added to what is there when `add`.
struct Out {
    float* rows;
    int64_t stride;
    const int32_t* order;
    bool add;
    float* row(int64_t m) const { return rows + (order ? order[m] : m) * stride; }
};

// Strips [s0, s0 + NS) for `rows` rows from m0 on, in a tile of MR.
template <class T, int MR, int NS, int FETCH, bool STAND = false>
static inline void multiply_tile(const Rows& x, const Matrix& matrix, int64_t s0, int64_t m0, int64_t ahead, const Out& out, int64_t rows = MR) {
    v16 sums[MR][NS];
    T::template run<MR, NS, FETCH, STAND>(x, matrix.data + s0 * matrix.strip_bytes(), matrix, ahead, sums);
    constexpr bool MAY_PAD = compiled_rows(T::CODES, MR - 1) == MR;
    for (int m = 0; m < MR; m++)
        for (int s = 0; s < NS && !(MAY_PAD && m >= rows); s++) write_sums(sums[m][s], matrix.n, (s0 + s) * STRIP, out.add, out.row(m0 + m));
}

// Strips [s0, s1) of floats for n_rows <= FEW_ROWS rows. They would wait for their own sums: several strips take turns.
template <class T>
static inline void multiply_few(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out) {
    with_rows<FEW_ROWS>(n_rows, [&](auto mr) {
        constexpr int MR = mr(), TURNS = MR == 1 ? 4 : 2;
        constexpr int FETCH = MR == 1 ? 0 : 1;  // what is fetched is the next strip
        for (; s0 + TURNS <= s1; s0 += TURNS) multiply_tile<T, MR, TURNS, FETCH, true>(x, matrix, s0, 0, TURNS * matrix.strip_bytes(), out);
        for (; s0 < s1; s0++) multiply_tile<T, MR, 1, EVERY<T::CODES, MR>, true>(x, matrix, s0, 0, AHEAD<T::CODES, MR>, out);
    });
}

// Strips [s0, s1) for all n_rows rows of x.
template <class T>
static inline void multiply_strips(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out) {
    constexpr bool FLOATS = is_float(T::CODES);
    constexpr int64_t FULL = FLOATS ? TILE_ROWS : MOST_ROWS;
    constexpr int STRIPS = FLOATS ? TILE_STRIPS : 1;
    if constexpr (FLOATS)
        if (x.stand) return multiply_few<T>(x, n_rows, matrix, s0, s1, out);
    const int64_t step = tile_rows(matrix, n_rows);
    const bool by_strips = LANES < 16 || n_rows > step;  // what is fetched is the next strip
    while (s0 < s1) {
        const int panel = n_rows > step && s1 - s0 >= STRIPS ? STRIPS : 1;
        for (int64_t m0 = 0; m0 < n_rows; m0 += step) {
            const int64_t rows = n_rows - m0 < step ? n_rows - m0 : step;
            const Rows at = rows_from(x, m0, matrix);
            if (by_strips && panel == STRIPS && rows == FULL && (m0 == 0 || SSE)) multiply_tile<T, FULL, STRIPS, 1>(at, matrix, s0, m0, panel * matrix.strip_bytes(), out);
            else if (!SSE && by_strips && panel == STRIPS && rows == FULL) multiply_tile<T, FULL, STRIPS, 0>(at, matrix, s0, m0, 0, out);
            else
                for (int s = 0; s < panel; s++)
                    with_rows<MOST_ROWS>(compiled_rows(T::CODES, rows), [&, rows](auto mr) {
                        constexpr int MR = mr();
                        if constexpr (compiled_rows(T::CODES, MR) == MR)
                            multiply_tile<T, MR, 1, EVERY<T::CODES, MR>>(at, matrix, s0 + s, m0, AHEAD<T::CODES, MR>, out, rows);
                    });
        }
        s0 += panel;
    }
}
