// What all attention kernels do with one head: sizes of a page, norm and rotation.
#pragma once
#include "kernel.h"
#include "simd.h"

constexpr int64_t PAGE = 64;      // tokens
constexpr int64_t MAX_DIM = 256;  // head_dim; checked where the operator is recorded

// Norms one head, then rotates its first `rotary` dims, in pairs (i, i + rotary / 2).
static inline void norm_rope(const float* x, const float* w, float eps, const float* cos, const float* sin, int64_t dim, int64_t rotary, bf16* out) {
    float y[MAX_DIM];
    v16 scale = splat(1.0f / sqrtf(sum_of_squares(x, dim) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += 16) store(y + i, load(x + i) * scale * (splat(1.0f) + load(w + i)));
    int64_t half = rotary / 2;
    for (int64_t i = 0; i < half; i += 16) {
        v16 a = load(y + i), b = load(y + half + i), c = load(cos + i), s = load(sin + i);
        store_bf16(out + i, fma(a, c, -(b * s)));
        store_bf16(out + half + i, fma(b, c, a * s));
    }
    for (int64_t i = rotary; i < dim; i += 16) store_bf16(out + i, load(y + i));
}
