// attn_prepare and attention: full attention, gated or not, over 64-token pages.
//
// attn_prepare: q, k = rope(zero-centred RMSNorm per head); q rounded to bfloat16 for the scores, k and v into the pages.
// attention: softmax(q k^T / sqrt(d)) v (* sigmoid(gate)), one pass with a running maximum over pages in order (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018). The keys are cut into splits at fixed positions: each split
// is summed by itself, and a row's splits are merged in order of position, whoever computed them. Pages and splits are at
// absolute positions and a row never looks at its neighbours, so a token's output does not depend on how the prompt was cut,
// on the batch, or on the number of threads. A row never multiplies what it may not see: such a token may be a rejected
// draft's, whose value is no number, and 0 times that is none.
//
// A row of an indexed layer whose context is longer than the index chooses reads the chosen groups of four keys and its last tokens, which
// stand in no group of four yet. They are copied together in order of position and then are all there is: the splits are those of a context
// of that length, so that a choice of everything has the bits of plain attention.
//
// A page holds k as words of two neighbouring elements, [nk, d / 2, 64 keys]: a score is a lane of its own and needs no sum
// across lanes; then v as rows, [nk, 64 keys, d]. In fewer bits it is as in kv.h.
#include "head.h"
#include "kv.h"
#include "pool.h"

#include <type_traits>

namespace {

constexpr int64_t SPLIT = 8 * PAGE;  // keys of a split: a constant of the arithmetic, changing it changes bits
constexpr int64_t ROWS = 32;         // query rows (token x head of the group) of a block
constexpr int64_t N_BLOCKS = 512;    // blocks of a wave
constexpr int64_t GROUP = 4;         // keys that an index chooses together

// Rows of a tile, registers of keys in a tile of scores and of columns in a tile of values: as many accumulators as the
// registers hold. They do not touch the bits.
constexpr int TILE = LANES == 16 ? 6 : 4;
#if defined(__AVX512BF16__)
constexpr int SCORE_VECTORS = 4;
#else
constexpr int SCORE_VECTORS = LANES == 16 ? 2 : 1;
#endif
constexpr int VALUE_VECTORS = LANES == 16 ? 4 : 1;
// The same where they are codes, whose sums take two registers each; but for bytes' less of both.
constexpr int ROUNDED_TILE = LANES == 16 ? 6 : 2;
constexpr int ROUNDED_VECTORS = LANES == 16 ? 2 : 1;

// proj f32 [T, row]: q [nq, d] | gate [nq, d], if gated | k [nk, d] | v [nk, d]
struct Heads {
    int64_t n_q, n_k, dim, gated;
    void read(Arguments& a) { a.read(n_q, n_k, dim, gated); }
    int64_t k_at() const { return (gated ? 2 : 1) * n_q * dim; }
    int64_t row() const { return k_at() + 2 * n_k * dim; }
    int64_t group() const { return n_q / n_k; }
};

// Pair of neighbouring elements of a query, in the form that a product with sixteen keys wants.
#if defined(__AVX512BF16__)
using Pair = uint32_t;
inline Pair pair_of(const bf16* x) { return x[0] | (uint32_t)x[1] << 16; }
inline v16 dot_pair(v16 acc, Pair q, const uint32_t* k) {
    __m512bh a = (__m512bh)_mm512_set1_epi32((int)q), b = (__m512bh)_mm512_loadu_si512(k);
    acc.part[0] = (f32_part)_mm512_dpbf16_ps((__m512)acc.part[0], a, b);
    return acc;
}
#else
struct Pair {
    float even, odd;
};
inline Pair pair_of(const bf16* x) { return {widen(x[0]), widen(x[1])}; }
inline v16 dot_pair(v16 acc, Pair q, const uint32_t* k) {
    return each_part([&](int i) {
        u32_part word;
        memcpy(&word, k + i * LANES, sizeof word);
        f32_part odd = fma(f32_part{} + q.odd, (f32_part)(word & 0xffff0000u), acc.part[i]);
        return fma(f32_part{} + q.even, (f32_part)(word << 16), odd);
    });
}
#endif

// State of a query row after some keys: dim weighted sums of values, then the maximum and the sum of weights.
struct Record {
    float* sums;
    int64_t dim;
    static int64_t size(int64_t dim) { return dim + 16; }
    float& top() const { return sums[dim]; }
    float& total() const { return sums[dim + 1]; }

    void clear() const {
        memset(sums, 0, dim * 4);
        top() = -INFINITY;
        total() = 0.0f;
    }

    void shrink(float factor) const {
        total() *= factor;
        for (int64_t i = 0; i < dim; i += 16) store(sums + i, load(sums + i) * splat(factor));
    }

    // Adds what is known of the keys of the next split; of one that is before a window nothing is.
    void merge(const Record& next) const {
        if (next.total() == 0) return;
        float high = next.top() > top() ? next.top() : top();
        float here = exp1(top() - high), there = exp1(next.top() - high);
        total() = total() * here + next.total() * there;
        for (int64_t i = 0; i < dim; i += 16)
            store(sums + i, fma(load(next.sums + i), splat(there), load(sums + i) * splat(here)));
        top() = high;
    }
};

// Query rows of tokens [t0, t1) of sequence s, for the group of query heads that shares key head h. A block is one task that
// walks its splits, or, where there are too few blocks, a task for each split and then one for each row.
struct Block {
    int64_t s, t0, t1, h, n_splits;
    const int32_t* chosen;  // groups that the one token reads, ascending; null: the rows read whatever they may see
    bool divided;
    int64_t first_task, first_record, first_row;  // among those of the wave
};

template <Kv KIND>
struct Attention {
    using Page = std::conditional_t<KIND == Kv::BF16, bf16, uint8_t>;
    const bf16* q;  // [T, nq, d]
    const float* proj;
    Heads heads;
    Page* pages;  // this layer's part of page 0
    int64_t page_stride;
    Counted n_seqs;
    const int32_t *seq_start, *seq_context, *place, *page_table;
    int64_t table_stride;  // page_table [places, stride]: the pages of the sequence in each place
    bf16* out;             // [T, nq, d]
    float* records;        // [n_records, d + 16]
    int64_t n_records;
    const int32_t* chosen;  // [T, n_chosen], or null
    int64_t n_chosen;
    int64_t causal = 1, window = 0;  // of plain pages: whether rows see no later key; keys less than so many away alone, 0: all

    void read(Arguments& a) {
        a.read(q, proj, heads, pages, page_stride, n_seqs, seq_start, seq_context, place, page_table, table_stride, out, records, n_records, chosen, n_chosen);
    }
    int64_t n_rows(const Block& b) const { return (b.t1 - b.t0) * heads.group(); }
    // Tokens up to token t of sequence s, itself with them; position of row r of a block in its sequence.
    int64_t context(int64_t s, int64_t t) const { return seq_context[s] + t - seq_start[s] + 1; }
    int64_t position(const Block& b, int64_t r) const { return context(b.s, b.t0 + r / heads.group()) - 1; }
    // Keys that row r of a block may see: those before this one, and not before the next. Of a chosen block, those that it reads.
    int64_t limit(const Block& b, int64_t r) const {
        if (b.chosen) return n_chosen * GROUP + (position(b, r) + 1) % GROUP;
        if (causal) return position(b, r) + 1;
        const int64_t all = seq_context[b.s] + seq_start[b.s + 1] - seq_start[b.s];
        return window && position(b, r) + window < all ? position(b, r) + window : all;
    }
    int64_t first(const Block& b, int64_t r) const {
        const int64_t before = position(b, r) - window + 1;
        return window && before > 0 ? before : 0;
    }
    // Whether the index leaves anything out for token t of sequence s.
    bool is_chosen(int64_t s, int64_t t) const { return chosen && context(s, t) / GROUP > n_chosen; }
    const bf16* query(const Block& b, int64_t r) const {
        const int64_t head = b.h * heads.group() + r % heads.group();
        return q + ((b.t0 + r / heads.group()) * heads.n_q + head) * heads.dim;
    }
    Page* page(const Block& b, int64_t position) const {
        return pages + page_table[place[b.s] * table_stride + position / PAGE] * page_stride;
    }
    const bf16* keys(const Block& b, int64_t position) const { return page(b, position) + b.h * PAGE * heads.dim; }

    // Copies a chosen block's keys [base, base + n_keys), in the order of their positions, to a page of one head.
    Page* gather(const Block& b, int64_t base, int64_t n_keys) const {
        alignas(64) static thread_local uint8_t room[4 * PAGE * MAX_DIM];
        const int64_t dim = heads.dim;
        for (int64_t to = 0; to < n_keys; to += GROUP) {
            const int64_t i = (base + to) / GROUP, position = GROUP * (i < n_chosen ? b.chosen[i] : context(b.s, b.t0) / GROUP), from = position % PAGE;
            if constexpr (KIND == Kv::BF16) {
                const bf16 *k = keys(b, position), *v = k + heads.n_k * PAGE * dim;
                for (int64_t j = 0; j < PAGE * dim; j += 2 * PAGE) memcpy((bf16*)room + j + 2 * to, k + j + 2 * from, GROUP * 4);
                memcpy((bf16*)room + (PAGE + to) * dim, v + from * dim, GROUP * dim * 2);
            } else {
                RoundedPage<KIND>(room, 1, 0, dim).copy(to, RoundedPage<KIND>(page(b, position), heads.n_k, b.h, dim), from, dim);
            }
        }
        return (Page*)room;
    }
    Record record(const Block& b, int64_t split, int64_t r) const {
        return {records + (b.first_record + split * n_rows(b) + r) * Record::size(heads.dim), heads.dim};
    }

    // scores[r] = scale * q[r] . k for MR rows and 16 NR keys; fetches v, which is wanted next.
    template <int MR, int NR, bool FETCH>
    static void score_tile(const Pair* rows, const bf16* k, const bf16* v, int64_t dim, float scale, float* scores) {
        v16 acc[MR][NR] = {};
        for (int64_t i = 0; i < dim / 2; i++) {
            if constexpr (FETCH)
                for (int j = 0; j < 4; j++) __builtin_prefetch(v + 128 * i + 32 * j);
            for (int r = 0; r < MR; r++) {
                Pair pair = rows[r * dim / 2 + i];
                for (int j = 0; j < NR; j++) acc[r][j] = dot_pair(acc[r][j], pair, (const uint32_t*)k + PAGE * i + 16 * j);
            }
        }
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < NR; j++) store(scores + r * PAGE + 16 * j, acc[r][j] * splat(scale));
    }

    // record[r] += p[r] . v over the first seen[r] keys of a page, in order, 16 NV columns at a time; fetches the keys of the
    // next page. No row sees fewer keys than the one before.
    template <int MR, int NV, bool FETCH>
    static void value_tile(const float* p, const bf16* v, const bf16* next, const int64_t* seen, int64_t dim, int64_t c, float* sums) {
        v16 acc[MR][NV];
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < NV; j++) acc[r][j] = load(sums + r * Record::size(dim) + c + 16 * j);
        int64_t i = 0;
        for (; i < seen[0]; i++) {
            if constexpr (FETCH)
                for (int j = 0; j < NV; j += 2) __builtin_prefetch(next + c * PAGE + 16 * (NV * i + j));
            v16 value[NV];
            for (int j = 0; j < NV; j++) value[j] = load_bf16(v + i * dim + c + 16 * j);
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < NV; j++) acc[r][j] = fma(splat(p[r * PAGE + i]), value[j], acc[r][j]);
        }
        for (; i < seen[MR - 1]; i++)
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < NV && i < seen[r]; j++)
                    acc[r][j] = fma(splat(p[r * PAGE + i]), load_bf16(v + i * dim + c + 16 * j), acc[r][j]);
        for (int r = 0; r < MR; r++)
            for (int j = 0; j < NV; j++) store(sums + r * Record::size(dim) + c + 16 * j, acc[r][j]);
    }

    template <int MR, bool FETCH>
    static void add_values(const float* p, const bf16* v, const bf16* next, const int64_t* seen, int64_t dim, float* sums) {
        constexpr int NV = VALUE_VECTORS;
        int64_t c = 0;
        for (; c + 16 * NV <= dim; c += 16 * NV) value_tile<MR, NV, FETCH>(p, v, next, seen, dim, c, sums);
        for (; c < dim; c += 16) value_tile<MR, 1, FETCH>(p, v, next, seen, dim, c, sums);
    }

    // Calls tile(rows of the tile, first row) for tiles of MR rows and one of what is left. Tiles do not touch the bits.
    template <int MR = TILE, class Tile>
    static void each_tile(int64_t n_rows, const Tile& tile, int64_t r = 0) {
        for (; r + MR <= n_rows; r += MR) tile(std::integral_constant<int, MR>{}, r);
        if constexpr (MR > 1) each_tile<MR - 1>(n_rows, tile, r);
    }

    // Attends with one split of a block: what its keys give for each row.
    void attend(const Block& b, int64_t split, float* sums) const {
        if constexpr (KIND == Kv::BF16) attend_plain(b, split, sums);
        else attend_rounded(b, split, sums);
    }

    void attend_plain(const Block& b, int64_t split, float* sums) const {
        int64_t dim = heads.dim, rows_here = n_rows(b), stride = Record::size(dim);
        float scores[ROWS * PAGE];
        int64_t seen[ROWS];  // keys of a page
        Pair rows[ROWS * MAX_DIM / 2];
        for (int64_t r = 0; r < rows_here; r++) {
            const bf16* x = query(b, r);
            for (int64_t i = 0; i < dim / 2; i++) rows[r * dim / 2 + i] = pair_of(x + 2 * i);
            Record{sums + r * stride, dim}.clear();
        }
        const float scale = 1.0f / sqrtf((float)dim);
        int64_t last = limit(b, rows_here - 1), end = last < (split + 1) * SPLIT ? last : (split + 1) * SPLIT;
        const int64_t begin = first(b, 0) / PAGE * PAGE;
        for (int64_t base = begin > split * SPLIT ? begin : split * SPLIT; base < end; base += PAGE) {
            int64_t n_keys = end - base < PAGE ? end - base : PAGE;
            const bf16 *k = b.chosen ? gather(b, base, n_keys) : keys(b, base), *v = k + (b.chosen ? 1 : heads.n_k) * PAGE * dim;
            const bf16* next = base + PAGE < end && !b.chosen ? keys(b, base + PAGE) : k;
            each_tile(rows_here, [&](auto n, int64_t r) {
                constexpr int MR = decltype(n)::value;
                if (r == 0) score_page<MR, true>(rows, k, v, n_keys, dim, scale, scores);
                else score_page<MR, false>(rows + r * dim / 2, k, v, n_keys, dim, scale, scores + r * PAGE);
            });
            for (int64_t r = 0; r < rows_here; r++) {
                const int64_t n_seen = limit(b, r) - base;
                softmax_tile(scores + r * PAGE, n_seen, Record{sums + r * stride, dim}, first(b, r) - base);
                seen[r] = n_seen < n_keys ? n_seen : n_keys;
            }
            each_tile(rows_here, [&](auto n, int64_t r) {
                constexpr int MR = decltype(n)::value;
                if (r == 0) add_values<MR, true>(scores, v, next, seen, dim, sums);
                else add_values<MR, false>(scores + r * PAGE, v, next, seen + r, dim, sums + r * stride);
            });
        }
    }

    // The same over codes.
    void attend_rounded(const Block& b, int64_t split, float* sums) const {
        const int64_t dim = heads.dim, rows_here = n_rows(b), stride = Record::size(dim);
        float scores[ROWS * PAGE], scales[ROWS];
        Quad rows[ROWS * MAX_DIM / 4], weights[ROWS * PAGE / 4];
        int32_t starts[ROWS];
        const float scale = 1.0f / sqrtf((float)dim);
        for (int64_t r = 0; r < rows_here; r++) {
            float x[MAX_DIM];
            for (int64_t i = 0; i < dim; i += 16) store(x + i, load_bf16(query(b, r) + i));
            scales[r] = fix_row(x, dim, rows + r * dim / 4, starts[r]) * scale;
            Record{sums + r * stride, dim}.clear();
        }
        const int64_t last = limit(b, rows_here - 1), end = last < (split + 1) * SPLIT ? last : (split + 1) * SPLIT;
        for (int64_t base = split * SPLIT; base < end; base += PAGE) {
            const int64_t n_keys = end - base < PAGE ? end - base : PAGE;
            const auto view = [&](int64_t at) {
                if (b.chosen) return RoundedPage<KIND>(gather(b, base, n_keys), 1, 0, dim);
                return RoundedPage<KIND>(page(b, at), heads.n_k, b.h, dim);
            };
            const RoundedPage<KIND> here = view(base), next = b.chosen ? here : view(base + PAGE < end ? base + PAGE : base);
            each_tile<ROUNDED_TILE>(rows_here, [&](auto n, int64_t r) {
                constexpr int MR = decltype(n)::value;
                const Quad* x = rows + r * dim / 4;
                if (r == 0) score_codes<MR, true>(x, here, n_keys, dim, scales, starts, scores);
                else score_codes<MR, false>(x, here, n_keys, dim, scales + r, starts + r, scores + r * PAGE);
            });
            Weighed known[ROWS];
            for (int64_t r = 0; r < rows_here; r++) {
                softmax_tile(scores + r * PAGE, limit(b, r) - base, Record{sums + r * stride, dim});
                known[r] = weigh(scores + r * PAGE, here, limit(b, r) - base, weights + r * PAGE / 4);
            }
            each_tile<ROUNDED_TILE>(rows_here, [&](auto n, int64_t r) {
                constexpr int MR = decltype(n)::value;
                if (r == 0) add_codes<MR, true>(weights, here, next, n_keys, dim, known, sums);
                else add_codes<MR, false>(weights + r * PAGE / 4, here, next, n_keys, dim, known + r, sums + r * stride);
            });
        }
    }

    // Fetches values of the page, which are wanted next.
    template <int MR, bool FETCH>
    static void score_codes(const Quad* rows, const RoundedPage<KIND>& page, int64_t n_keys, int64_t dim, const float* scales, const int32_t* starts, float* scores) {
        constexpr int NR = ROUNDED_VECTORS, LINES = RoundedPage<KIND>::VALUE_BITS / 2;
        for (int64_t at = 0; at < n_keys; at += 16 * NR) {
            Tile<MR, NR> tile;
            auto fetch = [&](int64_t i) {
                if constexpr (FETCH)
                    if (at == 0)
                        for (int j = 0; j < LINES; j++) __builtin_prefetch(page.values + 64 * (LINES * i + j));
            };
            multiply_tile<MR, NR, 8>(rows, dim / 4, page.keys + at * 4, PAGE * 4, dim / 4, fetch, tile);
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < NR; j++)
                    store(scores + r * PAGE + at + 16 * j, tile[r][j].total(starts[r], CODE_BIAS) * splat(scales[r]) * load(page.key_scales + at + 16 * j));
        }
    }

    // A page's weights of a row, as rounded: their multiplier and sum; and what least values add to each column.
    struct Weighed {
        float step, least;
        int32_t start;
    };
    static Weighed weigh(const float* p, const RoundedPage<KIND>& page, int64_t n_seen, Quad* out) {
        float x[PAGE], least[PAGE] = {};
        for (int64_t i = 0; i < PAGE; i += 16) {
            store(x + i, load(p + i) * load(page.value_scales + i));
            if constexpr (RoundedPage<KIND>::HAS_LEAST) store(least + i, load(p + i) * load(page.least_values + i));
        }
        for (int64_t i = n_seen < 0 ? 0 : n_seen; i < PAGE; i++) x[i] = least[i] = 0.0f;  // those scales may be anything
        Weighed found;
        found.step = fix_row(x, PAGE, out, found.start);
        found.least = sum((load(least) + load(least + 16)) + (load(least + 32) + load(least + 48)));
        return found;
    }

    // record[r] += weights[r] . values of a page; fetches the keys of the next one.
    template <int MR, bool FETCH>
    static void add_codes(const Quad* weights, const RoundedPage<KIND>& page, const RoundedPage<KIND>& next, int64_t n_keys, int64_t dim, const Weighed* known, float* sums) {
        constexpr int BITS = RoundedPage<KIND>::VALUE_BITS, NV = ROUNDED_VECTORS < 2 && BITS == 4 ? 2 : ROUNDED_VECTORS;
        constexpr int BIAS = BITS == 8 ? CODE_BIAS : 0, WIDTH = BITS == 8 ? 16 * NV : 8 * NV;  // columns, but for those of high halves
        const int64_t n_words = dim * BITS / 8;
        for (int64_t c = 0; c < n_words; c += WIDTH) {
            Tile<MR, NV> tile;
            auto fetch = [&](int64_t i) {
                if constexpr (FETCH)
                    for (int j = 0; j < WIDTH / 16 * (BITS == 4 ? 2 : 1); j++)
                        __builtin_prefetch(next.keys + 64 * (dim / 16 * i + c / 16 * (BITS == 4 ? 2 : 1) + j));
            };
            multiply_tile<MR, NV, BITS>(weights, PAGE / 4, page.values + c * 4, n_words * 4, (n_keys + 3) / 4, fetch, tile);
            for (int r = 0; r < MR; r++)
                for (int j = 0; j < NV; j++) {
                    float* at = sums + r * Record::size(dim) + c + (BITS == 8 ? 16 * j : 16 * (j % (NV / 2)) + j / (NV / 2) * dim / 2);
                    v16 y = fma(tile[r][j].total(known[r].start, BIAS), splat(known[r].step), load(at));
                    store(at, RoundedPage<KIND>::HAS_LEAST ? y + splat(known[r].least) : y);
                }
        }
    }

    template <int MR, bool FETCH>
    static void score_page(const Pair* rows, const bf16* k, const bf16* v, int64_t n_keys, int64_t dim, float scale, float* scores) {
        constexpr int NR = SCORE_VECTORS;
        if (n_keys <= 16) return score_tile<MR, 1, false>(rows, k, v, dim, scale, scores);  // as in a frame of speech
        for (int64_t i = 0; i < n_keys; i += 16 * NR) {
            if (i == 0) score_tile<MR, NR, FETCH>(rows, k, v, dim, scale, scores);
            else score_tile<MR, NR, false>(rows, k + 2 * i, v, dim, scale, scores + i);
        }
    }

    // Turns a page's scores into weights relative to the running maximum; keys from `n_seen` on, and before `from`, weigh exactly
    // nothing.
    static void softmax_tile(float* scores, int64_t n_seen, const Record& row, int64_t from = 0) {
        for (int64_t i = n_seen < 0 ? 0 : n_seen; i < PAGE; i++) scores[i] = -INFINITY;
        for (int64_t i = 0; i < from && i < PAGE; i++) scores[i] = -INFINITY;
        if (n_seen <= 0 || from >= PAGE) {
            memset(scores, 0, PAGE * 4);
            return;
        }
        v16 highest = vmax(vmax(load(scores), load(scores + 16)), vmax(load(scores + 32), load(scores + 48)));
        float top = max(highest);
        if (top > row.top()) {
            row.shrink(row.top() == -INFINITY ? 0.0f : exp1(row.top() - top));
            row.top() = top;
        }
        v16 weights[4];
        for (int i = 0; i < 4; i++) {
            weights[i] = vexp(load(scores + 16 * i) - splat(row.top()));
            store(scores + 16 * i, weights[i]);
        }
        row.total() += sum((weights[0] + weights[1]) + (weights[2] + weights[3]));
    }

    // Row r of a block, all its keys known.
    void finish(const Block& b, int64_t r, const Record& row) const {
        int64_t t = b.t0 + r / heads.group(), head = b.h * heads.group() + r % heads.group(), dim = heads.dim;
        const float* gate = proj + t * heads.row() + (heads.n_q + head) * dim;
        bf16* to = out + (t * heads.n_q + head) * dim;
        v16 inverse = splat(1.0f / row.total());
        for (int64_t i = 0; i < dim; i += 16) {
            v16 y = load(row.sums + i) * inverse;
            store_bf16(to + i, heads.gated ? y * sigmoid(load(gate + i)) : y);
        }
    }

    // Attends with all splits of a block, by one thread.
    void walk(const Block& b) const {
        float known[ROWS * (MAX_DIM + 16)], next[ROWS * (MAX_DIM + 16)];
        int64_t stride = Record::size(heads.dim);
        attend(b, 0, known);
        for (int64_t split = 1; split < b.n_splits; split++) {
            attend(b, split, next);
            for (int64_t r = 0; r < n_rows(b); r++)
                if (limit(b, r) > split * SPLIT) Record{known + r * stride, heads.dim}.merge({next + r * stride, heads.dim});
        }
        for (int64_t r = 0; r < n_rows(b); r++) finish(b, r, {known + r * stride, heads.dim});
    }

    // Row r of a divided block, once all its splits are attended.
    void merge(const Block& b, int64_t r) const {
        Record row = record(b, 0, r);
        for (int64_t split = 1; split * SPLIT < limit(b, r); split++) row.merge(record(b, split, r));
        finish(b, r, row);
    }
};

// Blocks that run together: as many as have room for their records.
template <Kv KIND>
struct Wave {
    const Attention<KIND>& attention;
    int64_t n_blocks = 0, n_tasks = 0, n_records = 0, n_rows = 0;
    Block blocks[N_BLOCKS];

    // A block whose records are more than there are is not divided, however long.
    void add(Block b, int64_t most_splits) {
        int64_t n = attention.n_rows(b), needed = n * b.n_splits;
        b.divided = b.n_splits > most_splits && needed <= attention.n_records;
        if (n_blocks == N_BLOCKS || (b.divided && n_records + needed > attention.n_records)) run();
        b.first_task = n_tasks;
        b.first_record = n_records;
        b.first_row = n_rows;
        blocks[n_blocks++] = b;
        n_tasks += b.divided ? b.n_splits : 1;
        if (b.divided) {
            n_records += needed;
            n_rows += n;
        }
    }

    // The last block that begins at or before i.
    const Block& block(int64_t i, int64_t Block::*first) const {
        int64_t low = 0, high = n_blocks;
        while (high - low > 1) {
            int64_t middle = (low + high) / 2;
            (blocks[middle].*first <= i ? low : high) = middle;
        }
        return blocks[low];
    }

    void run() {
        parallel_for(n_tasks, [&](int64_t i, int) {
            const Block& b = block(i, &Block::first_task);
            if (!b.divided) return attention.walk(b);
            attention.attend(b, i - b.first_task, attention.record(b, i - b.first_task, 0).sums);
        });
        parallel_for(n_rows, [&](int64_t i, int) {
            const Block& b = block(i, &Block::first_row);
            attention.merge(b, i - b.first_row);
        });
        n_blocks = n_tasks = n_records = n_rows = 0;
    }
};

// Writes k and v, bfloat16 [d] each, of the token in place `at` of a page, for key head h. A plain value stands there already.
template <Kv KIND>
void write_token(std::conditional_t<KIND == Kv::BF16, bf16, uint8_t>* page, const Heads& heads, int64_t h, int64_t at, const bf16* k, const bf16* v) {
    const int64_t dim = heads.dim;
    if constexpr (KIND == Kv::BF16) {
        bf16* words = page + h * PAGE * dim;
        for (int64_t i = 0; i < dim; i += 2) memcpy(words + PAGE * i + 2 * at, k + i, 4);
    } else {
        RoundedPage<KIND>(page, heads.n_k, h, dim).write(at, k, v, dim);
    }
}

// Arguments of attn_prepare but for the format.
struct Prepare {
    const float* proj;
    Heads heads;
    Counted n_tokens;
    const int32_t *positions, *angles, *token_place, *page_table;
    int64_t table_stride;
    const float *q_norm, *k_norm;
    float eps;
    const float *cos, *sin;
    int64_t rotary;
    bf16* q_out;

    void read(Arguments& a) {
        a.read(proj, heads, n_tokens, positions, angles, token_place, page_table, table_stride, q_norm, k_norm, eps, cos, sin, rotary, q_out);
    }

    template <Kv KIND>
    void run(void* pages, int64_t page_stride) const {
        const int64_t dim = heads.dim;
        parallel_for(n_tokens, [&](int64_t t, int) {
            int64_t position = positions[t];
            const float *x = proj + t * heads.row(), *c = cos + angles[t] * rotary / 2, *s = sin + angles[t] * rotary / 2;
            for (int64_t h = 0; h < heads.n_q; h++)
                norm_rope(x + h * dim, q_norm, eps, c, s, dim, rotary, q_out + (t * heads.n_q + h) * dim);
            auto page = (typename Attention<KIND>::Page*)pages + (int64_t)page_table[token_place[t] * table_stride + position / PAGE] * page_stride;
            x += heads.k_at();
            for (int64_t h = 0; h < heads.n_k; h++) {
                bf16 k[MAX_DIM], room[MAX_DIM], *v = room;
                if constexpr (KIND == Kv::BF16) v = page + ((heads.n_k + h) * PAGE + position % PAGE) * dim;
                norm_rope(x + h * dim, k_norm, eps, c, s, dim, rotary, k);
                for (int64_t i = 0; i < dim; i += 16) store_bf16(v + i, load(x + (heads.n_k + h) * dim + i));
                write_token<KIND>(page, heads, h, position % PAGE, k, v);
            }
        });
    }
};

template <Kv KIND>
void attend_all(Attention<KIND> x) {
    int64_t n_tokens_block = ROWS / x.heads.group();
    auto each_block = [&](auto use) {
        for (int64_t s = 0; s < x.n_seqs; s++)
            for (int64_t t = x.seq_start[s], end = x.seq_start[s + 1], t1; t < end; t = t1) {
                t1 = t + n_tokens_block < end ? t + n_tokens_block : end;
                while (t1 > t + 1 && x.is_chosen(s, t1 - 1)) t1--;
                Block b{.s = s, .t0 = t, .t1 = t1, .chosen = x.is_chosen(s, t) ? x.chosen + t * x.n_chosen : nullptr};
                b.n_splits = (x.limit(b, x.n_rows(b) - 1) + SPLIT - 1) / SPLIT;
                use(b);
            }
    };
    // A block is divided when it is so long that, as one task, it could be what the others wait for.
    int64_t n_splits = 0;
    each_block([&](const Block& b) { n_splits += b.n_splits * x.heads.n_k; });
    int64_t most_splits = pool_size() == 1 ? n_splits : n_splits / (4 * pool_size());
    Wave<KIND> wave{x};
    each_block([&](Block b) {
        for (b.h = 0; b.h < x.heads.n_k; b.h++) wave.add(b, most_splits > 1 ? most_splits : 1);
    });
    wave.run();
}

// use(integral_constant) of a format.
template <class Use>
void with_format(int64_t kv, const Use& use) {
    switch ((Kv)kv) {
        case Kv::INT8: return use(std::integral_constant<Kv, Kv::INT8>{});
        case Kv::K8V4: return use(std::integral_constant<Kv, Kv::K8V4>{});
        default: use(std::integral_constant<Kv, Kv::BF16>{});
    }
}

}  // namespace

// proj, n_q, n_k, d, gated, T (counted), positions i32 [T], angles i32 [T] (rows of cos and sin), token_place i32 [T],
// page_table i32 [places, stride], stride, q_norm f32 [d], k_norm f32 [d], eps, cos f32 [n_angles, rotary / 2], sin, rotary, q out bf16,
// pages, page_stride, kv; of bf16 pages and their stride count bfloat16, else bytes
KERNEL(deltic_attn_prepare, Prepare x, void* pages, int64_t page_stride, int64_t kv) {
    with_format(kv, [&](auto kind) { x.template run<decltype(kind)::value>(pages, page_stride); });
}

// kv, q bf16 [T, nq, d], proj, n_q, n_k, d, gated, pages, page_stride, S (counted), seq_start i32 [S + 1], seq_context i32 [S], place i32 [S],
// page_table, stride, out, records f32 [n_records, d + 16] (scratch), n_records, chosen i32 [T, n_chosen] or null, n_chosen
extern "C" __attribute__((visibility("default"))) void deltic_attention(const int64_t* arguments) {
    with_format(arguments[0], [&](auto kind) { call(attend_all<decltype(kind)::value>, arguments + 1); });
}

// As deltic_attention but for kv, over bf16 pages; then causal (0: a sequence's rows see each other) and window (0: none)
KERNEL(deltic_block_attention, Attention<Kv::BF16> x, int64_t causal, int64_t window) {
    x.causal = causal;
    x.window = window;
    attend_all(x);
}
