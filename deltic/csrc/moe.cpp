// moe: route, group by expert, two grouped GEMMs, combine, shared expert: added to the residual stream.
//
//   p = softmax(router logits); the k largest (ties: lower expert first), renormalised when `norm`
//   x += sum_slots p_slot * Expert_slot(h)  +  sigmoid(h . shared_gate) * Shared(h)
//
// A token's outputs are combined in the order of its slots, so neither the grouping nor the neighbours touch its bits.
#include "kernel.h"
#include "linear.h"
#include "pool.h"

namespace {

struct Routing {
    int32_t* expert;  // [T, k]
    float* weight;    // [T, k]
    int32_t* order;   // [T * k] slots (token * k + slot) grouped by expert
    int32_t* begin;   // [E + 1]
};

void route(const float* logits, int64_t n_experts, int64_t k, bool norm, int32_t* expert, float* weight, float* scratch) {
    v16 high = splat(-INFINITY);
    for (int64_t e = 0; e < n_experts; e++) scratch[e] = logits[e];
    int64_t padded = (n_experts + 15) / 16 * 16;
    for (int64_t e = n_experts; e < padded; e++) scratch[e] = -INFINITY;
    for (int64_t e = 0; e < padded; e += 16) high = vmax(high, load(scratch + e));
    float top = max(high);
    v16 sums = {};
    for (int64_t e = 0; e < padded; e += 16) {
        v16 p = vexp(load(scratch + e) - splat(top));
        store(scratch + e, p);
        sums = sums + p;
    }
    float total = sum(sums), kept = 0.0f;
    for (int64_t slot = 0; slot < k; slot++) {
        int64_t best = 0;
        for (int64_t e = 1; e < n_experts; e++)
            if (scratch[e] > scratch[best]) best = e;
        expert[slot] = (int32_t)best;
        weight[slot] = scratch[best] / total;
        kept += weight[slot];
        scratch[best] = -1.0f;
    }
    if (norm)
        for (int64_t slot = 0; slot < k; slot++) weight[slot] /= kept;
}

// Counting sort of the slots by expert: order within an expert is token order.
void group(const Routing& r, int64_t n_slots, int64_t n_experts) {
    memset(r.begin, 0, (n_experts + 1) * 4);
    for (int64_t i = 0; i < n_slots; i++) r.begin[r.expert[i] + 1]++;
    for (int64_t e = 0; e < n_experts; e++) r.begin[e + 1] += r.begin[e];
    for (int64_t i = 0; i < n_slots; i++) r.order[r.begin[r.expert[i]]++] = (int32_t)i;
    for (int64_t e = n_experts; e > 0; e--) r.begin[e] = r.begin[e - 1];
    r.begin[0] = 0;
}

}  // namespace

// h bf16 [T, H] (normed input), logits f32 [T, E], residual f32 [T, H], T (counted), H, E, k, M, norm,
// gate_up bf16 [E, 2M, H], down bf16 [E, H, M], shared_gate bf16 [H], shared f32 [T, H] (the shared expert's output),
// scratch: expert i32 [T k], weight f32 [T k], order i32 [T k], begin i32 [E + 1], probabilities f32 [T, E + 16],
// up f32 [T k, 2M], act bf16 [T k, M], y f32 [T k, H]
KERNEL(deltic_moe) {
    Arguments a{arguments};
    auto h = a.pointer<const bf16>();
    auto logits = a.pointer<const float>();
    auto residual = a.pointer<float>();
    int64_t n_tokens = a.count(), width = a.integer(), n_experts = a.integer(), k = a.integer(), inner = a.integer();
    bool norm = a.integer();
    auto gate_up = a.pointer<const bf16>();
    auto down = a.pointer<const bf16>();
    auto shared_gate = a.pointer<const bf16>();
    auto shared = a.pointer<const float>();
    Routing r;
    r.expert = a.pointer<int32_t>();
    r.weight = a.pointer<float>();
    r.order = a.pointer<int32_t>();
    r.begin = a.pointer<int32_t>();
    auto probabilities = a.pointer<float>();
    auto up = a.pointer<float>();
    auto act = a.pointer<bf16>();
    auto y = a.pointer<float>();
    if (n_tokens == 0) return;

    parallel_for(n_tokens, [&](int64_t t, int) {
        route(logits + t * n_experts, n_experts, k, norm, r.expert + t * k, r.weight + t * k, probabilities + t * (n_experts + 16));
    });
    group(r, n_tokens * k, n_experts);

    // out[slot] = w[expert] . input(slot): one task per expert and block of weight rows.
    auto grouped = [&](const bf16* w, int64_t n_rows, int64_t n_k, auto input, float* out) {
        int64_t n_blocks = (n_rows + W_BLOCK - 1) / W_BLOCK;
        parallel_for(n_experts * n_blocks, [&](int64_t i, int) {
            int64_t e = i / n_blocks, n0 = i % n_blocks * W_BLOCK, n = n_rows - n0 < W_BLOCK ? n_rows - n0 : W_BLOCK;
            const bf16* rows[X_BLOCK];
            for (int64_t m0 = r.begin[e]; m0 < r.begin[e + 1]; m0 += X_BLOCK) {
                int64_t n_m = r.begin[e + 1] - m0 < X_BLOCK ? r.begin[e + 1] - m0 : X_BLOCK;
                for (int64_t m = 0; m < n_m; m++) rows[m] = input(r.order[m0 + m]);
                multiply_block(rows, n_m, w + (e * n_rows + n0) * n_k, n, n_k, false,
                               [&](int64_t m) { return out + (int64_t)r.order[m0 + m] * n_rows + n0; });
            }
        });
    };
    grouped(gate_up, 2 * inner, width, [&](int64_t slot) { return h + slot / k * width; }, up);
    parallel_for(n_tokens * k, [&](int64_t slot, int) { silu_mul_row(up + slot * 2 * inner, inner, act + slot * inner); });
    grouped(down, width, inner, [&](int64_t slot) { return act + slot * inner; }, y);
    parallel_for(n_tokens, [&](int64_t t, int) {
        float gate = 0.0f;
        for (int64_t k0 = 0; k0 < width; k0 += K_BLOCK) {
            const bf16 *x = h + t * width + k0, *w = shared_gate + k0;
            dot_rows<1>(&x, 1, &w, 0, width - k0 < K_BLOCK ? width - k0 : K_BLOCK, 0, [&](int64_t, int64_t, float part) { gate += part; });
        }
        v16 open = splat(sigmoid1(gate));
        for (int64_t i = 0; i < width; i += 16) {
            v16 out = {};
            for (int64_t slot = 0; slot < k; slot++) out = fma(splat(r.weight[t * k + slot]), load(y + (t * k + slot) * width + i), out);
            out = fma(open, load(shared + t * width + i), out);
            store(residual + t * width + i, load(residual + t * width + i) + out);
        }
    });
}
