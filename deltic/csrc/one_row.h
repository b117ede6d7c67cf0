// One row and a matrix of codebooks, in registers, with AVX-512 VBMI. A store takes as long as two multiplications.
//
// A unit's entries are looked up before the unit before it is multiplied: from its first load to its sum it takes 80 cycles, and the
// instructions of three units are all that wait in a core (Zen 5), so 20 to 36 cycles went by for each, of 12 that they need.
#pragma once
#include "matrix.h"

#if defined(__AVX512VBMI__)

// With `used` in their registers by then.
template <int N>
static inline __attribute__((always_inline)) void in_registers(__m512i (&used)[N]) {
#pragma GCC unroll 4
    for (__m512i& one : used) asm volatile("" : "+v"(one));
}

// A format as Tiles (matrix.h). GROUP: 16 or 32.
template <Codes C, int GROUP>
struct OneRow {
    static constexpr Codes CODES = C;
    template <int MR, int NS, int FETCH, bool STAND>
    static inline void run(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16 (&out)[MR][NS]) {
        if (FETCHES_ALL) return run<true>(x, w, matrix, ahead, out[0][0]);
        run<false>(x, w, matrix, ahead, out[0][0]);
    }

    template <bool STREAM>
    static inline void run(const Rows& x, const uint8_t* w, const Matrix& matrix, int64_t ahead, v16& out) {
        constexpr int GROUPS = UNIT / GROUP;
        const uint32_t* words = x.words;
        const float* x_scale = x.scale;
        const int32_t* start = x.start;
        v16 total = {};
        constexpr int64_t A_UNIT = unit_bytes(C) + 16 * GROUPS + 4;  // with a share of the scales
        const uint8_t* line = w + 2 * NEAR;
        Looked<C> here = look<C>(w);
        for (int64_t k0 = 0; k0 < matrix.k; k0 += BLOCK) {
            const int64_t n_k = matrix.k - k0 < BLOCK ? matrix.k - k0 : BLOCK;
            const uint8_t *scales_at = w + n_k / UNIT * unit_bytes(C), *next = scales_at + matrix.scale_bytes(n_k);
            const BlockScales<Scales::K_EIGHTH> of_block(scales_at);
            for (int64_t i = 0; i < n_k / UNIT; i++) {
                if constexpr (STREAM) {
#pragma GCC unroll 4
                    for (int64_t v = 0; v < A_UNIT; v += 64) __builtin_prefetch(line + v, 0, 3);
                    line += A_UNIT;
                } else __builtin_prefetch(w + ahead, 0, 2);
                // Behind the last unit of all nothing need be readable: it is looked up again.
                const uint8_t* following = (i + 1) * UNIT < n_k ? w + unit_bytes(C) : k0 + n_k < matrix.k ? next : w;
                Looked<C> there = look<C>(following);
                in_registers(there.halves);
                in_registers(here.halves);
                w16 codes[8];
                expand<C, true>(here, codes);
#pragma GCC unroll 2
                for (int g = 0; g < GROUPS; g++) {
                    v16i sum = splat_int(C == Codes::IQ1 ? (start[g] >> 7) * IQ1_EXCESS : start[g]), other = splat_int(0);
                    asm("" : "+v"(sum.part[0]));  // else Clang makes a float of it first
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        sum = dot4(sum, codes[4 * g + j], words[4 * g + j]);
                        if constexpr (GROUPS == 1) other = dot4(other, codes[4 + j], words[4 + j]);
                    }
                    if constexpr (GROUPS == 1) sum.part[0] += other.part[0];
                    const v16 value = to_float(sum) * of_block.scale(i * GROUPS + g);
                    total = fma(each_part([&](int) { return everywhere(x_scale[g]); }), value, total);
                }
                words += 8, x_scale += GROUPS, start += GROUPS;
                w = following, here = there;
            }
        }
        out = total;
    }
};

#endif
