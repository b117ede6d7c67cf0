// LoRA of whole matrices and of the embedding; that of experts is part of moe.cpp.
#include "lora.h"

// x bf16 [T, K], K, out f32 [T, stride], stride, adapters (groups counted, begin, rows, slot, slot of each row, table, step), scratch
KERNEL(deltic_lora, const bf16* x, int64_t k, float* out, int64_t stride, Adapters adapters, LoraScratch s) {
    auto group_of = [&](int64_t i) { return Group{adapters.begin[i], adapters.begin[i + 1], &adapters.entry(adapters.slot[i]), 0}; };
    lora_down(adapters.n_groups, group_of, k, [&](int64_t m) { return x + adapters.rows[m] * k; }, s);
    lora_up(adapters.n_groups, group_of, adapters.rows, out, stride, s);
}

// The x of an embedding is the row of an id that has a 1, so that `down x` is a column. An id below 0 is a picture's: it has none.
// ids i32 [T], out f32 [T, H], H, adapters, scratch
KERNEL(deltic_lora_embed, const int32_t* ids, float* out, int64_t width, Adapters adapters, LoraScratch s) {
    auto group_of = [&](int64_t i) { return Group{adapters.begin[i], adapters.begin[i + 1], &adapters.entry(adapters.slot[i]), 0}; };
    parallel_for(adapters.n_groups, [&](int64_t i, int) {
        const Group g = group_of(i);
        const int64_t rank = g.entry->rank;
        for (int64_t m = g.begin; m < g.end; m++) {
            const int32_t id = ids[adapters.rows[m]];
            for (int64_t j = 0; j < rank; j += 16) store(s.u + m * s.most + j, id < 0 ? v16{} : load_bf16((const bf16*)g.entry->down + id * rank + j));
        }
    });
    lora_up(adapters.n_groups, group_of, adapters.rows, out, width, s);
}
