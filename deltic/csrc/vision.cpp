// The vision tower: rows of patches, and attention of every patch of a frame to every other.
//
// A call works on rows [begin, begin + n) of all patches, so that a forward can be run in pieces: rows of a scratch are counted from
// 0, those of all patches from begin on. Patches of a frame stand block by block: of each merge x merge block, in raster order, its
// patches in raster order. A row never looks at other rows but through the keys and values of its frame, which are walked from the
// frame's first on. So neither pieces nor other pictures nor threads touch the bits.
//
// attention: softmax(q k^T / sqrt(d)) v by tiles of KEYS keys with a running maximum (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). Both products are those of matrix.h, turned around: queries are the lanes. Scores are keys times
// queries [keys, 32], so that a maximum or a sum of a query needs no sum across lanes; two rows of weights, rounded to bfloat16, are a
// vector of pairs as the second product reads them. Keys, and values as [d, keys], are stored as that product packs its rows.
#include <algorithm>

#include "kernel.h"
#include "multiply.h"
#include "pool.h"

namespace {

constexpr int64_t KEYS = 192;     // keys of a tile: a constant of the arithmetic, changing it changes bits
constexpr int64_t QUERIES = 128;  // of a task
constexpr int64_t PANEL = 2 * STRIP;
constexpr int64_t MAX_DIM = 128;  // head_dim; checked where the operator is recorded
constexpr int64_t ROWS = 16;      // of a task, where rows are independent

inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Elements of a head that the product of scores walks: the matrix unit takes 32 at a time. Behind the head's own they are 0.
inline int64_t score_dim(int64_t dim) {
#if defined(__AMX_BF16__)
    return up_to(dim, 32);
#else
    return dim;
#endif
}

// A matrix of bfloat16 in strips.
inline Matrix strips(const void* data, int64_t n, int64_t k) { return {(const uint8_t*)data, (int64_t)Codes::BF16, n, k, k}; }

// Frames f: patches [start[f], start[f + 1]), of grid[f] = rows and columns; its keys begin at key_start[f], a multiple of 32.
struct Frames {
    Counted n;
    const int32_t *start, *grid, *key_start;
    int64_t merge;
    void read(Arguments& a) { a.read(n, start, grid, key_start, merge); }
    int64_t of(int64_t patch) const { return std::upper_bound(start + 1, start + n + 1, patch) - (start + 1); }
    int64_t size(int64_t f) const { return start[f + 1] - start[f]; }
    void place(int64_t f, int64_t patch, int64_t& row, int64_t& column) const {
        const int64_t i = patch - start[f], block = i / (merge * merge), within = i % (merge * merge), across = grid[2 * f + 1] / merge;
        row = block / across * merge + within / merge;
        column = block % across * merge + within % merge;
    }
};

// Place on one axis of the table of positions, stretched: neighbours of `index` of `size`, and how near the second is.
struct Between {
    int64_t low, high;
    float share;
    Between(int64_t index, int64_t size, int64_t side) {
        const float at = (float)index * (float)(side - 1) / (float)(size > 1 ? size - 1 : 1);
        low = (int64_t)at;
        high = low + 1 < side ? low + 1 : side - 1;
        share = at - (float)low;
    }
};

// Keys and values of a frame and a head, a tile after the other.
struct Keys {
    uint32_t *keys, *values;
    int64_t n, dim;  // n: keys of the frame

    static Rows rows(const uint32_t* words, int64_t n_rows, int64_t k) { return place_rows((uint8_t*)words, n_rows, strips(nullptr, PANEL, k)); }
    int64_t count(int64_t tile) const { return n - tile * KEYS < KEYS ? n - tile * KEYS : KEYS; }
    int64_t padded(int64_t tile) const { return up_to(count(tile), 32); }
    uint32_t* keys_of(int64_t tile) const { return keys + tile * KEYS * score_dim(dim) / 2; }
    uint32_t* values_of(int64_t tile) const { return values + tile * KEYS * dim / 2; }

    // Position of word j of a row among n_rows rows of n_words words, as pack_tile puts it.
    static int64_t word(int64_t n_rows, int64_t n_words, int64_t row, int64_t j) {
        const Matrix matrix = strips(nullptr, PANEL, 2 * n_words);
        if (rows_stand(matrix, n_rows)) return row * n_words + j;
        const int64_t step = tile_rows(matrix, n_rows), m0 = row / step * step, rows = n_rows - m0 < step ? n_rows - m0 : step;
        return m0 * n_words + j * rows + row - m0;
    }
    void put_key(int64_t key, const bf16* x) const {
        const int64_t tile = key / KEYS, n_words = score_dim(dim) / 2;
        const int64_t first = word(count(tile), n_words, key % KEYS, 0), step = word(count(tile), n_words, key % KEYS, 1) - first;
        for (int64_t j = 0; j < n_words; j++) memcpy(keys_of(tile) + first + j * step, x + 2 * j, 4);
    }
    void put_value(int64_t key, const bf16* x) const {
        const int64_t tile = key / KEYS, within = key % KEYS;
        for (int64_t i = 0; i < dim; i++) ((bf16*)(values_of(tile) + word(dim, padded(tile) / 2, i, within / 2)))[within % 2] = x[i];
    }
};

// The keys and values of all heads: keys bf16 [heads, n_keys, d up to a multiple of 32], values bf16 [heads, n_keys, d].
struct KeyMemory {
    uint32_t *keys, *values;
    int64_t n_keys, heads, dim;
    void read(Arguments& a) { a.read(keys, values, n_keys, heads, dim); }
    Keys of(const Frames& frames, int64_t f, int64_t head) const {
        const int64_t first = head * n_keys + frames.key_start[f];
        // Within a head, keys follow one another by score_dim.
        uint32_t* k = keys + head * n_keys * up_to(dim, 32) / 2 + frames.key_start[f] * score_dim(dim) / 2;
        return {k, values + first * dim / 2, frames.size(f), dim};
    }
};

// Queries of one frame and head, up to QUERIES of them.
struct alignas(64) Queries {
    uint32_t words[QUERIES * MAX_DIM / 2];  // by panels, in strips
    float sums[QUERIES / PANEL][MAX_DIM * PANEL];
    float top[QUERIES], total[QUERIES];
    float scores[KEYS * PANEL];
    uint32_t weights[KEYS / 2 * PANEL];

    // q: rows of `stride` elements.
    void begin(const bf16* q, int64_t n, int64_t stride, int64_t k) {
        memset(words, 0, up_to(n, PANEL) * k * 2);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < k / 2; j++) memcpy(words + (i / STRIP * (k / 2) + j) * STRIP + i % STRIP, q + i * stride + 2 * j, 4);
        for (int64_t i = 0; i < up_to(n, PANEL); i++) top[i] = -INFINITY, total[i] = 0.0f;
    }

    // Scores of n keys become weights, in the order of the second product; sums and totals shrink where a maximum grew.
    void soften(int64_t panel, int64_t n, int64_t n_padded, int64_t dim, float scale) {
        for (int64_t s = 0; s < 2; s++) {
            const float* of = scores + s * STRIP;
            float *top_of = top + panel * PANEL + s * STRIP, *total_of = total + panel * PANEL + s * STRIP, *sum = sums[panel] + s * STRIP;
            v16 best[2] = {load(of), load(of)};
            for (int64_t i = 1; i < n; i++) best[i % 2] = vmax(best[i % 2], load(of + i * PANEL));
            const v16 before = load(top_of), now = vmax(before, vmax(best[0], best[1]) * splat(scale));
            const v16 shrink = vexp(before - now);
            store(top_of, now);
            for (int64_t i = 0; i < dim; i++) store(sum + i * PANEL, load(sum + i * PANEL) * shrink);
            v16 even = {}, odd = {};
            uint32_t* to = weights + s * n_padded / 2 * STRIP;
            auto weight = [&](int64_t i) { return i < n ? round_bf16(vexp(fma(load(of + i * PANEL), splat(scale), -now))) : v16{}; };
            for (int64_t i = 0; i < n_padded; i += 2, to += STRIP) {
                const v16 a = weight(i), b = weight(i + 1);
                even = even + a, odd = odd + b;
                for (int p = 0; p < PARTS; p++) {
                    const u32_part pair = (u32_part)a.part[p] >> 16 | (u32_part)b.part[p];
                    memcpy(to + p * LANES, &pair, sizeof pair);
                }
            }
            store(total_of, fma(load(total_of), shrink, even + odd));
        }
    }

    void attend(const Keys& x, int64_t n_panels, float scale) {
        const int64_t k = score_dim(x.dim);
        memset(sums, 0, n_panels * sizeof sums[0]);
        for (int64_t tile = 0; tile * KEYS < x.n; tile++) {
            const int64_t n = x.count(tile), n_padded = x.padded(tile);
            const Rows keys = Keys::rows(x.keys_of(tile), n, k), values = Keys::rows(x.values_of(tile), x.dim, n_padded);
            for (int64_t p = 0; p < n_panels; p++) {
                multiply(keys, n, strips(words + p * PANEL * k / 2, PANEL, k), 0, 2, {scores, PANEL, nullptr, false});
                soften(p, n, n_padded, x.dim, scale);
                multiply(values, x.dim, strips(weights, PANEL, n_padded), 0, 2, {sums[p], PANEL, nullptr, true});
            }
        }
    }

    // out: rows of `stride` elements.
    void finish(int64_t n, int64_t dim, bf16* out, int64_t stride) const {
        bf16 turned[MAX_DIM * STRIP];
        for (int64_t first = 0; first < n; first += STRIP) {
            const float* sum = sums[first / PANEL] + first % PANEL;
            const v16 inverse = splat(1.0f) / load(total + first);
            for (int64_t i = 0; i < dim; i++) store_bf16(turned + i * STRIP, load(sum + i * PANEL) * inverse);
            for (int64_t m = 0; m < STRIP && first + m < n; m++)
                for (int64_t i = 0; i < dim; i++) out[(first + m) * stride + i] = turned[i * STRIP + m];
        }
    }
};

}  // namespace

// LayerNorm: out[m] = (x - mean) / sqrt(variance + eps) * w + b of row begin + m, rounded once to bfloat16.
// x f32 [T, H], w f32 [H], b f32 [H], out bf16 [R, H], begin (counted), R (counted), H, eps
KERNEL(deltic_layer_norm, const float* x, const float* w, const float* b, bf16* out, Counted begin, Counted n_rows, int64_t width, float eps) {
    parallel_for(n_rows, [&](int64_t m, int) {
        const float* row = x + (begin + m) * width;
        v16 total = {}, squares = {};
        for (int64_t i = 0; i < width; i += 16) total = total + load(row + i);
        const v16 mean = splat(sum(total) / (float)width);
        for (int64_t i = 0; i < width; i += 16) {
            const v16 d = load(row + i) - mean;
            squares = fma(d, d, squares);
        }
        const v16 scale = splat(1.0f / sqrtf(sum(squares) / (float)width + eps));
        for (int64_t i = 0; i < width; i += 16) store_bf16(out + m * width + i, fma((load(row + i) - mean) * scale, load(w + i), load(b + i)));
    });
}

// out[m] = GELU(x[m] + bias), then 0 up to the stride.
// x f32 [R, W], bias f32 [W], out bf16 [R, stride], R (counted), W, stride, exact (by erf; else by tanh)
KERNEL(deltic_bias_gelu, const float* x, const float* bias, bf16* out, Counted n_rows, int64_t width, int64_t stride, bool exact) {
    parallel_for(n_rows, [&](int64_t m, int) {
        for (int64_t i = 0; i < width; i += 16) {
            const v16 y = load(x + m * width + i) + load(bias + i);
            store_bf16(out + m * stride + i, exact ? gelu(y) : gelu_tanh(y));
        }
        memset(out + m * stride + width, 0, (stride - width) * sizeof(bf16));
    });
}

// out[begin + m] = (out[begin + m] +) (x[m] + bias).
// x f32 [R, W], bias f32 [W], out f32 [T, W], begin (counted), R (counted), W, add
KERNEL(deltic_bias_rows, const float* x, const float* bias, float* out, Counted begin, Counted n_rows, int64_t width, bool add) {
    parallel_for(n_rows, [&](int64_t m, int) {
        float* to = out + (begin + m) * width;
        for (int64_t i = 0; i < width; i += 16) {
            const v16 y = load(x + m * width + i) + load(bias + i);
            store(to + i, add ? load(to + i) + y : y);
        }
    });
}

// out[begin + m] = (x[m] + bias) + the embedding of the patch's position: the table, a square of entries, stretched to the frame's grid
// with its corners on the grid's, linear in between.
// x f32 [R, H], bias f32 [H], table bf16 [side * side, H], side, frames, begin (counted), R (counted), H, out f32 [T, H]
KERNEL(deltic_patch_rows, const float* x, const float* bias, const bf16* table, int64_t side, Frames frames, Counted begin, Counted n_rows, int64_t width, float* out) {
    parallel_for(n_rows, [&](int64_t m, int) {
        const int64_t f = frames.of(begin + m);
        int64_t row, column;
        frames.place(f, begin + m, row, column);
        const Between y(row, frames.grid[2 * f], side), z(column, frames.grid[2 * f + 1], side);
        const bf16* entry[4] = {table + (y.low * side + z.low) * width, table + (y.low * side + z.high) * width,
                                table + (y.high * side + z.low) * width, table + (y.high * side + z.high) * width};
        const float share[4] = {(1.0f - y.share) * (1.0f - z.share), (1.0f - y.share) * z.share, y.share * (1.0f - z.share), y.share * z.share};
        for (int64_t i = 0; i < width; i += 16) {
            v16 position = load_bf16(entry[0] + i) * splat(share[0]);
            for (int j = 1; j < 4; j++) position = fma(load_bf16(entry[j] + i), splat(share[j]), position);
            store(out + (begin + m) * width + i, load(x + m * width + i) + load(bias + i) + position);
        }
    });
}

// q, k and v of rows [begin, begin + R): with their bias, q and k rotated over the whole head in pairs (i, i + d / 2), the first half
// of the pairs by the patch's row and the others by its column; rounded to bfloat16.
// qkv f32 [R, 3 heads d] (q | k | v), bias f32 [3 heads d], frames, cos f32 [places, d / 4], sin, begin (counted), R (counted),
// q bf16 [T, heads, d up to a multiple of 32], keys, values, n_keys, heads, d
KERNEL(deltic_patch_keys, const float* qkv, const float* bias, Frames frames, const float* cos, const float* sin, Counted begin, Counted n_rows, bf16* q, KeyMemory memory) {
    const int64_t dim = memory.dim, heads = memory.heads, half = dim / 2, quarter = dim / 4, stride = up_to(dim, 32);
    parallel_for((n_rows + ROWS - 1) / ROWS, [&](int64_t task, int) {
        const int64_t stop = (task + 1) * ROWS < n_rows ? (task + 1) * ROWS : (int64_t)n_rows;
        for (int64_t m = task * ROWS; m < stop; m++) {
            const int64_t patch = begin + m, f = frames.of(patch), key = patch - frames.start[f];
            int64_t row, column;
            frames.place(f, patch, row, column);
            float c[MAX_DIM / 2], s[MAX_DIM / 2], y[MAX_DIM] = {};
            bf16 narrow[MAX_DIM], none[MAX_DIM] = {};
            memcpy(c, cos + row * quarter, quarter * 4), memcpy(c + quarter, cos + column * quarter, quarter * 4);
            memcpy(s, sin + row * quarter, quarter * 4), memcpy(s + quarter, sin + column * quarter, quarter * 4);
            auto rounded = [&] {
                for (int64_t i = 0; i < stride; i += 16) store_bf16(narrow + i, load(y + i));
            };
            auto rotated = [&](int64_t at) {
                const float *x = qkv + m * 3 * heads * dim + at, *b = bias + at;
                for (int64_t i = 0; i < half; i++) {
                    const float p = x[i] + b[i], r = x[half + i] + b[half + i];
                    y[i] = p * c[i] - r * s[i];
                    y[half + i] = r * c[i] + p * s[i];
                }
                rounded();
            };
            for (int64_t h = 0; h < heads; h++) {
                const Keys keys = memory.of(frames, f, h);
                rotated(h * dim);
                memcpy(q + (patch * heads + h) * stride, narrow, stride * 2);
                rotated((heads + h) * dim);
                keys.put_key(key, narrow);
                const int64_t at = (2 * heads + h) * dim;
                for (int64_t i = 0; i < dim; i++) y[i] = qkv[m * 3 * heads * dim + at + i] + bias[at + i];
                rounded();
                keys.put_value(key, narrow);
                if (key + 1 == keys.n)  // the second product takes 32 keys at a time
                    for (int64_t i = keys.n; i % KEYS % 32; i++) keys.put_value(i, none);
            }
        }
    });
}

// out[m] = softmax(q k^T / sqrt(d)) v of row begin + m over all keys of its frame, which must be there.
// q bf16 [T, heads, d up to a multiple of 32], frames, keys, values, n_keys, heads, d, begin (counted), R (counted), out bf16 [R, heads d]
KERNEL(deltic_patch_attention, const bf16* q, Frames frames, KeyMemory memory, Counted begin, Counted n_rows, bf16* out) {
    const int64_t dim = memory.dim, heads = memory.heads, stride = up_to(dim, 32), end = begin + n_rows;
    const float scale = 1.0f / sqrtf((float)dim);
    if (n_rows == 0) return;
    for (int64_t f = frames.of(begin); f < frames.n && frames.start[f] < end; f++) {
        const int64_t first = std::max<int64_t>(begin, frames.start[f]), last = std::min<int64_t>(end, frames.start[f + 1]);
        const int64_t n_blocks = (last - first + QUERIES - 1) / QUERIES;
        parallel_for(n_blocks * heads, [&](int64_t task, int) {  // those of a head after one another: its keys stay near
            const int64_t h = task / n_blocks, at = first + task % n_blocks * QUERIES, n = std::min(QUERIES, last - at);
            Queries queries;
            queries.begin(q + (at * heads + h) * stride, n, heads * stride, score_dim(dim));
            queries.attend(memory.of(frames, f, h), (n + PANEL - 1) / PANEL, scale);
            queries.finish(n, dim, out + ((at - begin) * heads + h) * dim, heads * dim);
        });
    }
}
