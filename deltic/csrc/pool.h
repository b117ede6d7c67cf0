// The engine's one thread pool. Workers spin briefly between the kernels of a step and sleep between steps.
#pragma once
#include <cstdint>

enum class PoolState : int64_t { READY = 0, NO_THREAD = 1, NOT_BOUND = 2 };

// Starts n_threads - 1 workers; the caller is the first thread. With cpus [n_threads], thread i runs on CPU cpus[i] only, the
// caller too. Does nothing when the pool is so already, but binds whichever thread calls, so it is called before every program.
// When a thread cannot be started or bound, there are no workers.
PoolState pool_start(int n_threads, const int32_t* cpus);
int pool_size();

using Task = void (*)(void* context, int64_t i, int i_thread);
void pool_run(int64_t n_tasks, Task task, void* context);

// Calls f(i, i_thread) for i in [0, n). Which thread takes which i is not fixed: a task must own what it writes.
template <class F>
static inline void parallel_for(int64_t n, const F& f) {
    pool_run(n, [](void* context, int64_t i, int i_thread) { (*(const F*)context)(i, i_thread); }, (void*)&f);
}
