// gdn: everything between the two projections of a gated DeltaNet layer, for decodes and prefill chunks alike.
//
//   u_t = SiLU(conv4(bf16(q|k|v)))            q, k l2-normalised per head, q scaled by dk^-1/2
//   beta = sigmoid(b), alpha = exp(-exp(A_log) softplus(a + dt_bias))
//   e_t = beta (v_t - alpha S^T k_t);  S = alpha S + k_t e_t^T;  o_t = S^T q_t
//   out = bf16(w * rms(o) * SiLU(z))
//
// Source: Yang et al., "Gated Delta Networks" (2024), eq. 10, with the prediction read from the decayed state. A prefill
// chunk is stepped token by token with the state in the first-level cache: the same arithmetic as a decode, hence the
// same bits. The chunked parallel form is left to devices where stepping is slow.
#include "kernel.h"
#include "pool.h"
#include "simd.h"

namespace {

struct Gdn {
    const float* proj;  // [T, row]: q | k | v | z | b | a
    int64_t row, n_tokens, n_seqs;
    const int32_t *seq_start, *seq_context, *slot, *token_seq;
    const float* conv_w;  // [4, C]
    bf16* conv_state;     // [slots, 3, C]: the last three columns, oldest first
    int64_t conv_stride;
    float* state;  // [slots, Hv, dk, dv]
    int64_t state_stride;
    const float *a_log, *dt_bias, *norm_w;
    float eps;
    int64_t n_k, n_v, dk, dv;
    float *u, *gates, *o;  // scratch [T, C], [T, 2 Hv] (alpha | beta), [T, Hv dv]
    bf16* out;             // [T, Hv dv]

    int64_t channels() const { return 2 * n_k * dk + n_v * dv; }

    // Column `back` tokens before token t of sequence s (back 0 is t itself), as bfloat16 values widened.
    v16 column(int64_t s, int64_t t, int64_t back, int64_t c) const {
        int64_t from = t - back;
        if (from >= seq_start[s]) return round_bf16(load(proj + from * row + c));
        int64_t before = seq_start[s] - from;  // 1..3 tokens before the chunk
        if (before > seq_context[s]) return v16{};
        return load_bf16(conv_state + slot[s] * conv_stride + (3 - before) * channels() + c);
    }

    void convolve(int64_t t) const {
        int64_t s = token_seq[t], n_channels = channels();
        for (int64_t c = 0; c < n_channels; c += 16) {
            v16 acc = column(s, t, 3, c) * load(conv_w + c);
            for (int64_t tap = 1; tap < 4; tap++)
                acc = fma(column(s, t, 3 - tap, c), load(conv_w + tap * n_channels + c), acc);
            store(u + t * n_channels + c, silu(acc));
        }
        for (int64_t h = 0; h < 2 * n_k; h++) {
            float* x = u + t * n_channels + h * dk;
            float scale = 1.0f / sqrtf(sum_of_squares(x, dk) + 1e-6f);
            if (h < n_k) scale *= 1.0f / sqrtf((float)dk);
            for (int64_t i = 0; i < dk; i += 16) store(x + i, load(x + i) * splat(scale));
        }
        const float *b = proj + t * row + n_channels + n_v * dv, *a = b + n_v;
        for (int64_t h = 0; h < n_v; h++) {
            float x = a[h] + dt_bias[h];
            float softplus = x > 20.0f ? x : log1pf(expf(x));
            gates[t * 2 * n_v + h] = expf(-expf(a_log[h]) * softplus);
            gates[t * 2 * n_v + n_v + h] = sigmoid1(b[h]);
        }
    }

    // Keeps the last three columns of sequence s for its next chunk. Runs after every token was convolved.
    void keep_columns(int64_t s) const {
        int64_t n_channels = channels(), last = seq_start[s + 1] - 1;
        bf16* kept = conv_state + slot[s] * conv_stride;
        for (int64_t c = 0; c < n_channels; c += 16) {
            v16 columns[3] = {column(s, last, 2, c), column(s, last, 1, c), column(s, last, 0, c)};
            for (int64_t i = 0; i < 3; i++) store_bf16(kept + i * n_channels + c, columns[i]);
        }
    }

    // One token on NV * 16 columns of one head's state. Even and odd rows have their own sums, to hide latency.
    template <int NV>
    static void step(float* S, int64_t stride, int64_t dk, const float* q, const float* k, const float* v, float alpha, float beta, float* o) {
        v16 even[NV] = {}, odd[NV] = {};
        for (int64_t i = 0; i < dk; i += 2)
            for (int j = 0; j < NV; j++) {
                even[j] = fma(splat(k[i]), load(S + i * stride + 16 * j), even[j]);
                odd[j] = fma(splat(k[i + 1]), load(S + (i + 1) * stride + 16 * j), odd[j]);
            }
        v16 e[NV];
        for (int j = 0; j < NV; j++) {
            e[j] = splat(beta) * (load(v + 16 * j) - splat(alpha) * (even[j] + odd[j]));
            even[j] = odd[j] = v16{};
        }
        for (int64_t i = 0; i < dk; i += 2)
            for (int j = 0; j < NV; j++) {
                v16 s0 = fma(splat(k[i]), e[j], splat(alpha) * load(S + i * stride + 16 * j));
                v16 s1 = fma(splat(k[i + 1]), e[j], splat(alpha) * load(S + (i + 1) * stride + 16 * j));
                store(S + i * stride + 16 * j, s0);
                store(S + (i + 1) * stride + 16 * j, s1);
                even[j] = fma(splat(q[i]), s0, even[j]);
                odd[j] = fma(splat(q[i + 1]), s1, odd[j]);
            }
        for (int j = 0; j < NV; j++) store(o + 16 * j, even[j] + odd[j]);
    }

    // All tokens of sequence s for columns [column, column + 16 NV) of value head h.
    template <int NV>
    void recur(int64_t s, int64_t h, int64_t column) const {
        constexpr int64_t width = 16 * NV;
        float local[256 * width];
        int64_t n_channels = channels(), head_k = h / (n_v / n_k);
        float* S = state + slot[s] * state_stride + h * dk * dv + column;
        bool fresh = seq_context[s] == 0, many = seq_start[s + 1] - seq_start[s] > 1;
        if (fresh)
            for (int64_t i = 0; i < dk; i++) memset(S + i * dv, 0, width * 4);
        if (many)
            for (int64_t i = 0; i < dk; i++) memcpy(local + i * width, S + i * dv, width * 4);
        for (int64_t t = seq_start[s]; t < seq_start[s + 1]; t++) {
            const float *q = u + t * n_channels + head_k * dk, *k = q + n_k * dk;
            const float* v = u + t * n_channels + 2 * n_k * dk + h * dv + column;
            float alpha = gates[t * 2 * n_v + h], beta = gates[t * 2 * n_v + n_v + h];
            step<NV>(many ? local : S, many ? width : dv, dk, q, k, v, alpha, beta, o + (t * n_v + h) * dv + column);
        }
        if (many)
            for (int64_t i = 0; i < dk; i++) memcpy(S + i * dv, local + i * width, width * 4);
    }

    void gated_norm(int64_t t) const {
        for (int64_t h = 0; h < n_v; h++) {
            const float *x = o + (t * n_v + h) * dv, *z = proj + t * row + channels() + h * dv;
            v16 scale = splat(1.0f / sqrtf(sum_of_squares(x, dv) / (float)dv + eps));
            for (int64_t i = 0; i < dv; i += 16)
                store_bf16(out + (t * n_v + h) * dv + i, load(norm_w + i) * (load(x + i) * scale) * silu(load(z + i)));
        }
    }
};

}  // namespace

// Arguments in the order of the fields of Gdn; n_tokens and n_seqs are counted.
KERNEL(deltic_gdn) {
    Arguments a{arguments};
    Gdn g;
    g.proj = a.pointer<const float>();
    g.row = a.integer();
    g.n_tokens = a.count();
    g.n_seqs = a.count();
    g.seq_start = a.pointer<const int32_t>();
    g.seq_context = a.pointer<const int32_t>();
    g.slot = a.pointer<const int32_t>();
    g.token_seq = a.pointer<const int32_t>();
    g.conv_w = a.pointer<const float>();
    g.conv_state = a.pointer<bf16>();
    g.conv_stride = a.integer();
    g.state = a.pointer<float>();
    g.state_stride = a.integer();
    g.a_log = a.pointer<const float>();
    g.dt_bias = a.pointer<const float>();
    g.norm_w = a.pointer<const float>();
    g.eps = a.number();
    g.n_k = a.integer();
    g.n_v = a.integer();
    g.dk = a.integer();
    g.dv = a.integer();
    g.u = a.pointer<float>();
    g.gates = a.pointer<float>();
    g.o = a.pointer<float>();
    g.out = a.pointer<bf16>();
    parallel_for(g.n_tokens, [&](int64_t t, int) { g.convolve(t); });
    parallel_for(g.n_seqs, [&](int64_t s, int) { g.keep_columns(s); });
    constexpr int WIDE = LANES == 16 ? 4 : 2;  // registers of a column block; they do not touch the bits
    int64_t width = g.dv % (16 * WIDE) == 0 ? 16 * WIDE : 16, n_blocks = g.dv / width;
    parallel_for(g.n_seqs * g.n_v * n_blocks, [&](int64_t i, int) {
        int64_t s = i / (g.n_v * n_blocks), h = i / n_blocks % g.n_v, column = i % n_blocks * width;
        if (width == 16 * WIDE) g.recur<WIDE>(s, h, column);
        else g.recur<1>(s, h, column);
    });
    parallel_for(g.n_tokens, [&](int64_t t, int) { g.gated_norm(t); });
}
