// The C interface: kernels take one array of 64-bit arguments, and a program is a flat list of kernel calls.
//
// A recorded step is an int64 array [kernel, n_args, args...]* built once at start; running it is one call from
// Python. Sizes that change from step to step are read by the kernels through pointers into the batch buffers.
#include "kernel.h"
#include "pool.h"

extern "C" {

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
