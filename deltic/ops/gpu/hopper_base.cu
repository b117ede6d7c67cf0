// Instructions of Hopper that its products share, each as a function: hopper.py puts this in front of them. A test
// has the same functions for a CPU, so that what is behind them runs there.

using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

enum Out { FLOAT32, BFLOAT16, SWIGLU };

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Ends this thread's loads of shared memory, before its warp arrives at a barrier and a copy overwrites what they read.
// An arrival passes loads that are under way. Where programs of another kernel on the same multiprocessor held loads
// up, a copy was faster than they were (docs/log/2026-11.md).
__device__ __forceinline__ void end_loads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  int done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;"
      ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(hint) : "memory");
}

__device__ __forceinline__ void copy_bytes(u32 to, const void* from, int n, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(n), "r"(barrier) : "memory");
}

__device__ __forceinline__ void copy_floats(u32 to, const float* from, int n, u32 barrier) {
  copy_bytes(to, from, 4 * n, barrier);
}

// Describes rows of 128 bytes, swizzled, in groups of 8 that are 1024 bytes apart, as an operand of wgmma: the
// address in 16 bytes, an offset that is ignored, 1024 / 16, and the swizzle of 128 bytes. The next 32 bytes of K
// are 2 further.
__device__ __forceinline__ u64 operand(u32 at) {
  return static_cast<u64>((at & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// The instructions that Triton makes of silu_product in ops/gpu/linear.py.
__device__ __forceinline__ float silu_product(float gate, float up) {
  float power, quotient;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, 1.44269504f)));
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(__fadd_rn(power, 1.0f)));
  return __fmul_rn(quotient, up);
}

__device__ __forceinline__ u32 two_bfloat16(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// Keeps the compiler from moving what it does with registers across wgmma, which writes them while it runs.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int positive(int a) { return a > 0 ? a : 0; }

// what the copies' cache hints are in CUTLASS (cute/arch/copy_sm90_desc.hpp)
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull, EVICT_NORMAL = 0x1000000000000000ull;
constexpr u64 EVICT_LAST = 0x14F0000000000000ull;

__device__ __forceinline__ void wait_for_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// What four 8 x 8 pieces of bfloat16 in shared memory are as operands: of each, `at` of eight threads are its rows.
__device__ __forceinline__ void load_pieces(u32 (&to)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at));
}

// d += a b: 16 rows, 8 columns and 16 elements of K, by a warp.
__device__ __forceinline__ void multiply_by_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
