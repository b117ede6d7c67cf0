// Product with codes of 4 bits, for Hopper: hopper.py puts this behind hopper.cu.
//
// Rows of w are the M side of wgmma, which takes them from registers: each of GROUPS groups of four warps decodes 64
// rows (operands.py), and multiplies them with all TOKENS rows of x in shared memory. While the tensor cores
// multiply a piece of K, its warps decode the next one. One thread copies codes, 256 columns at once, and rows of
// x, the first codes before the kernel in front has ended. Sums are of K in order, in one float32 accumulator:
// the bits of ops/gpu/linear.py's kernel.
//
// hopper.py defines, besides what hopper.cu names: GROUPS; TOKENS; PIECE, of so many times 32 columns; X_BLOCKS, of
// 64 columns of x in a stage; and `multiply_decoded<N>(d, a, b, add)`, which is wgmma of 64 rows in registers, N
// columns and 16 elements of K: d = a b + (add ? d : 0).
//
// Stages of codes and of x have a pair of barriers each. One is full once its bytes have come, and empty once all
// warps of the groups have arrived.

// A float of 16 bits as two bfloat16.
__device__ __forceinline__ u32 two_of(u32 bits) {
#if HALF_SCALES
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return two_bfloat16(value, value);
#else
  return __byte_perm(bits, 0, 0x1010);
#endif
}

// a b + c of two bfloat16.
__device__ __forceinline__ u32 fma_two(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 load_u32(u32 at) {
  u32 value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at));
  return value;
}

__device__ __forceinline__ u32 load_u16(u32 at) {
  unsigned short value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(at));
  return value;
}

__device__ __forceinline__ u32 load_u8(u32 at) {
  u32 value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(at));
  return value;
}

__device__ __forceinline__ void product_of_codes(
    const TensorMap* w_map, const TensorMap* x_map, const Arguments& g, int n_stages, int first_tile, int step) {
  constexpr int WARPS = 4 * GROUPS, ROWS = 64 * GROUPS, HALF = ROWS / 2, SUBS = 256 / GROUP;
  constexpr int X_BYTES = X_BLOCKS * TOKENS * 128, CODE_BYTES = ROWS * 128;
  constexpr int LEAST_BYTES = LEAST == 2 ? 1 : LEAST ? 2 : 0;
  extern __shared__ unsigned char memory[];
  const u32 x_tiles = (shared_address(memory) + 1023) & ~1023u, tiles = x_tiles + n_stages * X_BYTES;
  const u32 scales = tiles + g.n_code_stages * CODE_BYTES, leasts = scales + g.n_code_stages * SUBS * ROWS * 2;
  const u32 code_full = leasts + g.n_code_stages * SUBS * ROWS * LEAST_BYTES;
  const u32 code_empty = code_full + 8 * g.n_code_stages;
  const u32 full = code_empty + 8 * g.n_code_stages, empty = full + 8 * n_stages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 32 * WARPS) {
    for (int s = 0; s < n_stages; ++s) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, WARPS);
    for (int s = 0; s < g.n_code_stages; ++s)
      barrier_init(code_full + 8 * s, 1), barrier_init(code_empty + 8 * s, WARPS);
    show_barriers();
  }
  __syncthreads();
  // of SWIGLU the first half of the rows are of gate, the second the same ones of up
  const int features = g.up ? HALF : ROWS, n_steps = g.n_blocks / 4;

  if (threadIdx.x >= 32 * WARPS) {
    if (threadIdx.x > 32 * WARPS) return;
    constexpr int PER = 4 / X_BLOCKS;  // stages of x for one of codes
    struct Place {
      int tile, block, k_block, row, token;
    };
    const auto begin = [&](Place& p, int tile, int n) {
      const int rest = tile / g.tiles_n, split = rest / g.tiles_m;
      p.tile = tile;
      p.block = 0;
      p.k_block = split * n;
      p.row = (rest - split * g.tiles_m) * features;
      p.token = (tile - rest * g.tiles_n) * TOKENS;
    };
    const auto next = [&](Place& p, int n) {
      ++p.k_block;
      if (++p.block == n) begin(p, p.tile + step, n);
    };
    const u64 hint = g.tiles_n == 1 ? EVICT_FIRST : EVICT_NORMAL;
    const auto copy_codes = [&](const Place& p, int s) {
      const u32 barrier = code_full + 8 * s, to = tiles + s * CODE_BYTES;
      const int second = g.up ? g.up + p.row : p.row + HALF;
      const int n = smaller(HALF, positive((g.up ? g.up : g.m) - p.row));
      const int n_second = smaller(HALF, positive(g.m - second));
      barrier_expect(barrier, CODE_BYTES + SUBS * (n + n_second) * (2 + LEAST_BYTES));
      for (int i = 0; i < HALF; i += 32) {
        copy_tile(to + i * 128, w_map, p.k_block * 128, p.row + i, barrier, hint);
        copy_tile(to + (HALF + i) * 128, w_map, p.k_block * 128, second + i, barrier, hint);
      }
#pragma unroll
      for (int sub = 0; sub < SUBS; ++sub) {
        const u64 from = static_cast<u64>(p.k_block * SUBS + sub) * g.m;
        const u32 place = (s * SUBS + sub) * ROWS;
        const auto copy = [&](u32 to, const void* base, int bytes) {
          const char* at = static_cast<const char*>(base) + from * bytes;
          if (n) copy_bytes(to + place * bytes, at + p.row * bytes, n * bytes, barrier);
          if (n_second) copy_bytes(to + (place + HALF) * bytes, at + second * bytes, n_second * bytes, barrier);
        };
        copy(scales, g.w_scale, 2);
        if (LEAST) copy(leasts, g.w_least, LEAST_BYTES);
      }
    };
    const auto copy_x = [&](const Place& p, int s) {
      barrier_expect(full + 8 * s, X_BYTES);
#pragma unroll
      for (int i = 0; i < X_BLOCKS; ++i)
        copy_tile(x_tiles + s * X_BYTES + i * TOKENS * 128, x_map, (p.k_block * X_BLOCKS + i) * 64, p.token,
                  full + 8 * s, EVICT_LAST);
    };
    const int n_code_turns = (g.n_tiles - first_tile + step - 1) / step * n_steps, n_turns = PER * n_code_turns;
    Place w, x;
    begin(w, first_tile, n_steps);
    begin(x, first_tile, PER * n_steps);
    // nobody in the step writes weights
    for (int s = 0; s < smaller(g.n_code_stages, n_code_turns); ++s, next(w, n_steps)) copy_codes(w, s);
    wait_for_front();
    for (int s = 0; s < smaller(n_stages, n_turns); ++s, next(x, PER * n_steps)) copy_x(x, s);
    // in the order in which stages become empty
    for (int i = 0, s = 0, parity = 0, code_s = 0, code_parity = 0; i < n_turns; ++i) {
      if (i + n_stages < n_turns) {
        barrier_wait(empty + 8 * s, parity);
        copy_x(x, s);
        next(x, PER * n_steps);
        if (++s == n_stages) s = 0, parity ^= 1;
      }
      if (i % PER == PER - 1 && i / PER + g.n_code_stages < n_code_turns) {
        barrier_wait(code_empty + 8 * code_s, code_parity);
        copy_codes(w, code_s);
        next(w, n_steps);
        if (++code_s == g.n_code_stages) code_s = 0, code_parity ^= 1;
      }
    }
    let_next_start();  // as hopper.cu does
    return;
  }

  wait_for_front();
  // a thread has rows `row` and `row + HALF` of w, which stand 8 apart in the operand
  const int row = 8 * warp + lane / 4;
  const u32 codes_at = tiles + row * 128 + lane / 4 * 16 + lane % 4 * 4;
  // pieces in a stage of codes, and in one of x; scales of a row in a piece
  constexpr int COUNT = 8 / PIECE, IN_STAGE = 2 * X_BLOCKS / PIECE, DEPTH = GROUP == 32 ? PIECE : 1;
  u32 words[PIECE][2], scale[DEPTH][2], low_zero[DEPTH][2], high_zero[DEPTH][2], least[DEPTH][2];
  u32 a[2][2 * PIECE][4] = {};
  const u32 magic = 0x43004300u | (g.n < 0);  // in a register: an instruction takes one constant
  float d[TOKENS / 2];
  int s = 0, parity = 0, stage = 0, x_parity = 0, before = 0;

  // Loads the codes of piece p of stage s, and its scales where they are not those of the piece before.
  const auto load = [&](int p) {
#pragma unroll
    for (int k = 0; k < PIECE; ++k) {
      const u32 at = (codes_at + s * CODE_BYTES) ^ ((PIECE * p + k) * 16);
      words[k][0] = load_u32(at);
      words[k][1] = load_u32(at + HALF * 128);
    }
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      const int column = 32 * (PIECE * p + k);
      if (column % GROUP) continue;
      const u32 at = (s * SUBS + column / GROUP) * ROWS + row;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 place = at + r * HALF;
        scale[k][r] = fma_two(two_of(load_u16(scales + 2 * place)), 0x40804080u, 0x80008000u);  // times 4
        low_zero[k][r] = LEAST ? 0xC200C200u : 0xC208C208u;    // -32, -34
        high_zero[k][r] = LEAST ? 0x80008000u : 0xC000C000u;   // -0, -2
        least[k][r] = 0x80008000u;
        if (LEAST == 1) least[k][r] = two_of(load_u16(leasts + 2 * place));
        if (LEAST == 2) {
          low_zero[k][r] = fma_two(0x43004300u | load_u8(leasts + place) * 0x10001u, 0xBE80BE80u, 0x80008000u);
          high_zero[k][r] = fma_two(low_zero[k][r], 0x3F803F80u, 0x42004200u);
        }
      }
    }
  };
  // Element t = lane % 4 of 8 codes of a row (decode.py) is of columns 2 t, 2 t + 1 of each 8 of 32: what a thread
  // has of the operands of two instructions. Two codes of a word become a quarter of (code - zero), which is exact:
  // in bfloat16, 0x4300 and a code are 128 + code, and a code in bits 4 to 7 alone is code * 2^-129, also where it
  // is subnormal. So two of three shifts are saved. Times four times the scale it is the value, rounded once.
  const auto decode = [&](u32 (&to)[2 * PIECE][4]) {
#pragma unroll
    for (int k = 0; k < PIECE; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int of = DEPTH == 1 ? 0 : k;
          const u32 word = j < 2 ? words[k][r] : words[k][r] >> 8;
          const u32 quarter = j % 2 ? fma_two(word & 0x00F000F0u, 0x7F007F00u, high_zero[of][r])
                                    : fma_two(word & 0x000F000Fu | magic, 0x3E803E80u, low_zero[of][r]);
          to[2 * k + j / 2][j % 2 * 2 + r] = fma_two(quarter, scale[of][r], least[of][r]);
        }
  };
  // Keeps an operand's registers until the instructions that read them have ended.
  const auto keep = [&](u32 (&of)[2 * PIECE][4]) {
#pragma unroll
    for (int k = 0; k < 2 * PIECE; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(of[k][i])::"memory");
  };
  const auto arrive = [&](u32 barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };

  barrier_wait(code_full + 8 * s, parity);
  load(0);
  decode(a[0]);
  for (int tile = first_tile; tile < g.n_tiles; tile += step) {
    for (int i = 0; i < n_steps; ++i) {
      const bool is_last = i == n_steps - 1 && tile + step >= g.n_tiles;
#pragma unroll
      for (int p = 0; p < COUNT; ++p) {
        if (p < COUNT - 1) {
          load(p + 1);
        } else if (!is_last) {
          if (++s == g.n_code_stages) s = 0, parity ^= 1;
          barrier_wait(code_full + 8 * s, parity);
          load(0);
        }
        if (p % IN_STAGE == 0) barrier_wait(full + 8 * stage, x_parity);
        const int column = p % IN_STAGE * 32 * PIECE;  // in the stage
        const u64 b = operand(x_tiles + stage * X_BYTES) + column / 64 * (TOKENS * 8) + column % 64 / 8;
        pin(d);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < 2 * PIECE; ++k) multiply_decoded<TOKENS>(d, a[p % 2][k], b + 2 * k, k + p ? 1 : i);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        pin(d);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        keep(a[(p + 1) % 2]);
        if (p % IN_STAGE == 0 && (i || p)) arrive(empty + 8 * before);
        if (p % IN_STAGE == IN_STAGE - 1) {
          before = stage;
          if (++stage == n_stages) stage = 0, x_parity ^= 1;
        }
        if (p < COUNT - 1 || !is_last) decode(a[(p + 1) % 2]);
        if (p == COUNT - 2) {
          end_loads();
          __syncwarp();
          arrive(code_empty + 8 * s);
        }
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(d);
    keep(a[1]);
    arrive(empty + 8 * before);

    // a thread has of two rows of w columns 8 j + 2 (lane % 4) and the one behind: rows of x
    const int rest = tile / g.tiles_n, split = rest / g.tiles_m, odd = lane / 4 % 2;
    const int column = (rest - split * g.tiles_m) * features + row;
    const int first = (tile - rest * g.tiles_n) * TOKENS + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      const int token = first + 8 * j;
      const u64 at = split * g.out_split + token * g.out_row;
      if (g.out_kind == FLOAT32) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (token + e < g.n && column + r * HALF < g.m_used)
              static_cast<float*>(g.out)[at + e * g.out_row + column + r * HALF] = d[4 * j + 2 * r + e];
        continue;
      }
      // two columns are stored at once: threads of neighbouring rows of w exchange what they have of a row of x
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r && g.out_kind == SWIGLU) continue;
        float v0 = d[4 * j + 2 * r], v1 = d[4 * j + 2 * r + 1];
        if (g.out_kind == SWIGLU) v0 = silu_product(v0, d[4 * j + 2]), v1 = silu_product(v1, d[4 * j + 3]);
        const float other = __shfl_xor_sync(~0u, odd ? v0 : v1, 4);
        const int to = column - odd + r * HALF;
        if (token + odd < g.n && to < (g.out_kind == SWIGLU ? g.up : g.m_used))
          static_cast<u32*>(g.out)[(at + odd * g.out_row + to) / 2] =
              odd ? two_bfloat16(other, v1) : two_bfloat16(v0, other);
      }
    }
  }
}
