// moe: route, group by expert, two grouped GEMMs, combine, shared expert: added to the residual stream.
//
//   p = softmax(router logits); the k largest (ties: lower expert first), renormalised when `norm`
//   x += sum_slots p_slot * Expert_slot(h)  +  sigmoid(gate) * Shared(h)
//
// The last logit of a token is the gate of the shared expert.
// A token's outputs are combined in the order of its slots, so neither the grouping nor the neighbours touch its bits.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "kernel.h"
#include "lora.h"

namespace {

struct Routing {
    int32_t* expert;  // [T, k]
    float* weight;    // [T, k]
    int32_t* order;   // [T * k] slots (token * k + slot) grouped by expert
    int32_t* begin;   // [E + 1]
    void read(Arguments& a) { a.read(expert, weight, order, begin); }
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

// Slots of one expert and one adapter that stand one behind the other in the order of the experts: `groups` gets their ends and places.
int64_t group_by_adapter(const Routing& r, int64_t n_slots, int64_t n_experts, int64_t k, const int32_t* slot_of, int32_t* groups) {
    int64_t n = 0;
    for (int64_t e = 0; e < n_experts; e++)
        for (int64_t i = r.begin[e], end; i < r.begin[e + 1]; i = end) {
            const int32_t slot = slot_of[r.order[i] / k];
            for (end = i + 1; end < r.begin[e + 1] && slot_of[r.order[end] / k] == slot;) end++;
            if (slot < 0) continue;
            int32_t* to = groups + 4 * n++;
            to[0] = (int32_t)i, to[1] = (int32_t)end, to[2] = slot, to[3] = (int32_t)e;
        }
    return n;
}

// Asks the system for memory that is mapped of a file, and does not wait: it reads the pages that are not there, together.
void read_ahead(const uint8_t* data, int64_t n_bytes) {
    constexpr uintptr_t MOST = 128 << 10;  // Linux reads less than a larger range where a device asks for no more at a time
    const uintptr_t page = sysconf(_SC_PAGESIZE), end = (uintptr_t)data + n_bytes;
    for (uintptr_t at = (uintptr_t)data / page * page; at < end; at += MOST)
        madvise((void*)at, end - at < MOST ? end - at : MOST, MADV_WILLNEED);
}

// Of the experts that a layer multiplies, so much is asked of the disk at once. All of them, as a prompt uses them, would drive each other out of
// little memory before they are multiplied.
constexpr int64_t MOST_AHEAD = 64 << 20;

// Asks for experts [from, to) of a matrix that have tokens.
void read_ahead(const Matrix& w, const int32_t* begin, int64_t from, int64_t to) {
    parallel_for(to - from, [&](int64_t i, int) {
        const int64_t e = from + i;
        if (begin[e] != begin[e + 1]) read_ahead(w.expert(e).data, w.n_strips() * w.strip_bytes());
    });
}

}  // namespace

// h bf16 [T, H] (normed input), logits f32 [T, E + 1], residual f32 [T, H], T (counted), E, k, norm,
// gate_up (packed, E matrices [2M, H]), rest (its last rows, where they have a format of their own, else nothing), down (packed, E matrices [H, M]), shared f32 [T, H] (the shared expert's output),
// scratch: expert i32 [T k], weight f32 [T k], order i32 [T k], begin i32 [E + 1], probabilities f32 [T, E + 16],
// rows u8 [T k, row_bytes of the wider], up f32 [T k, 2M], act bf16 [T k, M], y f32 [T k, H],
// adapters as of gate_up (as in lora.cpp; no groups: none), the table of those of down, scratch of T k rows, groups i32 [4 T k], on_disk: the experts are mapped and not all in memory
KERNEL(deltic_moe, const bf16* h, const float* logits, float* residual, Counted n_tokens, int64_t n_experts, int64_t k, bool norm,
       Matrix gate_up, Matrix rest, Matrix down, const float* shared, Routing r, float* probabilities, uint8_t* workspace, float* up, bf16* act,
       float* y, Adapters adapters, const int64_t* down_table, LoraScratch s, int32_t* groups, bool on_disk) {
    if (n_tokens == 0) return;
    const int64_t width = down.n, inner = down.k;

    parallel_for(n_tokens, [&](int64_t t, int) {
        route(logits + t * (n_experts + 1), n_experts, k, norm, r.expert + t * k, r.weight + t * k, probabilities + t * (n_experts + 16));
    });
    group(r, n_tokens * k, n_experts);
    const Matrix matrices[] = {gate_up, rest.n ? rest : down, down};
    const int64_t n_matrices = rest.n ? 3 : 2;
    int64_t n_used = 0, largest = 0, all = 0;
    for (int64_t e = 0; on_disk && e < n_experts; e++) n_used += r.begin[e] != r.begin[e + 1];
    for (int64_t m = 0; m < n_matrices; m++) {
        const int64_t size = matrices[m].n_strips() * matrices[m].strip_bytes();
        all += n_used * size;
        largest = std::max(largest, size);
    }
    const bool in_blocks = all > MOST_AHEAD;  // experts are multiplied while the next ones are read
    const int64_t block = in_blocks ? std::min(n_experts, MOST_AHEAD / largest + 1) : n_experts;
    auto ask = [&](int64_t m, int64_t e) { read_ahead(matrices[m], r.begin, e, std::min(n_experts, e + block)); };
    if (on_disk)
        for (int64_t m = 0; m < (in_blocks ? 1 : n_matrices); m++) ask(m, 0);
    const int64_t n_groups = adapters.n_groups ? group_by_adapter(r, n_tokens * k, n_experts, k, adapters.slot_of, groups) : 0;
    // out[slot] += the adapters' terms of it.
    auto adapted = [&](const int64_t* table, int64_t width, auto input, float* out, int64_t stride) {
        if (!n_groups) return;
        adapters.table = table;
        auto group_of = [&](int64_t i) { return Group{groups[4 * i], groups[4 * i + 1], &adapters.entry(groups[4 * i + 2]), groups[4 * i + 3]}; };
        lora_down(n_groups, group_of, width, [&](int64_t m) { return input(r.order[m]); }, s);
        lora_up(n_groups, group_of, r.order, out, stride, s);
    };

    // out[slot] = w[expert] . input(slot), rows of `stride` floats, of matrix m: one task per expert and share of its strips.
    auto grouped = [&](int64_t m, auto input, float* out, int64_t stride) {
        const Matrix& w = matrices[m];
        auto rows_of = [&](int64_t first, int64_t n_rows) { return place_rows(workspace + first * row_bytes(w.k), n_rows, w); };
        parallel_for(n_experts, [&](int64_t e, int) {
            const int64_t first = r.begin[e], n_rows = r.begin[e + 1] - first, step = tile_rows(w, n_rows);
            const Rows rows = rows_of(first, n_rows);
            for (int64_t m0 = 0; m0 < n_rows; m0 += step)
                pack_tile(rows, m0, n_rows - m0 < step ? n_rows - m0 : step, w, [&](int64_t m) { return input(r.order[first + m]); });
        });
        const int64_t n_strips = w.n_strips(), share = n_strips < 4 ? n_strips : 4, n_tasks = (n_strips + share - 1) / share;
        for (int64_t e0 = 0, e1; e0 < n_experts; e0 = e1) {
            e1 = std::min(n_experts, e0 + block);
            if (in_blocks && e1 < n_experts) ask(m, e1);
            if (in_blocks && e1 == n_experts && m + 1 < n_matrices) ask(m + 1, 0);
            parallel_for((e1 - e0) * n_tasks, [&](int64_t i, int) {
                const int64_t e = e0 + i / n_tasks, s0 = i % n_tasks * share, first = r.begin[e], n_rows = r.begin[e + 1] - first;
                if (n_rows == 0) return;
                multiply(rows_of(first, n_rows), n_rows, w.expert(e), s0, s0 + share < n_strips ? s0 + share : n_strips,
                         {out, stride, r.order + first, false});
            });
        }
    };
    auto token = [&](int64_t slot) { return h + slot / k * width; };
    grouped(0, token, up, 2 * inner);
    if (rest.n) grouped(1, token, up + gate_up.n, 2 * inner);
    adapted(adapters.table, width, token, up, 2 * inner);
    parallel_for(n_tokens * k, [&](int64_t slot, int) { silu_mul_row(up + slot * 2 * inner, inner, act + slot * inner); });
    auto activation = [&](int64_t slot) { return act + slot * inner; };
    grouped(n_matrices - 1, activation, y, width);
    adapted(down_table, inner, activation, y, width);
    parallel_for(n_tokens, [&](int64_t t, int) {
        v16 open = splat(sigmoid1(logits[t * (n_experts + 1) + n_experts]));
        for (int64_t i = 0; i < width; i += 16) {
            v16 out = {};
            for (int64_t slot = 0; slot < k; slot++) out = fma(splat(r.weight[t * k + slot]), load(y + (t * k + slot) * width + i), out);
            out = fma(open, load(shared + t * width + i), out);
            store(residual + t * width + i, load(residual + t * width + i) + out);
        }
    });
}
