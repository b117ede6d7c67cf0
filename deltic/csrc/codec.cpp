// The vocoder of the 12.5 Hz speech tokenizer: convolutions, a windowed attention, and the little between them. All is float32, but
// that the inputs and weights of a convolution may be bfloat16; its sums are float32 then, too.
//
// Rows are points of time, channels are contiguous. A buffer holds the rows of several streams one after another; in front of
// each stream's there is room for `head` rows, what a causal convolution saw before: it comes from the stream's state and the
// newest rows go back there. Every output is one sum over taps and channels in one order, in one accumulator, so that its bits do
// not depend on how the frames were cut, on the streams beside it, or on the threads. A transposed convolution with kernel 2r and
// stride r is a convolution of two taps whose outputs are r rows of N / r channels; a linear has one tap.
//
// Weights are packed in panels of 32 outputs, [panel][tap][channel][32], or of bfloat16 [panel][tap][channel / 2][32][2]: K goes by
// in words of 32 bits, one value or two. A tile of rows and a panel's 32 sums stay in registers
// while K goes by; K is cut into parts that leave room in the second-level cache, and sums wait in memory in between.
#include "kernel.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <type_traits>

namespace {

constexpr int64_t PANEL = 32;
constexpr int MR = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;  // rows of a tile, and strips of 16 outputs: what the registers hold
constexpr int NS = LANES == 16 ? 2 : 1;
constexpr int64_t TILES = 16;       // of a task
constexpr int64_t PART = 1024;      // most words of K in one pass
constexpr int64_t MAX_WINDOW = 256;
constexpr int64_t FEW_WEIGHTS = 1 << 17;  // words that stay in the second-level cache, whatever else goes by

// The frames of a pass: stream s has frames [start[s], start[s + 1]) and its state in slot[s].
struct Batch {
    const int32_t *start, *slot;
    Counted n;
    float* states;  // [n_slots, state_size]; the first value of a state is its position in frames
    int64_t state_size;
    void read(Arguments& a) { a.read(start, slot, n, states, state_size); }
    float* state(int64_t s) const { return states + slot[s] * state_size; }
};

struct Rows {
    float* data;  // null: there are none; is_half: bfloat16
    int64_t ld, head;
    bool is_half;
    void read(Arguments& a) { a.read(data, ld, head, is_half); }
    int64_t first(int64_t s, int64_t g) const { return (g + (s + 1) * head) * ld; }
    // Row g of all that the buffer holds, which belongs to stream s; those of its past are before its first one.
    float* row(int64_t s, int64_t g) const { return data + first(s, g); }
    bf16* half_row(int64_t s, int64_t g) const { return (bf16*)data + first(s, g); }
    int64_t words() const { return is_half ? ld / 2 : ld; }  // from row to row

    void put(int64_t s, int64_t g, int64_t column, v16 v) const {
        if (is_half) store_bf16(half_row(s, g) + column, v);
        else store(row(s, g) + column, v);
    }
};

// Puts what the streams' rows follow in front of them, and keeps what the next rows will follow.
void carry(const Batch& batch, const Rows& x, int64_t rate, int64_t channels, int64_t offset) {
    if (!x.head) return;
    const int64_t parts = channels % 64 ? 1 : 4, width = channels / parts;
    parallel_for(batch.n * parts, [&](int64_t i, int) {
        const int64_t s = i / parts, n_rows = (batch.start[s + 1] - batch.start[s]) * rate;
        const int64_t first = batch.start[s] * rate - x.head, column = i % parts * width;
        float* state = batch.state(s) + offset + column;
        if (x.is_half) {  // the state's values are float32 in any case
            bf16* head = x.half_row(s, first) + column;
            for (int64_t j = 0; j < x.head; j++)
                for (int64_t c = 0; c < width; c += 16) store_bf16(head + j * x.ld + c, load(state + j * channels + c));
            for (int64_t j = 0; j < x.head; j++)
                for (int64_t c = 0; c < width; c += 16) store(state + j * channels + c, load_bf16(head + (n_rows + j) * x.ld + c));
            return;
        }
        float* head = x.row(s, first) + column;
        for (int64_t j = 0; j < x.head; j++) memcpy(head + j * x.ld, state + j * channels, width * 4);
        for (int64_t j = 0; j < x.head; j++) memcpy(state + j * channels, head + (n_rows + j) * x.ld, width * 4);
    });
}

// x + sin^2(alpha x) / beta. sin on [-pi/2, pi/2], fitted to 7e-9; multiples of pi are taken away in two parts.
inline v16 snake(v16 x, v16 alpha, v16 inverse_beta) {
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    v16 t = x * alpha;
    v16 n = fma(t, splat(0.31830987334251404f), magic) - magic;
    v16 r = fma(n, splat(8.742277657347586e-08f), fma(n, splat(-3.1415927410125732f), t));
    v16 u = r * r;
    v16 p = fma(u, splat(2.5992781948608935e-06f), splat(-0.00019806202009695978f));
    p = fma(u, p, splat(0.008333010326027542f));
    p = fma(u, p, splat(-0.16666656731361068f));
    v16 sine = fma(r * u, p, r);
    return fma(sine * sine, inverse_beta, x);
}

enum Activation : int64_t { NONE = 0, GELU = 1, SWIGLU = 2, CLAMP = 3 };

struct Conv {
    Batch batch;
    Rows x;
    int64_t rate, channels, taps, dilation, offset;  // rate: rows of x per frame; offset: of its past in the state
    const uint32_t* w;
    int64_t n;
    const float* bias;  // [n] and so are these; null: none
    Activation activation;
    const float* scale;
    Rows residual, out;
    int64_t phases;  // rows of output for each of input
    const float *alpha, *inverse_beta;
    Rows snaked;

    void read(Arguments& a) {
        a.read(batch, x, rate, channels, taps, dilation, offset, w, n, bias, activation, scale, residual, out, phases, alpha, inverse_beta, snaked);
    }
    int64_t words() const { return x.is_half ? channels / 2 : channels; }  // of a tap
    int64_t k() const { return taps * words(); }
    int64_t n_panels() const { return (n + PANEL - 1) / PANEL; }
    int64_t n_rows() const { return batch.start[batch.n] * rate; }

    // Where rows follow one another without a gap, a tile may hold those of several streams.
    int64_t n_segments() const { return x.head ? batch.n : 1; }
    int64_t first_row(int64_t segment) const { return (x.head ? batch.start[segment] : segment ? batch.start[batch.n] : 0) * rate; }
    int64_t n_tiles(int64_t segment) const { return (first_row(segment + 1) - first_row(segment) + MR - 1) / MR; }

    // sums [rows][PANEL] (+)= x W^T for words [k0, k1) of K, one or two strips of the panel. Word: float, or uint32_t with two bfloat16.
    template <class Word, int ROWS, int STRIPS, bool FETCH>
    void multiply(const Word* rows, const Word* panel, int64_t k0, int64_t k1, float* sums) const {
        constexpr int N = STRIPS * PARTS;
        f32_part acc[ROWS][N] = {};
        if (k0)
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; m++) memcpy(acc[m], sums + m * PANEL, sizeof acc[m]);
        const int64_t ld = x.words(), ahead = (k1 - k0) * PANEL;
        for (int64_t k = k0; k < k1;) {
            const int64_t tap = k / words(), c = k % words(), end = std::min(k1, k - c + words());
            const Word* at = rows + tap * dilation * ld + c;
            const Word *w = panel + k * PANEL, *w_end = panel + end * PANEL;
            for (; w < w_end; w += PANEL, at++) {
                decltype(everywhere(Word())) weights[N];
#pragma GCC unroll 4
                for (int j = 0; j < N; j++) memcpy(&weights[j], w + j * LANES, sizeof weights[j]);
                if constexpr (FETCH)
                    for (int s = 0; s < STRIPS; s++) __builtin_prefetch(w + s * 16 + ahead, 0, 2);
#pragma GCC unroll 16
                for (int m = 0; m < ROWS; m++) {
                    const auto value = everywhere(at[m * ld]);
#pragma GCC unroll 4
                    for (int j = 0; j < N; j++) acc[m][j] = fold(acc[m][j], value, weights[j]);
                }
            }
            k = end;
        }
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) memcpy(sums + m * PANEL, acc[m], sizeof acc[m]);
    }

    // A tile of n_rows rows and the strips of a panel; is_first: of its task, so the next weights are fetched.
    template <class Word>
    void multiply_tile(const void* rows, const void* weights, int64_t n_rows, int64_t n_strips, bool is_first, int64_t k0, int64_t k1, float* sums) const {
        auto x = (const Word*)rows;
        auto w = (const Word*)weights;
        // With AVX2 the loop does it all: beside the others, Clang runs out of registers there (2.1 times the time of one strip).
        with_rows<MR>(n_rows, [&](auto mr) {
            if (LANES != 8 && n_strips == NS && is_first) multiply<Word, mr(), NS, true>(x, w, k0, k1, sums);
            else if (LANES != 8 && n_strips == NS) multiply<Word, mr(), NS, false>(x, w, k0, k1, sums);
            else
                for (int64_t s = 0; s < n_strips; s++) multiply<Word, mr(), 1, false>(x, w + s * 16, k0, k1, sums + s * 16);
        });
    }

    // Finishes the sums [n_rows][PANEL] of rows from g on, the first of which belongs to stream s.
    void finish(const float* sums, int64_t s, int64_t g, int64_t n_rows, int64_t panel) const {
        int64_t stream[MR];
        for (int64_t m = 0; m < n_rows; m++) {
            while (g + m >= batch.start[s + 1] * rate) s++;
            stream[m] = s;
        }
        const int64_t n_out = activation == SWIGLU ? n / 2 : n, width = n_out / phases;  // width: channels of a row of output
        const int64_t per_panel = activation == SWIGLU ? 16 : PANEL;
        for (int64_t i = 0; i < per_panel && panel * per_panel + i < n_out; i += 16) {
            const int64_t j = panel * per_panel + i, phase = j / width, column = j % width;
            const v16 none = {};
            const v16 b = bias ? load(bias + j) : none, factor = scale ? load(scale + j) : none;
            const v16 a = alpha ? load(alpha + j) : none, c = alpha ? load(inverse_beta + j) : none;
            for (int64_t m = 0; m < n_rows; m++) {
                const int64_t row = (g + m) * phases + phase;
                v16 v = load(sums + m * PANEL + i);
                if (bias) v = v + b;
                if (activation == GELU) v = gelu(v);
                if (activation == SWIGLU) v = silu(v) * load(sums + m * PANEL + 16);  // 16 of the gate, then what they multiply
                if (activation == CLAMP) v = -vmax(-vmax(v, splat(-1.0f)), splat(-1.0f));
                if (scale) v = v * factor;
                if (residual.data) v = v + load(residual.row(stream[m], row) + column);
                if (width < 16) {
                    float first[16];
                    store(first, v);
                    memcpy(out.row(stream[m], row) + column, first, width * 4);
                    continue;
                }
                if (out.data) out.put(stream[m], row, column, v);
                if (snaked.data) snaked.put(stream[m], row, column, snake(v, a, c));
            }
        }
    }

    // TILES tiles from number `first` on, for one panel.
    void task(int64_t first, int64_t panel) const {
        alignas(64) float sums[TILES * MR * PANEL];
        const uint32_t* weights = w + panel * k() * PANEL;
        const int64_t n_parts = (k() + PART - 1) / PART, part = (k() + n_parts - 1) / n_parts;
        const int64_t n_strips = std::min<int64_t>(2, (n - panel * PANEL + 15) / 16);
        int64_t begin = 0;
        while (begin < n_segments() && first >= n_tiles(begin)) first -= n_tiles(begin++);
        for (int64_t k0 = 0; k0 < k(); k0 += part) {
            const int64_t k1 = std::min(k(), k0 + part);
            int64_t segment = begin, tile = first;
            for (int64_t i = 0; i < TILES; i++, tile++) {
                while (segment < n_segments() && tile >= n_tiles(segment)) tile = 0, segment++;
                if (segment == n_segments()) break;
                const int64_t all = n_tiles(segment), g = first_row(segment), n_all = first_row(segment + 1) - g;
                const int64_t g0 = g + n_all * tile / all, n_rows = g + n_all * (tile + 1) / all - g0;
                float* to = sums + i * MR * PANEL;
                if (x.is_half) multiply_tile<uint32_t>(x.half_row(segment, g0 - x.head), weights, n_rows, n_strips, i == 0, k0, k1, to);
                else multiply_tile<float>(x.row(segment, g0 - x.head), weights, n_rows, n_strips, i == 0, k0, k1, to);
                if (k1 == k()) finish(to, x.head ? segment : 0, g0, n_rows, panel);
            }
        }
    }

    void run() const {
        carry(batch, x, rate, channels, offset);
        int64_t n_all = 0;
        for (int64_t segment = 0; segment < n_segments(); segment++) n_all += n_tiles(segment);
        const int64_t n_blocks = (n_all + TILES - 1) / TILES;
        if (n_panels() * PANEL * k() <= FEW_WEIGHTS)
            parallel_for(n_blocks, [&](int64_t i, int) {
                for (int64_t panel = 0; panel < n_panels(); panel++) task(i * TILES, panel);
            });
        else
            parallel_for(n_blocks * n_panels(), [&](int64_t i, int) { task(i % n_blocks * TILES, i / n_blocks); });
    }
};

}  // namespace

// batch: start i32 [S + 1], slot i32 [S], S (counted), states f32 [n_slots, size], size.  rows: data f32 or bf16, ld, head, is_half
// codes i32 [T, 16], tables f32 [16, size, D], size, D, out (rows of 2D, head 0): the entry of code 0, then the sum of the others'
KERNEL(deltic_codec_embed, Batch batch, const int32_t* codes, const float* tables, int64_t size, int64_t dim, Rows out) {
    parallel_for(batch.start[batch.n], [&](int64_t t, int) {
        auto entry = [&](int64_t i) { return tables + (i * size + codes[t * 16 + i]) * dim; };
        float* row = out.data + t * out.ld;
        memcpy(row, entry(0), dim * 4);
        for (int64_t d = 0; d < dim; d += 16) {
            v16 total = load(entry(1) + d);
            for (int64_t i = 2; i < 16; i++) total = total + load(entry(i) + d);
            store(row + dim + d, total);
        }
    });
}

// y = activation(bias + conv(x)) * scale + residual; out = y, snaked = snake(y). Which of them there are, Conv says; x, out and
// snaked may be bfloat16, and w is what x is.
// batch, x (rows), rate, channels, taps, dilation, offset, w (packed), n, bias f32 [n], activation, scale f32 [n], residual (rows),
// out (rows), phases, alpha f32 [n], 1 / beta f32 [n], snaked (rows). bias has 16 values where n is less.
KERNEL(deltic_codec_conv, Conv conv) { conv.run(); }

// out = x * rsqrt(mean(x^2) + eps) * w. batch, x (rows), w f32 [width], out (rows), width, eps; heads 0
KERNEL(deltic_codec_rms_norm, Batch batch, Rows x, const float* w, Rows out, int64_t width, float eps) {
    parallel_for(batch.start[batch.n], [&](int64_t t, int) {
        const float* row = x.data + t * x.ld;
        v16 scale = splat(1.0f / sqrtf(sum_of_squares(row, width) / (float)width + eps));
        for (int64_t i = 0; i < width; i += 16) store(out.data + t * out.ld + i, load(row + i) * scale * load(w + i));
    });
}

// out = LayerNorm(bias + depthwise conv(x)). batch, x (rows), rate, width, taps, offset, w f32 [taps, width], bias f32 [width],
// norm weight and bias f32 [width], eps, out (rows, head 0)
KERNEL(deltic_codec_depthwise_norm, Batch batch, Rows x, int64_t rate, int64_t width, int64_t taps, int64_t offset, const float* w,
       const float* bias, const float* norm_weight, const float* norm_bias, float eps, Rows out) {
    carry(batch, x, rate, width, offset);
    parallel_for(batch.start[batch.n] * rate, [&](int64_t g, int) {
        int64_t s = 0;
        while (g >= batch.start[s + 1] * rate) s++;
        float* to = out.row(s, g);
        v16 total = {}, squares = {};
        for (int64_t i = 0; i < width; i += 16) {
            v16 y = load(bias + i);
            for (int64_t j = 0; j < taps; j++) y = fma(load(w + j * width + i), load(x.row(s, g - x.head + j) + i), y);
            total = total + y;
            store(to + i, y);
        }
        v16 mean = splat(sum(total) / (float)width);
        for (int64_t i = 0; i < width; i += 16) {
            v16 y = load(to + i) - mean;
            squares = fma(y, y, squares);
        }
        v16 scale = splat(1.0f / sqrtf(sum(squares) / (float)width + eps));
        for (int64_t i = 0; i < width; i += 16) store(to + i, fma((load(to + i) - mean) * scale, load(norm_weight + i), load(norm_bias + i)));
    });
}

// Attention over the frame itself and window - 1 before it. batch, qkv (rows of 3 n_heads dim, rotated in place), n_heads, dim,
// window, cos and sin f32 [positions, dim / 2], offset, out (rows of n_heads dim); heads 0.
// State: [n_heads][window - 1][2][dim] rotated keys and values; those of position p in row p mod (window - 1).
KERNEL(deltic_codec_attention, Batch batch, Rows qkv, int64_t n_heads, int64_t dim, int64_t window, const float* cos,
       const float* sin, int64_t offset, Rows out) {
    const int64_t all = n_heads * dim, half = dim / 2, ring = window - 1;
    const float scale = 1.0f / sqrtf((float)dim);
    parallel_for(batch.n * n_heads, [&](int64_t i_task, int) {
        const int64_t s = i_task / n_heads, h = i_task % n_heads, t0 = batch.start[s], n = batch.start[s + 1] - t0;
        const int64_t begin = (int64_t)batch.state(s)[0];
        float* past = batch.state(s) + offset + h * ring * 2 * dim;
        auto head = [&](int64_t t, int64_t part) { return qkv.data + (t0 + t) * qkv.ld + part * all + h * dim; };
        for (int64_t t = 0; t < n; t++)
            for (int64_t part = 0; part < 2; part++)
                for (int64_t i = 0; i < half; i += 16) {
                    float* x = head(t, part) + i;
                    v16 low = load(x), high = load(x + half), c = load(cos + (begin + t) * half + i), d = load(sin + (begin + t) * half + i);
                    store(x, fma(low, c, -(high * d)));
                    store(x + half, fma(high, c, low * d));
                }
        auto row = [&](int64_t p, int64_t part) { return p >= begin ? head(p - begin, part) : past + (p % ring * 2 + part - 1) * dim; };
        for (int64_t t = 0; t < n; t++) {
            float weight[MAX_WINDOW];
            // Key i of the window is at position `first` + i; there are none before the stream's begin.
            const int64_t first = begin + t - ring, unseen = first < 0 ? -first : 0, padded = (window + 15) / 16 * 16;
            for (int64_t i = 0; i < padded; i++) weight[i] = -INFINITY;
            for (int64_t i = unseen; i < window; i++) {
                const float *q = head(t, 0), *k = row(first + i, 1);
                v16 dot = {};
                for (int64_t d = 0; d < dim; d += 16) dot = fma(load(q + d), load(k + d), dot);
                weight[i] = sum(dot) * scale;
            }
            v16 top = load(weight), total = {};
            for (int64_t i = 16; i < padded; i += 16) top = vmax(top, load(weight + i));
            top = splat(max(top));
            for (int64_t i = 0; i < padded; i += 16) {
                v16 e = vexp(load(weight + i) - top);
                store(weight + i, e);
                total = total + e;
            }
            const v16 inverse = splat(1.0f / sum(total));
            for (int64_t d = 0; d < dim; d += 16) {
                v16 mixed = {};
                for (int64_t i = unseen; i < window; i++) mixed = fma(splat(weight[i]), load(row(first + i, 2) + d), mixed);
                store(out.data + (t0 + t) * out.ld + h * dim + d, mixed * inverse);
            }
        }
        for (int64_t t = n > ring ? n - ring : 0; t < n; t++)
            for (int64_t part = 1; part < 3; part++) memcpy(past + ((begin + t) % ring * 2 + part - 1) * dim, head(t, part), dim * 4);
    });
}
