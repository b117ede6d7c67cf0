// The multiplication of matrix.h on Intel's matrix unit, bfloat16 only: a strip is already the tile that the unit reads.
//
// A tile multiply adds, for up to 16 rows of x and 16 outputs, 32 elements of K to float32 sums. Rows do not look at one
// another, and K runs in order, so the bits of an output depend neither on the number of rows nor on the neighbours; one row
// takes the same path as many. Rows of x are read as they stand, [n_rows, K].
#pragma once

#if defined(__AMX_BF16__)
#include "matrix.h"

namespace amx {

struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// Sums are tiles 0 to 3 (rows x strips), x is in 4 and 5, w in 6 and 7.
static inline void configure(int64_t first, int64_t second) {
    Shapes shapes;
    const uint8_t a = (uint8_t)first, b = (uint8_t)(second ? second : 1);
    const uint8_t rows[8] = {a, a, b, b, a, b, 16, 16};
    memcpy(shapes.rows, rows, sizeof rows);
    _tile_loadconfig(&shapes);
}

// The sums of up to 32 rows and one or two strips; sums [2][2][16 * 16].
template <bool ROWS, bool STRIPS>
static inline void tile(const uint8_t* x, int64_t stride, const uint8_t* w, int64_t strip, int64_t k, float (*sums)[2][256]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t j = 0; j < k / 32; j++) {
        _tile_loadd(6, w + j * 1024, 64);
        if constexpr (STRIPS) _tile_loadd(7, w + strip + j * 1024, 64);
        _tile_loadd(4, x + j * 64, stride);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (STRIPS) _tile_dpbf16ps(1, 4, 7);
        if constexpr (ROWS) {
            _tile_loadd(5, x + 16 * stride + j * 64, stride);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (STRIPS) _tile_dpbf16ps(3, 5, 7);
        } else {
            for (int64_t i = 0; i < 1024; i += 64) {  // a few rows wait for memory: fetch what comes
                __builtin_prefetch(w + j * 1024 + i + FAR, 0, 2);
                if constexpr (STRIPS) __builtin_prefetch(w + strip + j * 1024 + i + FAR, 0, 2);
            }
        }
    }
    _tile_stored(0, sums[0][0], 64);
    if constexpr (STRIPS) _tile_stored(1, sums[0][1], 64);
    if constexpr (ROWS) _tile_stored(2, sums[1][0], 64);
    if constexpr (ROWS && STRIPS) _tile_stored(3, sums[1][1], 64);
}

// Strips [s0, s1) for all n_rows rows of x.
static inline void multiply(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out) {
    const int64_t stride = matrix.k * 2, strip = matrix.strip_bytes();
    alignas(64) float sums[2][2][256];
    int64_t configured = 0;
    for (int64_t s = s0; s < s1; s += 2)
        for (int64_t m0 = 0; m0 < n_rows; m0 += 32) {
            const int64_t n = n_rows - m0 < 32 ? n_rows - m0 : 32, first = n < 16 ? n : 16;
            const uint8_t *rows = (const uint8_t*)x.words + m0 * stride, *w = matrix.data + s * strip;
            const bool two = s + 1 < s1;
            if (n != configured) configure(first, n - first);
            configured = n;
            if (n > 16 && two) tile<true, true>(rows, stride, w, strip, matrix.k, sums);
            else if (n > 16) tile<true, false>(rows, stride, w, strip, matrix.k, sums);
            else if (two) tile<false, true>(rows, stride, w, strip, matrix.k, sums);
            else tile<false, false>(rows, stride, w, strip, matrix.k, sums);
            for (int64_t m = 0; m < n; m++)
                for (int64_t i = 0; i < (two ? 2 : 1); i++) write_sums(load(sums[m / 16][i] + m % 16 * 16), matrix.n, (s + i) * STRIP, out.add, out.row(m0 + m));
        }
    _tile_release();
}

}  // namespace amx
#endif
