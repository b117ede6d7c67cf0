// The functions of hopper_base.cu on a CPU, for hopper_on_cpu.py: threads of a program are fibers, taken in turn.
//
// Shared memory holds nonsense until something is written. A copy makes nonsense of where it goes as soon as it is
// asked for, and has its bytes there, and tells its barrier, some turns later, in any order. A warp's instruction
// waits for all 32 of its threads. A sum of mma is exact, with what it is added to, and rounded once. What the chip
// does not allow ends the run with a message: places that are not aligned, boxes that are too large, memory that
// the program has not, rows of x or a product before the wait for the kernel in front, and a standstill.

#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
  u64 at;
  int n_rows, row_bytes, each, box_rows, box_bytes, is_swizzled, is_behind_wait;
  unsigned char rest[128 - 8 - 7 * 4];
};

enum Out { FLOAT32, BFLOAT16, SWIGLU };
constexpr u64 EVICT_FIRST = 0, EVICT_NORMAL = 1, EVICT_LAST = 2;

struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct Index {
  int x;
};

namespace cpu {

struct Fiber {
  ucontext_t context;
  std::unique_ptr<unsigned char[]> stack;
  bool done = false, has_waited = false, has_ended = false;
};
struct Barrier {
  int count, left, phase;
  long bytes;
};
struct Copy {
  u32 to, barrier;
  TensorMap map;
  int column, row, turns;
};
struct Warp {
  int n = 0, turn = 0, kind = 0;
  void* given[32];
};

constexpr u32 BEGIN = 528;  // of shared memory: no multiple of 1024
constexpr size_t PAGE = 4096, STACK = 96 << 10;
static unsigned char* shared;
static u32 n_shared;
static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static std::map<u32, Barrier> barriers;
static std::vector<Copy> copies;
static ucontext_t scheduler;
static int current, n_together, together_turn;
static long n_events;
static char message[256];
static std::mt19937 chance;

[[noreturn]] static void fail(const char* text) {
  snprintf(message, sizeof message, "thread %d: %s", current, text);
  setcontext(&scheduler);
  __builtin_unreachable();
}
static void check(bool is_so, const char* text) {
  if (!is_so) fail(text);
}
static void yield();
static unsigned char* bytes_at(u32 at, u32 n) {
  check(at >= BEGIN && at - BEGIN + n <= n_shared, "shared memory that the program has not");
  return shared + (at - BEGIN);
}
static Barrier& barrier_at(u32 at) {
  bytes_at(at, 8);
  check(at % 8 == 0 && barriers.count(at), "no barrier is there");
  return barriers[at];
}
static void look(Barrier& b) {
  if (b.left || b.bytes) return;
  b.left = b.count;
  ++b.phase;
}
static void end(const Copy& c) {
  const TensorMap& m = c.map;
  const u32 mask = !m.is_swizzled ? 0 : m.box_bytes / 16 - 1;
  for (int r = 0; r < m.box_rows; ++r)
    for (int b = 0; b < m.box_bytes; ++b) {
      const long row = c.row + r, byte = static_cast<long>(c.column) * m.each + b;
      u32 to = c.to + r * m.box_bytes + b;
      to ^= (to >> 7 & mask) << 4;
      *bytes_at(to, 1) = row < m.n_rows && byte < m.row_bytes
                             ? reinterpret_cast<const unsigned char*>(m.at)[row * m.row_bytes + byte] : 0;
    }
  Barrier& b = barrier_at(c.barrier);
  b.bytes -= m.box_rows * m.box_bytes;
  look(b);
  ++n_events;
}
// Waits for the 32 threads of a warp, of which the last one does `all` for what each has given.
template <class All>
static void together(int kind, void* given, All all) {
  Warp& warp = warps[current / 32];
  const int turn = warp.turn;
  check(!warp.n || warp.kind == kind, "threads of a warp are at different instructions");
  warp.kind = kind;
  warp.given[current % 32] = given;
  ++n_events;
  if (++warp.n == 32) {
    all(warp.given);
    warp.n = 0;
    ++warp.turn;
  }
  while (warp.turn == turn) yield();
}
static float float_of(u32 bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static u32 bits_of(float value) {
  u32 bits;
  memcpy(&bits, &value, 4);
  return bits;
}
// The nearest bfloat16, ties to even, of a float64: rounded once, as a fused multiply-add is.
static u32 rounded(double value) {
  if (value != value) return 0x7FFF;
  const double size = std::fabs(value);
  if (size >= 0x1.FFp127) return (std::signbit(value) ? 0x8000 : 0) | 0x7F80;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int last = exponent - 8 < -133 ? -133 : exponent - 8;
  const double near = std::nearbyint(std::ldexp(size, -last));
  return bits_of(static_cast<float>(std::ldexp(std::signbit(value) ? -near : near, last))) >> 16;
}
static u32 fma_two(u32 a, u32 b, u32 c) {
  u32 both = 0;
  for (int s = 0; s < 32; s += 16) {
    const auto of = [s](u32 word) { return static_cast<double>(float_of(word >> s << 16)); };
    both |= rounded(of(a) * of(b) + of(c)) << s;
  }
  return both;
}
static u32 permuted(u32 a, u32 b, u32 chosen) {
  const u64 eight = a | static_cast<u64>(b) << 32;
  u32 found = 0;
  for (int i = 0; i < 4; ++i) {
    check((chosen >> 4 * i & 15) < 8, "a byte permutation that copies signs");
    found |= static_cast<u32>(eight >> 8 * (chosen >> 4 * i & 7) & 255) << 8 * i;
  }
  return found;
}

}  // namespace cpu

static Index threadIdx, blockIdx, blockDim;

inline u32 shared_address(const void* p) {
  return cpu::BEGIN + static_cast<u32>(static_cast<const unsigned char*>(p) - cpu::shared);
}
inline void barrier_init(u32 at, int count) {
  cpu::bytes_at(at, 8);
  cpu::barriers[at] = {count, count, 0, 0};
}
inline void show_barriers() {}
inline void barrier_expect(u32 at, u32 bytes) {
  cpu::Barrier& b = cpu::barrier_at(at);
  b.bytes += bytes;
  cpu::check(b.left > 0, "more arrive than a barrier waits for");
  --b.left;
  cpu::look(b);
  ++cpu::n_events;
}
inline void end_loads() { cpu::fibers[cpu::current].has_ended = true; }
inline void barrier_arrive(u32 at) {
  const int first = cpu::current / 32 * 32;
  for (int i = first; i < first + 32; ++i) {
    cpu::check(cpu::fibers[i].has_ended, "a stage is given back before loads of it have ended");
    cpu::fibers[i].has_ended = false;
  }
  barrier_expect(at, 0);
}
inline void barrier_wait(u32 at, u32 parity) {
  cpu::Barrier& b = cpu::barrier_at(at);
  while ((b.phase & 1) == static_cast<int>(parity)) cpu::yield();
}
inline void copy_tile(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64) {
  const TensorMap& m = *map;
  const auto limits = [](int n, int each) { return n > 0 && n % each == 0; };
  cpu::check(m.at && m.at % 16 == 0 && limits(m.row_bytes, 16) && limits(m.box_bytes, 16), "a map that is not aligned");
  cpu::check(m.box_rows > 0 && m.box_rows <= 256 && m.box_bytes / m.each <= 256, "a box that is too large");
  cpu::check(column * m.each % 16 == 0, "a copy that begins inside of 16 bytes");
  cpu::check(to % 128 == 0, "a copy to what is no multiple of 128");
  cpu::check(column >= 0 && row >= 0, "a copy of what is in front of a matrix");
  cpu::check(!m.is_behind_wait || cpu::fibers[cpu::current].has_waited, "rows of x in front of the wait");
  memset(cpu::bytes_at(to, m.box_rows * m.box_bytes), 0xFF, m.box_rows * m.box_bytes);
  cpu::copies.push_back({to, barrier, m, column, row, static_cast<int>(cpu::chance() % 256)});
  ++cpu::n_events;
}
inline void wait_for_front() { cpu::fibers[cpu::current].has_waited = true; }
inline void let_next_start() {}
inline void __syncwarp() {
  cpu::together(1, nullptr, [](void**) {});
}
inline void __syncthreads() {
  const int turn = cpu::together_turn;
  ++cpu::n_events;
  if (++cpu::n_together == blockDim.x) cpu::n_together = 0, ++cpu::together_turn;
  while (cpu::together_turn == turn) cpu::yield();
}
inline void load_pieces(u32 (&to)[4], u32 at) {
  struct Given {
    u32* to;
    u32 at;
  } given{to, at};
  cpu::check(at % 16 == 0, "a row of a piece that is not aligned");
  cpu::together(2, &given, [](void** of) {
    const auto each = reinterpret_cast<Given**>(of);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        memcpy(each[lane]->to + i, cpu::bytes_at(each[8 * i + lane / 4]->at + lane % 4 * 4, 4), 4);
  });
}
inline void multiply_by_warp(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  struct Given {
    float* d;
    const u32* a;
    u32 b[2];
  } given{d, a, {b0, b1}};
  cpu::check(cpu::fibers[cpu::current].has_waited, "a product in front of the wait");
  cpu::together(3, &given, [](void** of) {
    const auto each = reinterpret_cast<Given**>(of);
    const auto number = [](u32 word, int k) { return static_cast<double>(cpu::float_of(k % 2 ? word >> 16 << 16 : word << 16)); };
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        float& to = each[m % 8 * 4 + n / 2]->d[m / 8 * 2 + n % 2];
        double sum = to;
        for (int k = 0; k < 16; ++k) {
          const int t = k % 8 / 2;
          sum += number(each[m % 8 * 4 + t]->a[k / 8 * 2 + m / 8], k) * number(each[n * 4 + t]->b[k / 8], k);
        }
        to = static_cast<float>(sum);
      }
  });
}
inline float float_of_half(unsigned short bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline u32 two_bfloat16(float low, float high) { return cpu::rounded(low) | cpu::rounded(high) << 16; }
inline float silu_product(float gate, float up) { return gate / (1.0f + std::exp2(-gate * 1.44269504f)) * up; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(u32 bits) { return cpu::float_of(bits); }
inline int smaller(int a, int b) { return a < b ? a : b; }

static void begin_thread();

static void cpu::yield() { swapcontext(&fibers[current].context, &scheduler); }

// Runs a grid. Returns what went wrong, or "".
static const char* run_grid(int programs, int threads, int shared_bytes, int seed) {
  using namespace cpu;
  const size_t room = (shared_bytes + PAGE - 1) / PAGE * PAGE;
  auto* const pages = static_cast<unsigned char*>(
      mmap(nullptr, room + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  mprotect(pages + room, PAGE, PROT_NONE);
  shared = pages + room - shared_bytes / 16 * 16;
  n_shared = shared_bytes / 16 * 16;
  chance.seed(seed);
  message[0] = 0;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < programs && !message[0]; ++blockIdx.x) {
    memset(shared, 0xFF, n_shared);
    barriers.clear();
    copies.clear();
    fibers = std::vector<Fiber>(threads);
    warps.assign(threads / 32, Warp());
    n_together = together_turn = 0;
    for (Fiber& fiber : fibers) {
      getcontext(&fiber.context);
      fiber.stack.reset(new unsigned char[STACK]);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = STACK;
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, begin_thread, 0);
    }
    for (int n_left = threads; n_left && !message[0];) {
      const long before = n_events;
      for (int i = 0, at = chance() % threads; i < threads && !message[0]; ++i, at = (at + 1) % threads) {
        if (fibers[at].done) continue;
        current = threadIdx.x = at;
        swapcontext(&scheduler, &fibers[at].context);
        if (fibers[at].done) --n_left, ++n_events;
      }
      int soonest = 1;  // where all wait for copies, their turns pass at once
      if (n_events == before && !copies.empty()) {
        soonest = copies[0].turns;
        for (const Copy& copy : copies) soonest = smaller(soonest, copy.turns);
      }
      for (size_t i = 0; i < copies.size() && !message[0];) {
        if ((copies[i].turns -= soonest) > 0) {
          ++i;
          continue;
        }
        const Copy copy = copies[i];
        copies.erase(copies.begin() + i);
        end(copy);
      }
      if (n_events == before && copies.empty() && !message[0]) snprintf(message, sizeof message, "all wait");
    }
    if (!message[0] && !copies.empty()) snprintf(message, sizeof message, "a copy that nobody waits for");
  }
  munmap(pages, room + PAGE);
  return message;
}
