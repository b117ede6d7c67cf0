#include "pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <system_error>
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
constexpr int YIELD = 64;         // spins between two offers of the CPU to whoever has work
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
std::vector<int32_t> bound;  // the CPU of each thread; empty where the system may choose

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// One turn of a spin. Where threads are more than CPUs, or others want them too, the thread that is waited for may itself wait
// for this CPU; without it the system would let the spin run until its time is over.
inline void relax(int spin) {
    if (spin % YIELD == YIELD - 1) std::this_thread::yield();
    else pause();
}

// Binding a caller is undone when the pool is no longer bound: threads that it starts would inherit it.
thread_local int32_t caller_cpu = -1;
#if defined(__linux__)
thread_local cpu_set_t caller_was;

bool bind(int32_t cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
    CPU_SET(cpu, &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
}

bool bind_caller(int32_t cpu) {
    if (cpu == caller_cpu) return true;
    if (caller_cpu < 0 && sched_getaffinity(0, sizeof caller_was, &caller_was) != 0) return false;
    if (cpu >= 0 ? !bind(cpu) : sched_setaffinity(0, sizeof caller_was, &caller_was) != 0) return false;
    caller_cpu = cpu;
    return true;
}
#else
bool bind(int32_t) { return false; }
bool bind_caller(int32_t cpu) { return cpu < 0; }
#endif

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
            relax(spin);
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
    bound.clear();
    stopping = false;
}

struct StopAtExit {
    ~StopAtExit() { stop(); }
} stop_at_exit;

}  // namespace

int pool_size() { return (int)workers.size() + 1; }

PoolState pool_start(int n_threads, const int32_t* cpus) {
    const int32_t* cpus_end = cpus ? cpus + n_threads : cpus;
    bool is_so = n_threads == pool_size() && std::equal(bound.begin(), bound.end(), cpus, cpus_end);
    if (!is_so) stop();
    if (!bind_caller(cpus ? cpus[0] : -1)) return PoolState::NOT_BOUND;
    if (is_so) return PoolState::READY;
    if (n_threads > MAX_THREADS) return PoolState::NO_THREAD;
    uint32_t last = n_posted.load();
    std::atomic<int> n_bound{0}, n_failed{0};
    try {
        for (int i = 1; i < n_threads; i++)
            workers.emplace_back([=, &n_bound, &n_failed] {
                // The starter waits for these, which live in its frame.
                if (cpus && !bind(cpus[i])) n_failed++;
                n_bound++;
                worker_loop(i, last);
            });
    } catch (const std::system_error&) {
        stop();
        bind_caller(-1);
        return PoolState::NO_THREAD;
    }
    for (int spin = 0; n_bound < n_threads - 1; spin++) relax(spin);
    if (n_failed) {
        stop();
        bind_caller(-1);
        return PoolState::NOT_BOUND;
    }
    bound.assign(cpus, cpus_end);
    return PoolState::READY;
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
    for (int spin = 0; job.n_done.load(std::memory_order_acquire) < n_tasks; spin++) relax(spin);
}
