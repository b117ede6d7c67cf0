// linear: out[m, n] = (out[m, n] +) sum_k x[m, k] w[n, k]: rows packed once, then strips of weights shared among threads.
#include "kernel.h"
#include "multiply.h"
#include "pool.h"

// With floats and with integers in plain groups; the other formats are in multiply.cpp.
void multiply(const Rows& x, int64_t n_rows, const Matrix& w, int64_t s0, int64_t s1, const Out& out) {
    auto with = [&](auto tiles) { multiply_with<decltype(tiles)>(x, n_rows, w, s0, s1, out); };
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
        default: return multiply_others(x, n_rows, w, s0, s1, out);
    }
}

// x bf16 [M, K], w (packed: data, format, N, K, group), out f32 [M, stride], its columns from the first of w's rows on, stride,
// workspace u8 [M * row_bytes], M (counted), add (out is the residual), packed (the workspace holds x as w's product reads it)
KERNEL(deltic_linear, const bf16* x, Matrix w, float* out, int64_t stride, uint8_t* workspace, Counted n_rows, bool add, bool packed) {
    if (n_rows == 0) return;
    Rows rows = place_rows(workspace, n_rows, w);
    if (is_float(w.codes()) && rows.stand) {
        rows.words = (const uint32_t*)x;
    } else if (!packed) {
        int64_t step = tile_rows(w, n_rows), n_tiles = (n_rows + step - 1) / step;
        parallel_for(n_tiles, [&](int64_t i, int) {
            int64_t m0 = i * step;
            pack_tile(rows, m0, n_rows - m0 < step ? n_rows - m0 : step, w, [&](int64_t m) { return x + m * w.k; });
        });
    }
    const Out to{out, stride, nullptr, add};
    int64_t n_strips = w.n_strips(), share = strips_per_task(n_strips, pool_size());
    parallel_for((n_strips + share - 1) / share, [&](int64_t i, int) {
        int64_t s1 = (i + 1) * share < n_strips ? (i + 1) * share : n_strips;
        multiply(rows, n_rows, w, i * share, s1, to);
    });
}
