#include "pool.h"

#include <atomic>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// A job lives in a ring entry chosen by its number. A thread claims task i of job j by advancing `ticket` from
// (j, i) to (j, i + 1); a thread that looked at an old job fails to advance it and looks again. The caller waits for
// tasks, not for threads, so a worker that the system has not scheduled delays nobody.
constexpr int RING = 64;
constexpr int SPINS = 4000;

struct Job {
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> n_tasks{0};
    std::atomic<int64_t> n_done{0};
};

Job ring[RING];
std::atomic<uint64_t> ticket{0};  // job number << 32 | next task
std::atomic<uint32_t> n_posted{0};  // changes with every job: what sleeping workers wait on
std::atomic<int> n_sleeping{0};
std::atomic<bool> stopping{false};
std::vector<std::thread> workers;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Runs tasks of job `number` until none is left to claim.
void work(uint32_t number, int i_thread) {
    Job& job = ring[number % RING];
    Task task = job.task.load(std::memory_order_relaxed);
    void* context = job.context.load(std::memory_order_relaxed);
    int64_t n_tasks = job.n_tasks.load(std::memory_order_relaxed);
    uint64_t seen = ticket.load(std::memory_order_acquire);
    while ((uint32_t)(seen >> 32) == number && (int64_t)(uint32_t)seen < n_tasks) {
        if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
        task(context, (int64_t)(uint32_t)seen, i_thread);
        job.n_done.fetch_add(1, std::memory_order_release);
        seen = ticket.load(std::memory_order_acquire);
    }
}

void worker_loop(int i_thread, uint32_t last) {
    while (!stopping.load(std::memory_order_relaxed)) {
        uint32_t posted = n_posted.load(std::memory_order_acquire);
        for (int spin = 0; posted == last && spin < SPINS; spin++) {
            relax();
            posted = n_posted.load(std::memory_order_acquire);
        }
        if (posted == last) {
            n_sleeping.fetch_add(1);
            n_posted.wait(last);
            n_sleeping.fetch_sub(1);
            continue;
        }
        last = posted;
        work(posted, i_thread);
    }
}

void stop() {
    stopping = true;
    n_posted.fetch_add(1);
    n_posted.notify_all();
    for (auto& worker : workers) worker.join();
    workers.clear();
    stopping = false;
}

struct StopAtExit {
    ~StopAtExit() { stop(); }
} stop_at_exit;

}  // namespace

int pool_size() { return (int)workers.size() + 1; }

void pool_start(int n_threads) {
    stop();
    uint32_t last = n_posted.load();
    for (int i = 1; i < n_threads; i++) workers.emplace_back(worker_loop, i, last);
}

void pool_run(int64_t n_tasks, Task task, void* context) {
    if (workers.empty() || n_tasks <= 1) {
        for (int64_t i = 0; i < n_tasks; i++) task(context, i, 0);
        return;
    }
    uint32_t number = n_posted.load(std::memory_order_relaxed) + 1;
    Job& job = ring[number % RING];
    job.task.store(task, std::memory_order_relaxed);
    job.context.store(context, std::memory_order_relaxed);
    job.n_tasks.store(n_tasks, std::memory_order_relaxed);
    job.n_done.store(0, std::memory_order_relaxed);
    ticket.store((uint64_t)number << 32, std::memory_order_release);
    n_posted.store(number);
    if (n_sleeping.load() > 0) n_posted.notify_all();
    work(number, 0);
    while (job.n_done.load(std::memory_order_acquire) < n_tasks) relax();
}
