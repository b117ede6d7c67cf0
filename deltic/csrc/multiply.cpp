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
    switch (w.codes()) {
#if defined(__AMX_BF16__)
        case Codes::BF16: return amx::multiply(x, n_rows, w, s0, s1, out);
#else
        case Codes::BF16: return with(Tiles<Codes::BF16>{});
#endif
        case Codes::E4M3: return with(Tiles<Codes::E4M3>{});
        case Codes::INT8: return least ? with(Tiles<Codes::INT8, true>{}) : with(Tiles<Codes::INT8>{});
        case Codes::UINT4: return least ? with(Tiles<Codes::UINT4, true>{}) : with(Tiles<Codes::UINT4>{});
        case Codes::UINT5: return least ? with(Tiles<Codes::UINT5, true>{}) : with(Tiles<Codes::UINT5>{});
        case Codes::UINT6: return with(Tiles<Codes::UINT6, false, true>{});
        case Codes::UINT2: return with(Tiles<Codes::UINT2, true, true>{});
        case Codes::UINT3: return with(Tiles<Codes::UINT3, false, true>{});
        case Codes::IQ4: return with(Tiles<Codes::IQ4>{});
        case Codes::E2M1: return w.group == 16 ? with(Tiles<Codes::E2M1, false, true>{}) : with(Tiles<Codes::E2M1>{});
    }
}
