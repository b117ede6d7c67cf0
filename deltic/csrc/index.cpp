// index_prepare and index_select: which groups of four keys an indexed attention layer reads (transformers 5.24, qwen4_exp, QSAIndexer).
//
//   query = rope(norm(q))     key of a group = rope(norm(bf16(mean of its four raw keys))), at the position of its first token
//   score = sum over heads of relu(query . key); chosen: the best complete groups, among equals the earlier ones
//
// A page holds the raw keys of its 64 tokens, [64, d], and behind them the keys of its 16 groups as words of two neighbouring
// elements, [d / 2, 16 groups]: the scores of a page's groups are the lanes of one sum. Raw keys are read from the page only, so that a
// group's key does not depend on how the prompt was cut; drafts that were rejected are overwritten there. A score is a sum of its own,
// and a choice reads all scores of its token: neither knows its neighbours.
#include "head.h"
#include "pool.h"

namespace {

constexpr int64_t GROUP = 4, GROUPS = PAGE / GROUP;  // tokens of a group, groups of a page
constexpr int64_t PAGES_TASK = 32;                   // pages whose scores are one task; it does not touch the bits

struct Index {
    int64_t n_q, dim;
    bf16* pages;  // this layer's part of page 0
    int64_t page_stride;
    Counted n_tokens;
    const int32_t *positions, *token_place, *page_table;
    int64_t table_stride;

    void read(Arguments& a) { a.read(n_q, dim, pages, page_stride, n_tokens, positions, token_place, page_table, table_stride); }
    // The page with a position of token t's sequence.
    bf16* page(int64_t t, int64_t position) const {
        return pages + (int64_t)page_table[token_place[t] * table_stride + position / PAGE] * page_stride;
    }
};

struct Prepare {
    const float* proj;  // [T, (n_q + 1) d]
    Index index;
    const int32_t *angles, *group_angles;
    const float *q_norm, *k_norm;
    float eps;
    const float *cos, *sin;
    int64_t rotary;
    bf16* q_out;

    void read(Arguments& a) { a.read(proj, index, angles, group_angles, q_norm, k_norm, eps, cos, sin, rotary, q_out); }

    void run() const {
        const int64_t dim = index.dim, n_q = index.n_q, half = rotary / 2;
        parallel_for(index.n_tokens, [&](int64_t t, int) {
            const float* x = proj + t * (n_q + 1) * dim;
            for (int64_t h = 0; h < n_q; h++)
                norm_rope(x + h * dim, q_norm, eps, cos + angles[t] * half, sin + angles[t] * half, dim, rotary, q_out + (t * n_q + h) * dim);
            bf16* raw = index.page(t, index.positions[t]) + index.positions[t] % PAGE * dim;
            for (int64_t i = 0; i < dim; i += 16) store_bf16(raw + i, load(x + n_q * dim + i));
        });
        parallel_for(index.n_tokens, [&](int64_t t, int) {
            const int64_t position = index.positions[t], at = position % PAGE;
            if (at % GROUP != GROUP - 1) return;
            bf16* page = index.page(t, position);
            const bf16* raw = page + (at - (GROUP - 1)) * dim;
            float mean[MAX_DIM];
            bf16 key[MAX_DIM];
            for (int64_t i = 0; i < dim; i += 16) {
                const v16 total = load_bf16(raw + i) + load_bf16(raw + dim + i) + load_bf16(raw + 2 * dim + i) + load_bf16(raw + 3 * dim + i);
                store(mean + i, round_bf16(total * splat(1.0f / GROUP)));
            }
            norm_rope(mean, k_norm, eps, cos + group_angles[t] * half, sin + group_angles[t] * half, dim, rotary, key);
            bf16* words = page + PAGE * dim + at / GROUP * 2;
            for (int64_t i = 0; i < dim; i += 2) memcpy(words + i * GROUPS, key + i, 4);
        });
    }
};

// Writes the places of the n_chosen largest of n floats, none of which is negative, in ascending order; among equals the first.
void choose(const float* scores, int64_t n, int64_t n_chosen, int32_t* chosen) {
    auto bits = [&](int64_t i) { return std::bit_cast<uint32_t>(scores[i]); };
    uint32_t least = 0;            // the smallest that is chosen, its digits of 8 bits one after another
    int64_t n_equal = n_chosen;    // chosen among those that have its digits so far
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {};
        for (int64_t i = 0; i < n; i++)
            if (shift == 24 || (bits(i) ^ least) >> (shift + 8) == 0) counts[bits(i) >> shift & 255]++;
        uint32_t digit = 255;
        for (; counts[digit] < n_equal; digit--) n_equal -= counts[digit];
        least |= digit << shift;
    }
    for (int64_t i = 0; i < n; i++) {
        if (bits(i) < least || (bits(i) == least && n_equal-- <= 0)) continue;
        *chosen++ = (int32_t)i;
    }
}

struct Select {
    const bf16* q;  // [T, n_q, d]
    Index index;
    float* scores;  // [n_rows, row]
    int64_t n_rows, row, n_chosen;
    int32_t* chosen;  // [T, n_chosen]

    void read(Arguments& a) { a.read(q, index, scores, n_rows, row, n_chosen, chosen); }
    int64_t n_groups(int64_t t) const { return (index.positions[t] + 1) / GROUP; }

    // Scores of the groups of one page for token t.
    void score_page(int64_t t, int64_t page, float* out) const {
        const int64_t dim = index.dim;
        const bf16* keys = index.page(t, page * PAGE) + PAGE * dim;
        v16 total = {};
        for (int64_t h = 0; h < index.n_q; h++) {
            const bf16* query = q + (t * index.n_q + h) * dim;
            v16 acc = {};
            for (int64_t i = 0; i < dim; i += 2) {
                uint32_t pair;
                memcpy(&pair, query + i, 4);
                acc = each_part([&](int p) {
                    u32_part words;
                    memcpy(&words, keys + i * GROUPS + 2 * p * LANES, sizeof words);
                    return fold(acc.part[p], everywhere(pair), words);
                });
            }
            total = total + vmax(acc, v16{});
        }
        store(out, total);
    }

    void run() const {
        for (int64_t t = 0, n; t < index.n_tokens; t += n) {
            // Tokens that are chosen for at once, and the pages of the longest.
            n = index.n_tokens - t < n_rows ? index.n_tokens - t : n_rows;
            int64_t most = 0;
            for (int64_t i = 0; i < n; i++) most = n_groups(t + i) > most ? n_groups(t + i) : most;
            if (most <= n_chosen) continue;
            const int64_t n_tasks = ((most + GROUPS - 1) / GROUPS + PAGES_TASK - 1) / PAGES_TASK;
            parallel_for(n * n_tasks, [&](int64_t i, int) {
                const int64_t token = t + i / n_tasks, groups = n_groups(token);
                if (groups <= n_chosen) return;
                int64_t page = i % n_tasks * PAGES_TASK, end = page + PAGES_TASK;
                for (; page < end && page * GROUPS < groups; page++) score_page(token, page, scores + i / n_tasks * row + page * GROUPS);
            });
            parallel_for(n, [&](int64_t i, int) {
                if (n_groups(t + i) > n_chosen) choose(scores + i * row, n_groups(t + i), n_chosen, chosen + (t + i) * n_chosen);
            });
        }
    }
};

}  // namespace

// proj, n_q, d, pages bf16 (this layer's part), page_stride, T (counted), positions i32 [T], token_place i32 [T], page_table i32 [places, stride],
// stride, angles i32 [T], group_angles i32 [T] (of the first token of a token's group), q_norm f32 [d], k_norm f32 [d], eps,
// cos f32 [n_angles, rotary / 2], sin, rotary, q out bf16 [T, n_q d]
KERNEL(deltic_index_prepare, Prepare x) { x.run(); }

// q, then n_q to stride as of deltic_index_prepare, scores f32 [n_rows, row] (scratch), n_rows, row (a multiple of 16), n_chosen,
// chosen i32 [T, n_chosen]
KERNEL(deltic_index_select, Select x) { x.run(); }
