// The multiplication with formats whose codes have 2, 3, 5 or 6 bits, a table or a codebook.
#include "multiply.h"
#include "one_row.h"

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
    auto one = [&](auto tiles) {
        for (int64_t s = s0; s < s1; s++) multiply_tile<decltype(tiles), 1, 1, EVERY<Codes::SIGN, 1>>(x, w, s, 0, NEAR, out);
    };
    if (n_rows == 1) switch (w.codes()) {
        case Codes::IQ1: return w.group == 16 ? one(OneRow<Codes::IQ1, 16>{}) : one(OneRow<Codes::IQ1, 32>{});
        case Codes::IQ2_XXS: return one(OneRow<Codes::IQ2_XXS, 32>{});
        case Codes::IQ2_XS: return one(OneRow<Codes::IQ2_XS, 16>{});
        case Codes::IQ2_S: return one(OneRow<Codes::IQ2_S, 16>{});
        case Codes::IQ3_XXS: return one(OneRow<Codes::IQ3_XXS, 32>{});
        case Codes::IQ3_S: return one(OneRow<Codes::IQ3_S, 32>{});
        default: return one(Tiles<Codes::SIGN, Scales::F16>{});
    }
#endif
    if (w.codes() == Codes::SIGN) return with(Tiles<Codes::BOOK>{});
    if (w.group == 16) return with(Tiles<Codes::BOOK, Scales::K_EIGHTH, false, 16>{});
    return with(Tiles<Codes::BOOK, Scales::K_EIGHTH, false, 32>{});
}
