#include "elementwise.h"

#include <algorithm>

#include "pool.h"

namespace tp {
namespace {

constexpr int TASK_ELEMENTS = 8192;  // below this a row-wise pass is cheaper than waking a helper

// f(row) for all rows, several rows a task.
template <class F>
void for_rows(int rows, int64_t row_elements, const F& f) {
    int each = int(std::max<int64_t>(1, TASK_ELEMENTS / std::max<int64_t>(1, row_elements)));
    for_each((rows + each - 1) / each, [&](int t) {
        for (int r = t * each; r < std::min(rows, (t + 1) * each); ++r) f(r);
    });
}

// y = f(null T*, x / rms(x), element, gate) for each of `heads` groups of dim elements of a row.
template <class F>
void norm_heads(const void* x, int64_t ldx, const void* gate, int64_t ldg, void* y, int64_t ldy, int rows, int heads, int dim,
                float eps, Dtype t, const F& f) {
    with_type(t, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_rows(rows, int64_t(heads) * dim * 2, [&](int r) {
            for (int h = 0; h < heads; ++h) {
                const T* in = static_cast<const T*>(x) + r * ldx + h * dim;
                const T* g = static_cast<const T*>(gate) + r * ldg + h * dim;
                T* out = static_cast<T*>(y) + r * ldy + h * dim;
                v16 inverse = splat(inverse_rms(in, dim, eps));
                for (int i = 0; i < dim; i += 16)
                    store_some(out + i, f(type, load_some(in + i, dim - i) * inverse, i, load_some(g + i, dim - i)), dim - i);
            }
        });
    });
}

}  // namespace

void rms_norm(const void* x, int64_t ldx, void* y, int64_t ldy, int rows, int dim, const float* scale, float eps, Dtype t) {
    with_type(t, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_rows(rows, dim, [&](int r) {
            const T* in = static_cast<const T*>(x) + r * ldx;
            T* out = static_cast<T*>(y) + r * ldy;
            v16 inverse = splat(inverse_rms(in, dim, eps));
            for (int i = 0; i < dim; i += 16)
                store_some(out + i, load_some(in + i, dim - i) * inverse * load_some(scale + i, dim - i), dim - i);
        });
    });
}

void gated_rms_norm(const void* x, int64_t ldx, const void* gate, int64_t ldg, void* y, int64_t ldy, int rows, int heads,
                    int dim, const float* weight, float eps, Dtype t) {
    norm_heads(x, ldx, gate, ldg, y, ldy, rows, heads, dim, eps, t, [&](auto* type, v16 normed, int i, v16 gate) {
        using T = std::remove_pointer_t<decltype(type)>;
        return rounded<T>(rounded<T>(normed) * load_some(weight + i, dim - i)) * silu(gate);
    });
}

void sigmoid_gated_rms_norm(const void* x, int64_t ldx, const void* gate, int64_t ldg, void* y, int64_t ldy, int rows, int heads,
                            int dim, const float* weight, float eps, Dtype t) {
    norm_heads(x, ldx, gate, ldg, y, ldy, rows, heads, dim, eps, t,
               [&](auto*, v16 normed, int i, v16 gate) { return normed * load_some(weight + i, dim - i) * sigmoid(gate); });
}

void grouped_gated_norm(const float* x, const void* gate, int64_t ldg, void* y, int rows, int dim, int groups, const float* weight,
                        float eps, bool norm_first, Dtype t) {
    int width = dim / groups;
    with_type(t, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_rows(rows, int64_t(dim) * 2, [&](int r) {
            float* work = static_cast<float*>(scratch(2, int64_t(width) * 4 + 64));
            for (int g = 0; g < groups; ++g) {
                const float* in = x + int64_t(r) * dim + g * width;
                const T* open = static_cast<const T*>(gate) + r * ldg + g * width;
                T* out = static_cast<T*>(y) + int64_t(r) * dim + g * width;
                for (int i = 0; i < width; i += 16) {
                    v16 v = load_some(in + i, width - i);
                    store_some(work + i, norm_first ? v : v * silu(load_some(open + i, width - i)), width - i);
                }
                v16 inverse = splat(weight ? inverse_rms(work, width, eps) : 1.0f);
                for (int i = 0; i < width; i += 16) {
                    int n = width - i;
                    v16 v = load_some(work + i, n) * inverse;
                    if (weight) v = v * load_some(weight + g * width + i, n);
                    store_some(out + i, norm_first ? v * silu(load_some(open + i, n)) : v, n);
                }
            }
        });
    });
}

void silu_mul(const void* x, int64_t ldx, void* y, int64_t ldy, int rows, int dim, float limit, Dtype t) {
    with_type(t, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const v16 most = splat(rounded<T>(limit));
        for_rows(rows, int64_t(dim) * 2, [&](int r) {
            const T* in = static_cast<const T*>(x) + r * ldx;
            T* out = static_cast<T*>(y) + r * ldy;
            for (int i = 0; i < dim; i += 16) {
                int n = dim - i;
                v16 gate = load_some(in + i, n), up = load_some(in + dim + i, n);
                gate = gate > most ? most : gate;  // NaN stays
                up = up > most ? most : up < -most ? -most : up;
                store_some(out + i, rounded<T>(silu(gate)) * up, n);
            }
        });
    });
}

void squared_relu(const void* x, int64_t ldx, void* y, int64_t ldy, int rows, int dim, Dtype t) {
    with_type(t, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for_rows(rows, dim, [&](int r) {
            const T* in = static_cast<const T*>(x) + r * ldx;
            T* out = static_cast<T*>(y) + r * ldy;
            for (int i = 0; i < dim; i += 16) {
                v16 v = load_some(in + i, dim - i);
                v = v < splat(0) ? splat(0) : v;  // NaN stays
                store_some(out + i, v * v, dim - i);
            }
        });
    });
}

}  // namespace tp
