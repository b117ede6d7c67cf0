// The multiplication with formats whose codes have 2, 3, 5 or 6 bits, or a table.
#include "multiply.h"

void multiply_others(const Rows& x, int64_t n_rows, const Matrix& w, int64_t s0, int64_t s1, const Out& out) {
    auto with = [&](auto tiles) { multiply_with<decltype(tiles)>(x, n_rows, w, s0, s1, out); };
    const bool least = has_least(w.scales());
    switch (w.codes()) {
        case Codes::UINT5:
            if (w.scales() == Scales::K_LEAST) return with(Tiles<Codes::UINT5, Scales::K_LEAST, true, 32>{});
            return least ? with(Tiles<Codes::UINT5, Scales::NONE, true, 32>{}) : with(Tiles<Codes::UINT5, Scales::NONE, false, 32>{});
        case Codes::UINT6: return with(Tiles<Codes::UINT6, Scales::K, false, 16>{});
        case Codes::UINT2: return with(Tiles<Codes::UINT2, Scales::K_LEAST, true, 16>{});
        case Codes::UINT3: return with(Tiles<Codes::UINT3, Scales::K, false, 16>{});
        case Codes::IQ4: return w.scales() == Scales::K ? with(Tiles<Codes::IQ4, Scales::K, false, 32>{}) : with(Tiles<Codes::IQ4, Scales::NONE, false, 32>{});
        case Codes::E2M1: return w.group == 16 ? with(Tiles<Codes::E2M1, Scales::NONE, false, 16>{}) : with(Tiles<Codes::E2M1, Scales::NONE, false, 32>{});
        default: __builtin_unreachable();  // linear.cpp has the others
    }
}
