// What the machine can do at best: the roofs that `deltic plan` and `deltic bench ops` print beside every figure.
#include "kernel.h"
#include "linear.h"
#include "pool.h"

// Reads every byte once. data, n_bytes, out f32 [n_blocks of 1 MiB]
KERNEL(deltic_read_memory) {
    Arguments a{arguments};
    auto data = a.pointer<const float>();
    int64_t n_blocks = a.integer() >> 20;
    auto out = a.pointer<float>();
    parallel_for(n_blocks, [&](int64_t block, int) {
        const float* x = data + block * (1 << 18);
        v16 sums[8] = {};
        for (int64_t i = 0; i < (1 << 18); i += 128)
            for (int j = 0; j < 8; j++) sums[j] = sums[j] + load(x + i + 16 * j);
        for (int j = 1; j < 8; j++) sums[0] = sums[0] + sums[j];
        out[block] = sum(sums[0]);
    });
}

// Multiplies a tile of X_TILE x W_TILE rows that stays in the first-level cache, n_repeats times on n_tasks tasks: 2 * X_TILE * W_TILE * 512 operations each.
// data bf16 [10, 512], n_tasks, n_repeats, out f32 [n_tasks], out operations f32 [1]
KERNEL(deltic_multiply_peak) {
    Arguments a{arguments};
    auto data = a.pointer<const bf16>();
    int64_t n_tasks = a.integer(), n_repeats = a.integer();
    auto out = a.pointer<float>();
    *a.pointer<float>() = 2.0f * X_TILE * W_TILE * 512 * n_tasks * n_repeats;
    parallel_for(n_tasks, [&](int64_t task, int) {
        const bf16 *x[X_TILE], *w[W_TILE];
        for (int i = 0; i < X_TILE; i++) x[i] = data + i * 512;
        for (int i = 0; i < W_TILE; i++) w[i] = data + (X_TILE + i) * 512;
        float total = 0;
        for (int64_t r = 0; r < n_repeats; r++) {
            float sums[X_TILE][W_TILE];
            dot_tile<X_TILE, W_TILE, false>(x, w, 512, 0, sums);
            total += sums[r % X_TILE][r % W_TILE];
            asm volatile("" ::: "memory");
        }
        out[task] = total;
    });
}
