// Dot products of bfloat16 rows that are not packed: attention's queries and keys.
#pragma once
#include <type_traits>

#include "simd.h"

// acc + x.w over 32 bfloat16 pairs: lane i takes elements 2i and 2i + 1.
static inline v16 dot_step(v16 acc, const bf16* x, const bf16* w) {
#if defined(__AVX512BF16__)
    __m512bh a = (__m512bh)_mm512_loadu_si512(x), b = (__m512bh)_mm512_loadu_si512(w);
    acc.part[0] = (f32_part)_mm512_dpbf16_ps((__m512)acc.part[0], a, b);
    return acc;
#else
    return each_part([&](int i) {
        u32_part a, b;
        memcpy(&a, x + 2 * i * LANES, sizeof a);
        memcpy(&b, w + 2 * i * LANES, sizeof b);
        f32_part odd = fma((f32_part)(a & 0xffff0000u), (f32_part)(b & 0xffff0000u), acc.part[i]);
        return fma((f32_part)(a << 16), (f32_part)(b << 16), odd);
    });
#endif
}

// Rows of x and of w in one tile: as many accumulators as the registers hold. They do not touch the bits.
constexpr int X_TILE = LANES == 16 ? 6 : 3;
constexpr int W_TILE = LANES == 16 ? 4 : 2;

// sums[m][n] = x[m] . w[n] over k elements (k a multiple of 32). Every output has its own accumulator that walks k in
// order, so its bits do not depend on MR, NR or the neighbours.
template <int MR, int NR>
static inline void dot_tile(const bf16* const* x, const bf16* const* w, int64_t k, float (*sums)[NR]) {
    v16 acc[MR][NR] = {};
    for (int64_t i = 0; i < k; i += 32)
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++) acc[m][n] = dot_step(acc[m][n], x[m] + i, w[n] + i);
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) sums[m][n] = sum(acc[m][n]);
}

// The last n < X_TILE rows: a tile of exactly that many.
template <int MR, class Tile>
static inline void dot_rest(int64_t n, int64_t m, const Tile& tile) {
    if constexpr (MR > 0) {
        if (n == MR) tile(std::integral_constant<int, MR>{}, m);
        else dot_rest<MR - 1>(n, m, tile);
    }
}

// Calls emit(m, n, sum) for each of n_x rows x and NR rows w, of which the first is row n.
template <int NR, class Emit>
static inline void dot_rows(const bf16* const* x, int64_t n_x, const bf16* const* w, int64_t n, int64_t k, const Emit& emit) {
    auto tile = [&](auto rows, int64_t m) {
        constexpr int MR = decltype(rows)::value;
        float sums[MR][NR];
        dot_tile<MR, NR>(x + m, w, k, sums);
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < NR; j++) emit(m + i, n + j, sums[i][j]);
    };
    int64_t m = 0;
    for (; m + X_TILE <= n_x; m += X_TILE) tile(std::integral_constant<int, X_TILE>{}, m);
    dot_rest<X_TILE - 1>(n_x - m, m, tile);
}

template <class Emit>
static inline void dot_block(const bf16* const* x, int64_t n_x, const bf16* const* w, int64_t n_w, int64_t k, const Emit& emit) {
    int64_t n = 0;
    for (; n + W_TILE <= n_w; n += W_TILE) dot_rows<W_TILE>(x, n_x, w + n, n, k, emit);
    for (; n < n_w; n++) dot_rows<1>(x, n_x, w + n, n, k, emit);
}
