// Rows of a speech model: sums of text and codec vectors, and what goes from one pass of a frame to the next.
//
// Tables are bfloat16 rows as stored, [V, H]; sums are float32, added in the order in which the calls stand. H is a multiple of 16.
#include "kernel.h"
#include "pool.h"
#include "simd.h"

// ids i32 [M], table bf16 [V, H], out bf16 [M, H], M (counted), H
KERNEL(deltic_gather, const int32_t* ids, const bf16* table, bf16* out, Counted n_rows, int64_t width) {
    parallel_for(n_rows, [&](int64_t m, int) { memcpy(out + m * width, table + ids[m] * width, width * 2); });
}

// out = in + bias; rounded to bfloat16 behind a SiLU, or in place.
// x f32 [M, W], bias f32 [W], silu out bf16 [M, W] or null, M (counted), W
KERNEL(deltic_bias, float* x, const float* bias, bf16* out, Counted n_rows, int64_t width) {
    parallel_for(n_rows, [&](int64_t m, int) {
        for (int64_t i = m * width, j = 0; j < width; i += 16, j += 16) {
            v16 y = load(x + i) + load(bias + j);
            if (out) store_bf16(out + i, silu(y));
            else store(x + i, y);
        }
    });
}

// A code of each of M frames: its row of the table goes to the predictor and into the frame's sum. A code below 0 (the logits were
// not finite) makes the sum NaN. With `past`, the first code: the predictor gets two rows, the slot's past in front; the sum begins.
// codes i32 [M], table bf16 [V, H], slot i32 [M], past bf16 [slots, H] or null, rows f32 or bf16 out [M or 2 M, H] or null,
// is_bf16, sum f32 [M, H], M (counted), H
KERNEL(deltic_code_rows, const int32_t* codes, const bf16* table, const int32_t* slot, const bf16* past, float* rows, bool is_bf16,
       float* sum, Counted n_frames, int64_t width) {
    auto put = [&](int64_t row, const bf16* x) {
        if (is_bf16) memcpy((bf16*)rows + row * width, x, width * 2);
        else
            for (int64_t i = 0; i < width; i += 16) store(rows + row * width + i, load_bf16(x + i));
    };
    parallel_for(n_frames, [&](int64_t m, int) {
        const bf16* x = table + (codes[m] < 0 ? 0 : codes[m]) * width;
        if (rows && past) put(2 * m, past + slot[m] * width);
        if (rows) put(past ? 2 * m + 1 : m, x);
        float* to = sum + m * width;
        v16 bad = splat(codes[m] < 0 ? NAN : 0.0f);
        for (int64_t i = 0; i < width; i += 16) store(to + i, (past ? bad : load(to + i) + bad) + load_bf16(x + i));
    });
}

// The talker's rows: out[m] = side + text[text_row[m]], without text where that is -1. side[m]: an id of the table; -1, nothing; KEPT, what
// out has already; or FIRST_VOICE - i, row i of voice.
// side i32 [M], text_row i32 [M], table bf16 [V, H], voice f32 [n, H], text f32 [n, H], out f32 [M, H], M (counted), H
KERNEL(deltic_talker_rows, const int32_t* side, const int32_t* text_row, const bf16* table, const float* voice, const float* text,
       float* out, Counted n_rows, int64_t width) {
    constexpr int32_t KEPT = -2, FIRST_VOICE = -3;  // and -1: nothing
    parallel_for(n_rows, [&](int64_t m, int) {
        const float* t = text_row[m] < 0 ? nullptr : text + text_row[m] * width;
        const bf16* code = side[m] < 0 ? nullptr : table + side[m] * width;
        const float* other = side[m] == KEPT ? out + m * width : side[m] <= FIRST_VOICE ? voice + (FIRST_VOICE - side[m]) * width : nullptr;
        for (int64_t i = 0; i < width; i += 16) {
            v16 x = code ? load_bf16(code + i) : other ? load(other + i) : v16{};
            store(out + m * width + i, t ? x + load(t + i) : x);
        }
    });
}

// out[slot[m]] = x[m]. x bf16 [M, H], slot i32 [M], out bf16 [slots, H], M (counted), H
KERNEL(deltic_keep_rows, const bf16* x, const int32_t* slot, bf16* out, Counted n_rows, int64_t width) {
    for (int64_t m = 0; m < n_rows; m++) memcpy(out + slot[m] * width, x + m * width, width * 2);
}
