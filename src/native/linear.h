// A linear layer with packed weights: y = x W^T (+ bias) (+ residual).
#pragma once
#include <cstdint>

#include "vec.h"

namespace tp {

class Linear {
  public:
    // weight: [n, k] of `dtype`, rows `ldw` elements apart, copied; bias: [n] of `dtype` or null, copied.
    Linear(const void* weight, int64_t ldw, const void* bias, int n, int k, Dtype dtype);
    Linear(const Linear&) = delete;
    Linear& operator=(const Linear&) = delete;
    ~Linear();

    int n() const { return n_; }
    int k() const { return k_; }
    Dtype dtype() const { return dtype_; }
    int64_t bytes() const { return bytes_; }

    // x: [rows, k] and y: [rows, n] of `dtype` (y of float32 if `wide`, unrounded), rows ldx and ldy elements apart.
    // residual: [rows, n] of `dtype`, rows ldy apart, or null; y = round(residual + round(x W^T)); it may be y itself.
    void run(const void* x, int64_t ldx, int rows, void* y, int64_t ldy, const void* residual, bool wide) const;

  private:
    int n_, k_, steps_, strips_;
    Dtype dtype_;
    int64_t bytes_;
    char* packed_;
    float* bias_;
};

}  // namespace tp
