// What the binding files share. Addresses are integers (tensor.data_ptr()).
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "step.h"

using Address = uintptr_t;

template <class T = void>
T* at(Address a) { return reinterpret_cast<T*>(a); }

inline tp::Dtype dtype_of(int code) {
    if (code < 0 || code > 2) throw pybind11::value_error("dtype codes are 0 float32, 1 bfloat16, 2 float16");
    return tp::Dtype(code);
}

// Rows with the arrays they point into: `keep` Python's, `own` computed here (a move leaves their data where it is).
struct __attribute__((visibility("hidden"))) StepRows {
    tp::Rows rows;
    pybind11::object keep;
    std::vector<int64_t> own_positions;
    std::vector<int32_t> own_ends, own_checkpoints;
};

// The kernels one by one, over plain addresses (module_calls.cpp).
void bind_calls(pybind11::module_& m);
