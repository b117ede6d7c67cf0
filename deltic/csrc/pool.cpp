#include "pool.h"

#include <atomic>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// A job lives in a ring entry chosen by its number. Each thread has a share of the tasks, always the same part, so that
// what a task touched last step (a state, a block of weights) is still in that core's cache; who is done takes from the
// others. Task i of share t is claimed by advancing ticket t from (job, i) to (job, i + 1): a thread that looked at an old
// job fails to advance it. The caller waits for tasks, not for threads, so a worker that the system has not scheduled
// delays nobody.
constexpr int RING = 64;
constexpr int SPINS = 4000;
constexpr int MAX_THREADS = 256;  // deltic/config.py refuses more

struct Job {
    std::atomic<Task> task{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> n_tasks{0};
    std::atomic<int> n_shares{1};
    std::atomic<int64_t> n_done{0};
};

struct alignas(64) Ticket {
    std::atomic<uint64_t> next{0};  // job number << 32 | next task of this share
};

Job ring[RING];
Ticket tickets[MAX_THREADS];
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

// Runs tasks of job `number` until none is left to claim: the thread's own share first.
void work(uint32_t number, int i_thread) {
    Job& job = ring[number % RING];
    Task task = job.task.load(std::memory_order_relaxed);
    void* context = job.context.load(std::memory_order_relaxed);
    int64_t n_tasks = job.n_tasks.load(std::memory_order_relaxed), n_done = 0;
    int n_shares = job.n_shares.load(std::memory_order_relaxed);
    for (int k = 0; k < n_shares; k++) {
        int share = (i_thread + k) % n_shares;
        int64_t end = n_tasks * (share + 1) / n_shares;
        std::atomic<uint64_t>& ticket = tickets[share].next;
        uint64_t seen = ticket.load(std::memory_order_acquire);
        while ((uint32_t)(seen >> 32) == number && (int64_t)(uint32_t)seen < end) {
            if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
            task(context, (int64_t)(uint32_t)seen, i_thread);
            n_done++;
            seen = ticket.load(std::memory_order_acquire);
        }
    }
    if (n_done) job.n_done.fetch_add(n_done, std::memory_order_release);
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
    for (int i = 1; i < n_threads && i < MAX_THREADS; i++) workers.emplace_back(worker_loop, i, last);
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
    int n_shares = pool_size();
    job.n_shares.store(n_shares, std::memory_order_relaxed);
    for (int share = 0; share < n_shares; share++)
        tickets[share].next.store((uint64_t)number << 32 | (uint64_t)(n_tasks * share / n_shares), std::memory_order_release);
    n_posted.store(number);
    if (n_sleeping.load() > 0) n_posted.notify_all();
    work(number, 0);
    while (job.n_done.load(std::memory_order_acquire) < n_tasks) relax();
}
