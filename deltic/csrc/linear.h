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
    return (v16)_mm512_dpbf16_ps((__m512)acc, a, b);
#else
    u16 a, b;
    memcpy(&a, x, sizeof a);
    memcpy(&b, w, sizeof b);
    acc = fma((v16)(a & 0xffff0000u), (v16)(b & 0xffff0000u), acc);
    return fma((v16)(a << 16), (v16)(b << 16), acc);
#endif
}

// sums[m][n] = x[m] . w[n] over k elements (k a multiple of 32, at most K_BLOCK). Every output has its own accumulator
// that walks k in order, so its bits do not depend on MR, NR or the neighbours.
template <int MR, int NR>
static inline void dot_tile(const bf16* const* x, const bf16* const* w, int64_t k, float (*sums)[NR]) {
    v16 acc[MR][NR] = {};
    for (int64_t i = 0; i < k; i += 32)
        for (int m = 0; m < MR; m++)
            for (int n = 0; n < NR; n++) acc[m][n] = dot_step(acc[m][n], x[m] + i, w[n] + i);
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) sums[m][n] = sum(acc[m][n]);
}

// Calls emit(m, n, sum) for each of n_x rows x and n_w rows w over one K block: tiles of 6 x 4, remainders smaller.
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
    for (; m + 6 <= n_x; m += 6) tile(std::integral_constant<int, 6>{}, m);
    switch (n_x - m) {
        case 1: tile(std::integral_constant<int, 1>{}, m); break;
        case 2: tile(std::integral_constant<int, 2>{}, m); break;
        case 3: tile(std::integral_constant<int, 3>{}, m); break;
        case 4: tile(std::integral_constant<int, 4>{}, m); break;
        case 5: tile(std::integral_constant<int, 5>{}, m); break;
    }
}

template <class Emit>
static inline void dot_block(const bf16* const* x, int64_t n_x, const bf16* const* w, int64_t n_w, int64_t k, const Emit& emit) {
    int64_t n = 0;
    for (; n + 4 <= n_w; n += 4) dot_rows<4>(x, n_x, w + n, n, k, emit);
    for (; n < n_w; n++) dot_rows<1>(x, n_x, w + n, n, k, emit);
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
        dot_block(x_at, n_x, w_at, n_w, k, [&](int64_t m, int64_t n, float value) {
            float* o = out(m) + n;
            *o = accumulate ? *o + value : value;
        });
    }
}
