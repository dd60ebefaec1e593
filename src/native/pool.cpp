#include "pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tp {
namespace {

constexpr auto SPIN = std::chrono::microseconds(150);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

class Pool {
  public:
    ~Pool() { resize(1); }

    int size() const { return int(helpers_.size()) + 1; }

    void resize(int n) {
        std::lock_guard<std::mutex> one(caller_);
        {
            std::lock_guard<std::mutex> lock(sleep_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& t : helpers_) t.join();
        helpers_.clear();
        stop_ = false;
        for (int i = 1; i < n; ++i) helpers_.emplace_back([this] { serve(); });
    }

    void run(int n, Task task, const void* self) {
        std::unique_lock<std::mutex> one(caller_, std::try_to_lock);
        if (n <= 1 || helpers_.empty() || !one.owns_lock()) {
            for (int i = 0; i < n; ++i) task(self, i);
            return;
        }
        task_.store(task, std::memory_order_relaxed);
        self_.store(self, std::memory_order_relaxed);
        count_.store(n, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        uint32_t job = ++jobs_;
        // The release publishes the fields above; sequential consistency orders it against the helpers' `sleeping_`.
        ticket_.store(uint64_t(job) << 32 | uint32_t(n), std::memory_order_seq_cst);
        if (sleeping_.load(std::memory_order_seq_cst)) {
            { std::lock_guard<std::mutex> lock(sleep_); }
            wake_.notify_all();
        }
        work(job);
        while (done_.load(std::memory_order_acquire) < n) relax();
    }

  private:
    // Claims and runs tasks of this job until none is left. The number left is in the ticket itself, so a claim succeeds only
    // while the job still has an unclaimed task, and the fields read before it belong to that job. (Against `count_`, which the
    // next job writes before its ticket, a late helper could claim a task of the next job under the old number.)
    void work(uint32_t job) {
        uint64_t seen = ticket_.load(std::memory_order_acquire);
        while (uint32_t(seen >> 32) == job) {
            Task task = task_.load(std::memory_order_relaxed);
            const void* self = self_.load(std::memory_order_relaxed);
            int count = count_.load(std::memory_order_relaxed), left = int(seen & 0xffffffff);
            if (left == 0) return;
            if (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
            task(self, count - left);
            done_.fetch_add(1, std::memory_order_release);
            seen = ticket_.load(std::memory_order_acquire);
        }
    }

    void serve() {
        uint32_t last = 0;
        while (!stop_) {
            uint32_t job = await(last);
            if (job == last) continue;
            last = job;
            work(job);
        }
    }

    uint32_t number() const { return uint32_t(ticket_.load(std::memory_order_seq_cst) >> 32); }

    // The number of a job newer than `last`, or `last` when the pool stops.
    uint32_t await(uint32_t last) {
        auto until = std::chrono::steady_clock::now() + SPIN;
        do {
            for (int i = 0; i < 64; ++i) {
                uint32_t job = number();
                if (job != last) return job;
                relax();
            }
            if (stop_) return last;
        } while (std::chrono::steady_clock::now() < until);
        std::unique_lock<std::mutex> lock(sleep_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_ || number() != last; });
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        return number();
    }

    std::vector<std::thread> helpers_;
    std::mutex caller_, sleep_;
    std::condition_variable wake_;
    std::atomic<bool> stop_{false};
    std::atomic<int> sleeping_{0};
    uint32_t jobs_ = 0;
    alignas(64) std::atomic<uint64_t> ticket_{0};  // job << 32 | tasks left to claim
    std::atomic<Task> task_{nullptr};
    std::atomic<const void*> self_{nullptr};
    std::atomic<int> count_{0};
    alignas(64) std::atomic<int> done_{0};
};

Pool& pool() {
    static Pool* p = new Pool;  // never destroyed: helpers may still spin while the process exits
    return *p;
}

struct Scratch {
    void* p[8] = {};
    int64_t size[8] = {};
    ~Scratch() {
        for (void* q : p) std::free(q);
    }
};

}  // namespace

void set_threads(int n) { pool().resize(std::max(1, n)); }
int threads() { return pool().size(); }
void run_tasks(int n, Task task, const void* self) { pool().run(n, task, self); }

void* scratch(int which, int64_t bytes) {
    thread_local Scratch mine;
    if (mine.size[which] < bytes) {
        std::free(mine.p[which]);
        int64_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        mine.p[which] = std::aligned_alloc(4096, size_t(size));
        mine.size[which] = mine.p[which] ? size : 0;
        if (!mine.p[which]) throw std::bad_alloc();
    }
    return mine.p[which];
}

void* alloc_pages(int64_t bytes) {
    void* p = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(p, size_t(bytes), MADV_HUGEPAGE);
#endif
    return p;
}
void free_pages(void* p, int64_t bytes) { munmap(p, size_t(bytes)); }

}  // namespace tp
