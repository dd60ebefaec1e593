// Rows of bytes from places named by ids to places named by ids: pages on their way between the device's buffer and the host's.
#pragma once
#include <cstdint>

namespace tp {

// Bytes of row ids[i]: base + ids[i] * stride_bytes and on.
struct RowsOf {
    char* base;
    int64_t stride_bytes;
    const int32_t* ids;
};

// For i in [0, n): bytes [0, n_bytes) of the i-th row of src go to the i-th row of dst, in this thread. Rows of dst are distinct,
// and no row of src is one of them.
void copy_rows(const RowsOf& dst, const RowsOf& src, int64_t n, int64_t n_bytes);

}  // namespace tp
