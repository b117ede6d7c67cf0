// The C interface: kernels take one array of 64-bit arguments, and a program is a flat list of kernel calls.
//
// A recorded step is an int64 array [kernel, n_args, args...]* built once at start; running it is one call from
// Python. Sizes that change from step to step are read by the kernels through pointers into the batch buffers.
#include <fenv.h>

#include "kernel.h"
#include "pool.h"

namespace {

// While it lives, the thread rounds to the nearest and keeps denormal numbers, as at the start of a process. Others may have changed
// that, for this thread or for one that started it: torch.set_flush_denormal, a library compiled with -ffast-math. A new thread
// inherits it.
struct Rounding {
    fenv_t callers;
    Rounding() { fegetenv(&callers), fesetenv(FE_DFL_ENV); }
    ~Rounding() { fesetenv(&callers); }
};

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int64_t deltic_start_threads(int64_t n_threads, const int32_t* cpus) {
    const Rounding rounding;
    return (int64_t)pool_start((int)n_threads, cpus);
}

__attribute__((visibility("default"))) void deltic_run(const int64_t* program, int64_t size) {
    const Rounding rounding;
    for (int64_t at = 0; at < size; at += 2 + program[at + 1]) {
        auto kernel = reinterpret_cast<void (*)(const int64_t*)>(program[at]);
        kernel(program + at + 2);
    }
}
}
