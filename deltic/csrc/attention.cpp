// attn_prepare and attention: gated full attention over 64-token pages.
//
// attn_prepare: q, k = rope(zero-centred RMSNorm per head); q rounded to bfloat16 for the scores, k and v into the pages.
// attention: softmax(q k^T / sqrt(d)) v * sigmoid(gate), one pass with a running maximum over pages in order (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018). Tiles are pages, at absolute positions, and a row never
// looks at its neighbours, so a token's output does not depend on how the prompt was cut.
#include "kernel.h"
#include "dot.h"
#include "pool.h"

#include <utility>
#include <vector>

namespace {

constexpr int64_t PAGE = 64;
constexpr int64_t ROWS = 32;       // query rows (token x head of the group) of one task
constexpr int64_t MAX_DIM = 256;  // head_dim; checked where the operator is recorded

// proj f32 [T, row]: q [nq, d] | gate [nq, d] | k [nk, d] | v [nk, d]
struct Heads {
    int64_t n_q, n_k, dim;
    int64_t row() const { return 2 * (n_q + n_k) * dim; }
};

// One head: norm, then rotation of the first `rotary` dims, pairs (i, i + rotary / 2).
void norm_rope(const float* x, const float* w, float eps, const float* cos, const float* sin, int64_t dim, int64_t rotary, bf16* out) {
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

struct Attention {
    const bf16* q;  // [T, nq, d]
    const float* proj;
    Heads heads;
    const bf16* pages;  // this layer's part of page 0: k [nk, 64, d] | v [nk, 64, d]
    int64_t page_stride;
    const int32_t *seq_start, *seq_context, *slot, *page_table;
    int64_t table_stride;  // page_table [slots, stride]: the pages of the sequence that holds a slot
    bf16* out;  // [T, nq, d]

    // out[r] += p[r] . v over the keys of a page, in order, 16 * NV columns at a time.
    template <int MR>
    static void add_values(const float* p, const bf16* v, int64_t n_keys, int64_t dim, float* out) {
        for (int64_t c = 0; c < dim; c += 32) {
            v16 acc[MR][2];
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < 2; j++) acc[r][j] = load(out + r * dim + c + 16 * j);
            for (int64_t i = 0; i < n_keys; i++) {
                v16 value[2] = {load_bf16(v + i * dim + c), load_bf16(v + i * dim + c + 16)};
                for (int r = 0; r < MR; r++)
                    for (int j = 0; j < 2; j++) acc[r][j] = fma(splat(p[r * PAGE + i]), value[j], acc[r][j]);
            }
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < 2; j++) store(out + r * dim + c + 16 * j, acc[r][j]);
        }
    }

    // Query rows of tokens [t0, t1) of sequence s, for the group of query heads that shares key head h.
    void block(int64_t s, int64_t t0, int64_t t1, int64_t h) const {
        int64_t dim = heads.dim, group = heads.n_q / heads.n_k, n_rows = (t1 - t0) * group;
        float acc[ROWS * MAX_DIM], scores[ROWS * PAGE], top[ROWS], total[ROWS];
        const bf16* rows[ROWS];
        int64_t limit[ROWS];  // keys the row may see
        for (int64_t r = 0; r < n_rows; r++) {
            int64_t t = t0 + r / group;
            rows[r] = q + (t * heads.n_q + h * group + r % group) * dim;
            limit[r] = seq_context[s] + t - seq_start[s] + 1;
            top[r] = -INFINITY;
            total[r] = 0.0f;
        }
        memset(acc, 0, n_rows * dim * 4);
        const float scale = 1.0f / sqrtf((float)dim);
        int64_t n_keys_all = limit[n_rows - 1];
        for (int64_t base = 0; base < n_keys_all; base += PAGE) {
            int64_t n_keys = n_keys_all - base < PAGE ? n_keys_all - base : PAGE;
            const bf16* page = pages + (int64_t)page_table[slot[s] * table_stride + base / PAGE] * page_stride;
            const bf16 *k = page + h * PAGE * dim, *v = page + (heads.n_k + h) * PAGE * dim;
            const bf16* keys[PAGE];
            for (int64_t i = 0; i < n_keys; i++) keys[i] = k + i * dim;
            dot_block(rows, n_rows, keys, n_keys, dim, [&](int64_t r, int64_t i, float x) { scores[r * PAGE + i] = x * scale; });
            for (int64_t r = 0; r < n_rows; r++) softmax_tile(scores + r * PAGE, limit[r] - base, top[r], total[r], acc + r * dim);
            int64_t r = 0;
            for (; r + X_TILE <= n_rows; r += X_TILE) add_values<X_TILE>(scores + r * PAGE, v, n_keys, dim, acc + r * dim);
            for (; r < n_rows; r++) add_values<1>(scores + r * PAGE, v, n_keys, dim, acc + r * dim);
        }
        for (int64_t r = 0; r < n_rows; r++) {
            int64_t t = t0 + r / group, head = h * group + r % group;
            const float* gate = proj + t * heads.row() + (heads.n_q + head) * dim;
            v16 inverse = splat(1.0f / total[r]);
            for (int64_t i = 0; i < dim; i += 16)
                store_bf16(out + (t * heads.n_q + head) * dim + i, load(acc + r * dim + i) * inverse * sigmoid(load(gate + i)));
        }
    }

    // Turns a page's scores into weights relative to the running maximum; keys from `n_seen` on weigh exactly nothing.
    void softmax_tile(float* scores, int64_t n_seen, float& top, float& total, float* acc) const {
        for (int64_t i = n_seen < 0 ? 0 : n_seen; i < PAGE; i++) scores[i] = -INFINITY;
        if (n_seen <= 0) {
            memset(scores, 0, PAGE * 4);
            return;
        }
        v16 highest = vmax(vmax(load(scores), load(scores + 16)), vmax(load(scores + 32), load(scores + 48)));
        float new_top = max(highest);
        new_top = new_top > top ? new_top : top;
        if (new_top > top) {
            float shrink = top == -INFINITY ? 0.0f : exp1(top - new_top);
            total *= shrink;
            for (int64_t i = 0; i < heads.dim; i += 16) store(acc + i, load(acc + i) * splat(shrink));
            top = new_top;
        }
        v16 weights[4];
        for (int i = 0; i < 4; i++) {
            weights[i] = vexp(load(scores + 16 * i) - splat(top));
            store(scores + 16 * i, weights[i]);
        }
        total += sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
    }
};

}  // namespace

// proj, n_q, n_k, d, T (counted), positions i32 [T], token_slot i32 [T], page_table i32 [slots, stride], stride,
// q_norm f32 [d], k_norm f32 [d], eps, cos f32 [max_len, rotary / 2], sin, rotary, q out bf16, pages bf16, page_stride
KERNEL(deltic_attn_prepare) {
    Arguments a{arguments};
    auto proj = a.pointer<const float>();
    Heads heads{a.integer(), a.integer(), a.integer()};
    int64_t n_tokens = a.count();
    auto positions = a.pointer<const int32_t>();
    auto token_slot = a.pointer<const int32_t>();
    auto page_table = a.pointer<const int32_t>();
    int64_t table_stride = a.integer();
    auto q_norm = a.pointer<const float>();
    auto k_norm = a.pointer<const float>();
    float eps = a.number();
    auto cos = a.pointer<const float>();
    auto sin = a.pointer<const float>();
    int64_t rotary = a.integer();
    auto q_out = a.pointer<bf16>();
    auto pages = a.pointer<bf16>();
    int64_t page_stride = a.integer(), dim = heads.dim;
    parallel_for(n_tokens, [&](int64_t t, int) {
        int64_t position = positions[t];
        const float *x = proj + t * heads.row(), *c = cos + position * rotary / 2, *s = sin + position * rotary / 2;
        for (int64_t h = 0; h < heads.n_q; h++)
            norm_rope(x + h * dim, q_norm, eps, c, s, dim, rotary, q_out + (t * heads.n_q + h) * dim);
        bf16* page = pages + (int64_t)page_table[token_slot[t] * table_stride + position / PAGE] * page_stride;
        x += 2 * heads.n_q * dim;
        for (int64_t h = 0; h < heads.n_k; h++) {
            bf16 *k = page + (h * PAGE + position % PAGE) * dim, *v = k + heads.n_k * PAGE * dim;
            norm_rope(x + h * dim, k_norm, eps, c, s, dim, rotary, k);
            for (int64_t i = 0; i < dim; i += 16) store_bf16(v + i, load(x + (heads.n_k + h) * dim + i));
        }
    });
}

// q bf16 [T, nq, d], proj, n_q, n_k, d, pages, page_stride, S (counted), seq_start i32 [S + 1], seq_context i32 [S], slot i32 [S], page_table, stride, out
KERNEL(deltic_attention) {
    Arguments a{arguments};
    Attention x;
    x.q = a.pointer<const bf16>();
    x.proj = a.pointer<const float>();
    x.heads = Heads{a.integer(), a.integer(), a.integer()};
    x.pages = a.pointer<const bf16>();
    x.page_stride = a.integer();
    int64_t n_seqs = a.count();
    x.seq_start = a.pointer<const int32_t>();
    x.seq_context = a.pointer<const int32_t>();
    x.slot = a.pointer<const int32_t>();
    x.page_table = a.pointer<const int32_t>();
    x.table_stride = a.integer();
    x.out = a.pointer<bf16>();
    int64_t n_tokens_block = ROWS / (x.heads.n_q / x.heads.n_k);
    static thread_local std::vector<std::pair<int32_t, int32_t>> blocks;
    blocks.clear();
    for (int64_t s = 0; s < n_seqs; s++)
        for (int64_t t = x.seq_start[s]; t < x.seq_start[s + 1]; t += n_tokens_block) blocks.emplace_back(s, t);
    const auto* first = blocks.data();
    parallel_for((int64_t)blocks.size() * x.heads.n_k, [&](int64_t i, int) {
        auto [s, t] = first[i / x.heads.n_k];
        int64_t end = x.seq_start[s + 1] < t + n_tokens_block ? x.seq_start[s + 1] : t + n_tokens_block;
        x.block(s, t, end, i % x.heads.n_k);
    });
}
