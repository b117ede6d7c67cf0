// The n-gram table of a layer: a token's id and those of the two before it name rows, which are gated by the residual streams and
// convolved (transformers 5.24, qwen4_exp, PLELayer).
//
//   id(n, h) = (xor_{p < n} id_{t-p} multiplier_p) mod prime_h + offset_h        in 64-bit integers
//   g_s = k_s . q_s / sqrt(H), k = norm(key e), q = norm(x);  u_s = sigmoid(sign(g_s) sqrt(max(|g_s|, 1e-6))) value e
//   x += u + silu(conv(bf16(norm(u))))                                           depthwise, over the tokens t, t - 3, t - 6, t - 9
//
// The inputs of the convolution before a chunk are kept as DeltaNet's are (gdn.cpp): those of the last tokens in the state slot, those of
// drafts in a window until it is known which of them stay.
#include "format.h"
#include "pool.h"

namespace {

enum class Stored : int64_t { BF16, F16, F32, E4M3 };

// 16 elements of a row.
v16 load_stored(const uint8_t* row, Stored type, int64_t i) {
    switch (type) {
        case Stored::BF16: return load_bf16((const bf16*)row + i);
        case Stored::F16: return load_f16(row + 2 * i);
        case Stored::F32: return load((const float*)row + i);
        default: {
            float x[16];
            for (int64_t j = 0; j < 16; j++) x[j] = e4m3(row[i + j]);
            return load(x);
        }
    }
}

struct Table {
    const int64_t* parts;  // addresses of the parts
    int64_t part_rows, width, row_bytes;
    Stored type;
    float scale;
    void read(Arguments& a) { a.read(parts, part_rows, width, row_bytes, type, scale); }
};

struct Hash {
    int64_t n_heads, longest;  // heads of all n-grams together; 2 to `longest` tokens
    const int64_t *multipliers, *primes, *offsets;
    void read(Arguments& a) { a.read(n_heads, longest, multipliers, primes, offsets); }
};

}  // namespace

// table: addresses i64 [n_parts], rows of a part, width (a multiple of 16), bytes of a row, type, scale; hash: heads, longest n-gram,
// multipliers i64 [longest], primes i64 [heads], offsets i64 [heads]; ids i32 [T], previous i32 [T, longest - 1] (the nearest first),
// out bf16 [T, heads width], T (counted)
KERNEL(deltic_ngram_rows, Table table, Hash hash, const int32_t* ids, const int32_t* previous, bf16* out, Counted n_tokens) {
    const int64_t n_each = hash.n_heads / (hash.longest - 1);
    const v16 scale = splat(table.scale);
    parallel_for(n_tokens, [&](int64_t t, int) {
        int64_t mixed = ids[t] * hash.multipliers[0];
        for (int64_t n = 1; n < hash.longest; n++) {
            mixed ^= previous[t * (hash.longest - 1) + n - 1] * hash.multipliers[n];
            for (int64_t h = (n - 1) * n_each; h < n * n_each; h++) {
                const int64_t id = mixed % hash.primes[h] + hash.offsets[h];
                const uint8_t* row = (const uint8_t*)table.parts[id / table.part_rows] + id % table.part_rows * table.row_bytes;
                bf16* to = out + (t * hash.n_heads + h) * table.width;
                for (int64_t i = 0; i < table.width; i += 16) store_bf16(to + i, load_stored(row, table.type, i) * scale);
            }
        }
    });
}

// kv f32 [T, S H + H] (keys of the streams, then the value), x f32 [T, S H] (gets u added), key norm, query norm, conv norm f32 [S H],
// out bf16 [T, S H] (what is convolved), T (counted), S, H, eps
KERNEL(deltic_ngram_gate, const float* kv, float* x, const float* key_norm, const float* query_norm, const float* conv_norm, bf16* out,
       Counted n_tokens, int64_t n_streams, int64_t width, float eps) {
    parallel_for(n_tokens, [&](int64_t t, int) {
        const float *keys = kv + t * (n_streams + 1) * width, *value = keys + n_streams * width;
        auto norm = [&](const float* row) { return 1.0f / sqrtf(sum_of_squares(row, width) / (float)width + eps); };
        for (int64_t s = 0; s < n_streams; s++) {
            const int64_t at = s * width;
            const float *key = keys + at, *wk = key_norm + at, *wq = query_norm + at;
            float* row = x + t * n_streams * width + at;
            const v16 by_key = splat(norm(key)), by_query = splat(norm(row)), one = splat(1.0f);
            v16 products = {};
            for (int64_t i = 0; i < width; i += 16)
                products = fma(load(key + i) * by_key * (one + load(wk + i)), load(row + i) * by_query * (one + load(wq + i)), products);
            float gate = sum(products) / sqrtf((float)width);
            const float size = sqrtf(fabsf(gate) > 1e-6f ? fabsf(gate) : 1e-6f);
            gate = gate > 0.0f ? size : gate < 0.0f ? -size : gate;
            const v16 open = splat(sigmoid1(gate));
            v16 squares = {};
            for (int64_t i = 0; i < width; i += 16) {
                const v16 u = open * load(value + i);
                squares = fma(u, u, squares);
                store(row + i, load(row + i) + u);
            }
            const v16 by = splat(1.0f / sqrtf(sum(squares) / (float)width + eps));
            for (int64_t i = 0; i < width; i += 16)
                store_bf16(out + t * n_streams * width + at + i, open * load(value + i) * by * (one + load(conv_norm + at + i)));
        }
    });
}

namespace {

constexpr int64_t TAPS = 4, MOST_KEPT = 16, CHANNELS = 256;  // CHANNELS: of a task

struct Convolution {
    const bf16* inputs;  // [T, C]
    float* x;            // [T, C]
    const float* taps;   // [4, C], the last meets the token itself
    int64_t n_channels, dilation;
    Counted n_seqs;
    const int32_t *seq_start, *seq_context, *start_slot, *slot, *snapshot_begin, *snapshot_n, *snapshot_slot, *n_redo, *is_lazy, *place;
    bf16* state;  // [slots, 3 dilation, C], the oldest first
    int64_t state_stride;
    bf16* window;  // [places, W, C]
    int64_t window_stride;

    void read(Arguments& a) {
        a.read(inputs, x, taps, n_channels, dilation, n_seqs, seq_start, seq_context, start_slot, slot, snapshot_begin, snapshot_n, snapshot_slot,
               n_redo, is_lazy, place, state, state_stride, window, window_stride);
    }
    int64_t n_kept() const { return (TAPS - 1) * dilation; }

    // 16 channels from c on of token t of sequence s, which may lie before the chunk.
    v16 column(int64_t s, int64_t t, int64_t c) const {
        if (t >= seq_start[s]) return load_bf16(inputs + t * n_channels + c);
        if (seq_start[s] - t > seq_context[s]) return v16{};
        const int64_t i = t - (seq_start[s] - n_redo[s]);
        if (i >= 0) return load_bf16(window + place[s] * window_stride + i * n_channels + c);
        return load_bf16(state + start_slot[s] * state_stride + (n_kept() + i) * n_channels + c);
    }

    void convolve(int64_t s, int64_t c0) const {
        const int64_t end = c0 + CHANNELS < n_channels ? c0 + CHANNELS : n_channels;
        for (int64_t t = seq_start[s]; t < seq_start[s + 1]; t++)
            for (int64_t c = c0; c < end; c += 16) {
                v16 total = {};
                for (int64_t tap = 0; tap < TAPS; tap++)
                    total = fma(column(s, t - (TAPS - 1 - tap) * dilation, c), load(taps + tap * n_channels + c), total);
                float* to = x + t * n_channels + c;
                store(to, load(to) + silu(total));
            }
    }

    // Keeps the inputs before token `end` of sequence s in a slot, and the next n_drafted in its window.
    void keep(int64_t s, int64_t end, int64_t to, int64_t n_drafted) const {
        for (int64_t c = 0; c < n_channels; c += 16) {
            v16 kept[MOST_KEPT];
            for (int64_t i = 0; i < n_kept(); i++) kept[i] = column(s, end - n_kept() + i, c);
            for (int64_t i = 0; i < n_kept(); i++) store_bf16(state + to * state_stride + i * n_channels + c, kept[i]);
            for (int64_t i = 0; i < n_drafted; i++) store_bf16(window + place[s] * window_stride + i * n_channels + c, column(s, end + i, c));
        }
    }

    // The snapshots come first: one reads the slot that it starts from, which may be the sequence's own.
    void keep_all(int64_t s) const {
        const int64_t begin = seq_start[s], end = seq_start[s + 1];
        for (int64_t i = snapshot_begin[s]; i < snapshot_begin[s + 1]; i++) keep(s, begin + snapshot_n[i], snapshot_slot[i], 0);
        if (is_lazy[s]) keep(s, begin, slot[s], end - begin);
        else keep(s, end, slot[s], 0);
    }

    void run() const {
        const int64_t n_tasks = (n_channels + CHANNELS - 1) / CHANNELS;
        parallel_for(n_seqs * n_tasks, [&](int64_t i, int) { convolve(i / n_tasks, i % n_tasks * CHANNELS); });
        parallel_for(n_seqs, [&](int64_t s, int) { keep_all(s); });
    }
};

}  // namespace

// Arguments in the order of Convolution's fields; n_seqs is counted.
KERNEL(deltic_ngram_conv, Convolution x) { x.run(); }
