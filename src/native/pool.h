// Fork-join threads: for_each(n, f) runs f(0) ... f(n - 1) on the caller and its helpers and returns when all are done.
//
// Tasks are claimed one by one, so a helper that the system has put aside delays nothing it has not claimed. Helpers spin for a
// moment after a job (the next one usually follows at once) and then sleep. Which thread runs a task must not change its result.
#pragma once
#include <cstdint>

namespace tp {

using Task = void (*)(const void* self, int index);

void set_threads(int n);  // threads in all, the caller included; at least 1
int threads();
void run_tasks(int n, Task task, const void* self);

template <class F>
inline void for_each(int n, const F& f) {
    run_tasks(n, [](const void* self, int i) { (*static_cast<const F*>(self))(i); }, &f);
}

// Memory of the calling thread, aligned to 64 bytes, at least `bytes` long, kept for the next call with the same `which`
// (0..7). Its content is whatever the last user left.
void* scratch(int which, int64_t bytes);

// Memory of whole pages for weights, huge ones where the system has them; zeroed. Freed with free_pages.
void* alloc_pages(int64_t bytes);
void free_pages(void* p, int64_t bytes);

}  // namespace tp
