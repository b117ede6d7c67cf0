// sample and logprobs: from rows of logits to tokens, one row a task.
//
// Order of the transformations (tests/reference/sample.py): bias, repetition, frequency and presence penalties, banned ids, mask,
// temperature, top-k, softmax, min-p, top-p, one draw. The draw uses Philox4x32-10 keyed by the seed and counted by the
// position (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): it depends on logits, seed and position.
#include <algorithm>

#include "kernel.h"
#include "pool.h"
#include "simd.h"

namespace {

struct Candidate {
    float value;
    int32_t id;
};
bool likelier(const Candidate& a, const Candidate& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; }
bool lower_id(const Candidate& a, const Candidate& b) { return a.id < b.id; }

double uniform(uint64_t seed, uint32_t position) {
    uint32_t x[4] = {position, 0, 0, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * x[0], b = (uint64_t)0xCD9E8D57u * x[2];
        uint32_t y[4] = {(uint32_t)(b >> 32) ^ x[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ x[3] ^ k1, (uint32_t)a};
        memcpy(x, y, sizeof x);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)(x[0] >> 8) * 0x1p-24;
}

// Parameters of one row, gathered from the batch arrays.
struct Row {
    float temperature;
    int32_t top_k;
    float top_p, min_p, repetition, frequency, presence;
    uint64_t seed;
    uint32_t position;
    const int32_t *history, *history_end, *generated;
    const int32_t *bias_ids, *bias_ids_end;
    const float* bias;
    const int32_t *banned, *banned_end;
};

void penalise(const Row& r, float* values, int32_t* counts) {
    constexpr int32_t SEEN = 1 << 30;
    for (const int32_t* t = r.generated; t < r.history_end; t++) counts[*t]++;
    for (const int32_t* t = r.history; t < r.history_end; t++) {
        int32_t count = counts[*t];
        if (count & SEEN) continue;
        float& v = values[*t];
        v = v > 0 ? v / r.repetition : v * r.repetition;
        if (count > 0) v -= r.frequency * (float)count + r.presence;
        counts[*t] = count | SEEN;
    }
    for (const int32_t* t = r.history; t < r.history_end; t++) counts[*t] = 0;
}

// Bans the ids whose bit in the mask is 0.
void apply_mask(float* values, int64_t n, const uint32_t* mask) {
    for (int64_t begin = 0; begin < n; begin += 32) {
        uint32_t bits = mask[begin / 32];
        int64_t end = std::min(begin + 32, n);
        if (bits == 0) std::fill(values + begin, values + end, -INFINITY);
        else if (bits != UINT32_MAX)
            for (int64_t i = begin; i < end; i++)
                if (!(bits >> (i - begin) & 1)) values[i] = -INFINITY;
    }
}

// Returns whether no value is NaN or infinite: any of them times 0 is NaN.
bool all_finite(const float* values, int64_t n) {
    v16 zeros = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) zeros = zeros + load(values + i) * splat(0.0f);
    float zero = sum(zeros);
    for (; i < n; i++) zero += values[i] * 0.0f;
    return zero == 0.0f;
}

float highest(const float* values, int64_t n) {
    v16 high = splat(-INFINITY);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) high = vmax(high, load(values + i));
    float top = max(high);
    for (; i < n; i++) top = std::max(top, values[i]);
    return top;
}

// The lowest id of the highest value, which is finite.
int32_t argmax(const float* values, int64_t n) { return (int32_t)(std::find(values, values + n, highest(values, n)) - values); }

// Brings the likeliest candidates whose weights reach `target` to the front; returns how many that takes. Halves the
// range that the last of them is in, so it costs O(n) and not a sort.
int64_t nucleus(Candidate* c, int64_t n, double target) {
    int64_t begin = 0, end = n;
    double reached = 0;
    while (end - begin > 64) {
        int64_t middle = begin + (end - begin) / 2;
        std::nth_element(c + begin, c + middle, c + end, likelier);
        double half = 0;
        for (int64_t i = begin; i < middle; i++) half += c[i].value;
        if (reached + half >= target) {
            end = middle;
        } else {
            reached += half;
            begin = middle;
        }
    }
    std::sort(c + begin, c + end, likelier);
    for (int64_t i = begin; i < end; i++) {
        reached += c[i].value;
        if (reached >= target) return i + 1;
    }
    return end;
}

constexpr int64_t BLOCK = 256;  // elements whose weights are summed together in `draw_from_all`

// values[i] = exp((values[i] - top) / temperature): weights relative to the likeliest, which weighs exactly 1. The
// difference comes first, so that the smallest temperature does not overflow.
void to_weights(float* values, int64_t n, float top, float temperature) {
    v16 t = splat(temperature);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store(values + i, vexp((load(values + i) - splat(top)) / t));
    for (; i < n; i++) values[i] = exp1((values[i] - top) / temperature);
}

float block_sum(const float* weights, int64_t n) {
    v16 sums = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sums = sums + load(weights + i);
    float total = sum(sums);
    for (; i < n; i++) total += weights[i];
    return total;
}

// The first candidate, in order of ids, at which the running sum exceeds u of the whole; of several weighing nothing, none.
int32_t draw_from(const Candidate* c, int64_t n, double total, double u) {
    double threshold = u * total, reached = 0;
    int32_t last = c[0].id;
    for (int64_t i = 0; i < n; i++) {
        if (c[i].value == 0) continue;  // a banned id must not be the last resort
        last = c[i].id;
        reached += c[i].value;
        if (reached > threshold) break;
    }
    return last;
}

// The same over all weights: block sums find the block, then its elements are walked.
int32_t draw_from_all(const float* weights, int64_t n, double u) {
    double total = 0, reached = 0;
    for (int64_t i = 0; i < n; i += BLOCK) total += block_sum(weights + i, std::min(BLOCK, n - i));
    double threshold = u * total;
    int32_t last = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t end = std::min(i + BLOCK, n);
        double sum = block_sum(weights + i, end - i);
        if (sum == 0) continue;
        if (reached + sum > threshold) {
            for (int64_t j = i; j < end && reached <= threshold; j++) {
                if (weights[j] > 0) last = (int32_t)j;
                reached += weights[j];
            }
            return last;
        }
        reached += sum;
        for (int64_t j = end; j > i; j--)
            if (weights[j - 1] > 0) {
                last = (int32_t)(j - 1);
                break;
            }
    }
    return last;
}

// The k likeliest of n values, in order of ids, in c[0 : k].
void select_top(const float* values, int64_t n, int64_t k, Candidate* c) {
    for (int64_t i = 0; i < k; i++) c[i] = {values[i], (int32_t)i};
    std::make_heap(c, c + k, likelier);  // the least likely of those kept is in front
    for (int64_t begin = k, end; begin < n; begin = end) {
        end = std::min(begin + 64, n);
        if (highest(values + begin, end - begin) <= c[0].value) continue;
        for (int64_t i = begin; i < end; i++) {
            if (values[i] <= c[0].value) continue;  // of equal values the lower id stays
            std::pop_heap(c, c + k, likelier);
            c[k - 1] = {values[i], (int32_t)i};
            std::push_heap(c, c + k, likelier);
        }
    }
    std::sort(c, c + k, lower_id);
}

// Draws one of the likeliest that reach top_p of `total`.
int32_t draw_nucleus(const Row& r, Candidate* c, int64_t n, double total, double u) {
    n = nucleus(c, n, r.top_p * total);
    std::sort(c, c + n, lower_id);
    total = 0;
    for (int64_t i = 0; i < n; i++) total += c[i].value;
    return draw_from(c, n, total, u);
}

int32_t draw(const Row& r, float* values, int64_t n, float top, Candidate* c) {
    double u = uniform(r.seed, r.position);
    int64_t m = 0;
    if (r.top_k > 0 && r.top_k < n) {
        m = r.top_k;
        select_top(values, n, m, c);
        for (int64_t i = 0; i < m; i++) values[i] = c[i].value;
        to_weights(values, m, top, r.temperature);
        for (int64_t i = 0; i < m; i++) c[i].value = values[i];
    } else {
        to_weights(values, n, top, r.temperature);
        if (r.min_p <= 0 && r.top_p >= 1) return draw_from_all(values, n, u);
        double total = 0;
        for (int64_t i = 0; i < n; i += BLOCK) total += block_sum(values + i, std::min(BLOCK, n - i));
        // All weights below (1 - top_p) / n of the whole add up to less than what top-p leaves out: none can be kept.
        float least = r.min_p > 0 ? r.min_p : 0.999f * (1 - r.top_p) * (float)total / (float)n;
        for (int64_t i = 0; i < n; i++)
            if (values[i] >= least) c[m++] = {values[i], (int32_t)i};
        if (r.min_p <= 0) return draw_nucleus(r, c, m, total, u);
    }
    double total = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < m; i++)
        if (c[i].value >= r.min_p) {  // the likeliest weighs exactly 1
            total += c[i].value;
            c[kept++] = c[i];
        }
    return r.top_p < 1 ? draw_nucleus(r, c, kept, total, u) : draw_from(c, kept, total, u);
}

}  // namespace

// logits f32 [R, V], V, n_real (ids from there on are padding), D draws (counted), then per draw: row i32 [D] (of logits),
// place i32 [D], position i32 [D], n_history i32 [D] (0: no penalties), n_prompt i32 [D] (history entries of the prompt);
// per place: temperature, top_k, top_p, min_p, repetition, frequency, presence, seed u64, history i32 [places, stride], stride;
// bias_begin i32 [D + 1], bias_ids, bias, banned_begin i32 [D + 1], banned, masked i32 [D] (0: no mask), masks u32 [D, W], W;
// scratch: values f32 [n, V], counts i32 [n, V] (zeros), candidates [n, V], n (a row for each thread or for each draw);
// out token_ids i32 [D], -1 where a logit is not finite or no id may be drawn
KERNEL(deltic_sample, const float* logits, int64_t n_vocab, int64_t n_real, Counted n_draws, const int32_t* row,
       const int32_t* places, const int32_t* position, const int32_t* n_history, const int32_t* n_prompt, const float* temperature,
       const int32_t* top_k, const float* top_p, const float* min_p, const float* repetition, const float* frequency,
       const float* presence, const uint64_t* seed, const int32_t* histories, int64_t history_stride, const int32_t* bias_begin,
       const int32_t* bias_ids, const float* bias, const int32_t* banned_begin, const int32_t* banned, const int32_t* masked,
       const uint32_t* masks, int64_t n_words, float* values_all, int32_t* counts_all, Candidate* candidates_all, int64_t n_scratch,
       int32_t* out) {
    parallel_for(n_draws, [&](int64_t d, int i_thread) {
        int64_t place = places[d];
        const int32_t* history = histories + place * history_stride;
        Row r{temperature[place], top_k[place], top_p[place], min_p[place], repetition[place], frequency[place],
              presence[place], seed[place], (uint32_t)position[d], history, history + n_history[d],
              history + n_prompt[d], bias_ids + bias_begin[d], bias_ids + bias_begin[d + 1],
              bias + bias_begin[d], banned + banned_begin[d], banned + banned_begin[d + 1]};
        const float* raw = logits + row[d] * n_vocab;
        if (!all_finite(raw, n_real)) {
            out[d] = -1;
            return;
        }
        bool plain = n_history[d] == 0 && r.bias_ids == r.bias_ids_end && r.banned == r.banned_end && !masked[d];
        if (r.temperature == 0 && plain) {
            out[d] = argmax(raw, n_real);
            return;
        }
        // Where there are more threads than draws the scratch is the draw's, else the thread's.
        int64_t i_scratch = n_scratch < pool_size() ? d : i_thread;
        float* values = values_all + i_scratch * n_vocab;
        memcpy(values, raw, n_real * 4);
        for (const int32_t* id = r.bias_ids; id < r.bias_ids_end; id++) values[*id] += r.bias[id - r.bias_ids];
        if (n_history[d] > 0) penalise(r, values, counts_all + i_scratch * n_vocab);
        for (const int32_t* id = r.banned; id < r.banned_end; id++) values[*id] = -INFINITY;
        if (masked[d]) apply_mask(values, n_real, masks + d * n_words);
        float top = highest(values, n_real);
        if (!std::isfinite(top)) out[d] = -1;
        else if (r.temperature == 0) out[d] = argmax(values, n_real);
        else out[d] = draw(r, values, n_real, top, candidates_all + i_scratch * n_vocab);
    });
}

// Log-softmax of raw logits at a target id, and the k likeliest ids (ties: lower id first).
// logits, V, n_real, N (counted), row i32 [N], target i32 [N], n_top i32 [N] (-1: skip), stride (most alternatives),
// out: logprob f32 [N], top_ids i32 [N, stride], top_logprobs f32 [N, stride]
KERNEL(deltic_logprobs, const float* logits, int64_t n_vocab, int64_t n_real, Counted n, const int32_t* row, const int32_t* target,
       const int32_t* n_top, int64_t stride, float* logprob, int32_t* top_ids, float* top_logprobs) {
    parallel_for(n, [&](int64_t i, int) {
        if (n_top[i] < 0 || target[i] < 0) return;
        const float* x = logits + row[i] * n_vocab;
        v16 most = splat(-INFINITY), sums = {};
        int64_t j = 0;
        for (; j + 16 <= n_real; j += 16) most = vmax(load(x + j), most);
        float high = max(most);
        for (; j < n_real; j++) high = x[j] > high ? x[j] : high;
        j = 0;
        for (; j + 16 <= n_real; j += 16) sums = sums + vexp(load(x + j) - splat(high));
        float total = sum(sums);
        for (; j < n_real; j++) total += exp1(x[j] - high);
        float log_total = high + logf(total);
        logprob[i] = x[target[i]] - log_total;

        int32_t* ids = top_ids + i * stride;
        float* best = top_logprobs + i * stride;
        int64_t n_kept = 0, n_wanted = n_top[i];
        for (int64_t id = 0; id < n_real && n_wanted > 0; id++) {
            if (n_kept == n_wanted && !(x[id] > best[n_kept - 1])) continue;
            int64_t at = n_kept < n_wanted ? n_kept++ : n_kept - 1;
            for (; at > 0 && x[id] > best[at - 1]; at--) {
                best[at] = best[at - 1];
                ids[at] = ids[at - 1];
            }
            best[at] = x[id];
            ids[at] = (int32_t)id;
        }
        for (int64_t at = 0; at < n_kept; at++) best[at] -= log_total;
    });
}
