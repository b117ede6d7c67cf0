// The multiplication with formats whose codes have 2, 3, 5 or 6 bits, a table or a codebook.
#include "multiply.h"

void multiply_others(const Rows& x, int64_t n_rows, const Matrix& w, int64_t s0, int64_t s1, const Out& out) {
    auto with = [&](auto tiles) { multiply_with<decltype(tiles)>(x, n_rows, w, s0, s1, out); };
    const bool least = has_least(w.scales());
    switch (w.codes()) {
        case Codes::UINT5:
            if (w.scales() == Scales::K_LEAST) return with(Tiles<Codes::UINT5, Scales::K_LEAST, true, 32>{});
            return least ? with(Tiles<Codes::UINT5, Scales::NONE, true, 32>{}) : with(Tiles<Codes::UINT5, Scales::NONE, false, 32>{});
        case Codes::UINT6: return with(Tiles<Codes::UINT6, Scales::K, false, 16>{});
        case Codes::UINT2:
            if (w.scales() == Scales::K_LEAST) return with(Tiles<Codes::UINT2, Scales::K_LEAST, true, 16>{});
            return with(Tiles<Codes::UINT2>{});
        case Codes::UINT3: return with(Tiles<Codes::UINT3, Scales::K, false, 16>{});
        case Codes::IQ4: return w.scales() == Scales::K ? with(Tiles<Codes::IQ4, Scales::K, false, 32>{}) : with(Tiles<Codes::IQ4, Scales::NONE, false, 32>{});
        case Codes::E2M1: return w.group == 16 ? with(Tiles<Codes::E2M1, Scales::NONE, false, 16>{}) : with(Tiles<Codes::E2M1, Scales::NONE, false, 32>{});
        case Codes::E4M3:
        case Codes::BF16: __builtin_unreachable();  // linear.cpp has the others
        default: break;
    }
#if defined(__AVX512VBMI__)
    // One row: in registers. A store takes as long as two multiplications.
    auto one = [&](auto tiles) { multiply_one<decltype(tiles)>(x, w, s0, s1, out); };
    if (n_rows == 1) switch (w.codes()) {
        case Codes::IQ1: return w.group == 16 ? one(Tiles<Codes::IQ1, Scales::K_EIGHTH, false, 16>{}) : one(Tiles<Codes::IQ1, Scales::K_EIGHTH, false, 32>{});
        case Codes::IQ2_XXS: return one(Tiles<Codes::IQ2_XXS, Scales::K_EIGHTH, false, 32>{});
        case Codes::IQ2_XS: return one(Tiles<Codes::IQ2_XS, Scales::K_EIGHTH, false, 16>{});
        case Codes::IQ2_S: return one(Tiles<Codes::IQ2_S, Scales::K_EIGHTH, false, 16>{});
        case Codes::IQ3_XXS: return one(Tiles<Codes::IQ3_XXS, Scales::K_EIGHTH, false, 32>{});
        case Codes::IQ3_S: return one(Tiles<Codes::IQ3_S, Scales::K_EIGHTH, false, 32>{});
        default: return one(Tiles<Codes::SIGN, Scales::F16>{});
    }
#endif
    if (w.codes() == Codes::SIGN) return with(Tiles<Codes::BOOK>{});
    if (w.group == 16) return with(Tiles<Codes::BOOK, Scales::K_EIGHTH, false, 16>{});
    return with(Tiles<Codes::BOOK, Scales::K_EIGHTH, false, 32>{});
}
