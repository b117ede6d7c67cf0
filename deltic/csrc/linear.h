// Dot products of bfloat16 rows, in the one order every kernel of the package uses.
#pragma once
#include <type_traits>

#include "simd.h"

// Elements of K summed in vector lanes before the lanes are added to the output. A constant of the arithmetic: changing
// it changes bits.
constexpr int64_t K_BLOCK = 2048;

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

// sums[m][n] = x[m] . w[n] over k elements (k a multiple of 32, at most K_BLOCK). Every output has its own accumulator
// that walks k in order, so its bits do not depend on MR, NR or the neighbours.
// With FETCH, what lies `ahead` elements beyond each row of w (the rows of the next tile) is fetched into the cache.
template <int MR, int NR, bool FETCH>
static inline void dot_tile(const bf16* const* x, const bf16* const* w, int64_t k, int64_t ahead, float (*sums)[NR]) {
    v16 acc[MR][NR] = {};
    for (int64_t i = 0; i < k; i += 32) {
        if constexpr (FETCH)
            for (int n = 0; n < NR; n++) __builtin_prefetch(w[n] + ahead + i);
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++) acc[m][n] = dot_step(acc[m][n], x[m] + i, w[n] + i);
    }
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

// Calls emit(m, n, sum) for each of n_x rows x and NR rows w over one K block.
template <int NR, class Emit>
static inline void dot_rows(const bf16* const* x, int64_t n_x, const bf16* const* w, int64_t n, int64_t k, int64_t ahead,
                            const Emit& emit) {
    auto tile = [&](auto rows, int64_t m) {
        constexpr int MR = decltype(rows)::value;
        float sums[MR][NR];
        if (ahead && m == 0) dot_tile<MR, NR, true>(x + m, w, k, ahead, sums);
        else dot_tile<MR, NR, false>(x + m, w, k, 0, sums);
        for (int i = 0; i < MR; i++)
            for (int j = 0; j < NR; j++) emit(m + i, n + j, sums[i][j]);
    };
    int64_t m = 0;
    for (; m + X_TILE <= n_x; m += X_TILE) tile(std::integral_constant<int, X_TILE>{}, m);
    dot_rest<X_TILE - 1>(n_x - m, m, tile);
}

template <class Emit>
static inline void dot_block(const bf16* const* x, int64_t n_x, const bf16* const* w, int64_t n_w, int64_t k, int64_t w_stride,
                             const Emit& emit) {
    int64_t n = 0;
    for (; n + W_TILE <= n_w; n += W_TILE) dot_rows<W_TILE>(x, n_x, w + n, n, k, W_TILE * w_stride, emit);
    for (; n < n_w; n++) dot_rows<1>(x, n_x, w + n, n, k, 0, emit);
}

constexpr int64_t W_BLOCK = 32;  // weight rows of one task: W_BLOCK * K_BLOCK * 2 bytes stay in the L2 cache
constexpr int64_t X_BLOCK = 96;  // input rows between two passes over the weight block

// out(m)[0 : n_w] = (+= when `add`) x[m] . w for n_x <= X_BLOCK rows given by pointer and n_w <= W_BLOCK rows of w.
template <class Out>
static inline void multiply_block(const bf16* const* x, int64_t n_x, const bf16* w, int64_t n_w, int64_t k_size, bool add, const Out& out) {
    const bf16* x_at[X_BLOCK];
    const bf16* w_at[W_BLOCK];
    for (int64_t k0 = 0; k0 < k_size; k0 += K_BLOCK) {
        int64_t k = k_size - k0 < K_BLOCK ? k_size - k0 : K_BLOCK;
        for (int64_t m = 0; m < n_x; m++) x_at[m] = x[m] + k0;
        for (int64_t n = 0; n < n_w; n++) w_at[n] = w + n * k_size + k0;
        bool accumulate = add || k0 > 0;
        dot_block(x_at, n_x, w_at, n_w, k, k_size, [&](int64_t m, int64_t n, float value) {
            float* o = out(m) + n;
            *o = accumulate ? *o + value : value;
        });
    }
}
