// LoRA: out += scale * up (down x) for some rows of a product, each with an adapter of its own or none.
//
// Rows of one adapter are a group. Its entry in a table of addresses says what it adds to this product, so that a recorded program
// finds adapters that were loaded since. A row's sums are those of `multiply`: they know nothing of its neighbours.
#pragma once
#include <algorithm>

#include "multiply.h"
#include "pool.h"

constexpr int64_t MOST_TERMS = 4;  // of one product: modules that are rows of one matrix

// A term's rows [first, first + n) of the product. up: [n, rank] packed in bfloat16, of every expert.
struct Term {
    const uint8_t* up;
    int64_t first, n, rank;
    double scale;
};

// Term that an adapter adds to a product. down: the terms' [rank, K], one below the other, packed in bfloat16, of every expert, or of an
// embedding the plain rows [V, rank]. Every rank is a multiple of 16, with zeros behind the adapter's own.
struct Entry {
    const uint8_t* down;
    int64_t rank, n_terms;  // n_terms 0: nothing
    Term terms[MOST_TERMS];
};

// The adapters of a step's rows. Entries of adapter i begin at table + i * step.
struct Adapters {
    int64_t n_groups;
    const int32_t *begin, *rows, *slot;  // [groups + 1], [T] rows of the step, [groups]
    const int32_t* slot_of;              // [T], -1: none
    const int64_t* table;
    int64_t step;

    const Entry& entry(int64_t i) const { return *(const Entry*)(table + i * step); }
    void read(Arguments& a) {
        Counted counted;
        a.read(counted, begin, rows, slot, slot_of, table, step);
        n_groups = counted.n;
    }
};

// Room for the rows that have adapters. most: floats of a row of u.
struct LoraScratch {
    uint8_t* packed;      // rows x, then rows v: bytes of the wider, twice
    float* u;
    bf16* v;
    int64_t most;
    void read(Arguments& a) { a.read(packed, u, v, most); }
};

struct Group {
    int64_t begin, end;  // into the order of rows
    const Entry* entry;
    int64_t expert;
    int64_t n_rows() const { return end - begin; }
};

static inline Matrix bfloat16_rows(const uint8_t* data, int64_t n, int64_t k, int64_t expert) {
    return Matrix{data, (int64_t)Codes::BF16, n, k, k}.expert(expert);
}

static inline void pack_rows(const Rows& rows, int64_t n_rows, const Matrix& w, const auto& row) {
    const int64_t step = tile_rows(w, n_rows);
    for (int64_t m0 = 0; m0 < n_rows; m0 += step) pack_tile(rows, m0, n_rows - m0 < step ? n_rows - m0 : step, w, row);
}

constexpr int64_t LORA_STRIPS = 32;  // of a task

// Row m of the order: u[m] = down x. input(m) gives the bfloat16 row x.
template <class GroupOf, class Input>
static inline void lora_down(int64_t n_groups, const GroupOf& group_of, int64_t k, const Input& input, const LoraScratch& s) {
    auto rows_of = [&](const Group& g, const Matrix& down) {
        return Rows{rows_stand(down, g.n_rows()), (const uint32_t*)(s.packed + g.begin * k * 2), nullptr, nullptr};
    };
    int64_t most = 0;
    for (int64_t i = 0; i < n_groups; i++) most = std::max(most, group_of(i).entry->rank);
    parallel_for(n_groups, [&](int64_t i, int) {
        const Group g = group_of(i);
        const Matrix down = bfloat16_rows(g.entry->down, g.entry->rank, k, g.expert);
        pack_rows(rows_of(g, down), g.n_rows(), down, [&](int64_t m) { return input(g.begin + m); });
    });
    const int64_t n_tasks = (most / STRIP + 1) / 2;  // two strips each
    parallel_for(n_groups * n_tasks, [&](int64_t i, int) {
        const Group g = group_of(i / n_tasks);
        const int64_t s0 = i % n_tasks * 2;
        const Matrix down = bfloat16_rows(g.entry->down, g.entry->rank, k, g.expert);
        const int64_t s1 = std::min(s0 + 2, down.n_strips());
        if (s0 < s1) multiply(rows_of(g, down), g.n_rows(), down, s0, s1, {s.u + g.begin * s.most, s.most, nullptr, false});
    });
}

// Row order[m] of out += up v with v = bfloat16(scale * u[m]).
template <class GroupOf>
static inline void lora_up(int64_t n_groups, const GroupOf& group_of, const int32_t* order, float* out, int64_t stride, const LoraScratch& s) {
    // v of a term is [rows, rank], behind those of the terms before it.
    auto rows_of = [&](const Group& g, const Matrix& up, int64_t before) {
        return Rows{rows_stand(up, g.n_rows()), (const uint32_t*)(s.packed + (g.begin * s.most + g.n_rows() * before) * 2), nullptr, nullptr};
    };
    int64_t most = 0;
    for (int64_t i = 0; i < n_groups; i++) {
        int64_t n_tasks = 0;
        const Entry& entry = *group_of(i).entry;
        for (int64_t t = 0; t < entry.n_terms; t++) n_tasks += (entry.terms[t].n + LORA_STRIPS * STRIP - 1) / (LORA_STRIPS * STRIP);
        most = std::max(most, n_tasks);
    }
    parallel_for(n_groups, [&](int64_t i, int) {
        const Group g = group_of(i);
        int64_t before = 0;
        for (int64_t t = 0; t < g.entry->n_terms; t++) {
            const Term& term = g.entry->terms[t];
            const Matrix up = bfloat16_rows(term.up, term.n, term.rank, g.expert);
            const v16 scale = splat((float)term.scale);
            for (int64_t m = g.begin; m < g.end; m++)
                for (int64_t j = before; j < before + term.rank; j += 16) store_bf16(s.v + m * s.most + j, load(s.u + m * s.most + j) * scale);
            pack_rows(rows_of(g, up, before), g.n_rows(), up, [&](int64_t m) { return s.v + (g.begin + m) * s.most + before; });
            before += term.rank;
        }
    });
    parallel_for(n_groups * most, [&](int64_t i, int) {
        const Group g = group_of(i / most);
        int64_t task = i % most, before = 0;
        for (int64_t t = 0; t < g.entry->n_terms; t++) {
            const Term& term = g.entry->terms[t];
            const Matrix up = bfloat16_rows(term.up, term.n, term.rank, g.expert);
            const int64_t n_tasks = (up.n_strips() + LORA_STRIPS - 1) / LORA_STRIPS, s0 = task * LORA_STRIPS;
            if (task < n_tasks)
                return multiply(rows_of(g, up, before), g.n_rows(), up, s0, std::min(s0 + LORA_STRIPS, up.n_strips()), {out + term.first, stride, order + g.begin, true});
            task -= n_tasks, before += term.rank;
        }
    });
}
