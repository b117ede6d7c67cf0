// Product of few rows with a weight of e4m3, for Hopper: hopper.py puts this behind hopper.cu.
//
// Rows of w are the M side of wgmma, 64 a tile, and all rows of x, up to TOKENS, its N side, as in the Triton
// kernels: sums take few registers, so that a program stands beside those of the kernel in front, and shared memory
// is full of weights when that one has ended. A program has two halves of HALF rows of w, of SwiGLU the same rows of
// gate and of up. Where HALF is not a multiple of 64, the last tile reads what is behind it, and nobody its sums.
// Scales of e4m3 are those of blocks of 128 x 128. A program has all that it needs in tables: those of w before the
// kernel in front has ended, those of x behind it. Sums have the order, and bits, of hopper.cu.
//
// hopper.py defines, besides what hopper.cu names: TOKENS, 8 or 16, and IS_SWIGLU.

__device__ __forceinline__ float load_float(u32 at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at));
  return value;
}

__device__ __forceinline__ void store_float(u32 at, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}

__device__ __forceinline__ void wait_for_groups() {
  asm volatile("bar.sync 1, %0;" ::"n"(N_MULTIPLIERS) : "memory");
}
__device__ __forceinline__ void begin_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

template <int FORM_OF_W, int HALF, bool IS_GATED>
__device__ __forceinline__ void product_of_few(
    const TensorMap* w_map, const TensorMap* x_map, const Arguments& g, int n_stages, int tile) {
  constexpr bool IS_E4M3 = FORM_OF_W == IN_E4M3;
  constexpr int K = IS_E4M3 ? 128 : 64, IN_HALF = (HALF + 63) / 64, SCALES = (HALF + 127) / 128 + 1;
  constexpr int N_TILES = IS_GATED ? (IN_HALF + 1) / 2 * 2 : IN_HALF;  // of a group of warps
  constexpr int X_BYTES = TOKENS * 128, W_BYTES = 2 * HALF * 128;
  extern __shared__ unsigned char memory[];
  const u32 w_tiles = (shared_address(memory) + 1023) & ~1023u, x_tiles = w_tiles + n_stages * W_BYTES;
  const u32 full = x_tiles + n_stages * X_BYTES, empty = full + 8 * n_stages;
  const u32 w_scales = empty + 8 * n_stages;  // [block][half][SCALES]
  const u32 x_scales = w_scales + (IS_E4M3 ? g.n_blocks * 2 * SCALES * 4 : 0);  // [block][TOKENS]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == N_MULTIPLIERS) {
    for (int s = 0; s < n_stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, N_MULTIPLIERS / 32);
    }
    show_barriers();
  }
  __syncthreads();
  const int split = tile / g.tiles_m, row = (tile - split * g.tiles_m) * (IS_GATED ? HALF : 2 * HALF);
  const int second = IS_GATED ? g.up + row : row + HALF, first_block = split * g.n_blocks;

  if (threadIdx.x >= N_MULTIPLIERS) {
    if (threadIdx.x > N_MULTIPLIERS) return;
    let_next_start();  // at once: it takes little room, and waits for us before it reads
    const auto copy_w = [&](int block, int s) {
      const u32 barrier = full + 8 * s, to = w_tiles + s * W_BYTES;
      barrier_expect(barrier, X_BYTES + W_BYTES);
      copy_tile(to, w_map, (first_block + block) * K, row, barrier, EVICT_FIRST);
      copy_tile(to + HALF * 128, w_map, (first_block + block) * K, second, barrier, EVICT_FIRST);
    };
    const auto copy_x = [&](int block, int s) {
      copy_tile(x_tiles + s * X_BYTES, x_map, (first_block + block) * K, 0, full + 8 * s, EVICT_LAST);
    };
    const int n_ahead = smaller(n_stages, g.n_blocks);
    const int n_before = smaller(g.n_before, n_ahead);
    for (int s = 0; s < n_before; ++s) copy_w(s, s);  // nobody in the step writes weights
    wait_for_front();
    for (int s = 0; s < n_before; ++s) copy_x(s, s);
    for (int s = n_before; s < n_ahead; ++s) copy_w(s, s), copy_x(s, s);
    for (int i = n_ahead, s = 0, parity = 0; i < g.n_blocks; ++i) {
      barrier_wait(empty + 8 * s, parity);
      copy_w(i, s);
      copy_x(i, s);
      if (++s == n_stages) s = 0, parity ^= 1;
    }
    return;
  }

  if constexpr (IS_E4M3) {
    const float* w_scale = static_cast<const float*>(g.w_scale);
    for (int i = threadIdx.x; i < g.n_blocks * 2 * SCALES; i += N_MULTIPLIERS) {
      const int block = i / (2 * SCALES), of = i - block * (2 * SCALES), half = of / SCALES;
      const int at = ((half ? second : row) / 128 + of - half * SCALES) * 128;
      store_float(w_scales + 4 * i, at < g.m ? w_scale[static_cast<u64>(first_block + block) * g.m + at] : 0.0f);
    }
    wait_for_front();
    for (int i = threadIdx.x; i < g.n_blocks * TOKENS; i += N_MULTIPLIERS) {
      const int block = i / TOKENS, token = i - block * TOKENS;
      store_float(x_scales + 4 * i,
                  token < g.n ? __ldcg(g.x_scale + static_cast<u64>(first_block + block) * g.n + token) : 0.0f);
    }
    wait_for_groups();
  } else {
    wait_for_front();
  }

  // a thread has of each tile rows `first` and `first + 8`, of each 8 rows of x two
  const int group = warp / 4, first = 16 * (warp % 4) + lane / 4;
  const auto half_of = [&](int i) { return IS_GATED ? i % 2 : group; };
  const auto tile_of = [&](int i) { return IS_GATED ? group + i / 2 * 2 : i; };
  float d[N_TILES][TOKENS / 2] = {};
  int stage = 0, parity = 0;
  const auto release = [&](int s) {
    if (lane == 0) barrier_arrive(empty + 8 * s);
  };
  const auto left = [&](int i, int s) {
    // an odd number of tiles: one is multiplied twice
    return operand(w_tiles + s * W_BYTES + (half_of(i) * HALF + 64 * smaller(tile_of(i), IN_HALF - 1)) * 128);
  };
  if constexpr (IS_E4M3) {
    u32 scale_at[N_TILES][2];
#pragma unroll
    for (int i = 0; i < N_TILES; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int from = half_of(i) ? second : row;
        const int at = smaller((from + 64 * tile_of(i) + first + 8 * r) / 128 - from / 128, SCALES - 1);
        scale_at[i][r] = w_scales + 4 * (half_of(i) * SCALES + at);
      }
    u32 x_scale_at = x_scales + 8 * (lane % 4);
    for (int block = 0; block < g.n_blocks; ++block) {
      barrier_wait(full + 8 * stage, parity);
      float part[N_TILES][TOKENS / 2];
      const u64 b = operand(x_tiles + stage * X_BYTES);
      begin_multiply();
#pragma unroll
      for (int i = 0; i < N_TILES; ++i) {
        const u64 a = left(i, stage);
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply<TOKENS, true>(part[i], a + 2 * k, b + 2 * k, k);
      }
      end_multiply();
      float w[N_TILES][2], x[TOKENS / 4];
#pragma unroll
      for (int j = 0; j < TOKENS / 4; ++j) x[j] = load_float(x_scale_at + 32 * (j / 2) + 4 * (j % 2));
#pragma unroll
      for (int i = 0; i < N_TILES; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) w[i][r] = load_float(scale_at[i][r]), scale_at[i][r] += 8 * SCALES;
      x_scale_at += 4 * TOKENS;
      wait_for_all_but<0>();
#pragma unroll
      for (int i = 0; i < N_TILES; ++i) pin(part[i]);
      release(stage);
      if (++stage == n_stages) stage = 0, parity ^= 1;
#pragma unroll
      for (int i = 0; i < N_TILES; ++i)
#pragma unroll
        for (int j = 0; j < TOKENS / 2; ++j)
          d[i][j] = __fmaf_rn(part[i][j], __fmul_rn(w[i][j / 2 % 2], x[j / 4 * 2 + j % 2]), d[i][j]);
    }
  } else {
    int before = 0;
    for (int block = 0; block < g.n_blocks; ++block) {
      barrier_wait(full + 8 * stage, parity);
      const u64 b = operand(x_tiles + stage * X_BYTES);
#pragma unroll
      for (int i = 0; i < N_TILES; ++i) pin(d[i]);
      begin_multiply();
#pragma unroll
      for (int i = 0; i < N_TILES; ++i) {
        const u64 a = left(i, stage);
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply<TOKENS, false>(d[i], a + 2 * k, b + 2 * k, block + k);
      }
      end_multiply();
#pragma unroll
      for (int i = 0; i < N_TILES; ++i) pin(d[i]);
      if (block) {
        wait_for_all_but<1>();
        release(before);  // the block before this one has been multiplied
      }
      before = stage;
      if (++stage == n_stages) stage = 0, parity ^= 1;
    }
    wait_for_all_but<0>();
#pragma unroll
    for (int i = 0; i < N_TILES; ++i) pin(d[i]);
  }

#pragma unroll
  for (int i = 0; i < N_TILES; ++i) {
    if (IS_GATED && i % 2) continue;
#pragma unroll
    for (int j = 0; j < TOKENS / 2; ++j) {
      const int in_half = 64 * tile_of(i) + first + j / 2 % 2 * 8, token = j / 4 * 8 + 2 * (lane % 4) + j % 2;
      const int column = row + (IS_GATED ? 0 : group * HALF) + in_half;
      if (in_half >= HALF || token >= g.n || column >= (IS_GATED ? g.up : g.m_used)) continue;
      const u64 at = split * g.out_split + token * g.out_row + column;
      float value = d[i][j];
      if constexpr (IS_GATED) value = silu_product(value, d[i + 1][j]);
      if (g.out_kind == FLOAT32)
        static_cast<float*>(g.out)[at] = value;
      else
        static_cast<unsigned short*>(g.out)[at] = static_cast<unsigned short>(two_bfloat16(value, value));
    }
  }
}
