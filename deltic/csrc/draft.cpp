// A block drafter (models/dflash): what it keeps of a step, convolutions within a block, and the scores of its next tokens.
#include <algorithm>

#include "kernel.h"
#include "pool.h"
#include "simd.h"

namespace {

struct Candidate {
    float value;
    int32_t id;
};

constexpr int64_t MOST = 64;  // candidates of a selector
constexpr float NEVER = -1e30f;  // the logit of an id that is no candidate: finite, as a sampler wants it

// The k likeliest of n values, the likeliest first.
void select_top(const float* values, int64_t n, int64_t k, Candidate* c) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        if (kept == k && !(values[i] > c[k - 1].value)) continue;  // of equal values the lower id stays
        int64_t at = kept < k ? kept++ : k - 1;
        for (; at > 0 && values[i] > c[at - 1].value; at--) c[at] = c[at - 1];
        c[at] = {values[i], (int32_t)i};
    }
}

}  // namespace

// out[m, first + i] = bfloat16(x[m, i]). x f32 [T, H], out bf16 [T, W], W, first, T (counted), H
KERNEL(deltic_keep_features, const float* x, bf16* out, int64_t stride, int64_t first, Counted n_rows, int64_t width) {
    parallel_for(n_rows, [&](int64_t m, int) {
        for (int64_t i = 0; i < width; i += 16) store_bf16(out + m * stride + first + i, load(x + m * width + i));
    });
}

// x *= factor. x f32 [T, H], T (counted), H, factor
KERNEL(deltic_scale_rows, float* x, Counted n_rows, int64_t width, float factor) {
    parallel_for(n_rows, [&](int64_t m, int) {
        for (int64_t i = m * width; i < (m + 1) * width; i += 16) store(x + i, load(x + i) * splat(factor));
    });
}

// y[m] = sum over taps j of (base[j] + kernel[m, first + j * G + group of the channel]) * x[m - j], with no row before row 0 of a
// block. Rows x are bf16, and y is rounded; or they are f32, and y is added to the residual stream.
// x bf16 [T, H] or null, x f32 [T, H] or null, nth i32 [T] (a row's number in its block), kernel f32 [T, W], W, first,
// base f32 [taps, H], taps, channels of a group (a multiple of 16), T (counted), H, y bf16 [T, H], residual f32 [T, H]
KERNEL(deltic_block_conv, const bf16* rounded, const float* x, const int32_t* nth, const float* kernels, int64_t stride,
       int64_t first, const float* base, int64_t taps, int64_t group, Counted n_rows, int64_t width, bf16* out, float* residual) {
    parallel_for(n_rows, [&](int64_t m, int) {
        const float* kernel = kernels + m * stride + first;
        for (int64_t i = 0; i < width; i += 16) {
            v16 y = {};
            for (int64_t j = 0; j < taps && j <= nth[m]; j++) {
                const int64_t at = (m - j) * width + i;
                v16 coefficient = load(base + j * width + i) + splat(kernel[j * (width / group) + i / group]);
                y = fma(coefficient, rounded ? load_bf16(rounded + at) : load(x + at), y);
            }
            if (rounded) store_bf16(out + m * width + i, y);
            else store(residual + m * width + i, load(residual + m * width + i) + y);
        }
    });
}

// Logits of the next token of each block: out[s] = logits[row[s]], times factor and bounded by cap (0: not). With a selector only its
// top_k likeliest ids stay, each with <predecessor[before[s]] * projected[row[s]], successor[id]> on top.
// logits f32 [R, V], V, n_real (ids from there on are padding), row i32 [S], S (counted), factor, cap, top_k (0: no selector),
// before i32 [S], predecessor bf16 [V, rank], successor bf16 [V, rank], projected f32 [R, rank], rank, out f32 [S, V]
KERNEL(deltic_block_scores, const float* logits, int64_t n_vocab, int64_t n_real, const int32_t* row, Counted n, float factor,
       float cap, int64_t top_k, const int32_t* before, const bf16* predecessor, const bf16* successor, const float* projected,
       int64_t rank, float* out) {
    parallel_for(n, [&](int64_t s, int) {
        const float* x = logits + row[s] * n_vocab;
        float* y = out + s * n_vocab;
        auto bounded = [&](float value) {
            value *= factor;
            return cap > 0 ? cap * (2 * sigmoid1(2 * value / cap) - 1) : value;
        };
        if (top_k == 0) {
            if (factor == 1 && cap == 0) memcpy(y, x, n_real * 4);
            else
                for (int64_t i = 0; i < n_real; i++) y[i] = bounded(x[i]);
            return;
        }
        Candidate best[MOST];
        const int64_t k = std::min(top_k, n_real);
        select_top(x, n_real, k, best);
        std::fill(y, y + n_real, NEVER);
        const bf16* of_before = predecessor + before[s] * rank;
        const float* of_row = projected + row[s] * rank;
        for (int64_t c = 0; c < k; c++) {
            const bf16* of_id = successor + best[c].id * rank;
            v16 total = {};
            for (int64_t i = 0; i < rank; i += 16)
                total = fma(load_bf16(of_before + i) * load(of_row + i), load_bf16(of_id + i), total);
            y[best[c].id] = bounded(best[c].value) + sum(total);
        }
    });
}

// chance[s] = sigmoid(<weight, state[row[s]] | embedded[s]> + bias), without embedded where rank is 0.
// state bf16 [R, H], H, row i32 [S], S (counted), embedded bf16 [S, rank], rank, weight f32 [H + rank], bias f32 [1], chance f32 [S]
KERNEL(deltic_confidence, const bf16* state, int64_t width, const int32_t* row, Counted n, const bf16* embedded, int64_t rank,
       const float* weight, const float* bias, float* chance) {
    for (int64_t s = 0; s < n; s++) {
        v16 total = {};
        for (int64_t i = 0; i < width; i += 16) total = fma(load_bf16(state + row[s] * width + i), load(weight + i), total);
        for (int64_t i = 0; i < rank; i += 16) total = fma(load_bf16(embedded + s * rank + i), load(weight + width + i), total);
        chance[s] = sigmoid1(sum(total) + bias[0]);
    }
}
