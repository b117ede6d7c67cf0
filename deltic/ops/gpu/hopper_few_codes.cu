// Product of up to 16 rows with codes, for Hopper: few_codes.py puts this behind hopper_base.cu.
//
// out[s, n, m] = the sum over slice s of K of x[n, k] w[m, k]. Rows of w are the tall side of mma.sync, 16 a tile: 8
// rows from `first` on and 8 from `second` on, of SwiGLU those of gate and the same of up. A warp has a tile and walks
// K in order, in one float32 accumulator. A program has as many as spread the weight over all multiprocessors. One
// thread copies stages of 256 columns of codes, scales and rows of x (TMA), as many ahead as fit, those of w before
// the kernel in front has ended. Operands are those of ops/gpu/operands.py, to the bit, by its own instructions, and
// sums have the order of ops/gpu/linear.py's kernel.
//
// A Form, which few_codes.py writes, says how a weight is stored: LOW and HIGH bits of a code in its two planes (16:
// bfloat16, which has no scales); columns that share a scale (GROUP); the type of scales (SCALE) and of what stands
// beside them (LEAST); N_OUTER outer scales of 256 columns; IS_LOWERED and IS_PAIRED as operands.py says; and
// `decode(v, first, second, scale, scale_2)`, which makes 8 bfloat16 of an element's words.
//
// A stage is full once its bytes have come, and empty once the warps of the program that multiply have arrived.

enum Scale { SCALE_FLOAT16, SCALE_BFLOAT16, SCALE_FLOAT32, SCALE_K, SCALE_K_EIGHTH, SCALE_E8M0 };
enum Least { LEAST_NONE, LEAST_VALUE, LEAST_ZERO, LEAST_SIGNED_ZERO };

struct Part {
  TensorMap low, high, scale, least, outer;  // of w; those that its form has
  void* out;
  u64 out_split, out_row;  // elements from a slice of K, and from a row, to the next
  int n, m_used, up;       // rows of x; of w that are wanted; first row of `up` for SWIGLU, else 0
  int n_blocks, n_stages, n_before;  // stages in a slice; that there is room for; of w that are copied before the wait
  int tiles, tiles_m, n_tiles;       // of 16 rows in a program; programs' worth in a slice, and in all slices
  int n_programs, out_kind;
  // bytes from the begin of a stage, in which rows of x are first: of half of the rows, and of the whole
  int low_at, high_at, scale_at, least_at, outer_at, stage_bytes, copied_bytes;
  int half_scale_bytes, half_least_bytes, half_outer_bytes, window;  // rows of a copy of scales
};

template <class F>
struct Sizes {
  static constexpr int SUBS = F::LOW == 16 ? 0 : 256 / F::GROUP, HALVES = F::GROUP == 16 ? 2 : 1;
  static constexpr int PARTS = F::IS_LOWERED && F::LEAST ? 2 : 1;  // words of a scale in front of operands
  static constexpr int UNITS = SUBS / HALVES, WORDS = 2 * HALVES * PARTS;  // of a thread's two rows
  static constexpr int EACH = (16 * SUBS + 31) / 32;  // scales of a tile that a thread prepares
  static constexpr int BYTES = UNITS * 8 * WORDS * 4;  // of a tile
  static constexpr int LOW_BOX = F::LOW >= 4 ? 128 : 32 * F::LOW, BOXES = F::LOW * 32 / LOW_BOX;
  static constexpr int HIGH_BOX = 32 * F::HIGH;
  static constexpr int SCALE_BYTES = F::SCALE == SCALE_FLOAT32 ? 4 : F::SCALE <= SCALE_BFLOAT16 ? 2 : 1;
  static constexpr int LEAST_BYTES = F::LEAST == LEAST_VALUE ? SCALE_BYTES : 1;
};

// Where 16 bytes `chunk` of row g (of 8) stand among rows of BOX bytes, as the copies swizzle them.
template <int BOX>
__device__ __forceinline__ int chunk_at(int g, int chunk) {
  return 16 * (BOX == 128 ? chunk ^ g : BOX == 64 ? chunk ^ (g >> 1) : chunk ^ (g >> 2));
}

template <class T>
__device__ __forceinline__ T shared_value(const unsigned char* at) {
  return *reinterpret_cast<const T*>(at);
}

template <class F>
__device__ __forceinline__ float number(const unsigned char* at) {
  if constexpr (F::SCALE == SCALE_FLOAT16) return float_of_half(shared_value<unsigned short>(at));
  if constexpr (F::SCALE == SCALE_BFLOAT16) return __uint_as_float(shared_value<unsigned short>(at) << 16);
  return shared_value<float>(at);
}

// The scale of a row and group, and what stands beside it, as `_packed` (operands.py) has them. at: rows in a copy.
template <class F>
__device__ __forceinline__ void prepare(
    u32 (&to)[Sizes<F>::PARTS], const unsigned char* scale_at, const unsigned char* least_at,
    const unsigned char* outer_at, int window) {
  constexpr float WORTH = 2.5353012004564588e+30f, UNIT = 2.3283064365386963e-10f;  // 2^101, 2^-32
  constexpr bool IS_K = F::SCALE == SCALE_K || F::SCALE == SCALE_K_EIGHTH;
  constexpr float TIMES = F::IS_LOWERED ? WORTH : 1.0f;
  float scale, least = 0.0f;
  if constexpr (IS_K) {
    const float outer = float_of_half(shared_value<unsigned short>(outer_at));
    const float integer = F::LEAST ? static_cast<float>(shared_value<unsigned char>(scale_at))
                                   : static_cast<float>(shared_value<signed char>(scale_at));
    scale = __fmul_rn(__fmul_rn(outer, TIMES * (F::SCALE == SCALE_K_EIGHTH ? 0.125f : 1.0f)), integer);
    if constexpr (F::LEAST != LEAST_NONE) {
      const float outer_2 = float_of_half(shared_value<unsigned short>(outer_at + 2 * window));
      least = __fmul_rn(__fmul_rn(outer_2, -UNIT), static_cast<float>(shared_value<unsigned char>(least_at)));
    }
  } else {
    if constexpr (F::SCALE == SCALE_E8M0) {
      const int e = shared_value<unsigned char>(scale_at);
      scale = __uint_as_float(e < 2 ? 0x00200000u << e : static_cast<u32>(e - 1) << 23);
    } else {
      scale = __fmul_rn(number<F>(scale_at), TIMES);
    }
    if constexpr (F::LEAST == LEAST_VALUE) least = __fmul_rn(number<F>(least_at), F::IS_LOWERED ? UNIT : 1.0f);
    if constexpr (F::LEAST == LEAST_ZERO) least = -128.0f - static_cast<float>(shared_value<unsigned char>(least_at));
    if constexpr (F::LEAST == LEAST_SIGNED_ZERO) least = static_cast<float>(shared_value<signed char>(least_at));
  }
  if constexpr (F::IS_LOWERED) {
    to[0] = two_bfloat16(scale, scale);
    if constexpr (F::LEAST != LEAST_NONE) to[1] = two_bfloat16(least, least);
  } else {
    to[0] = two_bfloat16(scale, least);
  }
}

template <class F, int TOKENS, bool IS_GATED>
__device__ __forceinline__ void product_of_few_codes(const Part& g, const TensorMap* x_map, int first_tile) {
  using S = Sizes<F>;
  extern __shared__ unsigned char unaligned[];
  unsigned char* const memory = unaligned + (-static_cast<int>(shared_address(unaligned)) & 1023);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int half = 8 * g.tiles, copier = blockDim.x - 32;
  const int scratch_at = g.n_stages * g.stage_bytes;
  const u32 base = shared_address(memory), full = base + scratch_at + g.tiles * S::BYTES, empty = full + 8 * g.n_stages;
  if (threadIdx.x == copier) {
    for (int s = 0; s < g.n_stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, g.tiles);
    }
    show_barriers();
  }
  __syncthreads();
  const int n_features = IS_GATED ? half : 2 * half;
  const int n_turns = (g.n_tiles - first_tile + g.n_programs - 1) / g.n_programs * g.n_blocks;
  struct Place {
    int tile, block, k_block, row, second;
  };
  const auto begin = [&](Place& p, int tile) {
    const int split = tile / g.tiles_m;
    p.tile = tile;
    p.block = 0;
    p.k_block = split * g.n_blocks;
    p.row = (tile - split * g.tiles_m) * n_features;
    p.second = p.row + (IS_GATED ? g.up : half);
  };

  if (threadIdx.x >= copier) {
    if (threadIdx.x > copier) return;
    let_next_start();  // at once: it takes little room, and waits for us before it reads
    const auto next = [&](Place& p) {
      ++p.k_block;
      if (++p.block == g.n_blocks) begin(p, p.tile + g.n_programs);
    };
    const auto copy_w = [&](const Place& p, int s) {
      const u32 barrier = full + 8 * s, to = base + s * g.stage_bytes;
      barrier_expect(barrier, g.copied_bytes);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = h ? p.second : p.row;
#pragma unroll
        for (int box = 0; box < S::BOXES; ++box)
          copy_tile(to + g.low_at + (h * S::BOXES + box) * half * S::LOW_BOX, &g.low,
                    F::LOW == 16 ? p.k_block * 256 + 64 * box : (p.k_block * S::BOXES + box) * S::LOW_BOX, row, barrier,
                    EVICT_FIRST);
        if constexpr (F::HIGH > 0)
          copy_tile(to + g.high_at + h * half * S::HIGH_BOX, &g.high, p.k_block * S::HIGH_BOX, row, barrier,
                    EVICT_FIRST);
        if constexpr (S::SUBS > 0)
          copy_tile(to + g.scale_at + h * g.half_scale_bytes, &g.scale, row & ~15, p.k_block * S::SUBS, barrier,
                    EVICT_FIRST);
        if constexpr (F::LEAST != LEAST_NONE)
          copy_tile(to + g.least_at + h * g.half_least_bytes, &g.least, row & ~15, p.k_block * S::SUBS, barrier,
                    EVICT_FIRST);
        if constexpr (F::N_OUTER > 0)
          copy_tile(to + g.outer_at + h * g.half_outer_bytes, &g.outer, row & ~15, p.k_block * F::N_OUTER, barrier,
                    EVICT_FIRST);
      }
    };
    const auto copy_x = [&](const Place& p, int s) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy_tile(base + s * g.stage_bytes + i * TOKENS * 128, x_map, p.k_block * 256 + 64 * i, 0, full + 8 * s,
                  EVICT_LAST);
    };
    Place w, x;
    begin(w, first_tile);
    begin(x, first_tile);
    const int n_ahead = smaller(g.n_stages, n_turns), n_before = smaller(g.n_before, n_ahead);
    for (int s = 0; s < n_before; ++s, next(w)) copy_w(w, s);  // nobody in the step writes weights
    wait_for_front();
    for (int s = 0; s < n_ahead; ++s, next(x)) {
      if (s >= n_before) copy_w(w, s), next(w);
      copy_x(x, s);
    }
    for (int i = n_ahead, s = 0, parity = 0; i < n_turns; ++i, next(w)) {
      barrier_wait(empty + 8 * s, parity);
      copy_w(w, s);
      copy_x(w, s);
      if (++s == g.n_stages) s = 0, parity ^= 1;
    }
    return;
  }
  if (warp >= g.tiles) return;
  wait_for_front();  // nobody reads any more what is written here

  // a thread has rows `row` and `row + half` of its tile, of each 8 rows of x two
  const int t = lane % 4, r8 = lane / 4, row = 8 * warp + r8;
  unsigned char* const scratch = memory + scratch_at + warp * S::BYTES;
  u32 words[S::EACH + 1][S::PARTS];
  // Prepares scales of a tile's stage: those of 32 rows and groups at once. Copies of scales, of which one may be
  // a byte, begin at a multiple of 16 rows: others are no legal instruction of the chip.
  const auto prepare_scales = [&](const unsigned char* stage, int tile) {
    if constexpr (S::SUBS > 0) {
#pragma unroll
      for (int e = 0; e < S::EACH; ++e) {
        const int sub = smaller((lane + 32 * e) / 16, S::SUBS - 1), h = lane % 16 / 8;
        const int at = 8 * warp + lane % 8 + ((IS_GATED ? tile * half : h * half) & 8);
        prepare<F>(words[e], stage + g.scale_at + h * g.half_scale_bytes + (sub * g.window + at) * S::SCALE_BYTES,
                   stage + g.least_at + h * g.half_least_bytes + (sub * g.window + at) * S::LEAST_BYTES,
                   stage + g.outer_at + h * g.half_outer_bytes + 2 * at, g.window);
      }
    }
  };
  const auto share_scales = [&]() {
    if constexpr (S::SUBS > 0) {
#pragma unroll
      for (int e = 0; e < S::EACH; ++e) {
        const int sub = (lane + 32 * e) / 16, h = lane % 16 / 8;
        const int word = ((sub / S::HALVES * 8 + lane % 8) * 2 + h) * S::HALVES + sub % S::HALVES;
#pragma unroll
        for (int part = 0; part < S::PARTS; ++part)
          if (sub < S::SUBS) *reinterpret_cast<u32*>(scratch + 4 * (word * S::PARTS + part)) = words[e][part];
      }
    }
  };

  float d[TOKENS / 2] = {};
  int s = 0, parity = 0;
  barrier_wait(full, 0);
  prepare_scales(memory, first_tile);
  int tile = first_tile, block = 0;
  for (int turn = 0; turn < n_turns; ++turn) {
    const unsigned char* const stage = memory + s * g.stage_bytes;
    share_scales();
    __syncwarp();
    const int before = s;
    if (++s == g.n_stages) s = 0, parity ^= 1;
    const unsigned char* lows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) lows[h] = stage + g.low_at + h * S::BOXES * half * S::LOW_BOX + row * S::LOW_BOX;
    const u32 x_at = base + before * g.stage_bytes + lane % 8 * 128 + 16 * (lane / 8 ^ lane % 8);
    u32 scales[S::WORDS];
#pragma unroll
    for (int q = 0; q < 8; ++q) {  // 32 columns
      if (q == 6 && turn + 1 < n_turns) {
        barrier_wait(full + 8 * s, parity);
        prepare_scales(memory + s * g.stage_bytes, block + 1 < g.n_blocks ? tile : tile + g.n_programs);
      }
      u32 b[TOKENS / 8][4];
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) load_pieces(b[j], (x_at ^ q % 2 * 64) + q / 2 * (TOKENS * 128) + j * 1024);
      u32 v[2][4];  // of both rows, the pairs of columns 2 t and 2 t + 1 of each 8
      if constexpr (F::LOW == 16) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v[h][j] =
                shared_value<u32>(lows[h] + q / 2 * (half * 128) + chunk_at<128>(r8, q % 2 * 4 + j) + 4 * t);
      } else {
        if (q % (8 / S::UNITS) == 0) {
          const unsigned char* from = scratch + (q * S::UNITS / 8 * 8 + r8) * (S::WORDS * 4);
          if constexpr (S::WORDS == 2) {
            const uint2 two = shared_value<uint2>(from);
            scales[0] = two.x, scales[1] = two.y;
          } else {
#pragma unroll
            for (int of = 0; of < S::WORDS; of += 4) {
              const uint4 four = shared_value<uint4>(from + 4 * of);
              scales[of] = four.x, scales[of + 1] = four.y, scales[of + 2] = four.z, scales[of + 3] = four.w;
            }
          }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned char* low = lows[h];
          u32 first, second = 0;
          if constexpr (F::LOW == 8) {
            const uint2 both = shared_value<uint2>(
                low + q / 4 * (half * 128) + chunk_at<128>(r8, q % 4 * 2 + t / 2) + t % 2 * 8);
            first = both.x, second = both.y;
          } else if constexpr (F::LOW == 4) {
            first = shared_value<u32>(low + chunk_at<128>(r8, q) + 4 * t);
          } else {
            first = shared_value<unsigned short>(low + chunk_at<64>(r8, q / 2) + q % 2 * 8 + 2 * t);
          }
          const unsigned char* high = stage + g.high_at + (h * half + row) * S::HIGH_BOX;
          if constexpr (F::HIGH == 2)
            second = shared_value<unsigned short>(high + chunk_at<64>(r8, q / 2) + q % 2 * 8 + 2 * t);
          if constexpr (F::HIGH == 1)
            second = shared_value<unsigned char>(high + chunk_at<32>(r8, q / 4) + q % 4 * 4 + t);
          const u32* of = scales + h * S::HALVES * S::PARTS;
          const u32 last = of[(S::HALVES - 1) * S::PARTS];
          if constexpr (S::PARTS == 2)
            F::decode(v[h], first, second, of[0] | static_cast<u64>(of[1]) << 32,
                      last | static_cast<u64>(of[2 * S::HALVES - 1]) << 32);
          else if constexpr (F::IS_PAIRED)
            F::decode(v[h], first, second, of[0] | static_cast<u64>(last) << 32, 0);
          else
            F::decode(v[h], first, second, of[0], last);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u32 a[4] = {v[0][2 * k], v[1][2 * k], v[0][2 * k + 1], v[1][2 * k + 1]};
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) multiply_by_warp(d + 4 * j, a, b[j][2 * k], b[j][2 * k + 1]);
      }
    }
    end_loads();
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * before);
    if (++block < g.n_blocks) continue;
    block = 0;

    Place p;
    begin(p, tile);
    tile += g.n_programs;
    const int split = p.k_block / g.n_blocks;
#pragma unroll
    for (int j = 0; j < TOKENS / 2; ++j) {
      const int token = j / 4 * 8 + 2 * t + j % 2, h = j / 2 % 2;
      const int column = p.row + row + (IS_GATED ? 0 : h * half);
      float value = d[j];
      d[j] = 0.0f;
      if (IS_GATED && h) continue;
      if constexpr (F::IS_LOWERED) value = __fmul_rn(value, 4294967296.0f);
      if constexpr (IS_GATED) {
        float up = d[j + 2];
        if constexpr (F::IS_LOWERED) up = __fmul_rn(up, 4294967296.0f);
        value = silu_product(value, up);
      }
      if (token >= g.n || column >= (IS_GATED ? g.up : g.m_used)) continue;
      const u64 at = split * g.out_split + token * g.out_row + column;
      if (g.out_kind == FLOAT32)
        static_cast<float*>(g.out)[at] = value;
      else
        static_cast<unsigned short*>(g.out)[at] = static_cast<unsigned short>(two_bfloat16(value, value));
    }
  }
}
