// Hyper-connections: what a block reads of S residual streams, and how it writes to them.
//
//   n   = x * rsqrt(mean(x^2) + eps) * (1 + w)         per stream
//   in  = mean over streams of sigmoid(up silu((down n) / S)) * n
//   x_s = x_s + 2 sigmoid((inject n) / S)_s * block(in)
//
// Source: transformers 5.24, qwen4_exp, GatedResidual. The two products are linears (linear.cpp): rows of `inject` are the last of
// `down`. The rest is here: a row reads its streams once for what the last block wrote and the norm of the next.
#include "kernel.h"
#include "pool.h"
#include "simd.h"

// x[s] += weight_s block, for the streams of a row; weight_s = 2 sigmoid(inject[s] / S), 1 without `inject`.
static void add_block(float* x, const float* block, const float* inject, int64_t n_streams, int64_t width) {
    for (int64_t s = 0; s < n_streams; s++) {
        const v16 weight = splat(inject ? 2.0f * sigmoid1(inject[s] / (float)n_streams) : 1.0f);
        for (int64_t i = 0; i < width; i += 16) store(x + s * width + i, fma(weight, load(block + i), load(x + s * width + i)));
    }
}

// x f32 [T, S H], block f32 [T, H], inject f32 [T, stride], its first S columns, or null (every stream gets all of it), stride, T (counted),
// S, H, begin (x is no number yet: 0 before)
KERNEL(deltic_inject, float* x, const float* block, const float* inject, int64_t stride, Counted n_rows, int64_t n_streams, int64_t width, bool begin) {
    parallel_for(n_rows, [&](int64_t t, int) {
        float* row = x + t * n_streams * width;
        if (begin) memset(row, 0, n_streams * width * 4);
        add_block(row, block + t * width, inject ? inject + t * stride : nullptr, n_streams, width);
    });
}

// x f32 [T, S H]; block f32 [T, H] or null, inject f32 [T, stride], stride: as of deltic_inject, added first; w f32 [S H]; out bf16 [M, S H];
// rows i32 [M] or null (row m of the output reads row rows[m] of x; no block is added then), M (counted), S, H, eps
KERNEL(deltic_connection_norm, float* x, const float* block, const float* inject, int64_t stride, const float* w, bf16* out, const int32_t* rows,
       Counted n_rows, int64_t n_streams, int64_t width, float eps) {
    parallel_for(n_rows, [&](int64_t m, int) {
        float* row = x + (rows ? rows[m] : m) * n_streams * width;
        if (block) add_block(row, block + m * width, inject + m * stride, n_streams, width);
        for (int64_t s = 0; s < n_streams; s++, row += width) {
            const v16 scale = splat(1.0f / sqrtf(sum_of_squares(row, width) / (float)width + eps));
            const int64_t at = s * width;
            for (int64_t i = 0; i < width; i += 16)
                store_bf16(out + m * n_streams * width + at + i, load(row + i) * scale * (splat(1.0f) + load(w + at + i)));
        }
    });
}

// low f32 [T, stride], its first R columns, stride, out bf16 [T, R], T (counted), R, S
KERNEL(deltic_connection_gate, const float* low, int64_t stride, bf16* out, Counted n_rows, int64_t rank, int64_t n_streams) {
    const v16 by = splat(1.0f / (float)n_streams);
    parallel_for(n_rows, [&](int64_t t, int) {
        for (int64_t i = 0; i < rank; i += 16) store_bf16(out + t * rank + i, silu(load(low + t * stride + i) * by));
    });
}

// up f32 [T, S H], normed bf16 [T, S H], out bf16 [T, H], block f32 [T, H] or null: set to 0 for what the block adds, T (counted), S, H
KERNEL(deltic_connection_mix, const float* up, const bf16* normed, bf16* out, float* block, Counted n_rows, int64_t n_streams, int64_t width) {
    const v16 by = splat(1.0f / (float)n_streams);
    parallel_for(n_rows, [&](int64_t t, int) {
        const int64_t first = t * n_streams * width;
        for (int64_t i = 0; i < width; i += 16) {
            v16 total = {};
            for (int64_t s = 0; s < n_streams; s++) {
                const int64_t at = first + s * width + i;
                total = fma(sigmoid(load(up + at)), load_bf16(normed + at), total);
            }
            store_bf16(out + t * width + i, total * by);
        }
        if (block) memset(block + t * width, 0, width * 4);
    });
}

// x f32 [T, W], out bf16 [M, W], rows i32 [M] or null, as of deltic_connection_norm, M (counted), W
KERNEL(deltic_round_rows, const float* x, bf16* out, const int32_t* rows, Counted n_rows, int64_t width) {
    parallel_for(n_rows, [&](int64_t m, int) {
        const float* row = x + (rows ? rows[m] : m) * width;
        for (int64_t i = 0; i < width; i += 16) store_bf16(out + m * width + i, load(row + i));
    });
}
