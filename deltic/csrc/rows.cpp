// Operators on single rows: embed, rms_norm, draft_rows, silu_mul.
#include "kernel.h"
#include "format.h"
#include "pool.h"

// table (packed [V, H]: data, format, V, H, group), token_ids i32 [T], out f32 [T, H], T (counted), rows bf16 [N, H] or null: an id
// below 0 is row -1 - id of these
KERNEL(deltic_embed, Matrix table, const int32_t* ids, float* out, Counted n_tokens, const bf16* rows) {
    parallel_for(n_tokens, [&](int64_t t, int) {
        float* to = out + t * table.k;
        if (ids[t] >= 0) return unpack_row(table, ids[t], to);
        const bf16* row = rows - (ids[t] + 1) * table.k;
        for (int64_t i = 0; i < table.k; i += 16) store(to + i, load_bf16(row + i));
    });
}

// Zero-centred RMSNorm: out = x * rsqrt(mean(x^2) + eps) * (1 + w), rounded once to bfloat16.
// x f32 [T, H], w f32 [H], out bf16 [M, H], rows i32 [M] or null (row m of the output reads row rows[m] of x), M (counted), H, eps
KERNEL(deltic_rms_norm, const float* x, const float* w, bf16* out, const int32_t* rows, Counted n_rows, int64_t width, float eps) {
    parallel_for(n_rows, [&](int64_t m, int) {
        const float* row = x + (rows ? rows[m] : m) * width;
        v16 scale = splat(1.0f / sqrtf(sum_of_squares(row, width) / (float)width + eps));
        for (int64_t i = 0; i < width; i += 16)
            store_bf16(out + m * width + i, load(row + i) * scale * (splat(1.0f) + load(w + i)));
    });
}

// Writes what a draft head reads, a row a residual stream: the zero-centred RMSNorm of a token's embedding, and behind it the stream's part
// of that of a hidden state, which is one over all streams.
// table (packed [V, H]), token_ids i32 [T], hidden bf16 [T, S H], embedding norm f32 [H], hidden norm f32 [S H], out bf16 [T S, 2H], T (counted),
// scratch f32 [T, S H], S, eps
KERNEL(deltic_draft_rows, Matrix table, const int32_t* ids, const bf16* hidden, const float* embed_norm, const float* hidden_norm,
       bf16* out, Counted n_tokens, float* scratch, int64_t n_streams, float eps) {
    const int64_t width = table.k, whole = n_streams * width;
    parallel_for(n_tokens, [&](int64_t t, int) {
        float* row = scratch + t * whole;
        // to: where column i goes.
        auto normed = [&](const float* w, int64_t n, auto to) {
            v16 scale = splat(1.0f / sqrtf(sum_of_squares(row, n) / (float)n + eps));
            for (int64_t i = 0; i < n; i += 16) store_bf16(to(i), load(row + i) * scale * (splat(1.0f) + load(w + i)));
        };
        bf16* first = out + t * 2 * whole;
        unpack_row(table, ids[t], row);
        normed(embed_norm, width, [&](int64_t i) { return first + i; });
        for (int64_t s = 1; s < n_streams; s++) memcpy(first + s * 2 * width, first, width * 2);
        for (int64_t i = 0; i < whole; i += 16) store(row + i, load_bf16(hidden + t * whole + i));
        normed(hidden_norm, whole, [&](int64_t i) { return first + i / width * 2 * width + width + i % width; });
    });
}

// out = SiLU(gate) * up. gate_up f32 [M, 2F] (gate first), out bf16 [M, F], M (counted), F
KERNEL(deltic_silu_mul, const float* gate_up, bf16* out, Counted n_rows, int64_t width) {
    parallel_for(n_rows, [&](int64_t m, int) { silu_mul_row(gate_up + m * 2 * width, width, out + m * width); });
}
