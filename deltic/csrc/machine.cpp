// Roofs of the machine, the best it can do: that `deltic plan` and `bench.ops` print beside every figure.
#include "kernel.h"
#include "multiply.h"
#include "pool.h"

// Reads every byte once. data, n_bytes, out f32 [n_blocks of 1 MiB]
KERNEL(deltic_read_memory, const float* data, int64_t n_bytes, float* out) {
    int64_t n_blocks = n_bytes >> 20;
    parallel_for(n_blocks, [&](int64_t block, int) {
        const float* x = data + block * (1 << 18);
        v16 sums[8] = {};
        for (int64_t i = 0; i < (1 << 18); i += 128)
            for (int j = 0; j < 8; j++) sums[j] = sums[j] + load(x + i + 16 * j);
        for (int j = 1; j < 8; j++) sums[0] = sums[0] + sums[j];
        out[block] = sum(sums[0]);
    });
}

// Multiplies one full tile that stays in the first-level cache, n_repeats times on n_tasks tasks.
// w (packed), x u8 (packed rows), n_tasks, n_repeats, out f32 [n_tasks, 32, N], out operations f32 [1]
KERNEL(deltic_multiply_peak, Matrix w, uint8_t* rows, int64_t n_tasks, int64_t n_repeats, float* out, float* n_operations) {
    const int64_t n_rows = rows_stand(w, 32) ? 32 : TILE_ROWS;  // a full tile of the unit
    Rows x = place_rows(rows, n_rows, w);
    *n_operations = 2.0f * n_rows * w.n * w.k * n_tasks * n_repeats;
    parallel_for(n_tasks, [&](int64_t task, int) {
        for (int64_t r = 0; r < n_repeats; r++)
            for (int64_t s = 0; s < w.n_strips(); s += TILE_STRIPS) multiply(x, n_rows, w, s, s + TILE_STRIPS, {out + task * n_rows * w.n, w.n, nullptr, false});
    });
}
