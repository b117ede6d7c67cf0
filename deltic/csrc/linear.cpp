// linear: out[m, n] = (residual[m, n] +) sum_k x[m, k] w[n, k], bfloat16 in, float32 accumulate and out.
#include "linear.h"

#include "kernel.h"
#include "pool.h"

// x bf16 [M, K], w bf16 [N, K], out f32 [M, N], M (counted at run time), N, K, add (out is the residual)
KERNEL(deltic_linear) {
    Arguments a{arguments};
    auto x = a.pointer<const bf16>();
    auto w = a.pointer<const bf16>();
    auto out = a.pointer<float>();
    int64_t m_size = a.count(), n_size = a.integer(), k_size = a.integer(), add = a.integer();
    if (m_size == 0) return;
    parallel_for((n_size + W_BLOCK - 1) / W_BLOCK, [&](int64_t block, int) {
        int64_t n0 = block * W_BLOCK, n = n_size - n0 < W_BLOCK ? n_size - n0 : W_BLOCK;
        const bf16* rows[X_BLOCK];
        for (int64_t m0 = 0; m0 < m_size; m0 += X_BLOCK) {
            int64_t n_m = m_size - m0 < X_BLOCK ? m_size - m0 : X_BLOCK;
            for (int64_t m = 0; m < n_m; m++) rows[m] = x + (m0 + m) * k_size;
            multiply_block(rows, n_m, w + n0 * k_size, n, k_size, add, [&](int64_t m) { return out + (m0 + m) * n_size + n0; });
        }
    });
}
