// The C interface: kernels take one array of 64-bit arguments, and a program is a flat list of kernel calls.
//
// A recorded step is an int64 array [kernel, n_args, args...]* built once at start; running it is one call from
// Python. Sizes that change from step to step are read by the kernels through pointers into the batch buffers.
#include "kernel.h"
#include "pool.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
// Linux hands the matrix unit's registers to a process that asks for them.
static int64_t ask_for_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#else
static int64_t ask_for_tiles() { return 1; }
#endif

extern "C" {

// 1 when this process may run the library's instructions, beyond what the CPU's flags say.
__attribute__((visibility("default"))) int64_t deltic_prepare() { return ask_for_tiles(); }

__attribute__((visibility("default"))) int64_t deltic_start_threads(int64_t n_threads, const int32_t* cpus) {
    return (int64_t)pool_start((int)n_threads, cpus);
}

__attribute__((visibility("default"))) void deltic_run(const int64_t* program, int64_t size) {
    for (int64_t at = 0; at < size; at += 2 + program[at + 1]) {
        auto kernel = reinterpret_cast<void (*)(const int64_t*)>(program[at]);
        kernel(program + at + 2);
    }
}
}
