// Row-wise pieces: norms, gates. Rounding follows transformers' modules: where they round to the model's dtype, so do these.
#pragma once
#include <cstdint>

#include "vec.h"

namespace tp {

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The same for sixteen: max(x, 0) + log(1 + e^-|x|); with t = e^-|x| and s = t / (2 + t) <= 1/3 the logarithm is 2 atanh(s), whose
// series is cut where its terms are below 2^-29 of the sum.
inline v16 softplus(v16 x) {
    v16 t = exp(x < splat(0) ? x : -x), s = t / (splat(2) + t), square = s * s;
    v16 p = splat(1.0f / 15);
    for (int k = 13; k > 0; k -= 2) p = fma(p, square, splat(1.0f / float(k)));
    return fma(s + s, p, x > splat(0) ? x : splat(0));
}

// 1 / sqrt(mean(x^2) + eps) over n elements.
template <class T>
inline float inverse_rms(const T* x, int n, float eps) {
    v16 even = splat(0), odd = splat(0);
    for (int i = 0; i < n; i += 32) {
        v16 a = load_some(x + i, n - i);
        even = fma(a, a, even);
        if (n - i > 16) {
            v16 b = load_some(x + i + 16, n - i - 16);
            odd = fma(b, b, odd);
        }
    }
    return 1.0f / std::sqrt(sum(even + odd) / float(n) + eps);
}

// y = x / rms(x) * scale; scale: float32 [dim] (1 + weight for zero-centred weights).
void rms_norm(const void* x, int64_t ldx, void* y, int64_t ldy, int rows, int dim, const float* scale, float eps, Dtype t);

// y = round(round(x / rms(x)) * weight) * silu(gate), for each of `heads` groups of dim elements of a row; y may be x.
void gated_rms_norm(const void* x, int64_t ldx, const void* gate, int64_t ldg, void* y, int64_t ldy, int rows, int heads,
                    int dim, const float* weight, float eps, Dtype t);

// y = x / rms(x) * weight * sigmoid(gate), rounded once; otherwise as gated_rms_norm.
void sigmoid_gated_rms_norm(const void* x, int64_t ldx, const void* gate, int64_t ldg, void* y, int64_t ldy, int rows, int heads,
                            int dim, const float* weight, float eps, Dtype t);

// y = x silu(gate) over the rms of each of `groups` equal parts of a row, times weight [dim]; x is float32, nothing is rounded but y.
// norm_first: the gate comes after the norm and the weight. weight null: no norm.
void grouped_gated_norm(const float* x, const void* gate, int64_t ldg, void* y, int rows, int dim, int groups, const float* weight,
                        float eps, bool norm_first, Dtype t);

// y[:, i] = round(silu(min(x[:, i], limit))) * clamp(x[:, dim + i], -limit, limit); limit: rounded to the dtype first, infinity for none.
void silu_mul(const void* x, int64_t ldx, void* y, int64_t ldy, int rows, int dim, float limit, Dtype t);

// y = max(x, 0)^2.
void squared_relu(const void* x, int64_t ldx, void* y, int64_t ldy, int rows, int dim, Dtype t);

}  // namespace tp
