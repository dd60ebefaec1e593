// Every task of every job runs exactly once, however jobs of differing sizes follow each other. Arguments: threads, jobs.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "pool.h"

int main(int, char** argv) {
    constexpr int MOST = 64;
    tp::set_threads(std::atoi(argv[1]));
    std::vector<std::atomic<int>> hits(MOST);
    unsigned random = 1;
    for (long job = std::atol(argv[2]); job > 0; --job) {
        random = random * 1664525u + 1013904223u;
        int n = 2 + int((random >> 20) % (MOST - 2));
        for (int i = 0; i < n; ++i) hits[size_t(i)].store(0);
        tp::for_each(n, [&](int i) { hits[size_t(i)].fetch_add(1); });
        for (int i = 0; i < n; ++i)
            if (int times = hits[size_t(i)].load(); times != 1) {
                std::printf("task %d of %d ran %d times\n", i, n, times);
                return 1;
            }
    }
}
