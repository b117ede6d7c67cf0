// The multiplication by format: the inner loops of matrix.h and amx.h are compiled here, once.
#include "multiply.h"
#include "amx.h"

void multiply(const Rows& x, int64_t n_rows, const Matrix& w, int64_t s0, int64_t s1, const Out& out) {
    auto with = [&](auto tiles) {
#if defined(__AMX_BF16__)
        using T = decltype(tiles);
        if constexpr (!T::HALF_UNITS)
            if (x.stand) return amx::multiply_groups<T::CODES, T::HAS_LEAST>(x, n_rows, w, s0, s1, out);
#endif
        multiply_strips<decltype(tiles)>(x, n_rows, w, s0, s1, out);
    };
    const bool least = has_least(w.scales());
    auto of_group = [&](auto codes) {
        if (w.group == 32) return least ? with(Tiles<codes(), Scales::NONE, true, 32>{}) : with(Tiles<codes(), Scales::NONE, false, 32>{});
        return least ? with(Tiles<codes(), Scales::NONE, true>{}) : with(Tiles<codes()>{});
    };
    switch (w.codes()) {
#if defined(__AMX_BF16__)
        case Codes::BF16: return amx::multiply(x, n_rows, w, s0, s1, out);
#else
        case Codes::BF16: return with(Tiles<Codes::BF16>{});
#endif
        case Codes::E4M3: return with(Tiles<Codes::E4M3>{});
        case Codes::INT8: return of_group(std::integral_constant<Codes, Codes::INT8>{});
        case Codes::UINT4:
            if (w.scales() == Scales::K_LEAST) return with(Tiles<Codes::UINT4, Scales::K_LEAST, true, 32>{});
            return of_group(std::integral_constant<Codes, Codes::UINT4>{});
        case Codes::UINT5:
            if (w.scales() == Scales::K_LEAST) return with(Tiles<Codes::UINT5, Scales::K_LEAST, true, 32>{});
            return least ? with(Tiles<Codes::UINT5, Scales::NONE, true, 32>{}) : with(Tiles<Codes::UINT5, Scales::NONE, false, 32>{});
        case Codes::UINT6: return with(Tiles<Codes::UINT6, Scales::K, false, 16>{});
        case Codes::UINT2: return with(Tiles<Codes::UINT2, Scales::K_LEAST, true, 16>{});
        case Codes::UINT3: return with(Tiles<Codes::UINT3, Scales::K, false, 16>{});
        case Codes::IQ4: return w.scales() == Scales::K ? with(Tiles<Codes::IQ4, Scales::K, false, 32>{}) : with(Tiles<Codes::IQ4, Scales::NONE, false, 32>{});
        case Codes::E2M1: return w.group == 16 ? with(Tiles<Codes::E2M1, Scales::NONE, false, 16>{}) : with(Tiles<Codes::E2M1, Scales::NONE, false, 32>{});
    }
}
