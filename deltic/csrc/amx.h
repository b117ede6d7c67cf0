// The multiplication of matrix.h on Intel's matrix unit: the vectors of a strip are the rows of the tile that the unit reads.
//
// A tile multiply adds, for up to 16 rows of x and 16 outputs, 32 products of bfloat16 or 64 of bytes. Rows do not look at one
// another, and K runs in order, so the bits of an output depend neither on the number of rows nor on the neighbours. Floats take
// this way for one row too; integers, whose sums are exact and have the bits of matrix.h, from 16 rows on. Rows of x are read as
// they stand, [n_rows, K].
#pragma once

#if defined(__AMX_BF16__)
#include "matrix.h"

namespace amx {

struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// Sums are tiles 0 to 3 (rows x strips), x is in 4 and 5, w in 6 and 7. x_bytes: of a row of x in a tile.
static inline void configure(int64_t first, int64_t second, int64_t x_bytes) {
    Shapes shapes;
    const uint8_t a = (uint8_t)first, b = (uint8_t)(second ? second : 1), words = (uint8_t)(x_bytes / 4);
    const uint8_t rows[8] = {a, a, b, b, a, b, words, words};
    memcpy(shapes.rows, rows, sizeof rows);
    shapes.row_bytes[4] = shapes.row_bytes[5] = (uint16_t)x_bytes;
    _tile_loadconfig(&shapes);
}

// The sums of up to 32 rows and one or two strips over n_steps tiles: int32 or float32 [2][2][16 * 16]. AHEAD: bytes between what is
// multiplied and what is fetched of w for few rows; 0: nothing is.
template <bool FLOATS, bool ROWS, bool STRIPS, int64_t AHEAD, class Sum>
static inline void tile(const uint8_t* x, int64_t stride, int64_t x_bytes, const uint8_t* w, const uint8_t* w1, int64_t n_steps, Sum (*sums)[2][256]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < n_steps; j++) {
        const int64_t at = j * x_bytes * 16;
        _tile_loadd(6, w + at, 64);
        if constexpr (STRIPS) _tile_loadd(7, w1 + at, 64);
        _tile_loadd(4, x + j * x_bytes, stride);
        if constexpr (FLOATS) _tile_dpbf16ps(0, 4, 6);
        else _tile_dpbsud(0, 4, 6);
        if constexpr (STRIPS && FLOATS) _tile_dpbf16ps(1, 4, 7);
        else if constexpr (STRIPS) _tile_dpbsud(1, 4, 7);
        if constexpr (ROWS) {
            _tile_loadd(5, x + 16 * stride + j * x_bytes, stride);
            if constexpr (FLOATS) _tile_dpbf16ps(2, 5, 6);
            else _tile_dpbsud(2, 5, 6);
            if constexpr (STRIPS && FLOATS) _tile_dpbf16ps(3, 5, 7);
            else if constexpr (STRIPS) _tile_dpbsud(3, 5, 7);
        } else if constexpr (AHEAD > 0) {
            for (int64_t i = 0; i < 1024; i += 64) {  // a few rows wait for memory: fetch what comes
                __builtin_prefetch(w + at + i + AHEAD, 0, 2);
                if constexpr (STRIPS) __builtin_prefetch(w1 + at + i + AHEAD, 0, 2);
            }
        }
    }
    _tile_stored(0, sums[0][0], 64);
    if constexpr (STRIPS) _tile_stored(1, sums[0][1], 64);
    if constexpr (ROWS) _tile_stored(2, sums[1][0], 64);
    if constexpr (ROWS && STRIPS) _tile_stored(3, sums[1][1], 64);
}

template <bool FLOATS, int64_t AHEAD, class Sum>
static inline void tile(int64_t n, bool two, const uint8_t* x, int64_t stride, int64_t x_bytes, const uint8_t* w, const uint8_t* w1, int64_t n_steps, Sum (*sums)[2][256]) {
    if (n > 16 && two) tile<FLOATS, true, true, AHEAD>(x, stride, x_bytes, w, w1, n_steps, sums);
    else if (n > 16) tile<FLOATS, true, false, AHEAD>(x, stride, x_bytes, w, w1, n_steps, sums);
    else if (two) tile<FLOATS, false, true, AHEAD>(x, stride, x_bytes, w, w1, n_steps, sums);
    else tile<FLOATS, false, false, AHEAD>(x, stride, x_bytes, w, w1, n_steps, sums);
}

// Strips [s0, s1) of bfloat16 for all n_rows rows of x. K is a multiple of 32, or of 16 where tiles are half as wide.
static inline void multiply(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out) {
    const int64_t stride = matrix.k * 2, strip = matrix.strip_bytes();
    const int64_t x_bytes = matrix.k % 32 ? 32 : 64;
    alignas(64) float sums[2][2][256];
    int64_t configured = 0;
    for (int64_t s = s0; s < s1; s += 2)
        for (int64_t m0 = 0; m0 < n_rows; m0 += 32) {
            const int64_t n = n_rows - m0 < 32 ? n_rows - m0 : 32, first = n < 16 ? n : 16;
            const uint8_t *rows = (const uint8_t*)x.words + m0 * stride, *w = matrix.data + s * strip;
            const bool two = s + 1 < s1;
            if (n != configured) configure(first, n - first, x_bytes);
            configured = n;
            tile<true, FAR>(n, two, rows, stride, x_bytes, w, w + strip, stride / x_bytes, sums);
            for (int64_t m = 0; m < n; m++)
                for (int64_t i = 0; i < (two ? 2 : 1); i++) write_sums(load(sums[m / 16][i] + m % 16 * 16), matrix.n, (s + i) * STRIP, out.add, out.row(m0 + m));
        }
    _tile_release();
}

constexpr int64_t SLAB = 128;     // rows whose sums stay near while K is walked
constexpr int64_t CHUNK = 256;    // elements of K that are decoded at once, at most

// A unit's codes as tiles read them: bytes of 32 elements, or pairs of bfloat16.
template <Codes C>
static inline void decode(const uint8_t* unit, uint8_t* to) {
    auto put = [&](int64_t vector, const w16& words) { memcpy(to + vector * 64, words.part, 64); };
    w16 first, second;
    if constexpr (C == Codes::E4M3) {
        for (int i = 0; i < 8; i++) {
            load_e4m3_pairs(unit + i * 64, first, second);
            put(2 * i, first), put(2 * i + 1, second);
        }
    } else {
        for (int i = 0; i < 4; i++) {
            load_codes<C>(unit, i, first, second);
            put(2 * i, first), put(2 * i + 1, second);
        }
    }
}

// The same of any other codes, a group after the other, as in tile_int and tile_e4m3 of matrix.h.
template <Codes C, bool LEAST>
static inline void multiply_groups(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out) {
    constexpr bool FLOATS = C == Codes::E4M3, BIASED = !FLOATS && too_large(C, LEAST) != 0;
    constexpr int64_t WIDTH = FLOATS ? 2 : 1;  // bytes of an element of x, and of w once it is decoded
    const int64_t k = matrix.k, group = matrix.group, block = matrix.block(), strip = matrix.strip_bytes(), groups = matrix.n_groups();
    const int64_t stride = k * WIDTH, x_bytes = FLOATS || (k % 64 == 0 && group % 64 == 0) ? 64 : 32;
    alignas(64) float sums[2][SLAB * 16];
    alignas(64) uint8_t codes[2][CHUNK * 16 * WIDTH];
    alignas(64) std::conditional_t<FLOATS, float, int32_t> acc[2][2][256];
    int64_t configured = 0;
    for (int64_t s = s0; s < s1; s += 2)
        for (int64_t r0 = 0; r0 < n_rows; r0 += SLAB) {
            const int64_t n_slab = n_rows - r0 < SLAB ? n_rows - r0 : SLAB, n_strips = s + 1 < s1 ? 2 : 1;
            const uint8_t *w = matrix.data + s * strip, *end = w + strip;
            memset(sums, 0, sizeof sums);
            for (int64_t k0 = 0; k0 < k; k0 += block) {
                const int64_t n_k = k - k0 < block ? k - k0 : block;
                v16 scale[2][MOST_GROUPS], least[2][MOST_GROUPS];
                for (int64_t i = 0; i < n_strips; i++)
                    read_scales(matrix.scales(), w + i * strip + matrix.code_bytes(n_k), end + i * strip, (n_k + group - 1) / group, scale[i], least[i]);
                if constexpr (LEAST && BIASED)
                    for (int64_t i = 0; i < n_strips; i++)
                        for (int64_t j = 0; j < (n_k + group - 1) / group; j++) least[i][j] = least[i][j] * splat(1.0f / start_factor(C, LEAST));
                for (int64_t a = 0, stop; a < n_k; a = stop) {
                    const int64_t in_block = a / group, g = (k0 + a) / group;
                    stop = (in_block + 1) * group < n_k ? (in_block + 1) * group : n_k;
                    if (stop - a > CHUNK) stop = a + CHUNK;
                    const uint8_t* at[2];
                    for (int64_t i = 0; i < n_strips; i++) {
                        at[i] = w + i * strip + matrix.code_bytes(a);
                        if constexpr (C == Codes::BOOK) {
                            unpack_units(matrix.codes(), at[i], (stop - a) / UNIT, codes[i]);
                            at[i] = codes[i];
                        } else if constexpr (C != Codes::INT8) {
                            for (int64_t u = 0; u < (stop - a) / UNIT; u++) decode<C>(at[i] + u * 64 * bits_of(C), codes[i] + u * UNIT * 16 * WIDTH);
                            at[i] = codes[i];
                        }
                    }
                    for (int64_t m0 = 0; m0 < n_slab; m0 += 32) {
                        const int64_t n = n_slab - m0 < 32 ? n_slab - m0 : 32, first = n < 16 ? n : 16;
                        if (n != configured) configure(first, n - first, x_bytes);
                        configured = n;
                        const uint8_t* rows = (const uint8_t*)x.words + (r0 + m0) * stride + (k0 + a) * WIDTH;
                        tile<FLOATS, 0>(n, n_strips == 2, rows, stride, x_bytes, at[0], at[1], (stop - a) * WIDTH / x_bytes, acc);
                        for (int64_t m = 0; m < n; m++) {
                            const int64_t row = (r0 + m0 + m) * groups + g;
                            for (int64_t i = 0; i < n_strips; i++) {
                                float* to = sums[i] + (m0 + m) * 16;
                                if constexpr (FLOATS) {
                                    store(to, fma(scale[i][in_block], load(acc[m / 16][i] + m % 16 * 16), load(to)));
                                } else {
                                    v16i whole;
                                    memcpy(&whole, acc[m / 16][i] + m % 16 * 16, 64);
                                    if constexpr (BIASED) whole.part[0] += x.start[row];
                                    v16 value = to_float(whole) * scale[i][in_block];
                                    if constexpr (LEAST) value = fma(splat((float)x.start[row]), least[i][in_block], value);
                                    store(to, fma(splat(x.scale[row]), value, load(to)));
                                }
                            }
                        }
                    }
                }
                w += matrix.code_bytes(n_k) + matrix.scale_bytes(n_k);
            }
            for (int64_t m = 0; m < n_slab; m++)
                for (int64_t i = 0; i < n_strips; i++) write_sums(load(sums[i] + m * 16), matrix.n, (s + i) * STRIP, out.add, out.row(r0 + m));
        }
    _tile_release();
}

}  // namespace amx
#endif
