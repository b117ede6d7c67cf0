// gdn: everything between the two projections of a gated DeltaNet layer, for decodes and prefill chunks alike.
//
//   u_t = SiLU(conv4(bf16(q|k|v)))            q, k l2-normalised per head, q scaled by dk^-1/2
//   beta = sigmoid(b), alpha = exp(-exp(A_log) softplus(a + dt_bias))
//   e_t = beta (v_t - alpha S^T k_t);  S = alpha S + k_t e_t^T;  o_t = S^T q_t
//   out = bf16(w * rms(o) * SiLU(z)), or sigmoid(z)
//
// Source: Yang et al., "Gated Delta Networks" (2024), eq. 10, with the prediction read from the decayed state. A prefill
// chunk is stepped token by token with the state in the first-level cache: the same arithmetic as a decode, hence the
// same bits. The chunked parallel form is left to devices where stepping is slow.
//
// A chunk with drafts is lazy: its rows may not be kept, so the state stays as it was before them, and their raw inputs are
// left in a window. Those that were accepted are redone from there by the sequence's next chunk, while its state is in the
// cache: a chunk reads and writes the state once, whatever was accepted.
//
// A state in bfloat16 is rounded behind every token, of a chunk as of a decode, so that both still have the same bits. It is
// rounded up or down at random: the nearer value would swallow every change below half of its last bit, and a slow decay with it.
// The random bits are a hash of the token's position, layer, head and element (tests/reference/layers.py), so of the tokens alone.
#include "kernel.h"
#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t CHUNK = 64;      // tokens whose q, k, v and o are kept at a time; it does not touch the bits
constexpr int64_t MAX_DIM = 256;  // dk and dv; checked where the operator is recorded
constexpr int64_t COLUMNS = 64;   // of a state that prefill keeps in the first-level cache
constexpr int64_t AHEAD = 8;      // rows of a state that are fetched in advance: to a decode it comes from memory

// 32 bits of which each depends on all of x.
uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

constexpr uint32_t KEY = 0x9e3779b9u;  // from one key to the next

// 16 columns of a state in memory, to and from float32.
v16 load_state(const float* p) { return load(p); }
v16 load_state(const bf16* p) { return load_bf16(p); }
void store_state(float* p, v16 v) { store(p, v); }
void store_state(bf16* p, v16 v) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
        u16_part h = __builtin_convertvector((u32_part)v.part[i] >> 16, u16_part);
        memcpy(p + i * LANES, &h, sizeof h);
    }
}

template <class To, class From>
void copy_row(To* to, const From* from, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store_state(to + i, load_state(from + i));
}

// Rounds two rows of 16 columns to bfloat16: each gets 16 random bits and is cut off. first: what the first column's hash is made
// of; by_column: what is added to that for each. No bits are added where `error`, which the rows' change is a multiple of, is not
// finite: they could make a number of what is none.
inline void round_rows(v16& even, v16& odd, uint32_t first, v16 by_column, v16 error) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) {
        u32_part x = (u32_part)by_column.part[i] + first;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) & (u32_part)(error.part[i] - error.part[i] == f32_part{});
        even.part[i] = (f32_part)(((u32_part)even.part[i] + (x & 0xffffu)) & 0xffff0000u);
        odd.part[i] = (f32_part)(((u32_part)odd.part[i] + (x >> 16)) & 0xffff0000u);
    }
}

// State: float or bf16.
template <class State>
struct Gdn {
    const float* proj;  // [T, row]: q | k | v | z | b | a
    int64_t row;
    Counted n_seqs;
    const int32_t *seq_start, *seq_context, *start_slot, *slot;
    const int32_t *snapshot_begin, *snapshot_n, *snapshot_slot;  // ragged over the sequences
    const float* conv_w;  // [4, C]
    bf16* conv_state;     // [slots, 3, C]: the last three columns, oldest first
    int64_t conv_stride;
    State* state;  // [slots, Hv, dk, dv]
    int64_t state_stride;
    const float *a_log, *dt_bias, *norm_w;
    float eps;
    int64_t n_k, n_v, dk, dv;
    bool tiled;  // value head h reads key head h % n_k, not h / (n_v / n_k)
    bool sigmoid_gate;
    const int32_t *n_redo, *is_lazy, *place;
    bf16* window_columns;  // [places, W, C]: what column() gave
    int64_t window_columns_stride;
    float* window_gates;  // [places, W, 2 Hv]: b | a
    int64_t window_gates_stride;
    int64_t layer;  // its number among those with a state
    bf16* out;  // [T, Hv dv]

    void read(Arguments& a) {
        a.read(proj, row, n_seqs, seq_start, seq_context, start_slot, slot, snapshot_begin, snapshot_n, snapshot_slot, conv_w, conv_state,
               conv_stride, state, state_stride, a_log, dt_bias, norm_w, eps, n_k, n_v, dk, dv, tiled, sigmoid_gate, n_redo, is_lazy, place,
               window_columns, window_columns_stride, window_gates, window_gates_stride, layer, out);
    }
    int64_t channels() const { return 2 * n_k * dk + n_v * dv; }

    // The token that sequence s goes on with: of its window, whose tokens lie before the chunk, if it has any to redo.
    int64_t first(int64_t s) const { return seq_start[s] - n_redo[s]; }

    // The 16 channels from c on of token t of sequence s, as bfloat16 values widened; t may lie up to 3 tokens before the first.
    v16 column(int64_t s, int64_t t, int64_t c) const {
        if (t >= seq_start[s]) return round_bf16(load(proj + t * row + c));
        if (seq_start[s] - t > seq_context[s]) return v16{};
        const int64_t i = t - first(s);
        if (i >= 0) return load_bf16(window_columns + place[s] * window_columns_stride + i * channels() + c);
        return load_bf16(conv_state + start_slot[s] * conv_stride + (3 + i) * channels() + c);
    }

    // b and a of token t of sequence s, of all heads.
    const float* gates(int64_t s, int64_t t) const {
        if (t >= seq_start[s]) return proj + t * row + channels() + n_v * dv;
        return window_gates + place[s] * window_gates_stride + (t - first(s)) * 2 * n_v;
    }

    // out [n, width] = SiLU(conv) of the channels from c0 on, for n tokens from t0 on.
    void convolve(int64_t s, int64_t t0, int64_t n, int64_t c0, int64_t width, float* out) const {
        const int64_t n_channels = channels();
        for (int64_t i = 0; i < width; i += 16) {
            const int64_t c = c0 + i;
            const v16 w[4] = {load(conv_w + c), load(conv_w + n_channels + c), load(conv_w + 2 * n_channels + c), load(conv_w + 3 * n_channels + c)};
            v16 x[3] = {column(s, t0 - 3, c), column(s, t0 - 2, c), column(s, t0 - 1, c)};
            const auto next = [&](int64_t t, v16 now) {
                store(out + t * width + i, silu(fma(now, w[3], fma(x[2], w[2], fma(x[1], w[1], x[0] * w[0])))));
                x[0] = x[1], x[1] = x[2], x[2] = now;
            };
            int64_t t = 0;
            for (; t0 + t < seq_start[s]; t++) next(t, column(s, t0 + t, c));
            for (; t < n; t++) {
                const float* at = proj + (t0 + t) * row + c;
                __builtin_prefetch(at + 8 * row);  // rows are too far apart for the hardware to guess
                next(t, round_bf16(load(at)));
            }
        }
    }

    void l2_normalise(int64_t n, float scale, float* x) const {
        for (int64_t t = 0; t < n; t++, x += dk) {
            v16 by = splat(scale / sqrtf(sum_of_squares(x, dk) + 1e-6f));
            for (int64_t i = 0; i < dk; i += 16) store(x + i, load(x + i) * by);
        }
    }

    // Keeps the three columns before token `end` of sequence s in a slot, and the next n_drafted in its window: there is read
    // what is overwritten here, 16 channels at a time.
    void keep_columns(int64_t s, int64_t end, int64_t slot, int64_t n_drafted) const {
        const int64_t n_channels = channels();
        bf16 *kept = conv_state + slot * conv_stride, *window = window_columns + place[s] * window_columns_stride;
        for (int64_t c = 0; c < n_channels; c += 16) {
            v16 columns[3] = {column(s, end - 3, c), column(s, end - 2, c), column(s, end - 1, c)};
            for (int64_t i = 0; i < 3; i++) store_bf16(kept + i * n_channels + c, columns[i]);
            for (int64_t i = 0; i < n_drafted; i++) store_bf16(window + i * n_channels + c, column(s, end + i, c));
        }
    }

    // Stores what the next chunk of sequence s reads, and the snapshots. Runs after every token was convolved. The snapshots come
    // first: a short one reads columns of the slot that it starts from, which may be the sequence's own.
    void keep_all_columns(int64_t s) const {
        const int64_t begin = seq_start[s], end = seq_start[s + 1];
        for (int64_t i = snapshot_begin[s]; i < snapshot_begin[s + 1]; i++) keep_columns(s, begin + snapshot_n[i], snapshot_slot[i], 0);
        if (!is_lazy[s]) return keep_columns(s, end, slot[s], 0);
        keep_columns(s, begin, slot[s], end - begin);
        float* window = window_gates + place[s] * window_gates_stride;
        for (int64_t t = begin; t < end; t++) memcpy(window + (t - begin) * 2 * n_v, gates(s, t), 2 * n_v * 4);
    }

    // Inputs that the tokens of a chunk bring to one head: q, k [n, dk], v, o [n, dv], its two gates, and what their rounding begins with.
    struct Head {
        float q[CHUNK * MAX_DIM], k[CHUNK * MAX_DIM], v[CHUNK * MAX_DIM], o[CHUNK * MAX_DIM], alpha[CHUNK], beta[CHUNK];
        uint32_t seed[CHUNK];
    };

    // Steps the tokens begin .. n - 1 through NV * 16 columns of one head's state S, rows `stride` apart. Every token reads
    // S^T k before it changes S; for all but the first that sum is taken while the token before writes S. Even and odd rows
    // have their own sums, to hide latency. T: State, or float with the same values.
    template <int NV, class T>
    void recur(int64_t begin, int64_t n, T* S, int64_t stride, int64_t column, Head& head) const {
        const float* k = head.k + begin * dk;
        v16 even[NV] = {}, odd[NV] = {};
        for (int64_t i = 0; i < dk; i += 2)
            for (int j = 0; j < NV; j++) {
                __builtin_prefetch(S + (i + AHEAD) * stride + 16 * j);
                __builtin_prefetch(S + (i + AHEAD + 1) * stride + 16 * j);
                even[j] = fma(splat(k[i]), load_state(S + i * stride + 16 * j), even[j]);
                odd[j] = fma(splat(k[i + 1]), load_state(S + (i + 1) * stride + 16 * j), odd[j]);
            }
        for (int64_t t = begin; t < n; t++) {
            v16 e[NV];
            for (int j = 0; j < NV; j++)
                e[j] = splat(head.beta[t]) * (load(head.v + t * dv + column + 16 * j) - splat(head.alpha[t]) * (even[j] + odd[j]));
            if (t + 1 < n) update<NV, true, T>(S, stride, t, column, head, e, even, odd);
            else update<NV, false, T>(S, stride, t, column, head, e, even, odd);
        }
    }

    // S = alpha S + k e^T; o = S^T q, before S is rounded; with NEXT, even + odd = S^T of the next token's k.
    template <int NV, bool NEXT, class T>
    void update(T* S, int64_t stride, int64_t t, int64_t column, Head& head, const v16* e, v16* even, v16* odd) const {
        const float *k = head.k + t * dk, *q = head.q + t * dk;
        v16 o_even[NV] = {}, o_odd[NV] = {}, next_even[NV] = {}, next_odd[NV] = {};
        const v16 decay = splat(head.alpha[t]);
        const uint32_t by_column = (uint32_t)dk * KEY, seed = head.seed[t] + (uint32_t)column * by_column;
        const v16 by_lane = each_part([&](int i) {
            u32_part lanes;
            for (int j = 0; j < LANES; j++) lanes[j] = (i * LANES + j) * by_column;
            return (f32_part)lanes;
        });
        for (int64_t i = 0; i < dk; i += 2) {
            const v16 k0 = splat(k[i]), k1 = splat(k[i + 1]), q0 = splat(q[i]), q1 = splat(q[i + 1]);
            v16 n0, n1;
            if constexpr (NEXT) n0 = splat(k[dk + i]), n1 = splat(k[dk + i + 1]);
            for (int j = 0; j < NV; j++) {
                v16 s0 = fma(k0, e[j], decay * load_state(S + i * stride + 16 * j));
                v16 s1 = fma(k1, e[j], decay * load_state(S + (i + 1) * stride + 16 * j));
                o_even[j] = fma(q0, s0, o_even[j]);
                o_odd[j] = fma(q1, s1, o_odd[j]);
                if constexpr (!std::is_same_v<State, float>) round_rows(s0, s1, seed + (uint32_t)i * KEY + 16 * j * by_column, by_lane, e[j]);
                store_state(S + i * stride + 16 * j, s0);
                store_state(S + (i + 1) * stride + 16 * j, s1);
                if constexpr (NEXT) {
                    next_even[j] = fma(n0, s0, next_even[j]);
                    next_odd[j] = fma(n1, s1, next_odd[j]);
                }
            }
        }
        for (int j = 0; j < NV; j++) {
            store(head.o + t * dv + column + 16 * j, o_even[j] + o_odd[j]);
            even[j] = next_even[j];
            odd[j] = next_odd[j];
        }
    }

    // The tokens begin .. n - 1 through the first `width` columns of S, from column c0 of the head on, NV * 16 at a time.
    // Inlined, so that a decode has its one token's own code where NV is that of a prefill (AVX2).
    template <int NV, class T>
    __attribute__((always_inline)) void recur_columns(int64_t begin, int64_t n, T* S, int64_t stride, int64_t c0, int64_t width, Head& head) const {
        int64_t c = 0;
        for (; c + 16 * NV <= width; c += 16 * NV) recur<NV, T>(begin, n, S + c, stride, c0 + c, head);
        for (; c < width; c += 16) recur<1, T>(begin, n, S + c, stride, c0 + c, head);
    }

    // Advances all columns of a head's state by n tokens, as many registers at a time as there are: from `start` to S, which may be
    // the same, and to `kept`, if any. S gets what the first n_stored tokens leave, `kept` what all do. Not cloned for its one
    // caller: knowing that `head` is thread-local, the compiler would look up its address in the innermost loops.
    __attribute__((noinline, noclone)) void recur_all(int64_t n, int64_t n_stored, const State* start, State* S, State* kept, Head& head) const {
        constexpr int DECODE = LANES == 16 ? 8 : 2, PREFILL = LANES == 16 ? 4 : SSE ? 1 : 2;
        if (n == 1 && n_stored == 1) {  // the state is read once from memory: whole rows, one after another
            if (start != S) memcpy(S, start, dk * dv * sizeof(State));
            recur_columns<DECODE>(0, 1, S, dv, 0, dv, head);
            if (kept) memcpy(kept, S, dk * dv * sizeof(State));
            return;
        }
        alignas(64) float local[MAX_DIM * COLUMNS];  // else vectors lie in two cache lines
        for (int64_t c0 = 0; c0 < dv; c0 += COLUMNS) {
            const int64_t width = dv - c0 < COLUMNS ? dv - c0 : COLUMNS;
            const auto store_to = [&](State* to) {
                for (int64_t i = 0; i < dk; i++) copy_row(to + i * dv + c0, local + i * width, width);
            };
            for (int64_t i = 0; i < dk; i++) copy_row(local + i * width, start + i * dv + c0, width);
            if (n_stored > 0) recur_columns<PREFILL>(0, n_stored, local, width, c0, width, head);
            if (n_stored > 0 || start != S) store_to(S);
            if (n_stored < n) recur_columns<PREFILL>(n_stored, n, local, width, c0, width, head);
            if (kept) store_to(kept);
        }
    }

    State* state_of(int64_t slot, int64_t h) const { return state + slot * state_stride + h * dk * dv; }

    // Runs all tokens of sequence s in value head h. Those of a lazy chunk and of its window are one block: CHUNK holds two windows.
    void run(int64_t s, int64_t h) const {
        static thread_local Head head;
        const int64_t head_k = tiled ? h % n_k : h / (n_v / n_k);
        State* S = state_of(slot[s], h);
        const State* start = seq_context[s] == 0 ? S : state_of(start_slot[s], h);
        if (seq_context[s] == 0) memset(S, 0, dk * dv * sizeof(State));
        int64_t snapshot = snapshot_begin[s], n;
        for (int64_t t0 = first(s); t0 < seq_start[s + 1]; t0 += n) {
            // A snapshot is the end of a block.
            const bool comes = snapshot < snapshot_begin[s + 1];
            const int64_t end = comes ? seq_start[s] + snapshot_n[snapshot] : seq_start[s + 1];
            n = end - t0 < CHUNK ? end - t0 : CHUNK;
            State* kept = comes && t0 + n == end ? state_of(snapshot_slot[snapshot++], h) : nullptr;
            convolve(s, t0, n, head_k * dk, dk, head.q);
            convolve(s, t0, n, (n_k + head_k) * dk, dk, head.k);
            convolve(s, t0, n, 2 * n_k * dk + h * dv, dv, head.v);
            l2_normalise(n, 1.0f / sqrtf((float)dk), head.q);
            l2_normalise(n, 1.0f, head.k);
            for (int64_t t = 0; t < n; t++) {
                const float* token = gates(s, t0 + t);
                float x = token[n_v + h] + dt_bias[h], softplus = x > 20.0f ? x : log1pf(expf(x));
                head.alpha[t] = expf(-expf(a_log[h]) * softplus);
                head.beta[t] = sigmoid1(token[h]);
                head.seed[t] = mixed((uint32_t)(seq_context[s] + t0 + t - seq_start[s]) ^ mixed((uint32_t)(layer << 16 | h)));
            }
            recur_all(n, is_lazy[s] ? n_redo[s] : n, start, S, kept, head);
            start = S;
            for (int64_t t = t0 < seq_start[s] ? seq_start[s] - t0 : 0; t < n; t++)
                gated_norm(head.o + t * dv, proj + (t0 + t) * row + channels() + h * dv, out + ((t0 + t) * n_v + h) * dv);
        }
    }

    void gated_norm(const float* x, const float* z, bf16* y) const {
        v16 scale = splat(1.0f / sqrtf(sum_of_squares(x, dv) / (float)dv + eps));
        for (int64_t i = 0; i < dv; i += 16) {
            const v16 gate = load(z + i);
            store_bf16(y + i, load(norm_w + i) * (load(x + i) * scale) * (sigmoid_gate ? sigmoid(gate) : silu(gate)));
        }
    }
};

}  // namespace

// Arguments in the order of the fields of Gdn; n_seqs is counted. One task is one head of one sequence, from the projection
// to the output.
template <class State>
static void run_all(const Gdn<State>& g) {
    parallel_for(g.n_seqs * g.n_v, [&](int64_t i, int) { g.run(i / g.n_v, i % g.n_v); });
    parallel_for(g.n_seqs, [&](int64_t s, int) { g.keep_all_columns(s); });
}
KERNEL(deltic_gdn, Gdn<float> g) { run_all(g); }
KERNEL(deltic_gdn_bf16, Gdn<bf16> g) { run_all(g); }
