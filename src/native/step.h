// A step's rows and the pools, as kernels see them (models/step_batch.py says what the arrays mean).
#pragma once
#include <cstdint>
#include <vector>

#include "e4m3.h"

namespace tp {

struct Rows {
    int count = 0, tokens = 0;
    const int64_t* positions = nullptr;
    const int32_t *offsets = nullptr, *starts = nullptr, *ends = nullptr, *slots = nullptr;
    const int32_t *checkpoint_offsets = nullptr, *checkpoint_slots = nullptr;
    std::vector<const int32_t*> pages;

    int length(int row) const { return offsets[row + 1] - offsets[row]; }
    // The row that holds a packed token.
    int row_of(int token) const {
        int low = 0, high = count - 1;
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (offsets[middle] <= token) low = middle;
            else high = middle - 1;
        }
        return low;
    }
};

// One part of every slot: item i is at base + i * stride bytes.
struct SlotView {
    char* base = nullptr;
    int64_t stride = 0;
    Dtype dtype = Dtype::f32;
    char* at(int slot) const { return base + slot * stride; }
};

// One layer's keys and values: [page][page_size][heads][dim].
struct KvView {
    char *keys = nullptr, *values = nullptr;
    int64_t page_stride = 0;  // bytes
    int page_size = 1, heads = 1, dim = 1;
    Dtype dtype = Dtype::f32;
    int64_t offset(const int32_t* pages, int token) const {
        int64_t item = (int64_t(token % page_size) * heads * dim) * item_bytes(dtype);
        return pages[token / page_size] * page_stride + item;
    }
};

}  // namespace tp
