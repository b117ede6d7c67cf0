// POSIX threads and Linux's futex, and nothing that the C++ library has in its own object code: the pinned compiler would
// compile that library first, which takes as long as all kernels.
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstring>
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
pthread_t workers[MAX_THREADS];
int n_workers = 0;
bool is_bound = false;
int32_t bound[MAX_THREADS];  // the CPU of each thread, where is_bound

// Sleeps while n_posted is `last`; may return early.
void sleep_while(uint32_t last) { syscall(SYS_futex, &n_posted, FUTEX_WAIT_PRIVATE, last, nullptr); }
void wake_all() { syscall(SYS_futex, &n_posted, FUTEX_WAKE_PRIVATE, INT_MAX); }

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins for one turn. Where threads are more than CPUs, or others want them too, the thread that is waited for may itself wait
// for this CPU; without it the system would let the spin run until its time is over.
inline void relax(int spin) {
    if (spin % YIELD == YIELD - 1) sched_yield();
    else pause();
}

// Binding a caller is undone when the pool is no longer bound: threads that it starts would inherit it.
thread_local int32_t caller_cpu = -1;
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
            sleep_while(last);
            n_sleeping.fetch_sub(1);
            continue;
        }
        last = posted;
        work(posted, i_thread);
    }
}

// Messages between a pool that starts and its workers. The starter waits for them, so it lives in the starter's frame.
struct Start {
    const int32_t* cpus;
    uint32_t last;
    std::atomic<int> n_taken{1}, n_bound{0}, n_failed{0};
};

void* worker(void* context) {
    auto& start = *(Start*)context;
    const uint32_t last = start.last;
    const int i_thread = start.n_taken++;
    if (start.cpus && !bind(start.cpus[i_thread])) start.n_failed++;
    start.n_bound++;
    worker_loop(i_thread, last);
    return nullptr;
}

void stop() {
    stopping = true;
    n_posted.fetch_add(1);
    wake_all();
    for (int i = 0; i < n_workers; i++) pthread_join(workers[i], nullptr);
    n_workers = 0;
    is_bound = false;
    stopping = false;
}

struct StopAtExit {
    ~StopAtExit() { stop(); }
} stop_at_exit;

}  // namespace

int pool_size() { return n_workers + 1; }

PoolState pool_start(int n_threads, const int32_t* cpus) {
    if (n_threads > MAX_THREADS) return PoolState::NO_THREAD;
    const bool is_so = n_threads == pool_size() && is_bound == (cpus != nullptr) && (!cpus || !memcmp(bound, cpus, n_threads * sizeof *cpus));
    if (!is_so) stop();
    if (!bind_caller(cpus ? cpus[0] : -1)) return PoolState::NOT_BOUND;
    if (is_so) return PoolState::READY;
    Start start{cpus, n_posted.load()};
    for (; n_workers < n_threads - 1; n_workers++)
        if (pthread_create(&workers[n_workers], nullptr, worker, &start) != 0) break;
    const bool all = n_workers == n_threads - 1;
    for (int spin = 0; start.n_bound < n_workers; spin++) relax(spin);
    if (!all || start.n_failed) {
        stop();
        bind_caller(-1);
        return all ? PoolState::NOT_BOUND : PoolState::NO_THREAD;
    }
    if ((is_bound = cpus != nullptr)) memcpy(bound, cpus, n_threads * sizeof *cpus);
    return PoolState::READY;
}

void pool_run(int64_t n_tasks, Task task, void* context) {
    if (!n_workers || n_tasks <= 1) {
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
    if (n_sleeping.load() > 0) wake_all();
    work(number, 0);
    for (int spin = 0; job.n_done.load(std::memory_order_acquire) < n_tasks; spin++) relax(spin);
}
