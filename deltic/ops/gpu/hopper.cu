// Product of few rows with a weight, for Hopper (sm_90a): hopper.py compiles it for a width and starts it.
//
// out[s, n, m] = the sum over slice s of K of x[n, k] w[m, k]. Rows of x are the M side of wgmma, 64 an
// instruction, and rows of w its N side, so that a multiprocessor can have as many of them as make all equally
// busy. One thread copies blocks of 128 bytes of K to shared memory (TMA), as many ahead as fit, and those of w
// before the kernel in front has ended. Two groups of four warps multiply them in order of K: bfloat16 into one
// float32 accumulator; e4m3 into one for each block, which is multiplied with both scales and added. Those are the
// bits of ops/gpu/linear.py's and fp8.py's kernels, whatever the width. Codes of 4 bits are in
// hopper_codes.cu, up to 16 rows of x beside e4m3 in hopper_few.cu.
//
// hopper.py writes in front of this: WIDTH and SIDE_WIDTH, rows of w of a group of warps (a multiple of 16);
// TOKEN_TILES, of 64 rows, of a program: 1, and each group has rows of w of its own, or 2, and each group has a
// tile; FORM of w: 0 bfloat16, 1 e4m3, 2 codes of 4 bits, in groups of GROUP columns with HALF_SCALES (float16
// instead of bfloat16) and LEAST (1 with least values, 2 with zeros); IN_BLOCKS (1: 128 neighbouring rows of e4m3
// have the same scales); WIDE (1: warps pass on registers); and
// `multiply<N, is_e4m3>(d, a, b, add)`, which is wgmma of 64 rows, N columns and 32 bytes of K:
// d = a b + (add ? d : 0).
//
// Barriers, a pair a stage. A stage is full once its bytes have come, for which the two groups wait; it is empty at
// the start, and again once their eight warps have arrived, for which the copying thread waits.

struct Arguments {
  const void* w_scale;   // [groups of K, m]
  const void* w_least;   // [groups of K, m]: least values or zeros, of codes
  const float* x_scale;  // [K / 128, n], of e4m3
  void* out;
  u64 out_split, out_row;        // elements from a slice of K, and from a row, to the next
  int n, m, m_used;              // rows of x; of w; of w that are wanted
  int up;                        // first row of `up` for SWIGLU, else 0
  int n_blocks;                  // of 128 bytes, in a slice of K
  int scale_blocks;              // of them, that share a scale of e4m3; 0: all of K
  int n_code_stages;             // of 256 columns of codes
  int n_before;                  // blocks of w that are copied before the wait, where rows of x are few
  int tiles_n, tiles_m, n_tiles; // of rows of x, of rows of w, and in all slices
  int out_kind;                  // Out
};

constexpr int N_MULTIPLIERS = 256;  // threads of the two groups; those behind them copy
constexpr int IN_BFLOAT16 = 0, IN_E4M3 = 1;
#if FORM == 2
// In hopper_codes.cu, which hopper.py puts behind this.
__device__ __forceinline__ void product_of_codes(
    const TensorMap* w_map, const TensorMap* x_map, const Arguments& g, int n_stages, int first_tile, int step);
#endif

#if FEW
// In hopper_few.cu, which hopper.py puts behind this.
template <int FORM_OF_W, int HALF, bool IS_GATED>
__device__ __forceinline__ void product_of_few(
    const TensorMap* w_map, const TensorMap* x_map, const Arguments& g, int n_stages, int tile);
#endif

// The tiles first_tile, first_tile + step, ... of a product. The tiles of rows of x of one tile of w are
// neighbours: the second finds the weights in the L2 cache.
template <int ROWS_EACH, int TILES, int FORM_OF_W>
__device__ __forceinline__ void product(
    const TensorMap* w_map, const TensorMap* x_map, const Arguments& g, int n_stages, int first_tile, int step) {
  constexpr bool IS_E4M3 = FORM_OF_W == IN_E4M3;
  constexpr int HALF = ROWS_EACH / 2, PARTS = TILES == 1 ? 2 : 1, ROWS = PARTS * ROWS_EACH, K = IS_E4M3 ? 128 : 64;
  constexpr int X_BYTES = TILES * 64 * 128, W_BYTES = ROWS * 128, SCALES = IS_E4M3 ? ROWS + 64 * TILES : 0;
  extern __shared__ unsigned char memory[];
  const u32 x_tiles = (shared_address(memory) + 1023) & ~1023u, w_tiles = x_tiles + n_stages * X_BYTES;
  const u32 scales = w_tiles + n_stages * W_BYTES;  // of a stage those of w, then those of x
  const u32 full = scales + n_stages * SCALES * 4, empty = full + 8 * n_stages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == N_MULTIPLIERS) {
    for (int s = 0; s < n_stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, N_MULTIPLIERS / 32);
    }
    show_barriers();
  }
  __syncthreads();
  // of SWIGLU a group has HALF rows of gate, and then the same rows of up
  const int features = g.up ? ROWS / 2 : ROWS;

  if (threadIdx.x >= N_MULTIPLIERS) {
#if WIDE
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
    if (threadIdx.x > N_MULTIPLIERS) return;
    struct Place {
      int tile, block, k_block, row, token;
    };
    const auto begin = [&](Place& p, int tile) {
      const int rest = tile / g.tiles_n, split = rest / g.tiles_m;
      p.tile = tile;
      p.block = 0;
      p.k_block = split * g.n_blocks;
      p.row = (rest - split * g.tiles_m) * features;
      p.token = (tile - rest * g.tiles_n) * (64 * TILES);
    };
    const auto next = [&](Place& p) {
      ++p.k_block;
      if (++p.block == g.n_blocks) begin(p, p.tile + step);
    };
    const u64 hint = g.tiles_n == 1 ? EVICT_FIRST : EVICT_NORMAL;
    const auto copy_w = [&](const Place& p, int s) {
      const u32 barrier = full + 8 * s, to = w_tiles + s * W_BYTES;
      if constexpr (IS_E4M3) {
        const int group = g.scale_blocks ? p.k_block / g.scale_blocks : 0, limit = g.up ? ROWS / 2 : ROWS;
        const float* from = static_cast<const float*>(g.w_scale) + static_cast<u64>(group) * g.m + p.row;
        const int n = smaller(limit, positive(g.m - p.row)), n_up = g.up ? smaller(limit, positive(g.up - p.row)) : 0;
        barrier_expect(barrier, X_BYTES + W_BYTES + 4 * (n + n_up + smaller(64 * TILES, g.n - p.token)));
        const u32 scales_to = scales + s * SCALES * 4;
        if (n) copy_floats(scales_to, from, n, barrier);
        if (n_up) copy_floats(scales_to + ROWS * 2, from + g.up, n_up, barrier);
      } else {
        barrier_expect(barrier, X_BYTES + W_BYTES);
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const u32 at = to + part * ROWS_EACH * 128;
        if (g.up) {
          copy_tile(at, w_map, p.k_block * K, p.row + part * HALF, barrier, hint);
          copy_tile(at + HALF * 128, w_map, p.k_block * K, g.up + p.row + part * HALF, barrier, hint);
        } else {
          copy_tile(at, w_map, p.k_block * K, p.row + part * ROWS_EACH, barrier, hint);
        }
      }
    };
    const auto copy_x = [&](const Place& p, int s) {
      copy_tile(x_tiles + s * X_BYTES, x_map, p.k_block * K, p.token, full + 8 * s, EVICT_LAST);
      if constexpr (IS_E4M3)
        copy_floats(scales + (s * SCALES + ROWS) * 4, g.x_scale + static_cast<u64>(p.k_block) * g.n + p.token,
                    smaller(64 * TILES, g.n - p.token), full + 8 * s);
    };
    const int n_turns = (g.n_tiles - first_tile + step - 1) / step * g.n_blocks, n_ahead = smaller(n_stages, n_turns);
    Place w, x;
    begin(w, first_tile);
    begin(x, first_tile);
    for (int s = 0; s < n_ahead; ++s, next(w)) copy_w(w, s);  // nobody in the step writes weights
    wait_for_front();
    for (int s = 0; s < n_ahead; ++s, next(x)) copy_x(x, s);
    for (int i = n_ahead, s = 0, parity = 0; i < n_turns; ++i, next(w)) {
      barrier_wait(empty + 8 * s, parity);
      copy_w(w, s);
      copy_x(w, s);
      if (++s == n_stages) s = 0, parity ^= 1;
    }
    // not before: what starts takes room and bandwidth from us
    let_next_start();
    return;
  }

#if WIDE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
  wait_for_front();
  const int group = warp / 4, row = 16 * (warp % 4) + lane / 4;
  const u32 x_at = x_tiles + (TILES == 2 ? 8192 * group : 0);
  const u32 w_at = w_tiles + (TILES == 1 ? group * ROWS_EACH * 128 : 0);
  // scales of the first and of the second half of the group's columns
  const u32 first_scales = scales + (TILES == 1 ? 4 * group * (g.up ? HALF : ROWS_EACH) : 0);
  const u32 second_scales = first_scales + (g.up ? ROWS * 2 : HALF * 4);
  const u32 x_scales = scales + 4 * (ROWS + (TILES == 2 ? 64 * group : 0) + row);
  float d[ROWS_EACH / 2];
  int stage = 0, parity = 0;
  const auto release = [&](int s) {
    if (lane == 0) barrier_arrive(empty + 8 * s);
  };
  for (int tile = first_tile; tile < g.n_tiles; tile += step) {
    if constexpr (IS_E4M3) {
#pragma unroll
      for (int i = 0; i < ROWS_EACH / 2; ++i) d[i] = 0.0f;
      for (int block = 0; block < g.n_blocks; ++block) {
        barrier_wait(full + 8 * stage, parity);
        float part[ROWS_EACH / 2], s0, s1;
        const u64 a = operand(x_at + stage * X_BYTES), b = operand(w_at + stage * W_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply<ROWS_EACH, true>(part, a + 2 * k, b + 2 * k, k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        const auto scale_at = [&](int column) {
          return (column < HALF ? first_scales + 4 * column : second_scales + 4 * (column - HALF)) + stage * SCALES * 4;
        };
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(s0) : "r"(x_scales + stage * SCALES * 4));
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(s1) : "r"(x_scales + stage * SCALES * 4 + 32));
#if IN_BLOCKS
        // tiles and halves begin at multiples of 8 rows, of 16 where halves are: those share a scale
        constexpr int EACH = HALF % 16 ? 8 : 16;
        float w[ROWS_EACH / EACH];
#pragma unroll
        for (int i = 0; i < ROWS_EACH / EACH; ++i)
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(w[i]) : "r"(scale_at(EACH * i)));
#endif
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        pin(part);
#pragma unroll
        for (int j = 0; j < ROWS_EACH / 8; ++j) {
          float w0, w1;
#if IN_BLOCKS
          w0 = w1 = w[8 * j / EACH];
#else
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w0), "=f"(w1) : "r"(scale_at(8 * j) + 8 * (lane % 4)));
#endif
          d[4 * j] = __fmaf_rn(part[4 * j], __fmul_rn(w0, s0), d[4 * j]);
          d[4 * j + 1] = __fmaf_rn(part[4 * j + 1], __fmul_rn(w1, s0), d[4 * j + 1]);
          d[4 * j + 2] = __fmaf_rn(part[4 * j + 2], __fmul_rn(w0, s1), d[4 * j + 2]);
          d[4 * j + 3] = __fmaf_rn(part[4 * j + 3], __fmul_rn(w1, s1), d[4 * j + 3]);
        }
        end_loads();
        __syncwarp();
        release(stage);
        if (++stage == n_stages) stage = 0, parity ^= 1;
      }
    } else {
      int before = 0;
      for (int block = 0; block < g.n_blocks; ++block) {
        barrier_wait(full + 8 * stage, parity);
        const u64 a = operand(x_at + stage * X_BYTES), b = operand(w_at + stage * W_BYTES);
        pin(d);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply<ROWS_EACH, false>(d, a + 2 * k, b + 2 * k, block + k);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        pin(d);
        if (block) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          release(before);  // the block before this one has been multiplied
        }
        before = stage;
        if (++stage == n_stages) stage = 0, parity ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      pin(d);
      release(before);
    }

    // a thread has columns 8 j + 2 (lane % 4) and the one behind, of two rows of x; those of up are HALF further
    const int rest = tile / g.tiles_n, split = rest / g.tiles_m;
    const int column =
        (rest - split * g.tiles_m) * features + (TILES == 1 ? group * (g.up ? HALF : ROWS_EACH) : 0) + 2 * (lane % 4);
    const int token = (tile - rest * g.tiles_n) * (64 * TILES) + (TILES == 2 ? 64 * group : 0) + row;
#pragma unroll
    for (int j = 0; j < ROWS_EACH / 8; ++j) {
      const int c = column + 8 * j;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (token + 8 * r >= g.n) continue;
        const u64 at = split * g.out_split + (token + 8 * r) * g.out_row + c;
        const float d0 = d[4 * j + 2 * r], d1 = d[4 * j + 2 * r + 1];
        if (g.out_kind == SWIGLU) {
          if (8 * j >= HALF || c >= g.up) continue;
          const int u = (4 * j + 2 * r + HALF / 2) % (ROWS_EACH / 2);
          static_cast<u32*>(g.out)[at / 2] = two_bfloat16(silu_product(d0, d[u]), silu_product(d1, d[u + 1]));
        } else if (c < g.m_used) {
          if (g.out_kind == FLOAT32)
            static_cast<float2*>(g.out)[at / 2] = make_float2(d0, d1);
          else
            static_cast<u32*>(g.out)[at / 2] = two_bfloat16(d0, d1);
        }
      }
    }
  }
}

// n_programs of the product with one weight; those behind them multiply rows in bfloat16 by another one, if
// there is one: a few rows alone would walk K with nearly all of the chip idle. All programs run at once.
extern "C" __global__ void __launch_bounds__(FORM == 2 ? 128 * GROUPS + 32 : WIDE ? 384 : 288, 1) linear(
    const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
    const __grid_constant__ Arguments g,
    int n_stages, int n_programs
#if SIDE_WIDTH
    , const __grid_constant__ TensorMap side_w_map, const __grid_constant__ TensorMap side_x_map,
    const __grid_constant__ Arguments side, int side_stages
#endif
) {
#if SIDE_WIDTH
  if (blockIdx.x >= n_programs) {
#if FEW
    product_of_few<IN_BFLOAT16, SIDE_WIDTH / 2, false>(
        &side_w_map, &side_x_map, side, side_stages, blockIdx.x - n_programs);
#else
    product<SIDE_WIDTH, TOKEN_TILES, IN_BFLOAT16>(
        &side_w_map, &side_x_map, side, side_stages, blockIdx.x - n_programs, gridDim.x - n_programs);
#endif
    return;
  }
#endif
#if FORM == 2
  product_of_codes(&w_map, &x_map, g, n_stages, blockIdx.x, n_programs);
#elif FEW
  product_of_few<FORM, WIDTH / 2, IS_SWIGLU>(&w_map, &x_map, g, n_stages, blockIdx.x);
#else
  product<WIDTH, TOKEN_TILES, FORM>(&w_map, &x_map, g, n_stages, blockIdx.x, n_programs);
#endif
}
