// The engine's one thread pool. Workers spin briefly between the kernels of a step and sleep between steps.
#pragma once
#include <cstdint>

// Starts n_threads - 1 workers (the caller is the last thread). May be called again with another count.
void pool_start(int n_threads);
int pool_size();

using Task = void (*)(void* context, int64_t i, int i_thread);
void pool_run(int64_t n_tasks, Task task, void* context);

// Calls f(i, i_thread) for i in [0, n). Which thread takes which i is not fixed: a task must own what it writes.
template <class F>
static inline void parallel_for(int64_t n, const F& f) {
    pool_run(n, [](void* context, int64_t i, int i_thread) { (*(const F*)context)(i, i_thread); }, (void*)&f);
}
