// Declared in `copy.h`.
#include "copy.h"

#include <cstring>

namespace tp {

void copy_rows(const RowsOf& dst, const RowsOf& src, int64_t n, int64_t n_bytes) {
    for (int64_t i = 0; i < n; ++i)
        memcpy(dst.base + dst.ids[i] * dst.stride_bytes, src.base + src.ids[i] * src.stride_bytes, size_t(n_bytes));
}

}  // namespace tp
